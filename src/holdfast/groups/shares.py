"""How a shared subscription is written: `$share/GROUP/FILTER`, and the three other ways the seeds write it.

One surprising rule: `$queue/` too names a group here, as seed 001 writes it; there is no anonymous queue.
"""

from __future__ import annotations

from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.topics import check_filter

PREFIXES = ("$share", "$shared", "$shares", "$queue")

NAME_BYTES_MAX = 256


def is_shared(text: str) -> bool:
    """Does this filter ask for a share of a group?"""
    return text.startswith("$") and text.partition("/")[0] in PREFIXES


def parse_share(text: str) -> GroupId:
    """The group this filter names; a RequestError that says what is wrong with it otherwise."""
    prefix, _, rest = text.partition("/")
    if prefix not in PREFIXES:
        raise RequestError(f"{text[:80]!r} is no shared subscription; write $share/GROUP/FILTER")
    name, slash, topic_filter = rest.partition("/")
    if not name or not slash or not topic_filter:
        raise RequestError(f"{text[:80]!r} lacks a group or a filter; write {prefix}/GROUP/FILTER")
    return GroupId(check_group_name(name), check_filter(topic_filter))


def check_group_name(name: str) -> str:
    if not name or any(char in name for char in "/+#\0") or len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise RequestError(
            f"{name[:80]!r} is not a group name; it takes 1 to {NAME_BYTES_MAX} bytes without '/', '+', '#' and NUL"
        )
    return name
