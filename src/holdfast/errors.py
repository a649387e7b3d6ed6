"""Every error Holdfast raises on purpose, and whose fault it is.

HoldfastError
├─ PeerError             the client broke MQTT; carries reason_code
├─ RequestError          the caller asked wrongly; nothing was changed
│  ├─ UnknownStream      no such log, stream or generation
│  ├─ UnknownSession     no such client id
│  ├─ UnknownBan         nobody of that name is banned
│  ├─ UnknownCampaign    no such request id, or no such use of it
│  ├─ Unprocessable      a value in a request is wrong
│  │  └─ UnknownPayload  no payload is stored under that hash
│  ├─ PreconditionFailed the stream was not where the caller expected it
│  ├─ Conflict           it exists already, and is different
│  └─ StaleEpoch         a newer holder exists; the old one is refused
├─ NodeUnavailable       a node cannot be reached just now
├─ StoreError            the store could not; __cause__ is the driver's error
│  ├─ StoreFull          no room left to write; reading still works
│  ├─ StoreUnavailable   the store cannot be reached just now
│  ├─ OutcomeUnknown     the connection broke during a commit
│  └─ CorruptBlock       a block does not match its checksum
└─ BrokenInvariant       our bug; carries the story
"""

from __future__ import annotations

from collections.abc import Sequence


class HoldfastError(Exception):
    """The root: catch this to catch everything Holdfast raises on purpose."""


class PeerError(HoldfastError):
    """The client broke MQTT. `reason_code` is what it is told."""

    def __init__(self, message: str, reason_code: int):
        super().__init__(message)
        self.reason_code = reason_code


class RequestError(HoldfastError):
    """The caller asked wrongly. The message names the value; nothing was changed."""


class UnknownStream(RequestError):
    """There is no such log, stream or generation (it may have been dropped by retention)."""


class UnknownSession(RequestError):
    """There is no session of that client id: it ended, or never began."""


class UnknownBan(RequestError):
    """There is no such ban: it has ended, was lifted, or was never made."""


class UnknownCampaign(RequestError):
    """There is no campaign of that request id, or not so many of them."""


class Unprocessable(RequestError):
    """The request can be read, and a value in it is wrong; the message names it."""


class UnknownPayload(Unprocessable):
    """No payload is stored under that hash: it was never sent, or nothing has referred to it for long."""


class PreconditionFailed(RequestError):
    """What the caller expected to find was not there; the message says what was."""


class Conflict(RequestError):
    """What the caller wants to make exists already, and is different; the message says in what."""


class StaleEpoch(RequestError):
    """A newer epoch owns this; whoever speaks for an older one is refused."""


class NodeUnavailable(HoldfastError):
    """A node cannot be reached, or the connection to it is lost; it may be back soon."""


class StoreError(HoldfastError):
    """The store could not do it. `__cause__` is the driver's own error."""


class StoreFull(StoreError):
    """There is no room to write. What is stored stays readable; free some space and go on."""


class StoreUnavailable(StoreError):
    """The store cannot be reached; nothing was written by this call."""


class OutcomeUnknown(StoreError):
    """The connection broke while a commit was under way: it may or may not have happened."""


class CorruptBlock(StoreError):
    """A stored block does not match its checksum. Only its own messages are lost."""

    def __init__(self, stream: object, base: int, count: int):
        super().__init__(
            f"block of {stream} at offsets {base}..{base + count - 1} does not match its checksum; "
            f"reading can go on at offset {base + count}"
        )
        self.stream, self.base, self.count = stream, base, count


class BrokenInvariant(HoldfastError):
    """Holdfast broke one of its own promises. `story` is how it came to that."""

    def __init__(self, message: str, story: Sequence[str] = ()):
        super().__init__("\n  ".join([message, *story]))
        self.story = tuple(story)
