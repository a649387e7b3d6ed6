"""Batch members over bare MQTT, against a real node: what they may say, what they hear, and what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import pytest

import holdfast
from e2e.clients import V5, V311, Client, Dial
from e2e.conftest import Clients, durable
from e2e.groups.members import Publisher
from holdfast.batch import BatchClient
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.messages import (
    Carried,
    FindLeader,
    GroupMessage,
    Invalidate,
    Leased,
    LeaseStreams,
    LeaveGroup,
    LeftGroup,
    Ping,
    RenewStreamLease,
    Report,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import GroupId, Mark, MemberId, Piece
from holdfast.machine import Address
from holdfast.model import Batch, Stream
from holdfast.topics import TopicFilter
from node import Node
from processes import wait_for

SHARDS = 4
TIMEOUT_SECONDS = 2.0
NOWHERE = Address("", "batch")

SUCCESS, NOT_AUTHORIZED, TOPIC_INVALID, PAYLOAD_INVALID = 0x00, 0x87, 0x90, 0x99
FILTER_INVALID, SUBSCRIBE_FIRST = 0x8F, 0x83

M = TypeVar("M", bound=GroupMessage)
Join = Callable[..., "Member"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node for all of these; nobody may read `secret/#`."""
    folder = tmp_path_factory.mktemp("leases")
    rules = folder / "acl"
    rules.write_text("anyone\ndeny subscribe secret/#\nallow all #\n")
    settings: dict[str, Any] = {
        "log.shards": SHARDS,
        "groups.ping_secs": 0.3,
        "groups.ping_timeout_secs": TIMEOUT_SECONDS,
        "groups.revoke_secs": 2,
        "auth.acl_file": rules,
    }
    with Node(folder, settings=settings) as running:
        # So that there is something of every stream to have made progress in.
        with holdfast.open(f"sqlite:///{folder}/data/holdfast.db") as log:
            log.append("messages", Batch(["filler"] * 200, [b""] * 200, [f"p{n}" for n in range(200)]))
            assert min(head.next_offset for head in log.heads("messages")) > 20
        yield running


