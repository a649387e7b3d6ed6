"""Filters, and every topic that could tell them apart."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

LEVELS = ["", "a", "$s"]
TOPICS = [
    topic for depth in range(1, 5) for parts in product([*LEVELS, "other"], repeat=depth) if (topic := "/".join(parts))
]
"""Every topic of up to four levels, with one level that no filter below names: enough to tell any two apart."""

filters = st.builds(
    lambda parts, tail: "/".join([*parts, *tail]),
    st.lists(st.sampled_from([*LEVELS, "+"]), max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool)
