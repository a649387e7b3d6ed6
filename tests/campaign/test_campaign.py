"""The fault campaign: two minutes of it with every test run, half an hour of it in `make soak`.

HOLDFAST_CAMPAIGN_SEED chooses the seed; otherwise it is the day's. A failure names the folder with its history.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from campaign.run import campaign, has_etcd
from servers import CannotRun

SOAK_MINUTES = 15.0
"""Each form of the metadata has half of the time."""


def seed_of_the_day() -> int:
    chosen = os.environ.get("HOLDFAST_CAMPAIGN_SEED")
    return int(chosen) if chosen else datetime.now(UTC).date().toordinal()


def run(seed: int, minutes: float, *, etcd: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-campaign-seed-{seed}-"))
    try:
        outcome = asyncio.run(campaign(seed, 60 * minutes, folder, etcd=etcd))
    except CannotRun as error:
        pytest.skip(str(error))
    if outcome.faults:
        told = "\n".join(outcome.faults)
        form = "etcd" if etcd else "store"
        pytest.fail(
            f"{told}\n{outcome.summary}\nhistory and logs: {folder}\n"
            f"again, in tests: python -m campaign --seed {seed} --minutes {minutes:g} --metadata {form}",
            pytrace=False,
        )


def test_two_minutes_of_faults() -> None:
    seed = seed_of_the_day()
    run(seed, 2.0, etcd=has_etcd(seed))


@pytest.mark.soak
@pytest.mark.parametrize("metadata", ["store", "etcd"])
def test_half_an_hour_of_faults(metadata: str) -> None:
    run(seed_of_the_day(), SOAK_MINUTES, etcd=metadata == "etcd")
