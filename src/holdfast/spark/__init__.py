"""The pipeline on Spark: a session, the formats, and the jobs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.spark.errors import plain
    from holdfast.spark.jobs.aggregate import AggregateOptions, aggregate, rebuild
    from holdfast.spark.jobs.job import Progress
    from holdfast.spark.jobs.lake import LakeOptions, lake, relocate
    from holdfast.spark.jobs.run import Runner, RunOptions, run
    from holdfast.spark.lifecycle.launching import session

__all__ = [
    "AggregateOptions",
    "LakeOptions",
    "Progress",
    "RunOptions",
    "Runner",
    "aggregate",
    "lake",
    "plain",
    "rebuild",
    "relocate",
    "run",
    "session",
]

_HOMES = {
    "errors": ("plain",),
    "jobs.aggregate": ("AggregateOptions", "aggregate", "rebuild"),
    "jobs.job": ("Progress",),
    "jobs.lake": ("LakeOptions", "lake", "relocate"),
    "jobs.run": ("Runner", "RunOptions", "run"),
    "lifecycle.launching": ("session",),
}


def __getattr__(name: str) -> Any:
    """On demand: Spark's workers import this package by the dozen and want the formats only."""
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(f"holdfast.spark.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'holdfast.spark' has no attribute {name!r}")
