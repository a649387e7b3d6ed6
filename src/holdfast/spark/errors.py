"""Spark's errors in one line: what we said, if it was us, without the pages around it."""

from __future__ import annotations

import re

from holdfast.errors import HoldfastError

_OURS = re.compile(r"holdfast\.(?:\w+\.)*(?:\w+): (?P<said>.+?)\s*(?:SQLSTATE: \w+)?\s*$", re.MULTILINE)

_ANY = re.compile(r"^(?:Caused by: )?(?:\w+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)


def plain(error: BaseException) -> str:
    """The one line that tells a person what went wrong."""
    if isinstance(error, HoldfastError):
        return str(error)
    text = str(error)
    if found := _OURS.search(text):
        return found["said"]
    if named := _ANY.findall(text):
        return str(named[-1])  # of a traceback, the line that says what it was
    return first_line(error)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
