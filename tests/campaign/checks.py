"""What clients saw, against what was promised: pure functions of a history, the log and the rows that are left.

Weather decides how much can be asked. While nothing is wrong (`calm`) promises hold to the second; around a fault only
what holds in any weather is checked. Every check names at most a few faults, with the events that show each.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from campaign.cluster import FLUSH_SECONDS, GRACE_SECONDS, LEASE_SECONDS
from campaign.history import Event
from campaign.wire import KEEP_ALIVE_SECONDS, NEVER

SHOWN_MAX = 8
AFTER_SECONDS = 10.0
"""So long after a fault has ended it may still show: leases, graces and reconnecting take their time."""
SAVE_SECONDS = FLUSH_SECONDS + 3.0
"""What a client acknowledged in calm weather is saved within this."""
CLOSED_SECONDS = 0.9
"""A node that closes a connection this soon after a good-bye has stored it; after 1 s it closes it in any case."""
READY_SECONDS = 5.0 + 1.0
BYTES_SECONDS = 1.5
"""What was sent may arrive this much later: proxies delay, and two cores are shared by many."""
SWEEP_SECONDS = 2.5
TIME_SECONDS = 1.0
"""A node's clock follows one that is wrong by 1%, and is off by so little."""
GONE_SECONDS = 1.5 * KEEP_ALIVE_SECONDS + LEASE_SECONDS + GRACE_SECONDS + SWEEP_SECONDS
"""A connection that ended in whatever way is known to have ended after this, once everything is well."""


class Logged(NamedTuple):
    """One message as the log has it at the end."""

    stream: str
    offset: int
    topic: str
    payload: str
    t: float
    """When it was stored, in the history's seconds."""


@dataclass
class Connection:
    """One connection of one client."""

    who: str
    number: int
    node: str = ""
    asked: float = 0.0
    welcome: float | None = None
    present: bool = False
    clean: bool = False
    expiry: int = 0
    will: str = ""
    delay: int = 0
    bye: Event | None = None
    dropped: bool = False
    end: float | None = None
    reason: int = -1
    heard: float = 0.0
    """When something was last received on it."""
    severed: bool = False
    """Its end may not have been the node's decision: the node was killed just then, or its clients were cut off."""

    @property
    def said_goodbye(self) -> bool:
        return self.bye is not None and self.bye.code == 0

    @property
    def confirmed(self) -> bool:
        """The node has stored what was last said on it."""
        return (
            self.bye is not None
            and self.end is not None
            and not (self.dropped or self.severed)
            and self.end - self.bye.t < CLOSED_SECONDS
            and self.reason < 0
        )


@dataclass
class Seen:
    """A history, sorted out."""

    events: list[Event]
    log: list[Logged]
    sessions: Mapping[str, bool]
    """Client ids in the store at the end, and whether each is connected."""
    end: float = 0.0
    connections: dict[str, list[Connection]] = field(default_factory=lambda: defaultdict(list))
    got: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    done: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """By message."""
    acked: dict[str, Event] = field(default_factory=dict)
    subscribed: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    copies: Counter[str] = field(default_factory=Counter)
    storms: list[tuple[float, float]] = field(default_factory=list)
    """From when to when something was wrong, or may still have shown."""
    healed: float = 0.0

    def __post_init__(self) -> None:
        self.copies.update(row.payload for row in self.log)
        open_faults: dict[tuple[str, str], list[float]] = defaultdict(list)
        severed: dict[str, list[float]] = defaultdict(list)
        for event in self.events:
            self.end = max(self.end, event.t)
            if event.what in ("fault", "healed") and event.msg.startswith(("kill", "clients")):
                severed[event.node].append(event.t)
            match event.what:
                case "fault":
                    open_faults[event.msg, event.node].append(event.t)
                case "healed":
                    self.healed = event.t
                    self.storms.append((open_faults[event.msg, event.node].pop(), event.t + AFTER_SECONDS))
                case "lag":
                    self.storms.append((event.t - event.secs - 1.0, event.t + 1.0))
                case "got":
                    self.got[event.who].append(event)
                case "done":
                    self.done[event.who].append(event)
                case "send":
                    self.sent[event.msg].append(event)
                case "acked":
                    self.acked.setdefault(event.msg, event)
                case "suback":
                    self.subscribed[event.who].append(event)
            if event.conn:
                self._connection(event)
        for left in open_faults.values():
            self.storms += [(begun, self.end) for begun in left]
        self.storms.sort()
        for one in (one for connections in self.connections.values() for one in connections):
            if one.bye is not None and one.end is not None:
                begin, end = one.bye.t - 0.1, one.end + 0.1
                one.severed = any(begin < at < end for at in severed[one.node])

    def _connection(self, event: Event) -> None:
        mine = self.connections[event.who]
        if event.what == "connect":
            mine.append(
                Connection(
                    event.who,
                    event.conn,
                    event.node,
                    event.t,
                    clean=event.clean,
                    expiry=event.expiry,
                    will=event.will,
                    delay=event.delay,
                )
            )
            return
        connection = mine[event.conn - 1]
        match event.what:
            case "connack" if event.code == 0:
                connection.welcome = connection.heard = event.t
                connection.present = event.present
            case "bye":
                connection.bye = event
                if event.expiry >= 0:
                    connection.expiry = event.expiry
            case "drop":
                connection.dropped = True
            case "closed":
                connection.end, connection.reason = event.t, event.code
            case "got" | "acked" | "suback":
                connection.heard = event.t

    def calm(self, begin: float, end: float) -> bool:
        return not any(begin < until and since < end for since, until in self.storms)

    def life_since(self, who: str) -> float | None:
        """Since when the subscription that is there at the end is there."""
        found = self.subscribed.get(who)
        return found[-1].t if found else None


