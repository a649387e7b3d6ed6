"""QoS 2 publishes of a client between PUBLISH and PUBREL: who knows of them, and who waits for what becomes of them."""

from __future__ import annotations

from holdfast.mqtt.inbound import Inbound


def test_whoever_lets_go_waits_until_every_publish_is_stored_or_has_failed():
    inbound, said = Inbound({1: 0}), []
    inbound.take(2)
    inbound.take(3)
    inbound.when_settled(lambda: said.append("settled"))
    inbound.stored(2)
    assert not said and inbound.under_way
    inbound.failed(3)
    assert said == ["settled"] and not inbound.under_way
    inbound.when_settled(lambda: said.append("at once"))
    assert said == ["settled", "at once"]


def test_one_that_failed_may_be_stored_all_the_same_and_stays_in_the_store():
    inbound = Inbound()
    inbound.take(4)
    inbound.failed(4)
    assert inbound.in_doubt and 4 not in inbound
    inbound.found({4: 0})
    assert not inbound.in_doubt and inbound.is_stored(4)


def test_whoever_lets_go_waits_until_what_was_released_is_removed():
    inbound, said = Inbound({1: 0}), []
    inbound.free(1)
    inbound.when_settled(lambda: said.append("settled"))
    assert not said and 1 in inbound
    inbound.forget(1)
    assert said == ["settled"] and 1 not in inbound
