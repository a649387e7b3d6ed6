"""How answers are shown: a table for people, JSON for programs, one line for an error."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(rows: Sequence[Any], as_json: bool, title: str | None = None) -> None:
    """Rows are dataclasses or mappings, all of one kind."""
    plain = [dataclasses.asdict(row) if dataclasses.is_dataclass(row) else dict(row) for row in rows]  # type: ignore[arg-type]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode([_json(row) for row in plain])).decode())
        return
    shown = Table(title=title)
    for name in plain[0] if plain else ["nothing"]:
        numeric = bool(plain) and isinstance(plain[0][name], int) and not isinstance(plain[0][name], bool)
        shown.add_column(name.replace("_", " "), justify="right" if numeric else "left")
    for row in plain:
        # Text, not markup: client ids and topics may have brackets in them.
        shown.add_row(*(Text(clean(_cell(value))) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # into a pipe or a file: nobody's window to fit
    console.print(shown)


def document(value: Any) -> None:
    """A whole answer as JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def clean(text: str) -> str:
    """What a client chose, fit for a terminal: nothing that moves the cursor or changes colours."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def line(text: str) -> None:
    """One line for people."""
    print(clean(text))


def _json(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                found[name] = value.decode()
            except UnicodeDecodeError:
                found[f"{name}_base64"] = base64.b64encode(value).decode()
        else:
            found[name] = value
    return found


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case bytes():
            return value.decode(errors="backslashreplace")[:60]
        case _:
            return str(value)


def fail(error: Exception) -> NoReturn:
    print(f"holdfast: {clean(str(error))}", file=sys.stderr)
    sys.exit(1)
