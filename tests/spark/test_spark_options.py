"""Every option has one meaning, and one that cannot be is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import RequestError
from holdfast.model import At, Beginning, Next, Stream
from holdfast.spark.options import ReadOptions, WriteOptions


@pytest.fixture
def there(sqlite: str) -> str:
    holdfast.open(sqlite).close()
    return sqlite


def test_defaults(there: str) -> None:
    batch = ReadOptions.of({"store": there}, streaming=False)
    assert (batch.log, batch.start, batch.end, batch.filters) == ("messages", Beginning(), Next(), ())
    assert ReadOptions.of({"store": there}, streaming=True).start == Next()


def test_names_are_case_blind_and_a_path_is_a_store(there: str) -> None:
    options = ReadOptions.of({"PATH": there, "maxMessagesPerTrigger": "10"}, streaming=True)
    assert options.messages_max == 10


def test_a_relative_path_is_made_absolute(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ReadOptions.of({"store": "sqlite:///store.db"}, streaming=False).store == f"sqlite:///{tmp_path}/store.db"


def test_offsets_by_stream(there: str) -> None:
    options = ReadOptions.of({"store": there, "start": '{"messages.1.0": 17}'}, streaming=False)
    assert options.start == At({Stream("messages", 0, 1): 17})


@pytest.mark.parametrize(
    ("options", "streaming", "message"),
    [
        ({}, False, "option 'store' is missing"),
        ({"store": "memory:"}, False, "lives in one process"),
        ({"store": "mysql://x"}, False, "of no known kind"),
        ({"store": "sqlite:////nowhere/x.db"}, False, "there is no store at /nowhere/x.db"),
        ({"bogus": "1"}, False, "option 'bogus' is not known; there are: end, "),
        ({"group": "g"}, True, "'g' is no group; write NAME:FILTER"),
        ({"topics": "a/#/b"}, False, "'#' stands alone"),
        ({"topics": "[1]"}, False, "a JSON list of filters"),
        ({"topics": "[nope"}, False, "not a JSON list"),
        ({"start": "yesterday"}, False, "'yesterday' is not a start position"),
        ({"start": '{"other.1.0": 1}'}, False, "other.1.0 is not a stream of log 'messages'"),
        ({"start": '{"messages.1.0": -1}'}, False, "not a whole number"),
        ({"start": "{nope"}, False, "is not JSON"),
        ({"end": "latest"}, True, "option 'end' is for batches only"),
        ({"subscription": "x"}, False, "option 'subscription' is for streams only"),
        ({"partitions": "0"}, False, "option 'partitions' is '0'; it takes a whole number from 1"),
        ({"maxMessagesPerTrigger": "lots"}, True, "it takes a whole number"),
        ({"trimmed": "maybe"}, True, "it takes error or earliest"),
        ({"log": "no/log"}, False, "is not a log name"),
        ({"ranges": "[[1]]"}, False, "it takes [[generation, shard, first, past], …]"),
    ],
)
def test_bad_reading(there: str, options: dict[str, str], streaming: bool, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ReadOptions.of({**({"store": there} if options else {}), **options}, streaming=streaming)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "streaming", "message"),
    [
        ({"topics": "a"}, False, "option 'topics' is not known"),
        ({"shards": "none"}, False, "it takes a whole number"),
        ({"shardBy": "color"}, False, "it takes publisher or topic"),
        ({"writeId": "x"}, True, "a stream is known by its checkpoint"),
        ({"position": "x"}, False, "goes with writeId"),
    ],
)
def test_bad_writing(there: str, options: dict[str, str], streaming: bool, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        WriteOptions.of({"store": there, **options}, streaming=streaming)
    assert message in str(caught.value)
