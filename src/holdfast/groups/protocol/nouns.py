"""The nouns of shared groups: group, member, what is lent to it, and how far it has come."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from holdfast.cursors import Cursor, Range
from holdfast.errors import RequestError
from holdfast.machine import Address
from holdfast.model import Stream

Key = Literal["publisher", "topic", "message"]
"""What belongs together in a group, and so goes to one member, in order; fixed when the group is declared."""


def check_key(text: str) -> Key:
    if text not in get_args(Key):
        raise RequestError(f"key {text[:80]!r} is not known; a group's key is publisher, topic or message")
    return cast("Key", text)


class GroupId(NamedTuple):
    """A group is its name and its filter; people write `name:filter`."""

    name: str
    filter: str

    def __str__(self) -> str:
        return f"{self.name.replace('%', '%25').replace(':', '%3A')}:{self.filter}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """The inverse of `str(group)`."""
        name, _, rest = text.partition(":")
        return cls(name.replace("%3A", ":").replace("%25", "%"), rest)


class MemberId(NamedTuple):
    """One member of a group, once: whoever comes back after a mishap comes with a higher `life`.

    `incarnation` grows each time the session is set up anew (reconnect, takeover), `number` counts the
    subscriptions made within it, `life` the times that one subscription had to start over.
    """

    session: str
    incarnation: int = 1
    number: int = 1
    life: int = 1

    def __str__(self) -> str:
        return f"{self.session}/{self.incarnation}.{self.number}.{self.life}"

    def agent(self, node: str) -> Address:
        """Where a borrower is reached: at its agent, of which one session may have an old and a new one."""
        return Address(node, "agent", f"{self.session}/{self.incarnation}")


class Piece(NamedTuple):
    """What is lent: a stream, or one of the `of` key slices of it."""

    stream: Stream
    part: int = 0
    of: int = 1

    def __str__(self) -> str:
        return str(self.stream) if self.of == 1 else f"{self.stream}[{self.part}/{self.of}]"


class Mark(NamedTuple):
    """A cursor at one moment, unchangeable, fit to travel."""

    offset: int = -1
    """Everything up to here is acknowledged or passed over."""
    acked: tuple[Range, ...] = ()
    """And these ranges above it."""

    @classmethod
    def of_cursor(cls, cursor: Cursor) -> Mark:
        return cls(cursor.offset, tuple(cursor.acked))

    def cursor(self) -> Cursor:
        return Cursor(self.offset, self.acked)

    @property
    def top(self) -> int:
        """The highest offset it says anything about."""
        return self.acked[-1][1] if self.acked else self.offset

    def __str__(self) -> str:
        return str(self.offset) + "".join(f"+{first}..{last}" for first, last in self.acked)


class Layer(NamedTuple):
    """What an earlier slicing of a stream had done: per slice index, its mark then."""

    of: int
    marks: tuple[tuple[int, Mark], ...]


class Policy(NamedTuple):
    """What to do about a message that is not acknowledged; None switches that half off."""

    ack_timeout_seconds: float | None = None
    attempts_max: int | None = None


NO_POLICY = Policy()

NO_LIMIT = 1 << 30
"""The packet maximum of a member that takes any."""


class Loan(NamedTuple):
    """A piece in a member's hands, once. The host names it back in `Acked`, `Drained` and `Delivered`."""

    member: MemberId
    piece: Piece
    number: int
    """Grows with every loan that one leader makes; for a batch member, the version that first held the piece."""
    course: str
    """Changes with every seek: acknowledgements of another course say nothing about this one."""

    def __str__(self) -> str:
        return f"{self.piece}#{self.number} of {self.member}"
