"""The simulator itself: seeds pass, and the same seed is the same run."""

from __future__ import annotations

import pytest

from holdfast.groups.leading.leader import Leader
from holdfast.sim import Failure, run_seed, run_seeds
from holdfast.sim.__main__ import main
from holdfast.sim.disk import Store
from holdfast.sim.faults import Faults

SEEDS = 150


def test_seeds() -> None:
    seen: list[int] = []
    failures = run_seeds(0, SEEDS, lambda done, failed: seen.append(done))
    assert not failures, failures[0]
    assert seen[-1] == SEEDS


@pytest.mark.parametrize("seed", [3, 11, 29])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = run_seed(seed, trace=True), run_seed(seed, trace=True)
    assert len(first.trace) > 100
    assert first.digest == second.digest


def test_watching_does_not_change_the_run() -> None:
    assert run_seed(5).events == run_seed(5, trace=True).events


def test_without_faults_nothing_is_delivered_twice() -> None:
    for seed in range(10):
        outcome = run_seed(seed, faults=Faults())
        assert outcome.failure is None
        assert outcome.deliveries > 0


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_saves_that_take_longer_than_members_wait_cost_no_acknowledgement(chance: float) -> None:
    """While it saves, a leader hears neither its members nor that its lease was renewed."""
    for seed in range(40):
        outcome = run_seed(seed, faults=Faults(save_slow=chance))
        assert outcome.failure is None, outcome.failure


def test_a_failure_tells_its_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Leader, "_merge_carried", lambda self, carried: set())
    failures = run_seeds(0, 60, failures_max=1)
    assert len(failures) == 1
    assert isinstance(failures[0], Failure)
    assert "acknowledged never again" in str(failures[0])
    assert len(failures[0].story) > 20
    assert main(["--seed", str(failures[0].seed), "-v"]) == 1
    assert "acknowledged never again" in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_the_store_fences_by_epoch() -> None:
    from holdfast.groups.protocol.effects import Save
    from holdfast.groups.protocol.nouns import GroupId

    store, group = Store(), GroupId("g", "#")
    lease = store.open_lease(5.0, 0.0)
    first = store.claim(group, "n1", lease, 0.0)
    assert first is not None
    assert store.save(Save(group, first.epoch), 4.9)
    assert not store.save(Save(group, first.epoch), 5.0), "the lease has ended"
    second = store.claim(group, "n2", store.open_lease(5.0, 6.0), 6.0)
    assert second is not None
    assert second.epoch > first.epoch
    assert not store.save(Save(group, first.epoch), 6.1)
    assert not store.renew_lease(lease, 5.0, 6.2), "it never comes back"
