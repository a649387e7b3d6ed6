"""Who may not connect: client ids, users and addresses that an operator has banned, for a while or for good.

Looking somebody up is a few dict look-ups however many bans there are. Addresses are kept by the length of their
prefix, so a look-up takes as many steps as there are different lengths, not as there are networks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from math import inf
from typing import Literal, TypeAlias, get_args

import msgspec

from holdfast.errors import RequestError

Kind = Literal["client", "user", "address"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NAME_BYTES_MAX = 65_535
REASON_CHARS_MAX = 500
SECS_MAX = 100 * 365 * 86_400.0
"""Whoever wants longer means for good."""

_MAPPED_BITS = 96
"""So much of an IPv6 address says that it is an IPv4 one in disguise."""

_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Length: TypeAlias = tuple[int, int]
"""An IP version, and how many bits are not looked at."""


class Ban(msgspec.Struct, frozen=True):
    """One ban. Times are the store's clock, in seconds since 1970."""

    kind: Kind
    name: str
    """A client id, the name of an authenticated user, or an address or a network, as `check_name` writes it."""
    reason: str = ""
    until: float | None = None
    """None: for good."""
    made_at: float = 0.0

    def ended(self, now: float) -> bool:
        return self.until is not None and self.until <= now


def check_kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise RequestError(f"kind {kind[:100]!r} is unknown; it is one of {', '.join(KINDS)}")
    return kind


def check_name(kind: Kind, name: str) -> str:
    """The one way to write this name; a RequestError if nobody can be called that."""
    what = {"client": "client id", "user": "user name", "address": "address"}[kind]
    if not name:
        raise RequestError(f"the {what} '' is empty")
    if "\0" in name:
        raise RequestError(f"{what} {name[:100]!r} contains NUL")
    size = len(_utf8(what, name))
    if size > NAME_BYTES_MAX:
        raise RequestError(f"{what} {name[:100]!r}… has {size} bytes; it takes up to {NAME_BYTES_MAX}")
    return _written(_network(name)) if kind == "address" else name


def make_ban(kind: str, name: str, reason: str, secs: float | None, now: float) -> Ban:
    """A ban that begins now; a RequestError names what is wrong with it."""
    known = check_kind(kind)
    _utf8("reason", reason)
    if len(reason) > REASON_CHARS_MAX:
        raise RequestError(f"reason {reason[:100]!r}… has {len(reason)} characters; it takes up to {REASON_CHARS_MAX}")
    if secs is not None and not 0 < secs <= SECS_MAX:
        raise RequestError(f"secs {secs!r} cannot be; it takes a number above 0, up to {SECS_MAX:.0f}")
    return Ban(known, check_name(known, name), reason, None if secs is None else now + secs, now)


class Bans:
    """Every ban there is. `replace` may be called on another thread than everything else."""

    def __init__(self) -> None:
        self._table = _Table(())

    def __len__(self) -> int:
        return len(self._table.bans)

    def find(self, client_id: str | None, user: str | None, address: str | None, now: float) -> Ban | None:
        """A ban that fits any of them. None is nobody: no ban is about that."""
        table = self._table
        if not table.bans:
            return None
        for ban in (table.clients.get(client_id), table.users.get(user)):
            if ban is not None and not ban.ended(now):
                return ban
        if table.networks and address is not None and (place := _place(address)) is not None:
            version, number = place
            for (of_version, ignored), networks in table.networks.items():
                if of_version == version:
                    ban = networks.get(number >> ignored)
                    if ban is not None and not ban.ended(now):
                        return ban
        return None

    def replace(self, bans: Iterable[Ban]) -> list[Ban]:
        """These and no others, from now on; those of them that were not there before."""
        before, self._table = self._table, _Table(bans)
        return [ban for ban in self._table.bans if ban not in before.bans]

    def due(self, now: float) -> list[Ban]:
        """Those that have ended: they ban nobody any more, and can be forgotten."""
        table = self._table
        return [ban for ban in table.bans if ban.ended(now)] if now >= table.first_end else []


class _Table:
    """All bans at one time; not changed once it is made."""

    def __init__(self, bans: Iterable[Ban]):
        self.bans = frozenset(bans)
        self.clients: dict[str | None, Ban] = {}
        self.users: dict[str | None, Ban] = {}
        self.networks: dict[_Length, dict[int, Ban]] = {}
        """By their first bits, the narrowest first."""
        self.first_end = min((ban.until for ban in self.bans if ban.until is not None), default=inf)
        found: dict[_Length, dict[int, Ban]] = {}
        for ban in self.bans:
            if ban.kind == "client":
                self.clients[ban.name] = ban
            elif ban.kind == "user":
                self.users[ban.name] = ban
            else:
                network = _network(ban.name)
                ignored = network.max_prefixlen - network.prefixlen
                first = int(network.network_address) >> ignored
                found.setdefault((network.version, ignored), {})[first] = ban
        self.networks = {length: found[length] for length in sorted(found)}


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {text[:100]!r} is not valid Unicode") from error


def _network(text: str) -> _Network:
    if "%" in text:
        raise RequestError(f"address {text[:100]!r} names an interface of one machine; leave out what begins with '%'")
    try:
        found = ipaddress.ip_interface(text)
    except ValueError as error:
        raise RequestError(
            f"address {text[:100]!r} is neither an IP address nor a network such as 10.1.0.0/16"
        ) from error
    network = found.network
    if found.ip != network.network_address:
        raise RequestError(f"address {text!r} is an address inside of a network; the network is {network}")
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if mapped is not None and network.prefixlen >= _MAPPED_BITS:
        return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network


def _written(network: _Network) -> str:
    return str(network.network_address if network.prefixlen == network.max_prefixlen else network)


@lru_cache(4096)
def _place(address: str) -> tuple[int, int] | None:
    """A peer's address as version and number; None where it is no IP address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.version, int(found)
