"""Requests as their senders write them: what is taken, and what is refused with the value that is wrong."""

from __future__ import annotations

import base64
import hashlib
import json
from math import inf
from typing import Any

import pytest

from holdfast.errors import RequestError, Unprocessable
from holdfast.fanout.nouns import State
from holdfast.fanout.requests import Checked, NotJson, options_of, parse

NOW = 1_800_000_000.0


def request(**changes: Any) -> dict[str, Any]:
    return {"request_id": "task_ota_7", "ids": ["b", "a"], "data": "hello", **changes}


def checked(**changes: Any) -> Checked:
    return parse(json.dumps(request(**changes)).encode(), NOW)


def test_a_plain_request_is_a_batch_of_a_campaign_that_sends() -> None:
    found = checked()
    assert found.data == b"hello" and found.batch.sha1 == hashlib.sha1(b"hello").digest()
    assert list(found.batch.ids) == ["a", "b"] and found.batch.priority == 4 and found.batch.expires == inf
    begin = found.batch.begin
    assert begin is not None and begin.sending and begin.open and begin.state is State.RUNNING and begin.settings == b""


def test_data_may_be_binary_or_elsewhere() -> None:
    data = bytes(range(256))
    assert checked(data=base64.b64encode(data).decode(), encoding="base64").data == data
    found = parse(json.dumps({"request_id": "task_a_1", "ids": ["v"], "data_sha1": "ab" * 20}).encode(), NOW)
    assert found.data is None and found.batch.sha1 == b"\xab" * 20


def test_an_expiry_is_seconds_or_a_time() -> None:
    assert checked(expires=60).batch.expires == NOW + 60
    assert checked(expires="2027-01-15T08:00:01Z").batch.expires == NOW + 1


def test_what_has_to_wait_for_something_does_not_send_yet() -> None:
    for options in (
        {"paused": True},
        {"start_at": "2027-01-15T09:00:00Z"},
        {"windows": [{"begin": "22:00", "end": "04:00"}]},
        {"waves": [{"percent": 10}]},
    ):
        begin = checked(campaign=options).batch.begin
        assert begin is not None and not begin.sending and begin.settings
        assert options_of(begin) is not None
    begin = checked(campaign={"rate_per_sec": 10, "in_flight_max": 3}).batch.begin
    assert begin is not None and begin.sending and (begin.rate_per_sec, begin.in_flight_max) == (10, 3)


def test_a_number_is_not_one_of_the_settings() -> None:
    assert checked(campaign={"number": 3}).batch.number == 3
    assert checked(campaign={"number": 3}).batch.settings == b""


@pytest.mark.parametrize("payload", [b"", b"{", b"nonsense", b'{"ids": [', b"\xff\xfe"])
def test_what_is_no_json_is_said_to_be_none(payload: bytes) -> None:
    with pytest.raises(NotJson):
        parse(payload, NOW)


@pytest.mark.parametrize("payload", [b"[]", b"[" * 100_000, b"7", b'{"ids": ' + b"[" * 100_000, b'{"a": 1'])
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError):
        parse(payload, NOW)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": []}, "at least one"),
        ({"ids": ["a", "b", "a"]}, "'a' is given twice"),
        ({"ids": ["a/b"]}, "'a/b' contains '/'"),
        ({"ids": ["a+"]}, "contains '+'"),
        ({"ids": ["#"]}, "contains '#'"),
        ({"ids": ["a\0"]}, "contains '\\\\x00'"),
        ({"ids": [""]}, "empty"),
        ({"ids": ["x" * 129]}, "more than 128 bytes"),
        ({"ids": ["ü" * 65]}, "more than 128 bytes"),
        ({"ids": [1]}, "ids"),
        ({"ids": "abc"}, "ids"),
        ({"request_id": "ota_7"}, "ota_7"),
        ({"request_id": "task_7"}, "task_7"),
        ({"request_id": "task_a/b_7"}, "task_a/b_7"),
        ({"request_id": "task_a_x"}, "task_a_x"),
        ({"data": None}, "data or data_sha1"),
        ({"data_sha1": "00" * 20}, "one of them"),
        ({"data": "x" * (512 * 1024 + 1)}, "524289"),
        ({"data": "not base64!", "encoding": "base64"}, "base64"),
        ({"encoding": "rot13"}, "rot13"),
        ({"priority": 10}, "priority"),
        ({"priority": -1}, "priority"),
        ({"resend": "sometimes"}, "sometimes"),
        ({"expires": 0}, "expires"),
        ({"expires": -5}, "-5"),
        ({"expires": 1e12}, "ten years"),
        ({"expires": "yesterday"}, "yesterday"),
        ({"expires": "2026-01-01T00:00:00Z"}, "over already"),
        ({"expires": "2027-06-01T00:00:00"}, "time zone"),
        ({"key": ""}, "key"),
        ({"key": "k" * 201}, "key"),
        ({"colour": "red"}, "colour"),
        ({"campaign": {"colour": "red"}}, "colour"),
        ({"campaign": {"rate_per_sec": 0}}, "rate_per_sec"),
        ({"campaign": {"waves": [{}]}}, "percent or vehicles"),
        ({"campaign": {"waves": [{"percent": 101}]}}, "percent"),
        ({"campaign": {"windows": [{"begin": "25:00", "end": "04:00"}]}}, "25:00"),
        ({"campaign": {"windows": [{"begin": "04:00", "end": "04:00"}]}}, "no time at all"),
        ({"campaign": {"end_at": "2027-01-15T07:00:00Z"}}, "over before it begins"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        checked(**changes)
    assert says.encode().decode("unicode_escape") in str(refused.value) or says in str(refused.value)


def test_ids_come_once() -> None:
    with pytest.raises(RequestError, match="twice"):
        parse(json.dumps(request()).encode(), NOW, streamed=True)
