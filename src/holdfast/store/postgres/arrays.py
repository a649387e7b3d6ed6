"""Many values as one parameter, as PostgreSQL reads an array: the driver's own way takes three times as long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from holdfast.store.in_sql.database import Row


def hashes(names: Iterable[str]) -> str:
    """What names that may be longer than a B-tree entry are known by."""
    return array(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest() for name in names)


def columns(rows: Iterable[Row]) -> list[str]:
    return [array(column) for column in zip(*rows, strict=True)]


def array(values: Iterable[object]) -> str:
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: object) -> str:
    match value:
        case None:
            return "NULL"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case bytes():
            return f'"\\\\x{value.hex()}"'
        case _:
            return str(value)
