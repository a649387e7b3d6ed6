"""What a store keeps of fan-out, and the seam a store implements.

Every change of a delivery names the state it was seen in and has its own verdict; a refusal never fails the others. A
delivery that ends leaves its table, is counted, and becomes a message of the log `deliveries`, in one transaction.
`tests/contract/test_fanout.py` asks every store for this.

    add ──▶ batch and parts (as they are) ──merge_step──▶ waiting rows, by vehicle ──commit──▶ in flight ──▶ end

Parts are kept until their campaign is closed: they say whom a batch was for, without an index over what waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from math import inf
from typing import NamedTuple, Protocol

from holdfast.fanout.nouns import Awaiting, Campaign, Counts, End, InFlight, State, UnderWay, Waiting

PART_IDS_MAX = 5_000
"""So many vehicles in one part; a batch has as many parts as it takes."""


class NewBatch(NamedTuple):
    """A request, checked."""

    request_id: str
    sha1: bytes
    """Of a payload that is stored already."""
    ids: Sequence[str]
    """VINs, sorted, without repeats. Empty: those of `upload`."""
    priority: int = 4
    expires: float = inf
    """By the store's clock."""
    resend: str = "replace"
    """replace | append | ignore: what becomes of deliveries of earlier campaigns with this request id that wait."""
    final: bool = False
    """No batch may join the campaign after this one."""
    key: str | None = None
    """A repeat under the same key does nothing and gets the first answer."""
    digest: bytes = b""
    """Of the whole request: the same key with another digest is a Conflict."""
    number: int | None = None
    """Which campaign of this request id it belongs to, whatever its payload; None: as the hash decides."""
    settings: bytes = b""
    """What it asks of the campaign; it must be the same as the first batch's, or empty."""
    begin: Campaign | None = None
    """What a campaign it begins is like; `id`, `number`, `request_id`, `sha1` and times are filled in."""
    upload: str | None = None
    """Its parts were staged under this name."""


class Added(NamedTuple):
    """What became of a request."""

    campaign: int
    number: int
    seq: int
    accepted: int
    """VINs that were taken. Those that are targets already are counted as repeated when they are merged."""
    began: bool
    """This batch has begun the campaign."""
    merged: bool
    """Its rows are there already: whoever waits can be told now. Otherwise `merge_step` has to be called."""
    repeated: bool = False
    """It was under a known key: nothing was done, and this is the first answer."""


class Part(NamedTuple):
    """A part that is visible."""

    number: int
    """In the order in which they became visible; never given twice."""
    seq: int
    place: int
    campaign: int
    ids: Sequence[str]
    """Sorted."""
    merged: int = 0
    """In the order in which parts were merged; 0: it is not."""


class MergeStep(NamedTuple):
    """One step of a merge: rows of several parts, in the order of VINs."""

    parts: tuple[int, ...]
    """All parts of the run; it is the same for all of its steps."""
    after: str
    """How far the run has come before this step; "" before the first."""
    last: str
    """How far it has come after it."""
    rows: Sequence[tuple[str, int]]
    """VIN and part number."""
    done: bool
    """This is the last step: the parts are merged."""


class Merged(NamedTuple):
    """What a step has done."""

    vins: list[str]
    """VINs for which something new waits."""
    repeated: int
    """Targets already, or ignored: nothing new waits for them."""


class Begin(NamedTuple):
    """Waiting → in flight. Refused unless it waits as seen and nothing else is in flight to that vehicle.

    `flight` is of the delivery that waits, for a session that has the epoch the flight says, in a campaign that is
    sending, within its limits.
    """

    seen: Waiting
    flight: InFlight


class Adopt(NamedTuple):
    """In flight → in flight, in a newer epoch of its session, or of another one."""

    seen: InFlight
    flight: InFlight


DOOMED = -1.0
"""In place of the time when what is in flight expires: it was cancelled."""


class Doom(NamedTuple):
    """In flight → in flight, and cancelled: if it is not answered, it does not wait again."""

    seen: InFlight