class Member:
    """A batch member without a machine: it says what the test says."""

    def __init__(self, client: Client, group: str, start: str | None = None, version: int = V5):
        self.client, self.group = client, GroupId.parse(group)
        self.id = MemberId(client.dial.client_id, time.time_ns() // 1000)
        self.base = f"$holdfast/lease/{quote(group, safe='')}"
        self.lease: LeaseStreams | None = None
        properties = {"UserProperty": [("holdfast-start", start)]} if start else None
        self.granted = client.subscribe(f"{self.base}/to/{self.id.session}", 1, properties=properties)

    def say(self, message: GroupMessage | bytes, qos: int = 1) -> int:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        return self.client.publish(f"{self.base}/from/{self.id.session}", payload, qos)

    def find(self, born: str = "", carried: tuple[Carried, ...] = ()) -> int:
        return self.say(FindLeader(self.id, NOWHERE, self.group, born, time.monotonic(), carried))

    def states(self, version: int, *states: Report, old: int | None = None, gone: tuple[Report, ...] = ()) -> int:
        assert self.lease is not None
        epoch = self.lease.epoch
        return self.say(UpdateStreamStates(self.id, NOWHERE, epoch, version, states, time.monotonic(), old, gone))

    def hears(self, kind: type[M], seconds: float = 10.0, where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of that kind; what comes before it is let pass."""
        give_up = time.monotonic() + seconds
        while True:
            arrived = self.client.next(max(0.01, give_up - time.monotonic()))
            assert arrived.topic == f"{self.base}/to/{self.id.session}"
            assert (arrived.qos, arrived.retain) == (0, False)
            message = wire.decode(arrived.payload)
            if isinstance(message, kind) and where(message):
                return message

    def joined(self) -> LeaseStreams:
        assert self.find() == SUCCESS
        self.lease = self.hears(LeaseStreams)
        return self.lease


@pytest.fixture
def join(clients: Clients, node: Node, name: str) -> Join:
    """`join(client_id, group="g:…")`: a member that listens."""

    def make(client_id: str, group: str = "", start: str | None = None, version: int = V5) -> Member:
        dial = Dial(client_id=f"{client_id}-{name}", version=version, port=node.mqtt_port)
        return Member(clients.make("paho", dial).connect(), group or f"g{name}:{name}/#", start, version)

    return make


def report(leased: Leased, loan: int, mark: Mark | None = None, final: bool = False) -> Report:
    return Report(leased.piece, loan, mark or leased.mark, final)


def shards(message: LeaseStreams | UpdateStreams) -> list[int]:
    return sorted(leased.piece.stream.shard for leased in message.streams)


@pytest.fixture
def messages(node: Node, name: str) -> None:
    """Enough in every stream to acknowledge some."""
    publisher = Publisher(node.mqtt_port, f"{name}-many", clients=64)
    publisher.publish(f"{name}/x", 64 * 4)
    publisher.close()


def test_joining_gives_every_stream_under_a_version(join: Join, node: Node) -> None:
    member = join("a")
    assert member.granted == 0
    lease = member.joined()
    assert lease.member == member.id
    assert shards(lease) == list(range(SHARDS))
    assert lease.version > 0
    assert 0 < lease.good_for_seconds <= TIMEOUT_SECONDS
    assert member.states(lease.version) == SUCCESS
    renewed = member.hears(RenewStreamLease)
    assert (renewed.version, renewed.new_version) == (lease.version, None)
    view = node.get(f"/api/v1/groups/{quote(str(member.group), safe='')}")
    assert [(each["session"], each["kind"]) for each in view["members"]] == [(member.id.session, "batch")]


def test_progress_that_cannot_be_is_not_believed(join: Join, node: Node) -> None:
    """It ended a group's consumption: everything up to there counted as read."""
    one = join("a", start="beginning")
    lease = one.joined()
    first, second = lease.streams[:2]
    one.states(lease.version, report(first, lease.version, Mark(1_000_000)))
    assert one.find(carried=(Carried(second.piece, second.course, Mark(1_000_000)),)) == SUCCESS
    one.states(lease.version, report(first, lease.version, Mark(3)))
    one.hears(RenewStreamLease)

    def progress() -> list[Mark]:
        again = join("a")  # the next one of the same name hears how far the group has come
        return sorted(leased.mark for leased in again.joined().streams)

    one.say(LeaveGroup(one.id, NOWHERE, one.group, ""))
    one.hears(LeftGroup)
    assert progress() == [Mark(), Mark(), Mark(), Mark(3)]
    wait_for(lambda: "beyond the end" in node.logs(), what="a word about it")


@pytest.mark.usefixtures("messages")
def test_an_exchange_of_versions_gives_streams_to_a_newcomer(join: Join) -> None:
    one, two = join("a", start="beginning"), join("b")
    lease = one.joined()
    one.states(lease.version)
    assert shards(two.joined()) == []
    update = one.hears(UpdateStreams)
    assert (update.old_version, len(update.streams)) == (lease.version, SHARDS // 2)
    assert two.lease is not None
    two.states(two.lease.version)
    taken = [leased for leased in lease.streams if leased.piece not in {kept.piece for kept in update.streams}]
    # Not finished yet: the lease goes on, the streams stay.
    one.states(update.version, old=lease.version, gone=tuple(report(each, lease.version) for each in taken))
    both = one.hears(RenewStreamLease, where=lambda renewed: renewed.new_version is not None)
    assert (both.version, both.new_version) == (lease.version, update.version)
    final = tuple(report(each, lease.version, Mark(4), final=True) for each in taken)
    one.states(update.version, old=lease.version, gone=final)
    alone = one.hears(RenewStreamLease, where=lambda renewed: renewed.new_version is None)
    assert alone.version == update.version
    one.states(update.version)
    moved = two.hears(UpdateStreams)
    assert sorted(leased.piece for leased in moved.streams) == sorted(each.piece for each in taken)
    assert {leased.mark.offset for leased in moved.streams} == {4}


def test_a_version_that_was_never_given(join: Join) -> None:
    member = join("a")
    lease = member.joined()
    member.states(lease.version)
    member.hears(RenewStreamLease)
    member.states(lease.version + 100)
    assert not member.hears(Invalidate).deleted
    # As the seed says: it starts over, in a new life, and is welcome.
    member.id = member.id._replace(life=2)
    again = member.joined()
    assert shards(again) == list(range(SHARDS))
    assert again.version > lease.version
    member.states(again.version)
    member.hears(RenewStreamLease)
    member.states(lease.version)  # late, and harmless
    member.states(again.version)
    assert member.hears(RenewStreamLease).version == again.version


def test_a_silent_member_loses_its_streams(join: Join) -> None:
    silent, other = join("a"), join("b")
    lease = silent.joined()
    silent.states(lease.version)
    other.joined()
    give_up = time.monotonic() + 10
    version, held = other.lease.version if other.lease else 0, 0
    while held < SHARDS:
        assert time.monotonic() < give_up
        other.states(version)
        message = wire.decode(other.client.next(5).payload)
        if isinstance(message, UpdateStreams | LeaseStreams):
            version, held = message.version, len(message.streams)
        time.sleep(0.02)
    silent.states(lease.version)
    assert not silent.hears(Invalidate).deleted


@pytest.mark.usefixtures("messages")
def test_progress_outlives_the_member(join: Join) -> None:
    one = join("a", start="beginning")
    lease = one.joined()
    first = lease.streams[0]
    one.states(lease.version, report(first, lease.version, Mark(9, ((12, 14),))))
    one.hears(RenewStreamLease)
    carried = Carried(lease.streams[1].piece, lease.streams[1].course, Mark(2))
    one.say(LeaveGroup(one.id, NOWHERE, one.group, "", (carried,)))
    assert one.hears(LeftGroup).member == one.id
    marks = {leased.piece: leased.mark for leased in join("b").joined().streams}
    assert marks[first.piece] == Mark(9, ((12, 14),))
    assert marks[lease.streams[1].piece] == Mark(2)


@pytest.mark.usefixtures("messages")
def test_what_was_never_leased_cannot_be_acknowledged(join: Join) -> None:
    one, two = join("a", start="beginning"), join("b")
    lease = one.joined()
    second = lease.streams[1]
    two.say(LeaveGroup(two.id, NOWHERE, two.group, "", (Carried(second.piece, second.course, Mark(9)),)))
    two.hears(LeftGroup)
    one.say(LeaveGroup(one.id, NOWHERE, one.group, ""))
    one.hears(LeftGroup)
    marks = {leased.piece: leased.mark for leased in join("c").joined().streams}
    assert marks[second.piece] == second.mark


@pytest.mark.parametrize("start", ["beginning", None])
def test_where_a_group_begins(join: Join, node: Node, name: str, start: str | None) -> None:
    node.post("/api/v1/publish", {"topic": f"{name}/x", "payload": "early", "qos": 1})
    marks = [leased.mark for leased in join("a", start=start).joined().streams]
    if start == "beginning":
        assert marks == [Mark()] * SHARDS
    else:
        assert max(marks) > Mark()  # behind what was there already


def test_a_deleted_group_says_so_and_is_not_brought_back(join: Join, node: Node) -> None:
    member = join("a")
    lease = member.joined()
    member.states(lease.version)
    member.hears(RenewStreamLease)
    url = f"{node.http}/api/v1/groups/{quote(str(member.group), safe='')}"
    httpx.delete(url, timeout=10).raise_for_status()
    assert member.hears(Invalidate).deleted
    born = lease.streams[0].course.rpartition(".")[0]
    member.find(born)
    assert member.hears(Invalidate).deleted
    assert "there is no group" in httpx.get(url, timeout=10).text


# ----------------------------------------------------------------------------------------- refusals


PIECE = Piece(Stream("messages", 0, 1))


def states_with(mark: Mark, piece: Piece = PIECE) -> Callable[[Member], GroupMessage]:
    return lambda m: UpdateStreamStates(m.id, NOWHERE, 1, 1, (Report(piece, 1, mark),), 0.0)


BAD: dict[str, tuple[Callable[[Member], GroupMessage | bytes], int]] = {
    "empty": (lambda m: b"", PAYLOAD_INVALID),
    "no JSON": (lambda m: b"\xff{", PAYLOAD_INVALID),
    "no message": (lambda m: b'["Nonsense", "", {}]', PAYLOAD_INVALID),
    "a field short": (lambda m: b'["FindLeader", "", {"member": ["a"]}]', PAYLOAD_INVALID),
    "a borrower's": (lambda m: Ping(m.id, NOWHERE, 1, 0.0), PAYLOAD_INVALID),
    "a leader's": (lambda m: Invalidate(m.id, True), PAYLOAD_INVALID),
    "another's": (lambda m: LeaveGroup(MemberId("somebody", 1), NOWHERE, m.group, ""), NOT_AUTHORIZED),
    "another group": (lambda m: FindLeader(m.id, NOWHERE, GroupId("h", "x"), "", 0.0), PAYLOAD_INVALID),
    "a range turned round": (states_with(Mark(1, ((9, 5),))), PAYLOAD_INVALID),
    "a range below": (states_with(Mark(10, ((5, 9),))), PAYLOAD_INVALID),
    "below nothing": (states_with(Mark(-2)), PAYLOAD_INVALID),
    "beyond all": (states_with(Mark(1 << 63)), PAYLOAD_INVALID),
    "no such slice": (states_with(Mark(1), PIECE._replace(part=2, of=2)), PAYLOAD_INVALID),
    "no such slicing": (states_with(Mark(1), PIECE._replace(part=0, of=3)), PAYLOAD_INVALID),
    "carried, and no such slice": (
        lambda m: FindLeader(m.id, NOWHERE, m.group, "", 0.0, (Carried(PIECE._replace(part=-1), "", Mark()),)),
        PAYLOAD_INVALID,
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_payloads_are_refused_and_disturb_nobody(join: Join, what: str) -> None:
    member, other = join("a"), join("b")
    lease = member.joined()
    member.states(lease.version)
    member.hears(RenewStreamLease)
    make, reason = BAD[what]
    message = make(other)
    assert other.say(message) == reason
    assert other.say(message, qos=0) == 0
    member.states(lease.version)
    assert member.hears(RenewStreamLease).version == lease.version
    other.joined()


def test_somebody_elses_topics(join: Join) -> None:
    member, other = join("a"), join("b")
    assert other.client.subscribe(f"{member.base}/to/{member.id.session}") == NOT_AUTHORIZED
    payload = wire.encode(FindLeader(member.id, NOWHERE, member.group, "", 0.0))
    assert other.client.publish(f"{member.base}/from/{member.id.session}", payload) == NOT_AUTHORIZED
    assert other.client.publish(f"{member.base}/to/{other.id.session}", payload) == NOT_AUTHORIZED
    assert other.client.subscribe(f"{other.base}/from/{other.id.session}") == NOT_AUTHORIZED


def test_a_filter_one_may_not_read(join: Join, name: str) -> None:
    member = join("a", group=f"g{name}:secret/plans")
    assert member.granted == NOT_AUTHORIZED
    assert member.find() == NOT_AUTHORIZED
    assert join("b", group=f"g{name}:#").granted == NOT_AUTHORIZED


@pytest.mark.parametrize(
    "topic", ["", "x", "g%3At/to", "g%3At/to/", "g%3At/for/CLIENT", "g/to/CLIENT", "%3At/to/CLIENT"]
)
def test_topics_that_are_none(join: Join, topic: str) -> None:
    client = join("a").client
    topic = "$holdfast/lease/" + topic.replace("CLIENT", client.dial.client_id)
    assert client.subscribe(topic) == FILTER_INVALID
    assert client.publish(topic.replace("/to/", "/from/"), b"") == TOPIC_INVALID


def test_whoever_does_not_listen_is_not_heard(join: Join) -> None:
    member = join("a")
    member.client.unsubscribe(f"{member.base}/to/{member.id.session}")
    assert member.find() == SUBSCRIBE_FIRST


def test_mqtt_3_is_answered_too(join: Join) -> None:
    member = join("a", version=V311)
    assert member.granted == 0
    assert shards(member.joined()) == list(range(SHARDS))
    assert member.say(b"nonsense") == SUCCESS  # it has no word for a refusal


def test_nothing_of_it_is_logged_or_kept(join: Join, node: Node, clients: Clients, name: str) -> None:
    dial = Dial(client_id=f"d-{name}", port=node.mqtt_port, version=V5, **durable(V5))
    watcher = clients.make("paho", Dial(client_id=f"w-{name}", version=V5, port=node.mqtt_port)).connect()
    watcher.subscribe(f"{name}/#")
    member = Member(clients.make("paho", dial).connect(), f"g{name}:{name}/#")
    member.joined()
    session = node.get(f"/api/v1/sessions/{dial.client_id}")
    assert session["subscriptions"] == []
    watcher.publish(f"{name}/mark", b"mark")
    assert watcher.until(b"mark") == []
    found = node.get("/api/v1/messages", filter="$holdfast/#", start="beginning")
    assert not found.get("messages", found) if isinstance(found, dict) else not found


# ----------------------------------------------------------------------------------------- the client


def test_the_client_shares_a_group_with_an_mqtt_client(node: Node, clients: Clients, name: str) -> None:
    group, count = f"g{name}:{name}/#", 200
    with BatchClient(f"127.0.0.1:{node.mqtt_port}", group, f"reader-{name}") as reader:
        assert reader.join()
        worker = clients.make("paho", Dial(client_id=f"worker-{name}", version=V5, port=node.mqtt_port)).connect()
        worker.subscribe(f"$share/g{name}/{name}/#")
        publishers = [
            clients.make("paho", Dial(client_id=f"p{n}-{name}", version=V5, port=node.mqtt_port)).connect()
            for n in range(8)
        ]
        for n in range(count):
            publishers[n % 8].publish(f"{name}/{n}", str(n).encode())
        read = set(read_all(reader, node, name, lambda found: len(found) + worker.messages.qsize() >= count))
        delivered = {message.text for message in worker.take(count - len(read))}
        assert read and delivered
        assert read | delivered == {str(n) for n in range(count)}
        assert not read & delivered


def read_all(
    reader: BatchClient, node: Node, name: str, enough: Callable[[dict[str, Any]], bool], seconds: float = 20.0
) -> dict[str, Any]:
    """Batch after batch, from the store, as Spark does it."""
    wanted = TopicFilter(f"{name}/#")
    found: dict[str, Any] = {}
    log = holdfast.open(f"sqlite:///{node.folder}/data/holdfast.db")
    give_up = time.monotonic() + seconds
    try:
        while not enough(found):
            assert time.monotonic() < give_up, f"{len(found)} read"
            for piece, held in reader.assignment().pieces.items():
                at, done = held.mark.offset + 1, held.done
                reading = log.read(piece.stream, at)
                for chunk in reading.chunks:
                    rows = chunk.batch.to_pylist()
                    for offset, row in zip(itertools.count(chunk.base + chunk.first), rows, strict=False):
                        if wanted.matches(row["topic"]) and done.wants(offset, row["publisher"], row["topic"]):
                            text = row["payload"].decode()
                            assert text not in found
                            found[text] = piece
                if reading.next_offset > at:
                    reader.ack(piece, [(at, reading.next_offset - 1)])
            reader.drained()
            time.sleep(0.02)
    finally:
        log.close()
    return found


def test_the_client_comes_back_to_a_restarted_node(tmp_path: Any, name: str) -> None:
    settings = {"log.shards": 2, "groups.lease_secs": 1, "groups.ping_timeout_secs": TIMEOUT_SECONDS}
    with (
        Node(tmp_path, settings=settings) as node,
        BatchClient(f"127.0.0.1:{node.mqtt_port}", "g:t/#", start="beginning") as reader,
    ):
        with holdfast.open(f"sqlite:///{tmp_path}/data/holdfast.db") as log:
            log.append("messages", Batch(["t/x"] * 40, [b""] * 40, [f"p{n}" for n in range(40)]))
        assert reader.join()
        piece = min(reader.assignment().pieces)
        reader.ack(piece, [(0, 4)])
        node.kill()
        deadline = time.monotonic() + 10
        while reader.version:
            assert time.monotonic() < deadline, "it holds what it cannot have"
            time.sleep(0.02)
        assert reader.trouble is not None
        reader.ack(piece, [(5, 6)])
        node.start()
        assert reader.join(20)
        pieces = reader.assignment().pieces
        assert pieces[piece].mark == Mark(6)
        assert reader.trouble is None
