"""Shared groups: a durable subscription that many members consume together. How a host drives it.

Three machines, each with `handle(event, now) -> list of effects` and a `deadline`; `now` is the node's own monotonic
clock, and no two nodes' clocks are ever compared:

    Registry     one per node            finds the leader of a group, or starts it here
    Leader       one per group, on       set up on `StartLeader(group, epoch, trusted_until)`, dropped on `Retire`
                 the node that claimed   or `StopLeader`
    Agent        one per connected       all shared subscriptions of a session (`NoAgent` if groups are disabled)
                 session
    BatchMember  one per batch reader    the same for Spark and other bulk readers

A driver's rules:

1. The clock first: if `now >= machine.deadline`, handle `TICK` before anything else, reading included. This is
   what keeps a process that was stopped from reading what is no longer its own.
2. Effects in order. `Save` is the last of its list: whatever waits for it is said when the answer is `Saved`. Give
   the machine `Saved`, `SaveFailed` (or `Deposed`, if the claim is no longer at `save.epoch`) before any other event.
   A save whose outcome is unknown counts as failed. After `Retire` the list is over.
3. A machine that raises, whose effect cannot be performed, or whose answer is an exception, is dropped with its story.
   A leader then counts as `LeaderRetired(..., clean=False)`; an agent is set up anew, its session joins again under a
   higher incarnation; with a registry go its leaders, and its lease is left to end by itself.

Where `Send(to, message)` goes, by `to.kind`: `registry` to the node's registry; `leader` to the leader of the group
`to.name`, or, if this node has none, to its registry; `agent` to the agent whose `address` is `to`; `batch` to the
batch member; `asker` to whoever sent that `Ask`. Nobody there: drop it (for an agent's, `farewell` spares the leader a
wait). `wire.encode` and `wire.decode` turn messages into bytes.

    effect                       what the host does                          what it answers, to whom
    ---------------------------  ------------------------------------------  ------------------------------------------
    OpenLease, RenewLease        the node's one lease in the metadata store  LeaseOpened, LeaseRenewed, LeaseLost,
                                                                             LeaseFailed -> registry
    Claim(group, lease)          create `claim_key` under it if absent, its  Claimed(epoch = version), Taken,
                                 value names the node                        ClaimFailed -> registry
    Resign                       delete the claim at that version            -
    TrustUntil                   -                                           Trusted -> every leader of the node
    Load                         read `record_key` and all the progress      Loaded, LoadFailed -> leader
    WatchStreams                 look, and keep looking; oldest news first   StreamsSeen -> leader, now and on change
    Trimmed                      keep a record of what was skipped, follow   -
                                 `groups.on_trimmed`
    Save                         `record.stored`, if the claim is at         Saved, SaveFailed, Deposed -> leader
                                 version `epoch`
    Retire                       drop the leader                             LeaderRetired -> registry
    StartReading                 read the piece; `progress.Done` says what   Acked for what the client acknowledged and
                                 to deliver                                  for what is passed over; Delivered if the
                                                                             policy counts attempts -> agent
    StopReading                  read no more                                Drained once nothing is in flight
    Abandon                      forget what is in flight, drop late acks    -
    Redeliver, Park              send again / append to the dead letters     Delivered / Acked, and read on
    Joined                       keep `born` with the subscription           -
    Ended                        the subscription is over; if `deleted`,     -
                                 forget it

A SUBSCRIBE first declares the group (`GroupRecord` with a `born` of its own and the resolved `starts`, put if
`record_key` is absent; else the one that is there), then gives the agent `Subscribe(group, born)`. A session that
resumes gives the `born` it kept, so that a group which was deleted meanwhile is not brought back. UNSUBSCRIBE is
`Unsubscribe`; a lost connection, kick, takeover or clean start is `Closed`, and the agent is kept until it is `empty`.
Operators send `Ask` to the nearest registry, again and again until `Answer` comes. Before a clean stop, give each
leader `Retreat` and each agent `Closed`, and wait a little.
"""

from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.registry import Registry
from holdfast.groups.member.agent import Agent, AnyAgent, NoAgent, farewell
from holdfast.groups.member.batch_member import BatchMember
from holdfast.groups.progress import Done
from holdfast.groups.protocol.nouns import GroupId, MemberId, Piece
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import ElectionSettings, LeaderSettings, MemberSettings
from holdfast.groups.shares import is_shared, parse_share

__all__ = [
    "Agent",
    "AnyAgent",
    "BatchMember",
    "Done",
    "ElectionSettings",
    "GroupId",
    "GroupRecord",
    "Leader",
    "LeaderSettings",
    "MemberId",
    "MemberSettings",
    "NoAgent",
    "Piece",
    "Registry",
    "farewell",
    "is_shared",
    "parse_share",
]