class Return(NamedTuple):
    """In flight → waiting, at its old place; or its end, if it was cancelled, has expired, or newer data waits for
    the vehicle: of a later campaign with its request id that replaces earlier ones, whatever that is doing."""

    seen: InFlight
    attempts: int
    not_before: float = 0.0
    refused: bool = False
    """The vehicle is done with that attempt; otherwise it may hold it as it was sent, which is remembered."""


class Await(NamedTuple):
    """In flight, or waiting again → awaiting its result."""

    seen: Waiting | InFlight
    until: float


class Finish(NamedTuple):
    """Waiting, in flight or awaiting → its end."""

    seen: Waiting | InFlight | Awaiting
    end: End
    reason: str = ""
    result: bytes = b""


Change = Begin | Adopt | Doom | Return | Await | Finish


class Verdict(Enum):
    """What became of a change."""

    DONE = auto()
    GONE = auto()
    """It is not as it was seen: ended, taken by somebody else, or never there."""
    BUSY = auto()
    """Begin: something else is in flight to that vehicle."""
    STALE = auto()
    """Begin, Adopt: the session has another epoch."""
    HELD = auto()
    """Begin: the campaign is not sending."""
    LIMITED = auto()
    """Begin: the campaign has sent as much as it may for now."""


class Found(NamedTuple):
    """What there is for one vehicle."""

    in_flight: InFlight | None
    waiting: list[Waiting]
    """Of campaigns that are sending, and within the cut of their waves; the first ones, in order."""
    more: bool
    """There are more than were asked for."""


class StoredPayload(NamedTuple):
    number: int
    sha1: bytes
    data: bytes


class EndedRow(NamedTuple):
    """A delivery that has ended, as its campaign remembers it."""

    vin: str
    place: int
    end: End
    reason: str
    ended_at: float


