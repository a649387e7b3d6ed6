"""Which session is which vehicle: templates, and filters that are read by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RequestError
from holdfast.fanout.vehicles import Template
from holdfast.topics import match

REQUEST = Template("agent/{VIN}/proxy/request/{request_id}")


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("agent/v1/proxy/request/+", ("v1", None)),
        ("agent/v1/proxy/request/task_a_1", ("v1", "task_a_1")),
        ("agent/v1/#", ("v1", None)),
        ("agent/+/proxy/request/+", (None, None)),
        ("+/v1/+/+/+", ("v1", None)),
        ("#", (None, None)),
        ("agent/v1/proxy/request/task_a_1/#", ("v1", "task_a_1")),
        ("agent/v1/proxy/request", None),
        ("agent/v1/proxy/request/+/+", None),
        ("agent/v1/proxy/ack/+", None),
        ("agents/v1/proxy/request/+", None),
        ("ecp/v1/online", None),
    ],
)
def test_a_filter_says_which_vehicle_and_which_requests(text: str, covered: tuple[str | None, str | None]) -> None:
    assert REQUEST.covered_by(text) == covered


@given(st.lists(st.sampled_from(["agent", "v1", "proxy", "request", "task_a_1", "+", "x"]), min_size=1, max_size=6))
def test_it_agrees_with_what_matches(levels: list[str]) -> None:
    for text in ("/".join(levels), "/".join([*levels, "#"])):
        covered = REQUEST.covered_by(text)
        for vin, request in (("v1", "task_a_1"), ("v2", "task_a_1"), ("v1", "task_b_1")):
            meant = covered is not None and covered[0] in (None, vin) and covered[1] in (None, request)
            assert meant == match(text, REQUEST.topic(vin, request)), text


def test_topics_are_made_and_read_back() -> None:
    assert REQUEST.topic("v1", "task_a_1") == "agent/v1/proxy/request/task_a_1"
    assert REQUEST.parse("agent/v1/proxy/request/task_a_1") == ("v1", "task_a_1")
    assert REQUEST.parse("agent/v1/proxy/ack/task_a_1") is None
    assert REQUEST.parse("agent/v1") is None
    assert REQUEST.filter == "agent/+/proxy/request/+"
    assert Template("ecp/{VIN}/online").parse("ecp/v1/online") == ("v1", "")


@pytest.mark.parametrize(
    "text", ["agent/x", "agent/x{VIN}", "{VIN}/{VIN}", "a/{VIN}/+", "a/{VIN}/#", "$a/{VIN}", "{VIN}/x{request_id}"]
)
def test_a_template_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="topic"):
        Template(text)
