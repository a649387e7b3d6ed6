"""Messages survive the wire, and what is not a message is refused."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from holdfast.errors import RequestError
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Layer, Mark, MemberId, Piece, Policy
from holdfast.groups.protocol.view import GroupView, MemberView, PieceView
from holdfast.groups.protocol.wire import decode, encode
from holdfast.machine import Address
from holdfast.model import Stream

PIECE = Piece(Stream("messages", 3, 1), 1, 4)
MARK = Mark(7, ((9, 12), (20, 20)))
LAYER = Layer(2, ((0, MARK), (1, Mark(3))))
MEMBER = MemberId("car/7", 2, 3, 4)
HOME = Address("n1", "agent", "car/7/2")
GROUP = GroupId("g", "t/#")
VIEW = GroupView(
    GROUP,
    3,
    "b",
    "b.0",
    "strict",
    False,
    (MemberView(MEMBER, "n1", "borrower", "connected", 1),),
    (PieceView(PIECE, None, "free", MARK),),
    2,
    "topic",
)
BY_NAME = {
    "member": MEMBER,
    "reply_to": HOME,
    "leader": HOME,
    "group": GROUP,
    "born": "b",
    "course": "b.0",
    "sent_at": 1.25,
    "echo": 1.25,
    "good_for_seconds": 2.5,
    "within_seconds": 10.0,
    "epoch": 5,
    "loan": 6,
    "version": 7,
    "old_version": 6,
    "new_version": None,
    "oldest_loan": 2,
    "leaving": True,
    "kept": False,
    "deleted": True,
    "piece": PIECE,
    "mark": MARK,
    "skip": (LAYER,),
    "key": "message",
    "packet_max": 1000,
    "largest_packet": 2000,
    "set_aside": (3, 4),
    "policy": Policy(1.0, None),
    "attempts": ((3, 1),),
    "carried": (m.Carried(PIECE, "b.0", MARK),),
    "reports": (m.Report(PIECE, 6, MARK, True, ((8, 2),)),),
    "states": (m.Report(PIECE, 6, MARK),),
    "old_states": (m.Report(PIECE, 6, MARK, True),),
    "streams": (m.Leased(PIECE, "b.0", MARK, (LAYER,), "topic"),),
    "request": "r1",
    "error": "why",
    "view": VIEW,
    "what": m.Seek(((Stream("messages", 0, 1), 5),)),
    "asked_at": 4.5,
}


@pytest.mark.parametrize("kind", get_args(m.GroupMessage), ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_went(kind: type) -> None:
    message = kind(**{field.name: BY_NAME[field.name] for field in dataclasses.fields(kind)})
    assert decode(encode(message)) == message


@pytest.mark.parametrize("what", [m.Describe(), m.DeleteGroup(True), m.SetPaused(True), m.Seek(())])
def test_every_request_comes_back_as_it_went(what: m.Request) -> None:
    ask = m.Ask("r", HOME, GROUP, what, 4.5, 10.0)
    again = decode(encode(ask))
    assert again == ask
    assert type(again.what) is type(what)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'["Ping","",{}]', b'["Nonsense","",{}]', b'["Ask","Nothing",{}]', b"\xff\x00"]
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        decode(data)
