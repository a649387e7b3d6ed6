"""What a plain Spark finds by itself: modules named `pyspark_…` are asked for their `DefaultSource`."""

from __future__ import annotations

from holdfast.spark.formats import HoldfastSource as DefaultSource

__all__ = ["DefaultSource"]
