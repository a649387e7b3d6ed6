"""Tokens for the HTTP API: one `name:role[,role]:sha256` a line; the token itself is shown once, when it is made.

A token is 32 random bytes, so unlike a password it needs no slow hash: there is nothing to guess from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from holdfast.auth.files import Watched, decode, edit, meaningful_lines
from holdfast.auth.identity import ROLES, Identity, Role, is_name
from holdfast.errors import RequestError

WHAT = "HTTP token file"

PREFIX = "hf_"
"""So that a token found lying about can be told for what it is."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One line of the file."""

    name: str
    roles: tuple[Role, ...]
    digest: str


class HttpTokens:
    """Answers whose token it is."""

    def __init__(self, path: Path):
        self.file = Watched(WHAT, path, _by_digest)

    def check(self, header: str | None) -> Identity | None:
        """Whoever the `Authorization` header's bearer token belongs to, or None."""
        self.file.refresh()
        scheme, _, token = (header or "").strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Looked up by digest: how long that takes tells nothing about any token.
        entry = self.file.value.get(_digest(token.strip()))
        return None if entry is None else Identity(user=entry.name, roles=_granted(entry.roles))


def make_token(path: Path, name: str, roles: Sequence[Role]) -> str:
    """Add a token to the file. It is returned, and stored nowhere."""
    if not is_name(name) or ":" in name or name.startswith("#"):
        raise RequestError(
            f"token name {name!r} cannot stand in an {WHAT}; "
            f"a name is printable, has no ':', and does not begin with '#' or a space"
        )
    if not roles:
        raise RequestError(f"token {name!r} has no role; give one or more of {', '.join(ROLES)}")
    token = PREFIX + secrets.token_urlsafe(32)

    def change(file: str, text: str) -> str:
        if any(entry.name == name for entry in _entries(file, text.encode())):
            raise RequestError(f"{file} has a token {name!r} already; delete it first, or choose another name")
        kept = text if not text or text.endswith("\n") else f"{text}\n"
        return f"{kept}{name}:{','.join(dict.fromkeys(roles))}:{_digest(token)}\n"

    edit(WHAT, path, change)
    return token


def delete_token(path: Path, name: str) -> None:
    """Take a token out of the file; whoever holds it is refused from now on."""

    def change(file: str, text: str) -> str:
        if not any(entry.name == name for entry in _entries(file, text.encode())):
            raise RequestError(f"{file} has no token {name!r}; `holdfast password token ls` shows those it has")
        kept = [line for line in text.split("\n") if line.strip().partition(":")[0] != name]
        return "\n".join(kept)

    edit(WHAT, path, change)


def list_tokens(path: Path) -> list[TokenEntry]:
    """Every token of the file, in the file's order."""
    return list(Watched(WHAT, path, _entries).value)


def _digest(token: str) -> str:
    return sha256(token.encode(errors="surrogatepass")).hexdigest()


def _granted(roles: Sequence[Role]) -> frozenset[Role]:
    """An admin may do everything; a publisher may not read, nor a reader publish."""
    return frozenset(ROLES if "admin" in roles else roles)


def _by_digest(name: str, content: bytes) -> dict[str, TokenEntry]:
    return {entry.digest: entry for entry in _entries(name, content)}


def _entries(name: str, content: bytes) -> list[TokenEntry]:
    found: dict[str, TokenEntry] = {}
    digests: set[str] = set()
    for number, line in meaningful_lines(decode(name, content)):
        where = f"{name}, line {number}"
        # The last part is never shown: it may be a token that somebody put there unhashed.
        parts = line.split(":")
        if len(parts) != 3:
            raise RequestError(
                f"{where}: got {len(parts)} parts, with ':' between; "
                f"a line is `name:role:sha256`, as `holdfast password token create` writes it"
            )
        token_name, roles, digest = parts
        if not is_name(token_name):
            raise RequestError(
                f"{where}: {token_name!r} is not a name; a name is printable, without spaces at its ends"
            )
        known = tuple(role for role in ROLES if role in roles.split(","))
        if len(known) != len(roles.split(",")):
            raise RequestError(f"{where}: roles {roles!r}; takes {', '.join(ROLES)}, or several with ',' between")
        if not _DIGEST.fullmatch(digest):
            raise RequestError(
                f"{where}: what follows '{token_name}:{roles}:' is not a SHA-256 digest of 64 hexadecimal digits; "
                f"make the token with `holdfast password token create`"
            )
        if token_name in found or digest in digests:
            raise RequestError(f"{where}: token {token_name!r} is there already; leave one line for each token")
        found[token_name] = TokenEntry(token_name, known, digest)
        digests.add(digest)
    return list(found.values())
