"""The pipeline on Spark: a session, the formats, and the jobs."""

from __future__ import annotations

from holdfast.spark.session import session

__all__ = ["session"]
