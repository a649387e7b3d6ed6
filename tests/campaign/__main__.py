"""`python -m campaign --seed N --minutes M`, in the folder `tests`: one campaign, or several, from the command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from campaign.run import campaign, has_etcd


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description="Real nodes under faults, checked afterwards.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--metadata", choices=("etcd", "store"), help="by the seed if not given")
    parser.add_argument("--folder", type=Path, help="where history and logs go")
    chosen = parser.parse_args()
    base = chosen.folder or Path(tempfile.mkdtemp(prefix="holdfast-campaign-found-"))
    failed = 0
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        etcd = has_etcd(seed) if chosen.metadata is None else chosen.metadata == "etcd"
        began = time.monotonic()
        outcome = asyncio.run(campaign(seed, 60 * chosen.minutes, base / f"seed-{seed}", etcd=etcd))
        print(f"seed {seed}{' etcd' if etcd else ''}: {outcome.summary}; {time.monotonic() - began:.0f} s", flush=True)
        for line in outcome.faults:
            print(f"  {line}", flush=True)
        if outcome.faults:
            failed += 1
            print(f"  history and logs: {outcome.folder}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
