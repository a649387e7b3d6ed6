"""Packet ids are given out one by one or in runs, and no id is given out while it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.window import PACKET_ID_MAX, Delivery, Window


class Origin:
    def __init__(self) -> None:
        self.settled: list[int] = []

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        assert all(delivery.origin is self for delivery in deliveries)
        self.settled += [delivery.offset for delivery in deliveries]

    def passed(self, offset: int) -> None: ...


@settings(max_examples=300)
@given(st.data())
def test_ids_in_runs_and_one_by_one(data: st.DataObject) -> None:
    """Near the end of the ids, so that they begin anew."""
    window, origins = Window(), [Origin(), Origin()]
    window.last_id = data.draw(st.integers(PACKET_ID_MAX - 20, PACKET_ID_MAX))
    out: dict[int, tuple[Origin, int]] = {}
    done: list[list[int]] = [[], []]
    for step in range(data.draw(st.integers(1, 12))):
        which = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["one", "run", "acks"])):
            case "one":
                packet_id = window.add(Delivery(origins[which], step, 1))
                assert packet_id not in out and 1 <= packet_id <= PACKET_ID_MAX
                out[packet_id] = origins[which], step
            case "run":
                ids = list(window.free_ids(data.draw(st.integers(0, 8))))
                used = ids[: data.draw(st.integers(0, len(ids)))]
                assert len(set(ids)) == len(ids) and not out.keys() & set(ids)
                assert all(1 <= packet_id <= PACKET_ID_MAX for packet_id in ids)
                window.add_run(used, origins[which], range(100 * step, 100 * step + len(used)), 1)
                out.update({id_: (origins[which], 100 * step + n) for n, id_ in enumerate(used)})
            case "acks":
                acked = data.draw(st.lists(st.sampled_from([*out, 7, 7]), max_size=6))
                assert window.puback(acked) is None
                for packet_id in acked:
                    if packet_id in out:
                        origin, offset = out.pop(packet_id)
                        done[origins.index(origin)].append(offset)
        assert [(i, d.origin, d.offset) for i, d in window] == [(i, *of) for i, of in out.items()]
        assert [origin.settled for origin in origins] == done


def test_a_full_window_has_no_more_ids() -> None:
    window, origin = Window(), Origin()
    window.last_id = 40_000
    window.add_run(window.free_ids(PACKET_ID_MAX), origin, range(PACKET_ID_MAX), 1)
    assert len(window) == PACKET_ID_MAX and list(window.free_ids(3)) == []
    window.puback([12])
    assert list(window.free_ids(3)) == [12]
