"""After the weather: everybody comes back, nothing more goes wrong, and then everything must come right.

`complaints` says what is still wrong. A run passes once there is nothing to complain about, twice in a row.
"""

from __future__ import annotations

from holdfast.groups.leading.leader import Leader
from holdfast.groups.member.batch_member import BatchMemberStatus
from holdfast.groups.member.borrower import BorrowerStatus
from holdfast.groups.progress import Done
from holdfast.groups.protocol.messages import SetPaused
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.record import GroupRecord
from holdfast.keys import progress_key
from holdfast.model import Stream
from holdfast.sim.checkers import Violation
from holdfast.sim.clients import ClientAck, SimBatch, SimSession
from holdfast.sim.workload import ASK_SECONDS, HEAL_SECONDS_MAX, WEATHER_SECONDS, Person, Workload


def heal(run: Workload) -> None:
    """End every fault, and bring everybody back."""
    world = run.world
    world.healing = True
    world.cut.clear()
    for node in run.nodes():
        if not node.up:
            node.restart()
        if node.paused_until > world.now:
            node.paused_until = world.now
            node.resumed()
    for person in run.people:
        run.do_arrive(person)
        for member in (person.session, person.job):
            if member is not None:
                member.stuck_until = -1.0
                for reader in list(member.readers.values()):
                    for offset in sorted(reader.in_flight):
                        world.after(0.05, member, ClientAck(reader, offset))
    run.asks.clear()


def bring_members(run: Workload) -> None:
    """Whoever was told that its group is deleted accepts it; a group without members gets one."""
    for person in run.people:
        member = person.session or person.job
        for ended in member.ended if member else []:
            if ended.deleted and ended.group not in _joined(person):
                person.wants.pop(ended.group, None)
        if person.lease and not person.wants:
            person.job = None
    for group in run.groups:
        run.ask(group, SetPaused(False))
        if run.record(group) is not None and not members_of(run, group):
            person = next(person for person in run.people if person.session)
            run.subscribe(person, group)


def _joined(person: Person) -> set[GroupId]:
    return {borrower.group for borrower in person.session.machine.borrowers.values()} if person.session else set()


def members_of(run: Workload, group: GroupId) -> list[Person]:
    record = run.record(group)
    return [p for p in run.people if (p.session or p.job) and record and p.wants.get(group) == record.born]


def check(run: Workload) -> None:
    """Run the healed world until nobody complains."""
    world = run.world
    # Stragglers may still be on their way, and what an operator has asked may still be done.
    world.run(world.now + ASK_SECONDS + 1)
    bring_members(run)
    last: list[str] = []
    good = 0
    while world.now < WEATHER_SECONDS + HEAL_SECONDS_MAX:
        world.run(world.now + 1.0)
        last = complaints(run)
        good = 0 if last else good + 1
        if good == 2:
            return
    raise Violation("after healing: " + "; ".join(last[:6]))


def complaints(run: Workload) -> list[str]:
    found: list[str] = []
    for group in run.groups:
        record = run.record(group)
        if record is not None:
            found += _group(run, group, record)
    for node in run.nodes():
        registry = node.registry.machine
        if any(registry.waiting.values()):
            found.append(f"{node.name} holds questions that nobody answers")
        for session in node.sessions.values():
            found += _session(run, session)
        for batch in node.batches.values():
            found += _batch(batch)
    for dropped in run.world.log.dropped:
        found += [f"{dropped} is dropped, {g} keeps a cursor" for g in run.groups if _key(run, g, dropped)]
    return found


def _key(run: Workload, group: GroupId, stream: Stream) -> bool:
    # All of its values have keys that begin alike.
    key = progress_key(group, stream)
    return run.record(group) is not None and any(found.startswith(key) for found in run.world.store.keys)


