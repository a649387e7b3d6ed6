"""What every store promises of fan-out, asked of each: one place for every delivery, and counts that always add up."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import Conflict, RequestError, UnknownCampaign, UnknownPayload
from holdfast.fanout.history import Ended, decode
from holdfast.fanout.nouns import (
    DELIVERIES,
    Awaiting,
    Campaign,
    Counts,
    End,
    InFlight,
    Sent,
    State,
    UnderWay,
    Waiting,
    lane_of,
    place_of,
    seq_of,
    ticket_of,
)
from holdfast.fanout.table import (
    PART_IDS_MAX,
    Added,
    Adopt,
    Await,
    Begin,
    Change,
    Doom,
    FanoutTable,
    Finish,
    MergeStep,
    NewBatch,
    Return,
    Verdict,
)
from holdfast.log.log import Log
from holdfast.sessions.table import RowWrite, SessionRow
from holdfast.store import Store, open_store
from processes import Report, child

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "memory": lambda: f"memory:fanout-{request.node.name}-{os.urandom(4).hex()}",
        "sqlite": lambda: f"sqlite:///{tmp_path}/store.db",
        "postgres": lambda: str(request.getfixturevalue("postgres_url")),
    }[request.param]()


@pytest.fixture
def opener(url: str) -> Iterator[Opener]:
    """Opens the same store again and again, as several processes would."""
    opened: list[Store] = []

    def open_() -> Store:
        opened.append(open_store(url))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    store = opener()
    store.log().create(DELIVERIES, shards=1, shard_by="topic")
    return store


@pytest.fixture
def table(store: Store) -> FanoutTable:
    return store.fanout()


DATA = b"\0data\xff"
SHA1 = hashlib.sha1(DATA).digest()


@pytest.fixture
def sha1(table: FanoutTable) -> bytes:
    return table.put_payload(DATA)


# -- what tests do again and again -----------------------------------------------------------------------


def batch(*vins: str, request_id: str = "task_a_1", sha1: bytes = SHA1, **more: object) -> NewBatch:
    return NewBatch(request_id, sha1, sorted(vins), **more)  # type: ignore[arg-type]


def like(**fields: object) -> Campaign:
    """What a campaign is to be."""
    given = {"state": State.RUNNING, "open": True, "sending": True, **fields}
    return Campaign(id=0, request_id="", number=0, sha1=b"", **given)  # type: ignore[arg-type]


def add(table: FanoutTable, *vins: str, **more: object) -> Added:
    (added,) = table.add([batch(*vins, **more)])  # type: ignore[arg-type]
    assert isinstance(added, Added), added
    return added


def refused(table: FanoutTable, one: NewBatch) -> Exception:
    (answer,) = table.add([one])
    assert isinstance(answer, Exception), answer
    return answer


def steps(table: FanoutTable, rows_max: int = 1000, ids_max: int = 100_000) -> Iterator[MergeStep]:
    """Every step of one run; whoever asks for the next one has made the last."""
    parts, after = table.unmerged(ids_max)
    rows = sorted((vin, part.number) for part in parts for vin in part.ids if vin > after)
    numbers = tuple(part.number for part in parts)
    if parts and not rows:
        yield MergeStep(numbers, after, after, [], True)
    while rows:
        some = rows[:rows_max]
        some += [row for row in rows[rows_max:] if row[0] == some[-1][0]]
        rows = rows[len(some) :]
        yield MergeStep(numbers, after, some[-1][0], some, not rows)
        after = some[-1][0]


def merge_all(table: FanoutTable, rows_max: int = 1000) -> list[str]:
    vins: list[str] = []
    while True:
        found = list(steps(table, rows_max))
        if not found:
            return vins
        for step in found:
            done = table.merge_step(step)
            if done is None:
                break
            vins += done.vins


def connect(store: Store, *client_ids: str) -> dict[str, int]:
    """Sessions, whose epochs are returned."""
    rows = [
        SessionRow(client_id=name, owner="n1", lease=7, connect="k", born="b", expiry_secs=60) for name in client_ids
    ]
    verdicts = store.sessions().write([RowWrite(row, None, True) for row in rows])
    return {verdict.row.client_id: verdict.row.epoch for verdict in verdicts if verdict.row}


def flight(waiting: Waiting, epoch: int, packet_id: int = 1, **fields: object) -> InFlight:
    given = {"node": "n1", "lease": 7, "sent_at": 1_700_000_000.5, **fields}
    sent = Sent(f"client-{waiting.vin}", "born", packet_id)
    return InFlight(*waiting[:5], waiting.attempts, sent, epoch, **given)  # type: ignore[arg-type]


def begin(waiting: Waiting, epoch: int, **fields: object) -> Begin:
    return Begin(waiting, flight(waiting, epoch, **fields))  # type: ignore[arg-type]


def waiting(table: FanoutTable, vin: str, limit: int = 100) -> list[Waiting]:
    found = table.look_up([vin], limit)
    return found[vin].waiting if vin in found else []


def fly(store: Store, table: FanoutTable, *vins: str) -> dict[str, InFlight]:
    """Begin the first delivery of each."""
    epochs = connect(store, *(f"client-{vin}" for vin in vins))
    begins = [begin(waiting(table, vin)[0], epochs[f"client-{vin}"]) for vin in vins]
    assert table.commit(begins) == [Verdict.DONE] * len(vins)
    return {change.seen.vin: change.flight for change in begins}


def counts(table: FanoutTable, campaign: int) -> dict[str, int]:
    """Those that are not 0."""
    found = table.counts([campaign])[campaign]
    return {name: getattr(found, name) for name in found.__struct_fields__ if getattr(found, name)}


def history(log: Log) -> list[Ended]:
    found = []
    for chunk in log.scan(DELIVERIES):
        columns = chunk.batch.to_pydict()
        assert set(columns["publisher"]) == {"$fanout"}
        found += [decode(*one) for one in zip(columns["topic"], columns["payload"], strict=True)]
    return found


def ended(table: FanoutTable, campaign: int, *ends: End) -> dict[str, tuple[End, str]]:
    return {row.vin: (row.end, row.reason) for row in table.ended(campaign, ends or tuple(End), "", 10_000)}


# -- payloads --------------------------------------------------------------------------------------------


def test_a_payload_is_stored_once_under_its_hash(opener: Opener, table: FanoutTable) -> None:
    large = os.urandom(512 << 10)
    assert table.put_payload(DATA) == SHA1 == table.put_payload(DATA)
    assert table.put_payload(large) == hashlib.sha1(large).digest()
    assert table.put_payload(b"") == hashlib.sha1(b"").digest()
    other = opener().fanout()
    number, third = other.payload_number(SHA1), other.payload_number(hashlib.sha1(large).digest())
    assert number is not None and third is not None and number != third
    assert other.payload_number(b"x" * 20) is None
    found = other.payloads([number, third, 999])
    assert {n: (p.number, p.sha1, p.data) for n, p in found.items()} == {
        number: (number, SHA1, DATA),
        third: (third, hashlib.sha1(large).digest(), large),
    }
    assert other.payloads([]) == {}


def spoil(store: Store, change: str, *args: object) -> None:
    """Change a payload behind everybody's back."""
    if hasattr(store, "database"):
        store.database.change(lambda db: db.run(f"update fanout_payloads set {change} = ?", *args))
    else:
        for payload in store.fanout()._state.payloads.values():  # type: ignore[attr-defined]
            setattr(payload, change, args[0])


def test_a_damaged_payload_is_not_there_and_a_collision_is_refused(store: Store, table: FanoutTable) -> None:
    table.put_payload(DATA)
    number = table.payload_number(SHA1)
    assert number is not None
    spoil(store, "data", b"other")
    assert table.payloads([number]) == {}
    spoil(store, "sha256", b"another")
    with pytest.raises(RequestError, match=SHA1.hex()):
        table.put_payload(DATA)


# -- intake ----------------------------------------------------------------------------------------------


