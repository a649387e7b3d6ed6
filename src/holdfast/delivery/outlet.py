"""An outlet: one session while its client is connected, what its socket takes, and who reads for it."""

from __future__ import annotations

from holdfast.delivery.readers import OwnReader, Reader
from holdfast.machine import Machine
from holdfast.sessions.retained import Selection
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed

NO_LIMIT = 1 << 30


class Outlet:
    """Made for one connection. Delivery alone changes it; `session` is the session's parts' own business."""

    __slots__ = (
        "agent",
        "attached",
        "blocked",
        "loan_news",
        "loans",
        "own",
        "packet_max",
        "reads",
        "retained",
        "session",
        "turn",
        "turn_asked",
        "turn_bytes",
        "version",
        "waiting",
        "window_max",
    )

    own: OwnReader

    def __init__(self, session: Session, version: int, window_max: int = 65_535, packet_max: int = NO_LIMIT):
        self.session = session
        self.version = version
        self.window_max = window_max
        self.packet_max = packet_max
        self.attached = False
        """Its connection serves the session; before and after, nothing is sent here."""
        self.blocked = False
        """The socket's buffer is full."""
        self.waiting: dict[Reader, None] = {}
        """Readers that wait for room, the longest waiting first."""
        self.reads = 0
        """How many readers are reading."""
        self.loans: dict[LoanFeed, Reader] = {}
        self.loan_news: dict[LoanFeed, None] = {}
        """Loans of which something was acknowledged or passed over since their agent was last told."""
        self.retained: dict[str, Selection] = {}
        """By filter: retained messages that a SUBSCRIBE is owed."""
        self.turn_asked = False
        """There is more to send than fits into one turn: the next one is asked for."""
        self.turn = 0
        self.turn_bytes = 0
        """What was written in that turn."""
        self.agent: Machine | None = None
        """Of a session in shared groups: it must have seen the clock before anything that was lent goes out."""

    def __repr__(self) -> str:
        return f"<outlet of {self.session.client_id}>"
