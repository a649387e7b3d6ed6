"""`python -m holdfast.sim --seeds 0:2000` runs seeds; `--seed N -v` replays one and prints what happened.

There are four worlds: `groups`, the machines of shared groups; `front`, the path of a message; `life`, the life of
sessions over several nodes; and `fanout`, deliveries to vehicles and the campaigns they belong to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from holdfast.sim.fanout.runner import run_fanout_seed, run_fanout_seeds
from holdfast.sim.front.runner import run_front_seed, run_front_seeds
from holdfast.sim.life.runner import run_life_seed, run_life_seeds
from holdfast.sim.runner import Failure, Outcome, run_seed, run_seeds

RUN: dict[str, Callable[[int], Outcome]] = {
    "groups": lambda seed: run_seed(seed, trace=True),
    "front": lambda seed: run_front_seed(seed, trace=True),
    "life": lambda seed: run_life_seed(seed, trace=True),
    "fanout": lambda seed: run_fanout_seed(seed, trace=True),
}
RUN_MANY: dict[str, Callable[[int, int, Callable[[int, int], None]], list[Failure]]] = {
    "groups": run_seeds,
    "front": run_front_seeds,
    "life": run_life_seeds,
    "fanout": run_fanout_seeds,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sim", description=__doc__)
    parser.add_argument(
        "--seeds", type=span, default=range(200), metavar="FIRST:PAST", help="which seeds to run (default 0:200)"
    )
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--world", choices=list(RUN), help="only this world (default: all)")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: print every effect")
    options = parser.parse_args(arguments)
    worlds = [options.world] if options.world else list(RUN)
    if options.seed is not None:
        return max([replay(world, options.seed, verbose=options.verbose) for world in worlds])
    return max([run_range(world, options.seeds) for world in worlds])


def replay(world: str, seed: int, *, verbose: bool) -> int:
    outcome = RUN[world](seed)
    print("\n".join(outcome.trace if verbose else outcome.trace[-60:]))
    clean = f"seed {seed}: clean, {outcome.deliveries} deliveries, {outcome.events} events"
    print(f"{world}: {outcome.failure or clean}")
    return 1 if outcome.failure else 0


def span(text: str) -> range:
    """`FIRST:PAST`, or `PAST` alone for the first so many."""
    first, colon, past = text.rpartition(":")
    try:
        return range(int(first) if colon else 0, int(past))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected FIRST:PAST, such as 0:2000, got {text!r}") from None


def run_range(world: str, seeds: range) -> int:
    began = time.monotonic()

    def on_progress(done: int, failed: int) -> None:
        if sys.stderr.isatty() and done % 20 == 0:
            seconds = time.monotonic() - began
            print(f"\r{world}: {done} seeds, {failed} failed, {seconds:.0f} s", end="", file=sys.stderr)

    failures = RUN_MANY[world](seeds.start, seeds.stop, on_progress)
    for failure in failures:
        print(f"{world}: {failure}")
    print(f"{world}: seeds {seeds.start}:{seeds.stop}: {len(failures)} failed, {time.monotonic() - began:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
