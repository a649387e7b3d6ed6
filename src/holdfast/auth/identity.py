"""What a peer shows, who that makes it, and what it is told otherwise."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

Role = Literal["reader", "publisher", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)

CertificateSubject: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]
"""As `ssl.SSLSocket.getpeercert()["subject"]` gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What came with a CONNECT, and how it came."""

    client_id: str
    username: str | None = None
    password: bytes | None = None
    peer_is_loopback: bool = False
    certificate_subject: CertificateSubject | None = None
    """Only of a certificate that TLS has verified."""

    def __repr__(self) -> str:
        # Written out so that no log line can ever hold the password.
        shown = "None" if self.password is None else "…"
        return f"Credentials(client_id={self.client_id!r}, username={self.username!r}, password={shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a peer is, once that has been checked."""

    user: str | None
    """None for the anonymous: a name that nothing has checked is not a name."""
    client_id: str = ""
    expires_at: float | None = None
    """Seconds since 1970 when the right to be connected ends; None where it does not."""
    roles: frozenset[Role] = frozenset()
    """What it may do over HTTP. Over MQTT the ACL file decides."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. The message is fit for the client's eyes, as a reason string."""

    reason_code: int
    message: str


def is_name(text: str) -> bool:
    """Can this name somebody? Anything printable can, so that names stay on their line in files and logs."""
    return bool(text) and text.isprintable() and text == text.strip()


@lru_cache(1024)
def is_loopback(host: object) -> bool:
    """Does a peer with this address come from this machine? One without an address could come from anywhere."""
    try:
        found = ipaddress.ip_address(host) if isinstance(host, str) else None
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found is not None and found.is_loopback