Check = Callable[[Seen], Iterator[str]]


def publisher_of(msg: str) -> tuple[str, int]:
    name, _, number = msg.partition(":")
    return name, int(number)


def matches(topic_filter: str, topic: str) -> bool:
    """Of the filters that are used here."""
    if topic_filter.startswith("$share/"):
        topic_filter = topic_filter.split("/", 2)[2]
    return topic_filter == topic or (topic_filter.endswith("/#") and topic.startswith(topic_filter[:-1]))


def topic_of(msg: str) -> str:
    return f"f/{publisher_of(msg)[0]}"


def settled(seen: Seen) -> Iterator[str]:
    """After everything was healed, everybody came back and everything under way came to an end."""
    for event in seen.events:
        if event.what in ("unsettled", "stuck"):
            yield f"{event.what} {event.node}: {event.msg}"


def stored(seen: Seen) -> Iterator[str]:
    """What was acknowledged is in the log: QoS 1 at least once, QoS 2 once; a publisher's messages in its order."""
    for msg, sends in seen.sent.items():
        copies, acked = seen.copies[msg], seen.acked.get(msg)
        if acked is not None and copies == 0:
            yield f"{msg} (QoS {acked.qos}) was acknowledged at {acked.t:.2f} and is not in the log"
        if sends[0].qos == 2 and copies > 1:
            where = [(round(row.t, 2), row.stream, row.offset) for row in seen.log if row.payload == msg]
            yield f"{msg} (QoS 2, sent at {[round(s.t, 2) for s in sends]}) is in the log {copies} times: {where}"
        if sends[0].qos == 1 and copies > len(sends):
            yield f"{msg} (QoS 1) was sent {len(sends)} times and is in the log {copies} times"
    first: dict[str, int] = {}
    known: set[str] = set()
    for row in sorted(seen.log, key=lambda row: (row.stream, row.offset)):
        if row.payload in seen.sent and row.payload not in known:
            known.add(row.payload)
            name, number = publisher_of(row.payload)
            if number < first.get(name, 0):
                yield f"{row.payload} was first stored after {name}:{first[name]}"
            first[name] = number


def timed(seen: Seen) -> Iterator[str]:
    """A message's time is when it was stored, whatever a node's clock says for a while."""
    for row in seen.log:
        sends, acked = seen.sent.get(row.payload), seen.acked.get(row.payload)
        if not sends or acked is None or seen.copies[row.payload] > 1:
            continue
        if not sends[0].t - TIME_SECONDS < row.t < acked.t + TIME_SECONDS:
            yield f"{row.payload} was stored between {sends[0].t:.2f} and {acked.t:.2f}; its time is {row.t:.2f}"