def _session(run: Workload, session: SimSession) -> list[str]:
    found = []
    if session.closed:
        found.append(f"{session.name} is closed and still there")
    for borrower in session.machine.borrowers.values():
        if borrower.status is not BorrowerStatus.CONNECTED:
            found.append(f"{borrower.member} is {borrower.status.name}")
        if len(borrower.memories):
            found.append(f"{borrower.member} still has memories")
    loans = sum(len(borrower.loans) for borrower in session.machine.borrowers.values())
    if len(session.readers) != loans:
        found.append(f"{session.name} reads {len(session.readers)}, holds {loans}")
    return found


def _batch(batch: SimBatch) -> list[str]:
    machine = batch.machine
    found = [] if machine.status is BatchMemberStatus.REPLAYING else [f"{machine.member} is {machine.status.name}"]
    if len(batch.readers) != len(machine.streams):
        found.append(f"{batch.name} reads {len(batch.readers)}, holds {len(machine.streams)}")
    return found


def _group(run: Workload, group: GroupId, record: GroupRecord) -> list[str]:
    leaders = [node.leaders[str(group)].machine for node in run.nodes() if str(group) in node.leaders]
    members = members_of(run, group)
    if not leaders and not members:
        return []
    if len(leaders) != 1:
        return [f"{group} has {len(leaders)} leaders"]
    leader = leaders[0]
    found = _lent(leader, members)
    for stream, messages in run.world.log.messages.items():
        progress = leader.group_streams.progress.get(stream)
        if progress is None:
            found.append(f"{group} does not know {stream}")
            continue
        start = run.truth.starts.get(record.course, {}).get(stream, 0)
        acked = run.truth.acked.get((record.course, stream), set())
        missing = [offset for offset in range(start, len(messages)) if offset not in acked]
        if missing:
            found.append(f"{group}: {stream} {missing} never consumed ({progress})")
        for piece in progress.pieces():
            done = Done(piece, progress.mark(piece), progress.layers, record.key)
            if any(done.wants(offset, *sent) for offset, sent in enumerate(messages)):
                found.append(f"{group}: {piece} is consumed, but its leader has not heard ({progress})")
    found += [
        f"{group} keeps {stream}" for stream in leader.group_streams.progress if stream not in run.world.log.messages
    ]
    return found


def _lent(leader: Leader, members: list[Person]) -> list[str]:
    found = []
    wanted = sorted(person.name for person in members)
    seated = sorted(seat.member.session for seat in leader.seats.values())
    if seated != wanted:
        found.append(f"{leader.group} seats {seated}, wanted {wanted}")
    if leader.book.unsettled:
        found.append(f"{leader.group}: unsettled {[str(piece) for piece in leader.book.unsettled]}")
    key = leader.record.key if leader.record else "publisher"
    held = {member: [entry.piece for entry in leader.book.of_member(member)] for member in leader.seats}
    # By topic, slices of one number stay together: these are what is balanced.
    numbers = {member: {(piece.part, piece.of) for piece in pieces} for member, pieces in held.items()}
    loads = [len(numbers[member] if key == "topic" else held[member]) for member in leader.seats]
    if key == "topic" and sum(loads) > len(set().union(*numbers.values())):
        found.append(f"{leader.group}: slices of one number are with several members: {numbers}")
    if loads and max(loads) - min(loads) > 1:
        found.append(f"{leader.group} is not balanced: {loads}")
    if loads and not min(loads) and max(loads) and leader.settings.slices_max > 1:
        found.append(f"{leader.group}: somebody has no work: {loads}")
    open_streams = leader.group_streams.open_streams(leader.record.order if leader.record else "strict", key)
    for stream in open_streams if key == "message" else ():
        slices = [sum(piece.stream == stream for piece in pieces) for pieces in held.values()]
        if slices and max(slices) - min(slices) > 1:
            found.append(f"{leader.group}: the slices of {stream} are not spread: {slices}")
    if open_streams and loads and not sum(loads):
        found.append(f"{leader.group} lends nothing of {[str(stream) for stream in open_streams]}")
    return found
