"""Effects and messages as people read them: one line each, the same in traces, scenarios and failures."""

from __future__ import annotations

from dataclasses import fields

from holdfast.groups.protocol.effects import Effect, Save
from holdfast.groups.protocol.messages import Carried, Leased, Report
from holdfast.groups.protocol.nouns import NO_LIMIT, Layer, Loan, Mark
from holdfast.groups.record import GroupRecord
from holdfast.machine import Address, Send

_QUIET = {
    "member",
    "group",
    "reply_to",
    "epoch",
    "born",
    "course",
    "leader",
    "log",
    "asked_at",
    "sent_at",
    "echo",
    "trusted_until",
    "in_doubt",
}
_USUAL = {"key": "publisher", "packet_max": NO_LIMIT, "largest_packet": NO_LIMIT}


def describe(effect: Effect) -> str:
    """One effect."""
    match effect:
        case Send(to, message):
            return f"-> {place(to)}: {say(message)}"
        case Save():
            return _save(effect)
        case _:
            return say(effect)


def say(thing: object) -> str:
    """A message, or an effect that is not a `Send`: its name and what matters in it."""
    name = type(thing).__name__
    parts = [name]
    for field in fields(thing):  # type: ignore[arg-type]
        value = getattr(thing, field.name)
        if field.name in _QUIET or value in (None, (), False, "", _USUAL.get(field.name)):
            continue
        if isinstance(value, tuple) and all(item is None for item in value):
            continue
        parts.append(f"{field.name}={show(value)}" if field.name not in ("loan", "piece") else show(value))
    return " ".join(parts)


def show(value: object) -> str:
    match value:
        case float():
            return f"{value:.3g}"
        case Report(piece, loan, mark, final, _, refused):
            too_large = f" refused {','.join(str(offset) for offset, _ in refused)}" if refused else ""
            return f"{piece}#{loan}@{mark}{' final' if final else ''}{too_large}"
        case Carried(piece, _, mark) | Leased(piece, _, mark, _, _):
            return f"{piece}@{mark}"
        case Loan() | Mark():
            return str(value)
        case Layer(of, marks):
            return f"1/{of}:" + ",".join(f"{part}@{mark}" for part, mark in marks)
        case int() if not isinstance(value, bool):
            return f"#{value}" if value else "#0"
        case tuple() if value and type(value) is tuple:
            return "[" + ", ".join(show(item) for item in value) + "]"
        case _:
            return str(value)


def place(to: Address) -> str:
    return to.name if to.kind in ("agent", "batch") else f"{to.kind}@{to.node}"


def _save(save: Save) -> str:
    parts = ["Save"]
    if save.delete:
        parts.append("delete")
    if isinstance(save.record, GroupRecord):
        flags = [flag for flag in ("lent", "paused", "idle") if getattr(save.record, flag)]
        parts.append(f"record turn={save.record.turn}" + "".join(f" {flag}" for flag in flags))
    for progress in save.progress:
        parts.append(f"{progress.stream}@" + "|".join(str(progress.mark(piece)) for piece in progress.pieces()))
    if save.forget:
        parts.append("forget " + " ".join(map(str, save.forget)))
    return " ".join(parts)
