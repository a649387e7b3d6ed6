"""A lock that is given to whoever has waited longest."""

from __future__ import annotations

import threading

from holdfast.store.sqlite.turns import Turns
from processes import wait_for


def test_who_waits_longest_is_next_and_who_lets_go_is_last() -> None:
    turns, order = Turns(), list[str]()
    threads = []
    with turns:
        assert turns.locked()
        for name in "abc":

            def work(name: str = name) -> None:
                with turns:
                    order.append(name)

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            wait_for(lambda: turns.waiting == len(threads), what=f"{name} to wait")
    with turns:
        order.append("again")
    for thread in threads:
        thread.join(10)
    assert order == ["a", "b", "c", "again"] and not turns.locked()


def test_an_exception_gives_it_back() -> None:
    turns = Turns()
    try:
        with turns:
            raise ValueError
    except ValueError:
        pass
    with turns:
        assert turns.locked()
    assert not turns.locked()


def test_one_at_a_time() -> None:
    turns, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(2_000):
            with turns:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1 and not turns.locked()
