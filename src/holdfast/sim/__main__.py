"""`python -m holdfast.sim --seeds 0:2000` runs seeds; `--seed N -v` replays one and prints what happened."""

from __future__ import annotations

import argparse
import sys
import time

from holdfast.sim.runner import run_seed, run_seeds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FIRST:PAST", help="which seeds to run (default 0:200)")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: print every effect")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        outcome = run_seed(options.seed, trace=True)
        print("\n".join(outcome.trace if options.verbose else outcome.trace[-60:]))
        print(
            outcome.failure or f"seed {options.seed}: clean, {outcome.deliveries} deliveries, {outcome.events} events"
        )
        return 1 if outcome.failure else 0
    first, _, past = options.seeds.partition(":")
    began = time.monotonic()

    def on_progress(done: int, failed: int) -> None:
        if sys.stderr.isatty() and done % 20 == 0:
            print(f"\r{done} seeds, {failed} failed, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)

    failures = run_seeds(int(first), int(past), on_progress)
    for failure in failures:
        print(failure)
    print(f"seeds {first}:{past}: {len(failures)} failed, {time.monotonic() - began:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