def delivered(seen: Seen) -> Iterator[str]:
    """Every subscriber that is there at the end has what was published since it subscribed."""
    for who, subscribed in seen.subscribed.items():
        if who.startswith("g") or not _stays(seen, who):
            continue
        since, had = subscribed[-1], {event.msg for event in seen.got[who] if event.t >= subscribed[-1].t - 1.0}
        missing = [
            msg
            for msg, acked in seen.acked.items()
            if acked.who.startswith("p") and not acked.who.startswith("probe")
            if matches(since.msg, topic_of(msg)) and seen.sent[msg][0].t > since.t and msg not in had
        ]
        if missing:
            yield f"{who} (subscribed to {since.msg} at {since.t:.2f}) never got {len(missing)}: {missing[:5]}"


def _stays(seen: Seen, who: str) -> bool:
    last = seen.connections[who][-1]
    return last.welcome is not None and (last.end is None or last.end >= seen.end - 0.5)


def _kept(seen: Seen, who: str) -> dict[str, float]:
    """Messages whose acknowledgement is saved for sure, and since when."""
    ended = {c.number: c.end if c.end is not None else seen.end for c in seen.connections[who]}
    byes = {c.number: c.bye.t for c in seen.connections[who] if c.bye is not None and c.bye.code == 0 and c.confirmed}
    found: dict[str, float] = {}
    for event in seen.done[who]:
        end = ended.get(event.conn, seen.end)
        if event.t <= byes.get(event.conn, -1.0):
            found.setdefault(event.msg, end)
        elif end > event.t + 0.5 and seen.calm(event.t - 1.0, event.t + SAVE_SECONDS):
            found.setdefault(event.msg, event.t + SAVE_SECONDS)
    return found


def not_again(seen: Seen) -> Iterator[str]:
    """What was acknowledged, and saved, does not come again; within one connection nothing comes twice."""
    for who, gots in seen.got.items():
        lives = [event.t for event in seen.subscribed[who]]
        kept = _kept(seen, who)
        on_one: dict[tuple[int, str], float] = {}
        for event in gots:
            if event.will:
                yield f"{who}: packet id {event.pid} at {event.t:.2f} is {event.msg}, and was {event.will} before"
            if event.repeat or seen.copies[event.msg] > 1:
                continue
            since = kept.get(event.msg)
            if since is not None and event.t > since and _same_life(lives, since, event.t):
                yield f"{who} got {event.msg} (QoS {event.qos}) at {event.t:.2f}; acknowledged and saved by {since:.2f}"
            before = on_one.get((event.conn, event.msg))
            if before is not None and not event.dup:
                yield f"{who} got {event.msg} twice on connection {event.conn}: {before:.2f}, {event.t:.2f}"
            on_one[event.conn, event.msg] = event.t


def _same_life(lives: list[float], one: float, other: float) -> bool:
    return bisect.bisect(lives, one) == bisect.bisect(lives, other)


def in_order(seen: Seen) -> Iterator[str]:
    """A subscriber gets what one publisher sent in the order it was sent; repeats apart.

    Of a message that is stored twice, a subscription that began in between has the second copy only.
    """
    stored = {row.payload: row.t for row in sorted(seen.log, key=lambda row: -row.t)}
    for who, gots in seen.got.items():
        if who.startswith("g"):
            continue
        lives = [event.t for event in seen.subscribed[who]]
        had: set[str] = set()
        newest: dict[str, tuple[int, float]] = {}
        for event in gots:
            if event.msg in had:
                continue
            had.add(event.msg)
            name, number = publisher_of(event.msg)
            last, at = newest.get(name, (0, 0.0))
            if seen.copies[event.msg] > 1 and stored[event.msg] < lives[bisect.bisect(lives, event.t) - 1]:
                continue
            if number < last and _same_life(lives, at, event.t):
                yield f"{who} got {event.msg} at {event.t:.2f}, after {name}:{last} at {at:.2f}"
            newest[name] = number, event.t


def once_connected(seen: Seen) -> Iterator[str]:
    """A connection that another one of the same client has replaced is silent, at the latest after a lease."""
    for who, connections in seen.connections.items():
        welcome = [(c.welcome, c) for c in connections if c.welcome is not None]
        replaced: dict[int, float] = {}
        for (_, old), (since, new) in pairwise(welcome):
            assert since is not None
            slack = BYTES_SECONDS if seen.calm(since - 1.0, since + BYTES_SECONDS) else LEASE_SECONDS + BYTES_SECONDS
            if old.node == new.node:
                slack = BYTES_SECONDS
            replaced[old.number] = since + slack
        for event in seen.got[who]:
            if event.t > replaced.get(event.conn, event.t):
                until = replaced[event.conn]
                yield f"{who} got {event.msg} on connection {event.conn} at {event.t:.2f}; replaced by {until:.2f}"