def test_a_small_batch_waits_at_once(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    before = table.now()
    added = add(table, "v2", "v1", priority=7, expires=2e9)
    assert added == Added(added.campaign, 1, added.seq, 2, began=True, merged=True)
    other = opener().fanout()
    payload = other.payload_number(sha1)
    place = place_of(7, added.seq)
    assert other.look_up(["v1", "v2", "v3"], 10) == {
        vin: (None, [Waiting(vin, place, added.campaign, payload, 2e9)], False) for vin in ("v1", "v2")
    }
    campaign = other.campaigns([added.campaign, 99])[added.campaign]
    assert (campaign.request_id, campaign.number, campaign.sha1) == ("task_a_1", 1, sha1)
    assert (campaign.state, campaign.open, campaign.sending, campaign.version) == (State.RUNNING, True, True, 0)
    assert before - 60 < campaign.created_at == campaign.batch_at < before + 60
    assert counts(other, added.campaign) == {"waiting": 2}
    assert other.unmerged(100) == ([], "")


def test_places_are_in_order_of_priority_then_age(table: FanoutTable, sha1: bytes) -> None:
    seqs = {
        name: add(table, "v", request_id=name, priority=priority).seq
        for name, priority in (("task_a_1", 4), ("task_b_1", 9), ("task_c_1", 0), ("task_d_1", 9), ("task_e_1", 4))
    }
    found = waiting(table, "v")
    assert [seq_of(row.place) for row in found] == [seqs[f"task_{name}_1"] for name in "bdaec"]
    assert [lane_of(row.place) for row in found] == [0, 0, 5, 5, 9]
    first_two = table.look_up(["v"], 2)["v"]
    assert first_two.waiting == found[:2] and first_two.more
    assert not table.look_up(["v"], 5)["v"].more


def test_a_large_batch_is_parts_until_it_is_merged(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n:06}" for n in range(PART_IDS_MAX + 10)]
    added = add(table, *vins)
    assert added.accepted == len(vins) and not added.merged
    assert table.look_up(vins[:3], 5) == {}
    assert counts(table, added.campaign) == {"waiting": len(vins)}, "they count from now on"
    parts, after = opener().fanout().unmerged(1)
    assert after == "" and [(p.seq, p.place, p.campaign) for p in parts] == [
        (added.seq, place_of(4, added.seq), added.campaign)
    ]
    assert list(parts[0].ids) == vins[:PART_IDS_MAX]
    everything, _ = table.unmerged(1_000_000)
    assert [vin for part in everything for vin in part.ids] == vins
    assert merge_all(table) == vins
    assert table.unmerged(1_000_000) == ([], "")
    assert counts(table, added.campaign) == {"waiting": len(vins)}
    assert len(waiting(table, vins[-1])) == 1


def test_a_small_batch_waits_its_turn_behind_parts(table: FanoutTable, sha1: bytes) -> None:
    add(table, *(f"v{n:03}" for n in range(65)))
    second = add(table, "w", request_id="task_b_1")
    assert not second.merged and waiting(table, "w") == []
    assert "w" in merge_all(table)
    assert add(table, "w", request_id="task_c_1").merged
    assert len(waiting(table, "w")) == 2


def test_batches_of_one_call_are_taken_in_order_each_with_its_answer(table: FanoutTable, sha1: bytes) -> None:
    answers = table.add(
        [
            batch("a"),
            batch("b", sha1=b"?" * 20),
            batch("b"),
            batch("a", number=7),
            batch("a", request_id="task_b_1", key="k", digest=b"1"),
            batch("a", request_id="task_b_1", key="k", digest=b"2"),
            batch("a", request_id="task_b_1", key="k", digest=b"1"),
            batch(*(f"x{n:03}" for n in range(100)), request_id="task_c_1"),
            batch("a", request_id="task_c_1"),
        ]
    )
    kinds = [answer if isinstance(answer, Added) else type(answer) for answer in answers]
    first = answers[0]
    assert isinstance(first, Added) and first.began
    assert kinds[1:4] == [UnknownPayload, Added(first.campaign, 1, kinds[2][2], 1, False, True), UnknownCampaign]  # type: ignore[index]
    assert kinds[5] is Conflict and kinds[6] == kinds[4]._replace(repeated=True)  # type: ignore[union-attr]
    assert not kinds[7].merged and not kinds[8].merged, "the one before is not merged"  # type: ignore[union-attr]
    seqs = [answer.seq for answer in answers if isinstance(answer, Added) and not answer.repeated]
    assert seqs == sorted(set(seqs))
    assert table.add([]) == []


def test_refusals_name_what_is_wrong_and_store_nothing(table: FanoutTable, sha1: bytes) -> None:
    wrong = {
        b"?" * 20: (UnknownPayload, (b"?" * 20).hex(), batch("a", sha1=b"?" * 20)),
        "number": (UnknownCampaign, "campaign 3 of task_a_1", batch("a", number=3)),
        "ids": (RequestError, "no ids", batch()),
        "repeat": (RequestError, "twice", batch("a", "a")),
        "order": (RequestError, "not sorted", NewBatch("task_a_1", sha1, ["b", "a"])),
        "slash": (RequestError, "'a/b'", batch("a/b")),
        "plus": (RequestError, "'+'", batch("+")),
        "hash": (RequestError, "'x#'", batch("a", "x#")),
        "nul": (RequestError, r"'a\x00b'", batch("a\0b")),
        "empty": (RequestError, "''", batch("", "a")),
        "long": (RequestError, "ééé", batch("é" * 65)),
        "surrogate": (RequestError, "Unicode", batch("a\ud800")),
        "upload": (RequestError, "'nothing'", NewBatch("task_a_1", sha1, [], upload="nothing")),
        "request id": (RequestError, "request id", batch("a", request_id="a\0")),
        "priority": (RequestError, "from 0 to 9, got 10", batch("a", priority=10)),
        "resend": (RequestError, "'again'", batch("a", resend="again")),
    }
    for name, (kind, text, one) in wrong.items():
        refusal = refused(table, one)
        assert isinstance(refusal, kind), name
        assert text in str(refusal), name
    assert table.page(0, 10) == [] and table.last_merged() == 0 and table.find("task_a_1") is None


@pytest.mark.parametrize(
    "vin", ["é" * 64, "x" * 128, "'; drop table x; --", '%s ? {} \\ "', " ", "a\nb", "\x01", "\uffff"]
)
def test_odd_vins_are_names_like_others(
    opener: Opener, store: Store, table: FanoutTable, sha1: bytes, vin: str
) -> None:
    added = add(table, vin, "other")
    flown = fly(store, table, vin)
    again = opener().fanout()
    assert again.vehicle(vin) == (flown[vin], [], [])
    assert again.commit([Finish(flown[vin], End.FAILED, 'odd " \\ é \U0001f69a')]) == [Verdict.DONE]
    assert ended(again, added.campaign) == {vin: (End.FAILED, 'odd " \\ é \U0001f69a')}
    assert history(store.log())[0].vin == vin
    assert again.retry(added.campaign, [vin]) == [vin]
    assert [row.vin for row in waiting(table, vin)] == [vin]


def test_a_known_key_does_nothing_and_gets_the_first_answer(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    first = add(table, "a", key="k", digest=b"d")
    again = add(opener().fanout(), "a", key="k", digest=b"d")
    assert again == first._replace(repeated=True)
    refusal = refused(table, batch("b", key="k", digest=b"other"))
    assert isinstance(refusal, Conflict) and "'k'" in str(refusal)
    assert counts(table, first.campaign) == {"waiting": 1} and table.repeated(first.campaign) == 0
    assert refused(table, batch("b", key="new", digest=b"d", sha1=b"?" * 20)) is not None
    assert add(table, "b", key="new", digest=b"d").accepted == 1, "a refusal is not remembered"


def test_an_upload_becomes_visible_all_at_once(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n:05}" for n in range(12_000)]
    for at in range(0, len(vins), PART_IDS_MAX):
        table.stage("up", vins[at : at + PART_IDS_MAX])
    table.stage("other", ["x"])
    assert table.unmerged(10) == ([], "") and table.parts_of(1, 0, 10) == []
    added = add(opener().fanout(), upload="up")
    assert added.accepted == len(vins) and not added.merged
    parts = table.parts_of(added.campaign, 0, 10)
    assert [vin for part in parts for vin in part.ids] == vins and not any(part.merged for part in parts)
    assert table.last_merged() == 0 and table.parts_since(0, 10) == [], "nothing of it can be found yet"
    assert isinstance(refused(table, NewBatch("task_a_1", sha1, [], upload="up")), RequestError)
    merge_all(table)
    merged = table.parts_since(0, 10)
    assert [part._replace(merged=0) for part in merged] == parts
    assert [part.merged for part in merged] == [1, 2, 3] and table.last_merged() == 3
    assert counts(table, added.campaign) == {"waiting": len(vins)}
    with pytest.raises(RequestError, match="at most 5000"):
        table.stage("up", [f"{n:06}" for n in range(PART_IDS_MAX + 1)])
    with pytest.raises(RequestError, match="not sorted"):
        table.stage("up", ["b", "a"])


def test_a_refused_batch_leaves_its_upload_to_be_tried_again(table: FanoutTable, sha1: bytes) -> None:
    table.stage("up", ["a", "b"])
    assert isinstance(refused(table, NewBatch("task_a_1", b"?" * 20, [], upload="up")), UnknownPayload)
    assert add(table, upload="up").accepted == 2


def test_uploads_that_nobody_named_are_dropped_in_steps(table: FanoutTable, sha1: bytes) -> None:
    for n in range(5):
        table.stage(f"up{n % 2}", [f"v{n}"])
    assert table.drop_uploads(table.now() - 60, 100) == 0
    assert [table.drop_uploads(table.now() + 60, 3) for _ in range(3)] == [3, 2, 0]
    assert isinstance(refused(table, NewBatch("task_a_1", sha1, [], upload="up0")), RequestError)


def test_nobody_sees_half_of_an_upload(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    other, seen, stop = opener().fanout(), set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(len(other.parts_of(1, 0, 100)))
            seen.add(sum(c.targets for c in other.counts([1]).values()) // 1000)

    for n in range(20):
        table.stage("up", [f"v{n:02}{m:03}" for m in range(1000)])
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            add(table, upload="up")
        finally:
            stop.set()
        looking.result(30)
    assert seen <= {0, 20}


# -- campaigns -------------------------------------------------------------------------------------------


def test_a_batch_joins_the_newest_open_campaign_with_its_hash(table: FanoutTable, sha1: bytes) -> None:
    other = table.put_payload(b"other")
    first = add(table, "a")
    joined = add(table, "b")
    assert (joined.campaign, joined.number, joined.began) == (first.campaign, 1, False)
    second = add(table, "a", sha1=other)
    assert second.began and second.number == 2 and second.campaign > first.campaign
    assert not table.campaigns([first.campaign])[first.campaign].open, "other data ends the earlier one"
    assert table.campaigns([first.campaign])[first.campaign].version == 1
    third = add(table, "a")
    assert third.began and third.number == 3
    beside = add(table, "c", sha1=other, resend="append")
    assert beside.number == 4 and table.campaigns([third.campaign])[third.campaign].open
    assert add(table, "d").number == 3 and add(table, "d", sha1=other).number == 4
    assert add(table, "x", request_id="task_b_1").number == 1
    found = table.find("task_a_1")
    assert found is not None and found.number == 4
    found = table.find("task_a_1", 2)
    assert found is not None and found.id == second.campaign
    assert table.find("task_a_1", 9) is None and table.find("nothing") is None


def test_a_final_batch_ends_the_joining(table: FanoutTable, sha1: bytes) -> None:
    first = add(table, "a")
    assert add(table, "b", final=True).campaign == first.campaign
    closed = table.campaigns([first.campaign])[first.campaign]
    assert not closed.open and closed.version == 1
    only = add(table, "c", final=True)
    assert only.began and only.number == 2 and not table.campaigns([only.campaign])[only.campaign].open
    refusal = refused(table, batch("d", number=1))
    assert isinstance(refusal, Conflict) and "campaign 1 of task_a_1" in str(refusal)


def test_a_number_names_the_campaign_whatever_the_payload(table: FanoutTable, sha1: bytes) -> None:
    other = table.put_payload(b"other")
    first = add(table, "a", begin=like(), settings=b"s")
    joined = add(table, "b", sha1=other, number=1)
    assert joined.campaign == first.campaign
    assert waiting(table, "b")[0].payload == table.payload_number(other)
    assert table.campaigns([first.campaign])[first.campaign].sha1 == sha1


def test_the_first_batch_fixes_the_settings(table: FanoutTable, sha1: bytes) -> None:
    want = like(settings=b"s", waved=True, cut=5, rate_per_sec=2.5, bytes_per_sec=1e6, in_flight_max=7)
    want = replace(want, awaits_result=True, control=b"\0c", reason="why", sending=False, state=State.PAUSED)
    first = add(table, "a", begin=want, settings=b"s")
    stored = table.campaigns([first.campaign])[first.campaign]
    filled = {"id": first.campaign, "request_id": "task_a_1", "number": 1, "sha1": sha1}
    assert stored == replace(want, **filled, created_at=stored.created_at, batch_at=stored.batch_at)
    assert add(table, "b", settings=b"s").campaign == add(table, "c").campaign == first.campaign
    refusal = refused(table, batch("d", settings=b"t"))
    assert isinstance(refusal, Conflict) and "settings" in str(refusal)
    assert counts(table, first.campaign) == {"waiting": 3}


def test_one_target_per_campaign_and_vehicle(store: Store, table: FanoutTable, sha1: bytes) -> None:
    """Whether it waits, is in flight, awaits its result or has ended."""
    names = ["waits", "flies", "awaits", "acked", "failed"]
    first = add(table, *names)
    flown = fly(store, table, "flies", "awaits", "acked")
    table.commit(
        [
            Await(flown["awaits"], 2e9),
            Finish(flown["acked"], End.ACKED),
            Finish(waiting(table, "failed")[0], End.FAILED, "why"),
        ]
    )
    before = counts(table, first.campaign)
    assert before == {"waiting": 1, "in_flight": 1, "awaiting_result": 1, "acked": 1, "failed": 1}
    again = add(table, *names, "new")
    assert again.campaign == first.campaign and again.accepted == 6 and again.merged
    assert counts(table, first.campaign) == {**before, "waiting": 2}
    assert table.repeated(first.campaign) == 5
    many = add(table, *names, *(f"x{n:03}" for n in range(100)))
    assert counts(table, many.campaign)["waiting"] == 2 + 105
    assert merge_all(table, 7) == [f"x{n:03}" for n in range(100)]
    assert counts(table, many.campaign) == {**before, "waiting": 102} and table.repeated(first.campaign) == 10
    assert len(waiting(table, "waits")) == 1 and waiting(table, "acked") == []


def test_a_repeat_within_one_run_is_one_target(table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n:03}" for n in range(80)]
    first = add(table, *vins)
    add(table, *vins[40:], "w")
    assert counts(table, first.campaign) == {"waiting": 121}
    assert merge_all(table, 9) == [*vins, "w"]
    assert counts(table, first.campaign) == {"waiting": 81} and table.repeated(first.campaign) == 40


@pytest.mark.parametrize("merged", [True, False], ids=["at once", "merged later"])
@pytest.mark.parametrize("resend", ["replace", "append", "ignore"])
def test_resend_says_what_becomes_of_what_waits(
    store: Store, table: FanoutTable, sha1: bytes, resend: str, merged: bool
) -> None:
    other = table.put_payload(b"other")
    more = [] if merged else [f"x{n:03}" for n in range(100)]
    first = add(table, "flies", "waits")
    unrelated = add(table, "waits", request_id="task_b_1")
    fly(store, table, "flies")
    second = add(table, "flies", "waits", "new", *more, sha1=other, resend=resend)
    assert second.merged == merged
    told = merge_all(table)
    found = [row.campaign for row in waiting(table, "waits")]
    if resend == "replace":
        assert found == [unrelated.campaign, second.campaign], "a new place at the end"
        assert counts(table, first.campaign) == {"in_flight": 1, "superseded": 1}
        assert [(e.vin, e.campaign, e.end) for e in history(store.log())] == [("waits", first.campaign, End.SUPERSEDED)]
        assert ended(table, first.campaign).keys() == {"waits"}
    elif resend == "append":
        assert found == [first.campaign, unrelated.campaign, second.campaign]
        assert counts(table, first.campaign) == {"in_flight": 1, "waiting": 1} and history(store.log()) == []
    else:
        assert found == [first.campaign, unrelated.campaign]
        assert table.repeated(second.campaign) == 1
    left = 3 + len(more) - (resend == "ignore")
    assert counts(table, second.campaign) == {"waiting": left}
    assert table.look_up(["flies"], 5)["flies"].waiting[0].campaign == second.campaign
    if not merged:
        assert told == ["flies", "new", *(["waits"] if resend != "ignore" else []), *more]


def test_a_campaign_supersedes_another_of_the_same_run(store: Store, table: FanoutTable, sha1: bytes) -> None:
    other = table.put_payload(b"other")
    vins = [f"v{n:03}" for n in range(100)]
    first, second = add(table, *vins), add(table, *vins[50:], "w", sha1=other)
    assert merge_all(table, 30) == [*vins, "w"]
    assert counts(table, first.campaign) == {"waiting": 50, "superseded": 50}
    assert counts(table, second.campaign) == {"waiting": 51}
    assert len(history(store.log())) == 50 and len(waiting(table, "v060")) == 1


def test_what_is_merged_into_a_cancelled_campaign_is_cancelled_at_once(
    store: Store, table: FanoutTable, sha1: bytes
) -> None:
    vins = [f"v{n:03}" for n in range(100)]
    added = add(table, *vins)
    (first, *others) = steps(table, 50)
    assert table.merge_step(first) is not None
    seen = table.campaigns([added.campaign])[added.campaign]
    stopped = replace(seen, state=State.CANCELLED, open=False, sending=False, version=seen.version + 1)
    assert table.change_campaign(stopped)
    done = table.merge_step(others[0])
    assert done is not None and done.vins == [] and done.repeated == 0
    assert counts(table, added.campaign) == {"waiting": 50, "cancelled": 50}
    assert {(e.vin, e.end) for e in history(store.log())} == {(vin, End.CANCELLED) for vin in vins[50:]}


def test_a_campaign_is_changed_by_whoever_has_seen_it_as_it_is(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    added = add(table, "a")
    seen = table.campaigns([added.campaign])[added.campaign]
    changed = replace(
        seen,
        state=State.PAUSED,
        sending=False,
        cut=3,
        rate_per_sec=1.5,
        bytes_per_sec=2.5,
        in_flight_max=9,
        control=b"c\0",
        reason="because",
        version=1,
    )
    assert table.change_campaign(changed)
    assert opener().fanout().campaigns([added.campaign]) == {added.campaign: changed}
    assert not table.change_campaign(changed)
    assert not table.change_campaign(replace(seen, version=3))
    assert not table.change_campaign(replace(seen, id=99, version=1))
    add(table, "b", final=True)
    assert not table.change_campaign(replace(changed, version=2)), "the batch has changed it"
    now = table.campaigns([added.campaign])[added.campaign]
    assert not now.open and now.version == 2 and now.reason == "because"


def test_batches_that_only_join_do_not_disturb_whoever_controls_it(table: FanoutTable, sha1: bytes) -> None:
    seen = table.campaigns([add(table, "a").campaign]).popitem()[1]
    add(table, "b")
    assert table.change_campaign(replace(seen, reason="x", version=1))
    now = table.campaigns([seen.id])[seen.id]
    assert now.batch_at >= seen.batch_at and now.version == 1


def test_one_keeper_at_a_time_and_an_older_one_is_fenced(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    other = opener().fanout()
    seen = table.campaigns([add(table, "a").campaign]).popitem()[1]
    first = table.keep("n1", 60)
    assert first is not None and other.keep("n2", 60) is None
    assert table.keep("n1", 0) == first, "it stays the same while it is kept"
    second = other.keep("n2", 60)
    assert second is not None and second > first
    assert table.keep("n1", 60) is None
    assert not table.change_campaign(replace(seen, reason="late", version=1), first)
    assert other.change_campaign(replace(seen, reason="now", version=1), second)
    assert table.campaigns([seen.id])[seen.id].reason == "now"


def test_campaigns_are_paged_newest_first(table: FanoutTable, sha1: bytes) -> None:
    ids = [add(table, "a", request_id=f"task_a_{n}").campaign for n in range(7)]
    for id_ in ids[::2]:
        assert table.change_campaign(replace(table.campaigns([id_])[id_], state=State.CLOSED, version=1))
    assert [c.id for c in table.page(0, 3)] == ids[:3:-1]
    assert [c.id for c in table.page(ids[4], 10)] == ids[3::-1]
    assert [c.id for c in table.page(0, 10, [State.RUNNING])] == ids[5::-2]
    assert [c.id for c in table.page(0, 10, [State.RUNNING, State.CLOSED])] == ids[::-1]
    assert table.page(0, 10, [State.PAUSED]) == []


# -- look-ups --------------------------------------------------------------------------------------------


def test_only_what_may_be_sent_is_found(table: FanoutTable, sha1: bytes) -> None:
    sending = add(table, "v", request_id="task_a_1")
    held = add(table, "v", request_id="task_b_1", begin=like(sending=False))
    waved = add(table, "v", "w", request_id="task_c_1", begin=like(waved=True))
    ticket = ticket_of(waved.campaign, "v")
    assert [row.campaign for row in waiting(table, "v")] == [sending.campaign] and waiting(table, "w") == []
    for cut, found in ((ticket - 1, False), (ticket, True), (None, False), (0xFFFFFFFF, True)):
        seen = table.campaigns([waved.campaign])[waved.campaign]
        assert table.change_campaign(replace(seen, cut=cut, version=seen.version + 1))
        assert [row.campaign for row in waiting(table, "v")] == [sending.campaign] + [waved.campaign] * found
    seen = table.campaigns([held.campaign])[held.campaign]
    assert table.change_campaign(replace(seen, sending=True, version=1))
    assert len(waiting(table, "v")) == 3
    in_flight, everything, awaiting = table.vehicle("v")
    assert in_flight is None and awaiting == [] and len(everything) == 3
    assert table.vehicle("nobody") == (None, [], [])


def test_a_look_up_finds_what_is_in_flight_too(store: Store, table: FanoutTable, sha1: bytes) -> None:
    add(table, "v", request_id="task_a_1")
    add(table, "v", "w", request_id="task_b_1")
    flown = fly(store, table, "v", "w")
    found = table.look_up(["v", "w", "x"], 5)
    assert found.keys() == {"v", "w"}
    assert found["v"].in_flight == flown["v"] and len(found["v"].waiting) == 1
    assert found["w"] == (flown["w"], [], False)
    assert table.look_up([], 5) == {}


# -- changes ---------------------------------------------------------------------------------------------


def test_a_delivery_goes_its_way(opener: Opener, store: Store, table: FanoutTable, sha1: bytes) -> None:
    added = add(table, "v", expires=2e9)
    epoch = connect(store, "client-v")["client-v"]
    seen = waiting(table, "v")[0]
    flown = flight(seen, epoch, packet_id=65_535)
    assert table.commit([Begin(seen, flown)]) == [Verdict.DONE]
    other = opener().fanout()
    assert other.vehicle("v") == (flown, [], []) and counts(other, added.campaign) == {"in_flight": 1}
    assert other.commit([Return(flown, attempts=1, not_before=1_700_000_010.5)]) == [Verdict.DONE]
    back = Waiting("v", seen.place, added.campaign, seen.payload, 2e9, 1, 1_700_000_010.5, flown.sent)
    assert table.vehicle("v") == (None, [back], []) and counts(table, added.campaign) == {"waiting": 1}
    again = flight(back, epoch, packet_id=2)
    assert again.attempts == 1 and table.commit([Begin(back, again)]) == [Verdict.DONE]
    adopted = again._replace(node="n2", lease=8, sent=Sent("client-v", "born", 3), sent_at=1_700_000_020.25)
    assert other.commit([Adopt(again, adopted)]) == [Verdict.DONE]
    assert table.vehicle("v")[0] == adopted
    before = table.now()
    assert table.commit([Await(adopted, until=1_800_000_000.5)]) == [Verdict.DONE]
    in_flight, rest, (awaiting,) = other.vehicle("v")
    assert (in_flight, rest) == (None, [])
    assert awaiting[:5] == ("v", seen.place, added.campaign, seen.payload, 1)
    assert abs(awaiting.acked_at - before) < 60 and awaiting.until == 1_800_000_000.5
    assert other.awaiting("v") == [awaiting] and other.awaiting("w") == []
    assert counts(table, added.campaign) == {"awaiting_result": 1}
    assert history(store.log()) == []
    assert table.commit([Finish(awaiting, End.ACKED, "done", b"result")]) == [Verdict.DONE]
    assert table.vehicle("v") == (None, [], []) and counts(table, added.campaign) == {"acked": 1}
    (end,) = history(opener().log())
    assert end[:6] == ("v", added.campaign, seen.place, End.ACKED, "done", 1) and end.result == b"result"
    (row,) = table.ended(added.campaign, [End.ACKED], "", 10)
    assert row[:4] == ("v", seen.place, End.ACKED, "done") and abs(row.ended_at - before) < 60


def test_what_is_not_as_it_was_seen_is_gone(store: Store, table: FanoutTable, sha1: bytes) -> None:
    add(table, "v", "w")
    epoch = connect(store, "client-v", "client-w")["client-v"]
    (seen,) = waiting(table, "v")
    assert table.commit([begin(seen._replace(place=seen.place + 1), epoch)]) == [Verdict.GONE]
    flown = flight(seen, epoch)
    assert table.commit([Begin(seen, flown)]) == [Verdict.DONE]
    awaiting = Awaiting("v", seen.place, seen.campaign, seen.payload, 0, 0.0, 0.0)
    wrong: list[Change] = [Begin(seen, flown), Finish(seen, End.FAILED), Finish(awaiting, End.ACKED)]
    for other in (
        flown._replace(vin="w"),
        flown._replace(place=flown.place + 1),
        flown._replace(epoch=epoch + 1),
        flown._replace(attempts=1),
    ):
        wrong += [Return(other, 0), Await(other, 0.0), Finish(other, End.ACKED), Adopt(other, other)]
    assert table.commit(wrong) == [Verdict.GONE] * len(wrong)
    assert table.vehicle("v") == (flown, [], []) and history(store.log()) == []
    assert table.commit([Finish(flown, End.ACKED)] * 2) == [Verdict.DONE, Verdict.GONE]
    assert len(history(store.log())) == 1
    assert table.commit([]) == []


def test_one_delivery_in_flight_per_vehicle(store: Store, table: FanoutTable, sha1: bytes) -> None:
    add(table, "v", request_id="task_a_1")
    add(table, "v", request_id="task_b_1")
    epoch = connect(store, "client-v")["client-v"]
    first, second = waiting(table, "v")
    assert table.commit([begin(first, epoch), begin(second, epoch)]) == [Verdict.DONE, Verdict.BUSY]
    assert table.commit([begin(second, epoch)]) == [Verdict.BUSY]
    flown = flight(first, epoch)
    done = table.commit([Finish(flown, End.ACKED), begin(second, epoch, packet_id=9)])
    assert done == [Verdict.DONE, Verdict.DONE]
    now = table.vehicle("v")
    assert now[0] == flight(second, epoch, packet_id=9) and now[1] == []
    back = Return(flight(second, epoch, packet_id=9), 0)
    again = Waiting(*second[:5], sent=flight(second, epoch, packet_id=9).sent)
    changes = [back, begin(again, epoch, packet_id=10), back, Await(flight(second, epoch, packet_id=10), 1.0)]
    assert table.commit(changes) == [Verdict.DONE, Verdict.DONE, Verdict.DONE, Verdict.GONE]
    assert table.vehicle("v")[0] is None and len(waiting(table, "v")) == 1


def test_only_the_session_s_present_epoch_may_send(store: Store, table: FanoutTable, sha1: bytes) -> None:
    add(table, "v")
    (seen,) = waiting(table, "v")
    assert table.commit([begin(seen, 1)]) == [Verdict.STALE], "there is no session"
    epoch = connect(store, "client-v")["client-v"]
    assert table.commit([begin(seen, epoch - 1)]) == [Verdict.STALE]
    assert table.commit([begin(seen, epoch)]) == [Verdict.DONE]
    row = store.sessions().read(["client-v"])["client-v"]
    (taken,) = store.sessions().write([RowWrite(row, (row.epoch, row.seq), True)])
    assert taken.row is not None
    old, new = flight(seen, epoch), flight(seen, taken.row.epoch, node="n2", lease=8)
    assert table.commit([Adopt(old, old)]) == [Verdict.STALE]
    assert table.commit([Adopt(old, new)]) == [Verdict.DONE]
    assert table.commit([Adopt(old, new), Return(old, 0), Finish(old, End.ACKED)]) == [Verdict.GONE] * 3
    dead = SessionRow(client_id="client-v", epoch=taken.row.epoch, seq=1, dead=True, left_at=0.0)
    store.sessions().write([RowWrite(dead, (taken.row.epoch, 0), False)])
    assert table.commit([Adopt(new, new)]) == [Verdict.STALE], "it was deleted"
    assert table.commit([Return(new, 0)]) == [Verdict.DONE]


def test_a_campaign_that_is_not_sending_begins_nothing(store: Store, table: FanoutTable, sha1: bytes) -> None:
    added = add(table, "v", "w", begin=like(waved=True, cut=0xFFFFFFFF))
    epochs = connect(store, "client-v", "client-w")
    v, w = waiting(table, "v")[0], waiting(table, "w")[0]
    flown = fly_of(table, v, epochs["client-v"])
    for fields in ({"sending": False}, {"sending": True, "cut": None}, {"cut": ticket_of(added.campaign, "w") - 1}):
        seen = table.campaigns([added.campaign])[added.campaign]
        assert table.change_campaign(replace(seen, **fields, version=seen.version + 1))
        assert table.commit([begin(w, epochs["client-w"])]) == [Verdict.HELD]
    seen = table.campaigns([added.campaign])[added.campaign]
    assert table.change_campaign(replace(seen, cut=ticket_of(added.campaign, "w"), version=seen.version + 1))
    assert table.commit([begin(w, epochs["client-w"]), Finish(flown, End.ACKED)]) == [Verdict.DONE] * 2


def fly_of(table: FanoutTable, seen: Waiting, epoch: int) -> InFlight:
    flown = flight(seen, epoch)
    assert table.commit([Begin(seen, flown)]) == [Verdict.DONE]
    return flown


def test_limits_hold_within_and_across_commits(store: Store, table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n}" for n in range(10)]
    epochs = connect(store, *(f"client-{vin}" for vin in vins))

    def begins(request_id: str, **limits: object) -> tuple[int, list[Begin]]:
        added = add(table, *vins, request_id=request_id, begin=like(**limits))
        found = {vin: [w for w in waiting(table, vin) if w.campaign == added.campaign] for vin in vins}
        return added.campaign, [begin(found[vin][0], epochs[f"client-{vin}"]) for vin in vins]

    def settle(changes: Sequence[Begin], verdicts: Sequence[Verdict]) -> None:
        done = [change for change, verdict in zip(changes, verdicts, strict=True) if verdict is Verdict.DONE]
        assert set(table.commit([Finish(change.flight, End.ACKED) for change in done])) <= {Verdict.DONE}

    campaign, changes = begins("task_a_1", in_flight_max=3)
    verdicts = table.commit(changes)
    assert verdicts == [Verdict.DONE] * 3 + [Verdict.LIMITED] * 7 and counts(table, campaign)["in_flight"] == 3
    assert table.commit(changes[3:]) == [Verdict.LIMITED] * 7
    more = table.commit([Finish(changes[0].flight, End.ACKED), changes[3], changes[4]])
    assert more == [Verdict.DONE, Verdict.DONE, Verdict.LIMITED]
    settle(changes[1:4], [Verdict.DONE] * 3)

    campaign, changes = begins("task_b_1", rate_per_sec=4.0)
    verdicts = table.commit(changes)
    assert verdicts.count(Verdict.DONE) == 4 and verdicts[4:] == [Verdict.LIMITED] * 6
    settle(changes, verdicts)
    campaign, changes = begins("task_c_1", rate_per_sec=0.001)
    verdicts = table.commit(changes)
    assert verdicts == [Verdict.DONE] + [Verdict.LIMITED] * 9, "one delivery at least"
    settle(changes, verdicts)
    assert table.commit(changes[1:]) == [Verdict.LIMITED] * 9

    campaign, changes = begins("task_d_1", bytes_per_sec=2.5 * len(DATA))
    verdicts = table.commit(changes)
    assert verdicts == [Verdict.DONE] * 3 + [Verdict.LIMITED] * 7, "the one that goes over it is paid for afterwards"
    settle(changes, verdicts)
    begun = time.monotonic()
    while Verdict.DONE not in table.commit(changes[3:4]):
        assert time.monotonic() - begun < 30
    assert counts(table, campaign)["in_flight"] == 1


def test_results_that_are_overdue_come_oldest_first(store: Store, table: FanoutTable, sha1: bytes) -> None:
    vins = ["a", "b", "c", "d"]
    add(table, *vins)
    flown = fly(store, table, *vins)
    table.commit([Await(flown[vin], until) for vin, until in zip(vins, (30.0, 10.0, 20.0, 40.0), strict=True)])
    assert [row.vin for row in table.overdue(30.0, 10)] == ["b", "c", "a"]
    assert [row.vin for row in table.overdue(100.0, 2)] == ["b", "c"]
    late = table.overdue(10.0, 10)
    assert table.commit([Finish(late[0], End.FAILED, "no result")]) == [Verdict.DONE]
    assert [row.vin for row in table.overdue(30.0, 10)] == ["c", "a"]


def test_orphans_are_in_flight_from_nodes_that_are_gone(store: Store, table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n}" for n in range(6)]
    add(table, *vins)
    epochs = connect(store, *(f"client-{vin}" for vin in vins))
    flights = [flight(waiting(table, vin)[0], epochs[f"client-{vin}"], lease=n % 3) for n, vin in enumerate(vins)]
    table.commit([Begin(waiting(table, one.vin)[0], one) for one in flights])
    assert table.orphans([0, 1, 2], "", 10) == []
    assert table.orphans([0], "", 10) == [one for one in flights if one.lease]
    assert table.orphans([0], "", 2) == [flights[1], flights[2]]
    assert table.orphans([0], "v2", 10) == [flights[4], flights[5]]
    assert table.orphans([], "v4", 10) == [flights[5]]


# -- ends ------------------------------------------------------------------------------------------------


def test_ends_are_listed_by_vehicle_and_failures_by_reason(store: Store, table: FanoutTable, sha1: bytes) -> None:
    names = [f"v{n:02}" for n in range(20)]
    added = add(table, *names)
    ends = [End.ACKED, End.FAILED, End.EXPIRED, End.SUPERSEDED, End.CANCELLED]
    finishes = [
        Finish(waiting(table, vin)[0], ends[n % 5], f"reason {n % 2}" if n % 5 == 1 else "")
        for n, vin in enumerate(names)
    ]
    assert table.commit(finishes) == [Verdict.DONE] * 20
    assert counts(table, added.campaign) == {str(end): 4 for end in ends}
    assert [r.vin for r in table.ended(added.campaign, [End.FAILED], "", 10)] == ["v01", "v06", "v11", "v16"]
    assert [r.vin for r in table.ended(added.campaign, [End.FAILED, End.EXPIRED], "v02", 3)] == ["v06", "v07", "v11"]
    assert [r.vin for r in table.ended(added.campaign, list(End), "v17", 10)] == ["v18", "v19"]
    assert table.ended(added.campaign, [], "", 10) == [] and table.ended(99, list(End), "", 10) == []
    assert table.reasons(added.campaign) == {"reason 0": 2, "reason 1": 2} and table.reasons(99) == {}
    assert sorted(e.vin for e in history(store.log())) == names


def test_ends_go_to_the_next_generation_if_the_open_one_was_sealed(
    opener: Opener, store: Store, table: FanoutTable, sha1: bytes
) -> None:
    add(table, *(f"v{n}" for n in range(4)))
    for n in range(4):
        assert table.commit([Finish(waiting(table, f"v{n}")[0], End.EXPIRED)]) == [Verdict.DONE]
        opener().log().seal(DELIVERIES)
    heads = [head.stream.generation for head in store.log().heads(DELIVERIES) if head.next_offset]
    assert heads == [1, 2, 3, 4] and len(history(store.log())) == 4


def test_everyone_who_watches_the_log_hears_of_ends(opener: Opener, store: Store, sha1: bytes) -> None:
    table, heard, elsewhere = store.fanout(), [], threading.Event()
    store.log().watch(heard.append)
    opener().log().watch(lambda log: elsewhere.set())
    add(table, "v")
    assert heard == []
    table.commit([Finish(waiting(table, "v")[0], End.EXPIRED)])
    assert heard == [DELIVERIES] and elsewhere.wait(10)


def test_without_the_log_nothing_ends(opener: Opener) -> None:
    store = opener()
    table = store.fanout()
    table.put_payload(DATA)
    added = add(table, "v")
    with pytest.raises(RequestError):
        table.commit([Finish(waiting(table, "v")[0], End.EXPIRED)])
    assert counts(table, added.campaign) == {"waiting": 1} and len(waiting(table, "v")) == 1
    assert ended(table, added.campaign) == {}


def test_retry_makes_new_deliveries_of_what_has_failed(store: Store, table: FanoutTable, sha1: bytes) -> None:
    other = table.put_payload(b"other")
    added = add(table, "acked", "failed", "flies", "waits", priority=7, expires=2e9)
    add(table, "expired", sha1=other, number=1)
    flown = fly(store, table, "acked", "flies")
    old = {vin: waiting(table, vin)[0] for vin in ("failed", "expired")}
    table.commit(
        [
            Finish(flown["acked"], End.ACKED),
            Finish(old["failed"], End.FAILED, "x"),
            Finish(old["expired"], End.EXPIRED),
        ]
    )
    assert table.retry(added.campaign, ["waits", "acked", "nobody", "failed", "flies", "expired"]) == [
        "expired",
        "failed",
    ]
    for vin, priority in (("failed", 7), ("expired", 4)):
        (row,) = waiting(table, vin)
        assert row.place > old[vin].place and lane_of(row.place) == 9 - priority
        assert row == old[vin]._replace(place=row.place, expires=inf)
        assert vin in [
            v for part in table.parts_of(added.campaign, 0, 100) for v in part.ids if part.place == row.place
        ]
    assert counts(table, added.campaign) == {"waiting": 3, "in_flight": 1, "acked": 1}
    assert ended(table, added.campaign).keys() == {"acked"} and table.reasons(added.campaign) == {}
    assert table.retry(added.campaign, ["failed"]) == [] and table.retry(added.campaign, []) == []
    assert table.unmerged(10) == ([], "")
    table.commit([Finish(waiting(table, "failed")[0], End.FAILED, "again")])
    seen = table.campaigns([added.campaign])[added.campaign]
    assert table.change_campaign(replace(seen, state=State.CANCELLED, version=seen.version + 1))
    with pytest.raises(RequestError, match="cancelled"):
        table.retry(added.campaign, ["failed"])
    with pytest.raises(UnknownCampaign):
        table.retry(999, ["failed"])


def test_what_comes_back_has_its_end_if_it_has_no_reason_to_wait(store: Store, table: FanoutTable, sha1: bytes) -> None:
    expired, doomed = add(table, "e", expires=1.0, request_id="task_e_1"), add(table, "d", request_id="task_d_1")
    old = add(table, "s", request_id="task_s_1")
    epochs = connect(store, "client-e", "client-d", "client-s")
    flights = {vin: flight(waiting(table, vin)[0], epochs[f"client-{vin}"]) for vin in "eds"}
    table.commit([begin(waiting(table, vin)[0], epochs[f"client-{vin}"]) for vin in "eds"])
    new = add(table, "s", request_id="task_s_1", sha1=table.put_payload(b"new"), begin=like(sending=False))
    assert table.commit([Doom(flights["d"])]) == [Verdict.DONE] and counts(table, doomed.campaign) == {"in_flight": 1}
    assert table.commit([Return(flights[vin], 0) for vin in "eds"]) == [Verdict.DONE] * 3
    assert counts(table, expired.campaign) == {"expired": 1} and counts(table, doomed.campaign) == {"cancelled": 1}
    assert counts(table, old.campaign) == {"superseded": 1} and counts(table, new.campaign) == {"waiting": 1}
    assert sorted((end.vin, end.end) for end in history(store.log())) == [
        ("d", End.CANCELLED),
        ("e", End.EXPIRED),
        ("s", End.SUPERSEDED),
    ]
    assert table.commit([Doom(flights["d"])]) == [Verdict.GONE]


def test_vehicles_whose_delivery_is_under_way_are_listed(store: Store, table: FanoutTable, sha1: bytes) -> None:
    added = add(table, "a", "b", "c", "d")
    other = add(table, "a", "x", request_id="task_b_1")
    epochs = connect(store, "client-b", "client-c")
    assert table.under_way(added.campaign, UnderWay.WAITING, "", 3) == ["a", "b", "c"]
    assert table.under_way(added.campaign, UnderWay.WAITING, "c", 3) == ["d"]
    flights = {vin: flight(waiting(table, vin)[0], epochs[f"client-{vin}"]) for vin in "bc"}
    table.commit([begin(waiting(table, vin)[0], epochs[f"client-{vin}"]) for vin in "bc"])
    table.commit([Await(flights["c"], 2e9)])
    assert table.under_way(added.campaign, UnderWay.WAITING, "", 9) == ["a", "d"]
    assert table.under_way(added.campaign, UnderWay.IN_FLIGHT, "", 9) == ["b"]
    assert table.under_way(added.campaign, UnderWay.AWAITING_RESULT, "", 9) == ["c"]
    assert table.under_way(other.campaign, UnderWay.WAITING, "", 9) == ["a", "x"]


# -- parts -----------------------------------------------------------------------------------------------


def test_who_follows_the_parts_misses_none(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    stop, count = threading.Event(), 25

    def follow() -> list[tuple[int, int]]:
        other, seen, last = opener().fanout(), [], 0
        while True:
            ending = stop.is_set()
            for part in other.parts_since(last, 3):
                seen.append((part.merged, part.seq))
                last = part.merged
                ending = False
            if ending:
                return seen

    def publish(name: str) -> list[int]:
        other = opener().fanout()
        return [add(other, f"v{n}", request_id=f"task_{name}_{n}").seq for n in range(count)]

    with ThreadPoolExecutor(5) as pool:
        followers = [pool.submit(follow) for _ in range(2)]
        try:
            seqs = [seq for one in [pool.submit(publish, name) for name in "abc"] for seq in one.result(60)]
        finally:
            stop.set()
        for follower in followers:
            seen = follower.result(30)
            assert [seq for _, seq in seen] == sorted(seqs)
            assert [number for number, _ in seen] == sorted({number for number, _ in seen})
            assert seen[-1][0] == table.last_merged()


def test_parts_of_a_campaign_say_whom_it_was_for(table: FanoutTable, sha1: bytes) -> None:
    first = add(table, *(f"v{n:03}" for n in range(100)))
    add(table, "x", request_id="task_b_1")
    add(table, "w")
    parts = table.parts_of(first.campaign, 0, 10)
    assert [len(part.ids) for part in parts] == [100, 1] and {part.campaign for part in parts} == {first.campaign}
    assert table.parts_of(first.campaign, parts[0].number, 10) == parts[1:]
    assert table.parts_of(first.campaign, 0, 1) == parts[:1]
    assert table.waiting_of(parts[0], ["v001"]) == []
    merge_all(table)
    found = table.waiting_of(parts[0], ["v001", "v002", "w", "nobody"])
    assert found == [*waiting(table, "v001"), *waiting(table, "v002")]
    table.commit([Finish(found[0], End.CANCELLED)])
    assert table.waiting_of(parts[0], ["v001", "v002"]) == found[1:]
    assert table.waiting_of(parts[0], []) == []


def test_expired_parts_are_told_of_until_they_are_done_with(table: FanoutTable, sha1: bytes) -> None:
    first = add(table, "a", request_id="task_a_1", expires=100.0)
    add(table, "b", request_id="task_b_1")
    second = add(table, "c", request_id="task_c_1", expires=50.0)
    late = add(table, *(f"v{n:03}" for n in range(100)), request_id="task_d_1", expires=70.0)
    assert [part.seq for part in table.expired_parts(100.0, 10)] == [second.seq, first.seq], "merged ones only"
    merge_all(table)
    assert [part.seq for part in table.expired_parts(100.0, 10)] == [second.seq, late.seq, first.seq]
    assert table.expired_parts(49.0, 10) == []
    (part,) = table.expired_parts(100.0, 1)
    assert list(part.ids) == ["c"]
    table.part_done(part.number)
    table.part_done(999)
    assert [part.seq for part in table.expired_parts(100.0, 10)] == [late.seq, first.seq]


# -- runs of merging -------------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_is_taken_up_by_another(opener: Opener, table: FanoutTable, sha1: bytes) -> None:
    vins = [f"v{n:03}" for n in range(300)]
    added = add(table, *vins)
    run = list(steps(table, 100))
    assert table.merge_step(run[0]) is not None
    add(table, "late", request_id="task_b_1")
    other = opener().fanout()
    parts, after = other.unmerged(1_000_000)
    assert [p.seq for p in parts] == [added.seq] and after == run[0].last, "exactly its parts"
    assert other.merge_step(run[0]) is None, "it is further"
    assert other.merge_step(run[2]) is None, "it is not so far"
    assert other.merge_step(run[1]._replace(parts=(*run[1].parts, run[1].parts[-1] + 1))) is None
    done = other.merge_step(run[1])
    assert done is not None and done.vins == vins[100:200] and done.repeated == 0
    assert table.merge_step(run[1]) is None
    assert table.merge_step(run[2]) is not None
    assert other.merge_step(run[2]) is None
    assert counts(table, added.campaign) == {"waiting": 300}
    parts, after = other.unmerged(1_000_000)
    assert after == "" and [list(p.ids) for p in parts] == [["late"]]
    assert other.merge_step(MergeStep((99,), "", "x", [], True)) is None
    assert other.merge_step(MergeStep((), "", "x", [], True)) is None
    assert merge_all(other) == ["late"]


def test_a_run_takes_whole_parts_up_to_a_number_of_vins(table: FanoutTable, sha1: bytes) -> None:
    for n in range(4):
        add(table, *(f"v{n}{m:03}" for m in range(100)))
    assert [len(table.unmerged(ids_max)[0]) for ids_max in (1, 100, 199, 200, 350, 1000)] == [1, 1, 1, 2, 3, 4]


def test_several_mergers_do_every_row_once(opener: Opener, store: Store, table: FanoutTable, sha1: bytes) -> None:
    other = table.put_payload(b"other")
    for k in range(6):
        add(table, *(f"v{n:04}" for n in range(k * 50, k * 50 + 300)))
    add(table, *(f"v{n:04}" for n in range(300)), sha1=other)
    told: list[str] = []

    def work() -> None:
        mine = opener().fanout()
        while mine.unmerged(1)[0]:
            for step in steps(mine, 40):
                done = mine.merge_step(step)
                if done is None:
                    break
                told.extend(done.vins)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(work) for _ in range(3)]:
            one.result(60)
    assert counts(table, 1) == {"waiting": 250, "superseded": 300} and table.repeated(1) == 1800 - 550
    assert counts(table, 2) == {"waiting": 300}
    assert sorted(set(told)) == [f"v{n:04}" for n in range(550)]
    assert len(history(store.log())) == 300


# -- races -----------------------------------------------------------------------------------------------


def test_two_who_begin_the_same_delivery_exactly_one_does(
    opener: Opener, store: Store, table: FanoutTable, sha1: bytes
) -> None:
    vins = [f"v{n:02}" for n in range(20)]
    epochs = connect(store, *(f"client-{vin}" for vin in vins))
    tables = [opener().fanout() for _ in range(3)]
    for round_ in range(8):
        add(table, *vins, request_id=f"task_a_{round_}")
        add(table, *vins, request_id=f"task_b_{round_}")
        seen = {vin: waiting(table, vin) for vin in vins}
        start = threading.Barrier(3)

        def attempt(at: int, seen: dict[str, list[Waiting]] = seen, start: threading.Barrier = start) -> list[InFlight]:
            rows = [(seen[vin][(at + n) % 2]) for n, vin in enumerate(vins)]
            random.shuffle(rows)
            changes = [begin(row, epochs[f"client-{row.vin}"], node=f"n{at}") for row in rows]
            start.wait(30)
            verdicts = tables[at].commit(changes)
            assert set(verdicts) <= {Verdict.DONE, Verdict.BUSY, Verdict.GONE}
            return [c.flight for c, v in zip(changes, verdicts, strict=True) if v is Verdict.DONE]

        with ThreadPoolExecutor(3) as pool:
            won = [one for found in pool.map(attempt, range(3)) for one in found]
        assert sorted(one.vin for one in won) == vins, f"round {round_}"
        assert {vin: found.in_flight for vin, found in table.look_up(vins, 1).items()} == {one.vin: one for one in won}
        table.commit([Finish(one, End.ACKED) for one in won])
        rest = [row for vin in vins for row in waiting(table, vin)]
        assert table.commit([Finish(row, End.EXPIRED) for row in rest]) == [Verdict.DONE] * 20


def test_counts_add_up_at_every_moment(opener: Opener, store: Store, table: FanoutTable, sha1: bytes) -> None:
    """Whatever changes at the same time, and every delivery ends once."""
    vins = [f"v{n:03}" for n in range(120)]
    epochs = connect(store, *(f"client-{vin}" for vin in vins))
    added = add(table, *vins)
    merge_all(table)
    stop, sums = threading.Event(), set()

    def watch() -> None:
        mine = opener().fanout()
        while not stop.is_set():
            sums.add(mine.counts([added.campaign])[added.campaign].targets)

    def disturb(seed: int) -> None:
        mine, chance = opener().fanout(), random.Random(seed)
        for _ in range(40):
            changes: list[Change] = []
            for vin in chance.sample(vins, 12):
                in_flight, rows, awaits = mine.vehicle(vin)
                if in_flight is not None:
                    changes.append(
                        chance.choice(
                            [
                                Return(in_flight, in_flight.attempts + 1),
                                Await(in_flight, 1.0),
                                Finish(in_flight, End.ACKED),
                                Adopt(in_flight, in_flight._replace(node="n2")),
                            ]
                        )
                    )
                for row in rows:
                    end = Finish(row, End.FAILED, "x")
                    changes.append(end if chance.random() < 0.1 else begin(row, epochs[f"client-{vin}"]))
                changes += [Finish(row, End.ACKED) for row in awaits]
            mine.commit(changes)
            if chance.random() < 0.3:
                mine.retry(added.campaign, chance.sample(vins, 30))

    with ThreadPoolExecutor(4) as pool:
        watching = pool.submit(watch)
        try:
            for one in [pool.submit(disturb, seed) for seed in range(3)]:
                one.result(60)
        finally:
            stop.set()
        watching.result(30)
    assert sums == {120}
    check(table, store, {added.campaign: set(vins)})


def check(table: FanoutTable, store: Store, targets: dict[int, set[str]]) -> None:
    """Counts are what there is: everybody once, and a payload for everything."""
    for campaign, vins in targets.items():
        found: list[tuple[str, str]] = []
        for vin in sorted(vins):
            in_flight, rows, awaits = table.vehicle(vin)
            if in_flight is not None and in_flight.campaign == campaign:
                found.append((vin, "in_flight"))
            found += [(vin, "waiting") for row in rows if row.campaign == campaign]
            found += [(vin, "awaiting_result") for row in awaits if row.campaign == campaign]
            numbers = {row.payload for row in rows}
            assert table.payloads(numbers).keys() == numbers
        found += [(vin, str(end)) for vin, (end, _) in ended(table, campaign).items()]
        assert sorted(vin for vin, _ in found) == sorted(vins)
        states = [state for _, state in found]
        assert counts(table, campaign) == {state: states.count(state) for state in set(states)}


def test_a_payload_is_never_collected_from_under_a_batch(opener: Opener, store: Store, table: FanoutTable) -> None:
    stop = threading.Event()
    data = [b"%d" % n for n in range(5)]

    def collect() -> int:
        mine, gone = opener().fanout(), 0
        while not stop.is_set():
            gone += mine.collect(0.0, mine.now() + 3600, 0.0, 100)
        return gone

    def publish(seed: int) -> int:
        mine, chance, refusals = opener().fanout(), random.Random(seed), 0
        for n in range(60):
            sha1 = mine.put_payload(chance.choice(data))
            (answer,) = mine.add([batch(f"v{seed}-{n}", request_id=f"task_{seed}_{n}", sha1=sha1)])
            if isinstance(answer, Exception):
                assert isinstance(answer, UnknownPayload)
                refusals += 1
                continue
            (row,) = waiting(mine, f"v{seed}-{n}")
            assert mine.payloads([row.payload])[row.payload].sha1 == sha1
            campaign = mine.campaigns([answer.campaign])[answer.campaign]
            mine.commit([Finish(row, End.ACKED)])
            mine.change_campaign(replace(campaign, state=State.CLOSED, version=campaign.version + 1))
            if n % 5 == 0:
                mine.collect(mine.now() + 3600, 0.0, 0.0, 1000)
        return refusals

    with ThreadPoolExecutor(3) as pool:
        collecting = pool.submit(collect)
        try:
            for one in [pool.submit(publish, seed) for seed in range(2)]:
                one.result(60)
        finally:
            stop.set()
        collecting.result(30)
    while table.collect(table.now() + 3600, table.now() + 3600, 0.0, 100):
        pass
    assert all(table.payload_number(hashlib.sha1(one).digest()) is None for one in data), "none is left behind"


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_nodes_wait_for_each_other_but_never_in_a_circle(
    opener: Opener, store: Store, table: FanoutTable, sha1: bytes
) -> None:
    other = table.put_payload(b"other")
    vins = [f"v{n:03}" for n in range(80)]
    epochs = connect(store, *(f"client-{vin}" for vin in vins))

    def work(seed: int) -> None:
        own, chance = opener(), random.Random(seed)
        mine = own.fanout()
        for _ in range(25):
            some = sorted(chance.sample(vins, 70 if chance.random() < 0.3 else 20))
            mine.add([NewBatch(f"task_a_{n}", chance.choice([sha1, other]), some) for n in chance.sample(range(4), 2)])
            merge_all(mine, 25)
            found = mine.look_up(chance.sample(vins, 40), 2)
            changes: list[Change] = [Finish(one.in_flight, End.ACKED) for one in found.values() if one.in_flight]
            for vin, one in found.items():
                changes += [begin(row, epochs[f"client-{vin}"], node=str(seed)) for row in one.waiting]
            chance.shuffle(changes)
            mine.commit(changes)
        own.close()  # what the server has counted of a connection is certain to be seen when it ends

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(work, seed) for seed in range(4)]:
            one.result(90)
    rows = store.database.ask(  # type: ignore[attr-defined]
        lambda db: db.run("select deadlocks from pg_stat_database where datname = current_database()")
    )
    assert rows == [(0,)]


# -- how it is done --------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_waits_takes_little_room(url: str, store: Store, table: FanoutTable) -> None:
    chance = random.Random(0)
    vins = sorted({f"WVW{chance.randrange(10**14):014}" for _ in range(50_000)})
    sha1 = table.put_payload(chance.randbytes(16 << 10))
    for at in range(0, len(vins), PART_IDS_MAX):
        add(table, *vins[at : at + PART_IDS_MAX], sha1=sha1)
    merge_all(table)
    with store.database.read() as db:  # type: ignore[attr-defined]
        pages, size = (db.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "page_size"))
    assert pages * size < len(vins) * 60 + 500_000


# -- collection ------------------------------------------------------------------------------------------


def test_closed_campaigns_are_collected_in_bounded_steps(store: Store, table: FanoutTable, sha1: bytes) -> None:
    later = table.now() + 3600
    vins = [f"v{n:03}" for n in range(150)]
    added, kept = add(table, *vins, key="k"), add(table, "v000", request_id="task_b_1")
    merge_all(table)
    rows = [row for vin in vins for row in waiting(table, vin) if row.campaign == added.campaign]
    assert table.collect(later, 0.0, 0.0, 100) == 0, "it is not closed"
    campaign = table.campaigns([added.campaign])[added.campaign]
    assert table.change_campaign(replace(campaign, state=State.CLOSED, open=False, version=1))
    assert table.collect(later, 0.0, 0.0, 100) == 0, "something waits still"
    table.commit([Finish(row, End.ACKED) for row in rows])
    assert table.collect(table.now() - 60, 0.0, 0.0, 100) == 0, "it was closed just now"
    taken = []
    while number := table.collect(later, 0.0, 0.0, 40):
        taken.append(number)
        assert len(taken) < 100
    assert max(taken) <= 40 and sum(taken) >= 150
    assert table.find("task_a_1") is None and table.counts([added.campaign]) == {}
    assert table.parts_of(added.campaign, 0, 10) == [] and ended(table, added.campaign) == {}
    assert [c.id for c in table.page(0, 10)] == [kept.campaign] and len(waiting(table, "v000")) == 1
    again = add(table, "v", sha1=table.put_payload(b"new"))
    assert again.number == 2 and again.campaign > kept.campaign and again.seq > kept.seq, "no number twice"
    assert table.last_merged() > 0
    assert table.collect(0.0, 0.0, table.now() - 60, 10) == 0
    assert table.collect(0.0, 0.0, later, 10) == 1
    assert not add(table, "v", key="k", digest=b"other").repeated
    check(table, store, {kept.campaign: {"v000"}})


def test_payloads_are_collected_when_nothing_refers_to_them(table: FanoutTable, sha1: bytes) -> None:
    later = table.now() + 3600
    unused = [table.put_payload(b"%d" % n) for n in range(5)]
    numbers = {table.payload_number(one) for one in unused}
    add(table, "v")
    assert table.collect(0.0, table.now() - 60, 0.0, 100) == 0, "they were touched just now"
    taken = [table.collect(0.0, later, 0.0, 2) for _ in range(4)]
    assert taken == [2, 2, 1, 0]
    assert table.payload_number(sha1) is not None
    assert isinstance(refused(table, batch("v", sha1=unused[0])), UnknownPayload)
    number = table.payload_number(table.put_payload(b"0"))
    assert number is not None and number not in numbers, "no number twice"


# -- kill -9 ---------------------------------------------------------------------------------------------


def work_until_killed(report: Report, url: str, number: int) -> None:
    """Batches, merges, deliveries and their ends, forever."""
    store = open_store(url)
    table = store.fanout()
    vins = [f"v{number}-{n:03}" for n in range(100)]
    epochs = connect(store, *(f"client-{vin}" for vin in vins))
    while True:
        for round_ in range(1000):
            sha1 = table.put_payload(b"%d" % round_)
            (added,) = table.add([NewBatch(f"task_{number}_{round_ % 3}", sha1, vins)])
            assert isinstance(added, Added)
            report.send(("added", added.campaign))
            merge_all(table, 30)
            for at in range(0, 100, 25):
                found = table.look_up(vins[at : at + 25], 1)
                begins = [begin(one.waiting[0], epochs[f"client-{vin}"]) for vin, one in found.items() if one.waiting]
                table.commit(begins)
                done = table.commit([Finish(change.flight, End.ACKED) for change in begins])
                report.send(("acked", [(c.seen.vin, c.seen.place) for c in begins if done[0] is Verdict.DONE]))


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_kill_9_leaves_rows_counts_and_history_that_agree(url: str, store: Store, table: FanoutTable) -> None:
    for number in range(4):
        with child(work_until_killed, url, number) as process:
            told = [process.next_report() for _ in range(random.randrange(3, 15))]
            process.kill()
            told += process.all_reports()
        merge_all(table)
        campaigns = {what for kind, what in told if kind == "added"}
        acked = {one for kind, what in told if kind == "acked" for one in what}
        found = history(store.log())
        places = [(end.vin, end.place) for end in found]
        assert len(places) == len(set(places)), "exactly one end each"
        assert acked <= {(end.vin, end.place) for end in found if end.end is End.ACKED}
        vins = {f"v{number}-{n:03}" for n in range(100)}
        check(table, store, dict.fromkeys(campaigns, vins))


# -- a model ---------------------------------------------------------------------------------------------


class Model:
    """What fan-out is meant to do, in dictionaries: every target of a campaign is in one state."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, str]] = {}
        self.queue: dict[str, list[tuple[int, int]]] = {}
        """By VIN: places and campaigns of what waits."""
        self.request_ids: dict[int, str] = {}
        self.replaces: dict[int, bool] = {}
        self.repeated: dict[int, int] = {}
        self.ends = 0

    def newer_waits(self, vin: str, campaign: int) -> bool:
        """Data that is to replace what comes back."""
        newer = [other for _, other in self.queue.get(vin, ()) if other > campaign]
        return any(self.request_ids[o] == self.request_ids[campaign] and self.replaces[o] for o in newer)

    def add(self, campaign: int, request_id: str, place: int, resend: str, vins: Sequence[str]) -> None:
        self.request_ids[campaign] = request_id
        self.replaces.setdefault(campaign, resend == "replace")
        targets = self.states.setdefault(campaign, {})
        for vin in vins:
            queue = self.queue.setdefault(vin, [])
            earlier = [one for one in queue if one[1] < campaign and self.request_ids[one[1]] == request_id]
            if vin in targets or (earlier and resend == "ignore"):
                self.repeated[campaign] = self.repeated.get(campaign, 0) + 1
                continue
            if resend == "replace":
                for one in earlier:
                    self.end(vin, one, "superseded")
            targets[vin] = "waiting"
            queue.append((place, campaign))
            queue.sort()

    def end(self, vin: str, one: tuple[int, int], state: str) -> None:
        if one in self.queue[vin]:
            self.queue[vin].remove(one)
        self.states[one[1]][vin] = state
        self.ends += 1

    def counts(self, campaign: int) -> Counts:
        states = list(self.states[campaign].values())
        return Counts(**{state: states.count(state) for state in set(states)})


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_come_to_what_a_model_says(
    opener: Opener, store: Store, table: FanoutTable, sha1: bytes, seed: int
) -> None:
    chance, model = random.Random(seed), Model()
    tables = [table, opener().fanout()]
    hashes = [sha1, table.put_payload(b"other")]
    vins = [f"v{n:02}" for n in range(25)]
    crowd = [f"x{n:03}" for n in range(60)]
    epochs = connect(store, *(f"client-{vin}" for vin in (*vins, *crowd)))
    pending: list[tuple[int, str, int, str, list[str]]] = []

    def batches() -> None:
        some = sorted(chance.sample(vins, chance.randrange(1, 20)))
        if chance.random() < 0.3:
            some += crowd
        resend = chance.choice(["replace", "append", "ignore"])
        request_id, priority = f"task_a_{chance.randrange(3)}", chance.randrange(10)
        one = NewBatch(request_id, chance.choice(hashes), some, priority, resend=resend)
        (added,) = chance.choice(tables).add([one])
        assert isinstance(added, Added)
        what = (added.campaign, request_id, place_of(priority, added.seq), resend, some)
        # Nothing overtakes what is in its lane, or is about the same request.
        behind = [one for one in pending if lane_of(one[2]) == lane_of(what[2]) or one[1] == what[1]]
        assert added.merged == (not behind and len(some) <= 64)
        pending.append(what)
        if added.merged:
            model.add(*pending.pop())

    def merges() -> None:
        merge_all(chance.choice(tables), chance.randrange(1, 40))
        while pending:
            model.add(*pending.pop(0))

    def moves() -> None:
        changes, then = [], []
        for vin in chance.sample(vins, 8):
            in_flight, rows, awaits = table.vehicle(vin)
            assert [(row.place, row.campaign) for row in rows] == model.queue.get(vin, [])
            if in_flight is not None:
                one = (in_flight.place, in_flight.campaign)
                change, state = chance.choice(
                    [
                        (
                            Return(in_flight, in_flight.attempts + 1, 5.0),
                            "superseded" if model.newer_waits(vin, in_flight.campaign) else "waiting",
                        ),
                        (Await(in_flight, 10.0), "awaiting_result"),
                        (Finish(in_flight, End.ACKED), "acked"),
                        (Finish(in_flight, End.FAILED, "x"), "failed"),
                    ]
                )
                changes.append(change)
                then.append((vin, one, state))
            elif rows:
                changes.append(begin(rows[0], epochs[f"client-{vin}"]))
                then.append((vin, (rows[0].place, rows[0].campaign), "in_flight"))
            for row in awaits[:1]:
                changes.append(Finish(row, End.ACKED, result=b"r"))
                then.append((vin, (row.place, row.campaign), "acked"))
        assert chance.choice(tables).commit(changes) == [Verdict.DONE] * len(changes)
        for vin, one, state in then:
            if state in ("acked", "failed", "superseded"):
                model.end(vin, one, state)
            else:
                model.states[one[1]][vin] = state
                if state == "waiting":
                    model.queue[vin] = sorted([*model.queue[vin], one])
                elif one in model.queue[vin]:
                    model.queue[vin].remove(one)

    def retries() -> None:
        if model.states:
            campaign = chance.choice(list(model.states))
            some = chance.sample(vins, 10)
            states = model.states[campaign]
            again = sorted(vin for vin in some if states.get(vin) in ("failed", "superseded"))
            assert chance.choice(tables).retry(campaign, some) == again
            for vin in again:
                states[vin] = "waiting"
                (new,) = [(row.place, row.campaign) for row in table.vehicle(vin)[1] if row.campaign == campaign]
                model.queue[vin] = sorted([*model.queue[vin], new])

    for _ in range(120):
        chance.choice([batches, merges, moves, moves, moves, retries])()
        if not pending:
            found = table.counts(model.states)
            assert found == {campaign: model.counts(campaign) for campaign in model.states}
            assert all(table.repeated(campaign) == model.repeated.get(campaign, 0) for campaign in model.states)
    merges()
    assert len(history(store.log())) == model.ends
    check(table, store, {campaign: set(states) for campaign, states in model.states.items()})
