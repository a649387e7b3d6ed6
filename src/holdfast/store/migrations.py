"""Numbered schema steps, one SQL file each; a database remembers how far it has come.

A file is named NNN_what.sql. Files are only ever added: what has shipped is never edited.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from holdfast.errors import StoreError


class Migration(NamedTuple):
    version: int
    name: str
    sql: str


def migrations(store: str) -> list[Migration]:
    folder = files(f"holdfast.store.{store}").joinpath("schema")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda e: e.name)
    return [Migration(int(e.name[:3]), e.name.removesuffix(".sql"), e.read_text()) for e in found]


def pending(store: str, version: int) -> list[Migration]:
    """What is still to be applied to a database at `version`."""
    known = migrations(store)
    newest = known[-1].version
    if version > newest:
        raise StoreError(
            f"the database has schema version {version}, this Holdfast knows up to {newest}: "
            "it was written by a newer release; upgrade this one"
        )
    return [m for m in known if m.version > version]
