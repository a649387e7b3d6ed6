"""Fan-out: one payload to many vehicles, one at a time each, in order, until every one of them has an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.sending import send as send

__all__ = ["send"]


def __getattr__(name: str) -> Any:
    """`holdfast.fanout.send` is where users look for it; it needs stores, which need this package."""
    if name != "send":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.sending import send

    return send