def wills(seen: Seen) -> Iterator[str]:
    """Once, when due; not after a good-bye, not if back in time."""
    at = {row.payload: row.t for row in seen.log if row.topic.startswith("w/")}
    for who, connections in seen.connections.items():
        for n, one in enumerate(connections):
            if not one.will:
                continue
            count = seen.copies[one.will]
            if count > 1:
                yield f"{who}: the will {one.will} was published {count} times"
            expected = _will_of(seen, one, connections[n + 1 :])
            if expected is not None and min(count, 1) != expected:
                yield f"{_story(one)}: its will (delay {one.delay}) was published {count} times, not {expected}"
            if count and one.end is not None and seen.calm(one.end - 8.0, one.end + one.delay + 1.0):
                due = one.end + (one.delay if one.bye is None or one.bye.code == 4 else 0)
                if at[one.will] < due - 1.0:
                    yield f"{_story(one)}: its will (delay {one.delay}) was published at {at[one.will]:.2f}, too early"


def _will_of(seen: Seen, one: Connection, later: list[Connection]) -> int | None:
    """How often its will is to be published; None: it depends on what nobody saw."""
    if one.welcome is None:
        return None
    if one.end is None or one.end >= seen.end - 0.5:
        return 0
    if one.said_goodbye:
        assert one.bye is not None
        return 0 if one.confirmed or seen.calm(one.bye.t - 1.0, one.bye.t + 3.0) else None
    back = next((c for c in later if c.welcome is not None), None)
    tried = later[0].asked if later else None
    if tried is None:
        settled = max(one.end, seen.healed) + GONE_SECONDS + one.delay + BYTES_SECONDS
        return 1 if seen.end > settled else None
    # A take-over: the connection ends when the next one is welcome, or a little before.
    left = min(one.end, tried)
    if back is not later[0] or not seen.calm(left - 8.0, max(tried, one.end) + 1.0):
        return None
    if one.delay == 0:
        return 1
    if back.welcome is not None and back.welcome < left + one.delay - 0.5:
        return 0
    return 1 if tried > one.end + one.delay + SWEEP_SECONDS else None


def _story(one: Connection) -> str:
    ended = "open" if one.end is None else f"ended {one.end:.2f}"
    how = "good-bye" if one.said_goodbye else "with its will" if one.bye else "lost" if not one.dropped else "dropped"
    return f"{one.who}'s connection {one.number} to {one.node} (asked {one.asked:.2f}, {ended}, {how})"


def lasting(seen: Seen) -> Iterator[str]:
    """A session is there before its expiry, and gone after it."""
    for who, connections in seen.connections.items():
        before: Connection | None = None
        unsure = False
        for one in connections:
            if one.welcome is None:
                unsure = True
                continue
            if before is not None and not one.clean:
                yield from _present(before, one, unsure)
            before, unsure = one, False
        if before is not None and before.end is not None and before.end < seen.end - 0.5:
            yield from _left_for_good(seen, who, before, unsure)


def _present(before: Connection, one: Connection, unsure: bool) -> Iterator[str]:
    assert one.welcome is not None
    expiry = before.expiry
    if not one.present and (expiry == NEVER or one.welcome - before.heard < expiry - BYTES_SECONDS):
        yield f"{_story(one)}: no session, {one.welcome - before.heard:.1f} s after {_story(before)}, expiry {expiry}"
    if one.present and before.confirmed and before.end is not None and not unsure:
        away = one.asked - before.end
        if expiry != NEVER and away > expiry + 2.0:
            yield f"{_story(one)}: a session, {away:.1f} s after {_story(before)}, expiry {expiry}"


def _left_for_good(seen: Seen, who: str, last: Connection, unsure: bool) -> Iterator[str]:
    assert last.end is not None
    there = who in seen.sessions
    if not there and (last.expiry == NEVER or seen.end - last.heard < last.expiry):
        yield f"{_story(last)}: its session (expiry {last.expiry}) is not there at the end, {seen.end:.2f}"
    since = max(last.end, seen.healed)
    if there and not unsure and last.expiry != NEVER and seen.end - since > last.expiry + GONE_SECONDS:
        yield f"{_story(last)}: its session (expiry {last.expiry}) is still there at the end, {seen.end:.2f}"


