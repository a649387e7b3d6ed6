"""The names of all keys in the metadata store: different things never share one, and none is too long.

    /holdfast/subscriptions/LOG/STREAM/CLIENT FILTER/cursor         a session's cursor
    /holdfast/subscriptions/LOG/STREAM/group:NAME:FILTER/cursor     a group's progress
    /holdfast/subscriptions/LOG/STREAM/dead-letters:NAME:FILTER/cursor   what a group has set aside
    /holdfast/subscriptions/LOG/STREAM/NAME/cursor                  a named subscription's cursor (Spark)
    /holdfast/groups/NAME:FILTER/record                             what was declared
    /holdfast/groups/NAME:FILTER/claim                              who leads it
    /holdfast/groups/NAME:FILTER/skipped                            what retention dropped before it was read
    /holdfast/nodes/NAME/LEASE                                      a node that is there
    /holdfast/bans/KIND/NAME                                        who may not connect
    /holdfast/bans-changed                                          moves whenever a ban does
    /holdfast/probe                                                 is written to see whether the store takes writes
    /holdfast/fanout-results                                        up to where vehicles' results are settled

Names are up to 65,535 bytes long and may hold anything. What has a meaning here is written as %XX, and a part that is
too long for a key is its beginning, a ~ and its hash; in a part that is not shortened a ~ is written as %7E, so nobody
can call itself by another's hash.
"""

from __future__ import annotations

import hashlib
import re

from holdfast.model import Stream

BANS = "/holdfast/bans/"
BANS_CHANGED = "/holdfast/bans-changed"
FANOUT_RESULTS = "/holdfast/fanout-results"
GROUPS = "/holdfast/groups/"
NODES = "/holdfast/nodes/"
PROBE = "/holdfast/probe"
SUBSCRIPTIONS = "/holdfast/subscriptions/"

PART_BYTES_MAX = 200
_BEGINNING = 32

# The per cent sign first: it must not be written anew where it stands for another.
_ALWAYS = "%/~\0"
_NO_SPACE = "%/~\0 "
_NO_COLON = "%/~\0 :"
_NO_CHARACTER = re.compile("[\ud800-\udfff]")


def session_cursor_key(stream: Stream, client_id: str, filter_text: str) -> str:
    """How far a client's subscription to this filter has come in a stream."""
    return _cursor_key(stream, f"{_plain(client_id, _NO_COLON)} {_plain(filter_text, _NO_SPACE)}")


def progress_key(group: tuple[str, str], stream: Stream) -> str:
    """How far a group, by its name and its filter, has come in a stream."""
    name, filter_text = group
    return _cursor_key(stream, f"group:{_plain(name, _NO_COLON)}:{_plain(filter_text, _NO_SPACE)}")


def progress_part_key(group: tuple[str, str], stream: Stream, part: int) -> str:
    """Where the parts of a progress are that is too large for one value; part 0 is where everyone looks."""
    key = progress_key(group, stream)
    return f"{key}/{part}" if part else key


def named_cursor_key(stream: Stream, name: str) -> str:
    """How far a subscription that has no client, only a name, has come in a stream."""
    return _cursor_key(stream, _plain(name, _NO_COLON))


def cursors_of_log(log: str) -> str:
    """What every cursor in a log's streams begins with."""
    return f"{SUBSCRIPTIONS}{_part(log)}/"


def cursors_of_stream(stream: Stream) -> str:
    """What every cursor in this stream begins with."""
    return f"{cursors_of_log(stream.log)}{_part(str(stream))}/"


def stream_of_cursor(key: str) -> Stream:
    """The stream that a cursor of whatever kind is in."""
    return Stream.parse(key.removeprefix(SUBSCRIPTIONS).split("/")[1])


def _cursor_key(stream: Stream, subscription: str) -> str:
    return f"{cursors_of_stream(stream)}{_short(subscription)}/cursor"


def record_key(group: tuple[str, str]) -> str:
    return f"{GROUPS}{_group(group)}/record"


def claim_key(group: tuple[str, str]) -> str:
    return f"{GROUPS}{_group(group)}/claim"


def skipped_key(group: tuple[str, str]) -> str:
    """What retention dropped before the group had read it."""
    return f"{GROUPS}{_group(group)}/skipped"


def dead_letters_key(group: tuple[str, str], stream: Stream) -> str:
    """Which messages of a stream the group has set aside."""
    name, filter_text = group
    return _cursor_key(stream, f"dead-letters:{_plain(name, _NO_COLON)}:{_plain(filter_text, _NO_SPACE)}")


def is_record(key: str) -> bool:
    """Among the keys of groups: is it a record?"""
    return key.endswith("/record")


def _group(group: tuple[str, str]) -> str:
    name, filter_text = group
    return _short(f"{_plain(name, _NO_COLON)}:{_plain(filter_text, _ALWAYS)}")


def node_key(name: str, lease: int) -> str:
    """A node, by its name and its lease: two processes may have one name, for a while."""
    return f"{NODES}{_part(name)}/{lease:x}"


def ban_key(kind: str, name: str) -> str:
    """A ban of a client id, a user or an address."""
    return f"{BANS}{_part(kind)}/{_part(name)}"


def _part(name: str) -> str:
    return _short(_plain(name, _ALWAYS))


def _plain(name: str, special: str) -> str:
    for char in special:
        if char in name:
            name = name.replace(char, f"%{ord(char):02X}")
    return name if name.isascii() else _NO_CHARACTER.sub(lambda found: f"%{ord(found[0]):02X}", name)


def _short(part: str) -> str:
    if len(part) <= PART_BYTES_MAX and len(part.encode()) <= PART_BYTES_MAX:
        return part
    return f"{part[:_BEGINNING]}~{hashlib.sha256(part.encode()).hexdigest()}"
