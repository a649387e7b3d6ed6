"""Chance of our own, so that waits differ from one another and a program's seeded `random` is left alone."""

from __future__ import annotations

import os
import random

chance = random.Random()
os.register_at_fork(after_in_child=chance.seed)  # two children must not wait alike