class FanoutTable(Protocol):
    """Safe to use from several threads; every call blocks. StoreError: failed, or nobody knows."""

    def now(self) -> float:
        """The store's clock, in seconds."""

    # -- payloads --------------------------------------------------------------------------------------------

    def put_payload(self, data: bytes) -> bytes:
        """Store it under its SHA-1, which is returned. A repeat touches it, so that it is not collected soon.

        RequestError if another payload has this SHA-1 (its SHA-256 differs).
        """

    def payloads(self, numbers: Collection[int]) -> dict[int, StoredPayload]:
        """Those that are there and whose data has the SHA-1 they are stored under."""

    def payload_number(self, sha1: bytes) -> int | None: ...

    # -- intake ----------------------------------------------------------------------------------------------

    def stage(self, upload: str, ids: Sequence[str]) -> None:
        """One part of an upload: sorted, without repeats, at most PART_IDS_MAX; invisible until a batch names it."""

    def drop_uploads(self, before: float, limit: int) -> int:
        """Remove parts that were staged before this and never became visible; how many."""

    def add(self, batches: Sequence[NewBatch]) -> list[Added | Exception]:
        """All in one transaction, in order; each has its answer, a RequestError if it is refused (Conflict: settings or
        key differ, UnknownCampaign, UnknownPayload). A refusal fails no other.

        A batch joins the newest campaign of its request id that is open and has its hash; any other begins a new
        one, after which the earlier ones of this request id are no longer open, unless it says `append`.
        """

    # -- merging ---------------------------------------------------------------------------------------------

    def unmerged(self, ids_max: int) -> tuple[list[Part], str]:
        """The oldest visible parts that are not merged, and how far a run over exactly these has come.

        If a run has begun, exactly its parts; else as many whole parts as have up to `ids_max` VINs, at least one.
        """

    def unmerged_of(self, campaign: int) -> int:
        """How many of its vehicles are in parts that are not merged: they cannot be found by their VINs yet."""

    def merge_step(self, step: MergeStep) -> Merged | None:
        """One transaction. None: the run is not where the caller believes; look again with `unmerged`.

        A row is not made for a VIN that waits, is in flight, awaits a result or has ended in its campaign already. If
        an earlier campaign of the same request id has something waiting for the VIN, that ends as superseded (replace),
        stays (append), or the new one is not made (ignore). In a campaign that was cancelled meanwhile, the new ones
        end as cancelled at once.
        """

    # -- dispatch --------------------------------------------------------------------------------------------

    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]:
        """Only those for which there is something."""

    def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        """All in one transaction, each with its own verdict, in order. A VIN may occur more than once."""

    def parts_since(self, merged: int, limit: int) -> list[Part]:
        """Parts that were merged after that one, in the order they were. Whoever goes on from the last misses none."""

    def last_merged(self) -> int:
        """`merged` of the part that was merged last; 0: there is none."""

    def orphans(self, alive: Collection[int], after: str, limit: int) -> list[InFlight]:
        """Deliveries in flight from nodes whose leases are not among these, by VIN, behind `after`."""

    def vehicle(self, vin: str) -> tuple[InFlight | None, list[Waiting], list[Awaiting]]:
        """Everything there is for one vehicle, whatever its campaigns are doing. At most 1,000 each."""

    def awaiting(self, vin: str) -> list[Awaiting]: ...

    def overdue(self, now: float, limit: int) -> list[Awaiting]:
        """Results that have not come in time, the oldest first."""

    # -- campaigns -------------------------------------------------------------------------------------------

    def campaigns(self, ids: Collection[int]) -> dict[int, Campaign]: ...

    def find(self, request_id: str, number: int | None = None) -> Campaign | None:
        """The newest with this request id, or the one of this number."""

    def page(self, before: int, limit: int, states: Collection[State] = ()) -> list[Campaign]:
        """The newest first, with ids below `before` (0: from the newest on)."""

    def counts(self, ids: Collection[int]) -> dict[int, Counts]:
        """In one snapshot."""

    def repeated(self, campaign: int) -> int:
        """How many VINs were asked for again."""

    def change_campaign(self, changed: Campaign, epoch: int | None = None) -> bool:
        """Compare and set: it must be at `changed.version` - 1. `epoch`: and its changer must still be the keeper.

        It is closed only if no batch has come, and nothing was retried, since it was read.
        """

    def parts_of(self, campaign: int, after: int, limit: int) -> list[Part]:
        """Its parts with greater numbers, in order, merged or not."""

    def expired_parts(self, now: float, limit: int) -> list[Part]:
        """Merged parts whose batches have expired and that were not done with yet."""

    def part_done(self, number: int) -> None:
        """Nothing of an expired part waits any more."""

    def waiting_of(self, part: Part, vins: Collection[str]) -> list[Waiting]:
        """Which of these VINs wait for a delivery of that part."""

    def ended(self, campaign: int, ends: Collection[End], after: str, limit: int) -> list[EndedRow]:
        """By VIN, behind `after`. Acked ones are there too, until the campaign is closed and collected."""

    def under_way(self, campaign: int, where: UnderWay, after: str, limit: int) -> list[str]:
        """VINs whose delivery has no end yet, as far as they are merged; in order, behind `after`."""

    def reasons(self, campaign: int) -> dict[str, int]:
        """How many failed, by reason."""

    def retry(self, campaign: int, vins: Sequence[str]) -> list[str]:
        """Those of these VINs (PART_IDS_MAX at most) that have ended without being acked wait again; which ones.

        They are new deliveries: batches of their own (one for each payload), merged, with the priority they had and
        without expiry. RequestError if the campaign is cancelled or closed.
        """

    # -- one keeper ------------------------------------------------------------------------------------------

    def keep(self, node: str, seconds: float) -> int | None:
        """Become or stay the keeper for so long: its epoch, greater with every change of hands; None: another is."""

    # -- collection ------------------------------------------------------------------------------------------

    def collect(self, before: float, payloads_before: float, keys_before: float, limit: int) -> int:
        """One bounded step: remove what closed campaigns (closed before `before`) have left, then keys, then payloads
        that nothing refers to and nobody has touched since. How many rows; 0: nothing is left to do."""
