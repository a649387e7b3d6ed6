"""Cursors: how far a subscription has come in a stream."""

from holdfast.cursors.cursor import Cursor, Range

__all__ = ["Cursor", "Range"]