def groups(seen: Seen) -> Iterator[str]:
    """Everything goes to a member; to another one only if the first was lost before its acknowledgement was saved."""
    members: dict[str, list[str]] = defaultdict(list)
    for who, subscribed in seen.subscribed.items():
        if who.startswith("g"):
            members[subscribed[0].msg].append(who)
    for share, names in members.items():
        kept: dict[str, float] = {}
        for who in names:
            for msg, since in _kept(seen, who).items():
                kept[msg] = min(since, kept.get(msg, since))
        gots = sorted((event for who in names for event in seen.got[who]), key=lambda event: event.t)
        by_msg: dict[str, list[Event]] = defaultdict(list)
        for event in gots:
            by_msg[event.msg].append(event)
        since = min(seen.subscribed[who][0].t for who in names)
        missing = [m for m, a in seen.acked.items() if matches(share, topic_of(m)) and m not in by_msg]
        missing = [m for m in missing if seen.sent[m][0].t > since and not m.startswith("probe")]
        if missing:
            yield f"{share}: no member ever got {len(missing)}: {missing[:5]}"
        for msg, deliveries in by_msg.items():
            if seen.copies[msg] == 1:
                yield from _one_member(seen, share, msg, deliveries, kept.get(msg))


def _one_member(seen: Seen, share: str, msg: str, deliveries: list[Event], kept: float | None) -> Iterator[str]:
    for one, other in pairwise(deliveries):
        if other.repeat:
            continue
        if kept is not None and other.t > kept:
            yield f"{share}: {other.who} got {msg} at {other.t:.2f}; acknowledged and saved by {kept:.2f}"
        connection = seen.connections[one.who][one.conn - 1]
        stayed = connection.end is None or connection.end > other.t
        if one.who != other.who and stayed and seen.calm(one.t - 1.0, other.t):
            yield f"{share}: {msg} went to {one.who} at {one.t:.2f} and to {other.who} at {other.t:.2f}"


def told_ready(seen: Seen) -> Iterator[str]:
    """/readyz says 503 within 5 s when publishes cannot be acknowledged."""
    blocked: dict[str, float] = {}
    said: dict[str, float] = {}
    """Since when a node has said that it is ready though it was blocked: at its recovery it may be a moment early."""
    told: set[str] = set()
    for event in seen.events:
        if event.who.startswith("probe-"):
            node = event.who.removeprefix("probe-")
            if event.what in ("connect", "send"):
                blocked.setdefault(node, event.t)
            elif event.what == "acked":
                blocked.pop(node, None)
                said.pop(node, None)
                told.discard(node)
        elif event.what == "healed" and event.msg in ("kill", "stop", "pause") and event.node in blocked:
            blocked[event.node] = event.t
        elif event.what == "lag":
            blocked = {node: since + event.secs for node, since in blocked.items()}
        elif event.what == "ready" and event.code != 200:
            said.pop(event.node, None)
            if event.code == 0 and event.node in blocked:
                blocked[event.node] = event.t  # it does not run, or not yet
        elif event.what == "ready" and event.node in blocked and event.node not in told:
            waited = event.t - blocked[event.node]
            if waited > READY_SECONDS and event.t - said.setdefault(event.node, event.t) > BYTES_SECONDS:
                told.add(event.node)
                yield f"node {event.node} was ready at {event.t:.2f}, and had acknowledged nothing for {waited:.1f} s"


CHECKS: tuple[Check, ...] = (
    settled,
    stored,
    timed,
    delivered,
    not_again,
    in_order,
    once_connected,
    wills,
    lasting,
    groups,
    told_ready,
)


def faults(seen: Seen, checks: Iterable[Check] = CHECKS) -> list[str]:
    """What was promised and did not hold."""
    found = []
    for check in checks:
        some = list(check(seen))
        found += [f"{check.__name__}: {line}" for line in some[:SHOWN_MAX]]
        if len(some) > SHOWN_MAX:
            found.append(f"{check.__name__}: and {len(some) - SHOWN_MAX} more")
    return found
