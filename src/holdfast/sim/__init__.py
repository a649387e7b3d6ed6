"""The simulator: the same machines, virtual time, one seed per run."""

from holdfast.sim.runner import Failure, Outcome, run_seed, run_seeds, story

__all__ = ["Failure", "Outcome", "run_seed", "run_seeds", "story"]
