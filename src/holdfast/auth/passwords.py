"""The password file: one `user:argon2id-hash` a line, and checking against it without paying argon2 each time.

A vehicle that reconnects brings the password it brought before. That it was right is remembered, as a keyed
digest which means nothing outside this process, for as long as the user's line in the file stays as it was.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError

from holdfast.auth.bounded import Recent
from holdfast.auth.files import Watched, decode, edit, meaningful_lines
from holdfast.auth.identity import is_name
from holdfast.errors import RequestError

WHAT = "password file"

HASHER = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
"""OWASP's choice for argon2id. About 20 ms; 19 MiB while it runs, so that several may run at once."""

REMEMBERED_MAX = 32_768
"""How many right passwords are remembered: a few MB, and room for three fleets of ten thousand."""

_HASH = re.compile(r"\$argon2id\$v=19\$m=(\d{1,8}),t=(\d{1,4}),p=(\d{1,3})\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)")


@dataclass(frozen=True, slots=True)
class User:
    """One line of the file, for people to see."""

    user: str
    memory_kib: int
    passes: int
    lanes: int


class Passwords:
    """Answers whether a password is right. Safe to share between threads (argon2 lets other threads run)."""

    def __init__(self, path: Path, remembered_max: int = REMEMBERED_MAX):
        self.file = Watched(WHAT, path, _parse)
        self._key = secrets.token_bytes(32)
        self._right: Recent[tuple[str, bytes], str] = Recent(remembered_max)

    def remembers(self, user: str, password: bytes) -> bool:
        """Is this the password that was right before, and still is? Takes microseconds; False means: not known yet."""
        self.file.refresh()
        proven = self._right.get((user, self._digest(password)))
        return proven is not None and proven == self.file.value.get(user)

    def verify(self, user: str, password: bytes) -> bool:
        """Is this the user's password? An unknown user takes as long as a wrong password."""
        if self.remembers(user, password):
            return True
        users = self.file.value
        encoded = users.get(user)
        try:
            HASHER.verify(encoded or _nobody(users), password)
        except VerificationError:
            return False
        if encoded is None:
            return False
        self._right.put((user, self._digest(password)), encoded)
        return True

    def _digest(self, password: bytes) -> bytes:
        return blake2b(password, key=self._key, digest_size=32).digest()


def set_password(path: Path, user: str, password: str, hasher: PasswordHasher = HASHER) -> bool:
    """Add a user, or change one's password. True if the user is new."""
    if not is_name(user) or ":" in user or user.startswith("#"):
        raise RequestError(
            f"user name {user!r} cannot stand in a {WHAT}; "
            f"a name is printable, has no ':', and does not begin with '#' or a space"
        )
    if not password:
        raise RequestError(f"the password for {user!r} is empty; give one of at least one character")
    try:
        line = f"{user}:{hasher.hash(password.encode())}"
    except UnicodeEncodeError as error:
        raise RequestError(f"the password for {user!r} is not valid Unicode; MQTT clients send it as UTF-8") from error
    new = True

    def change(name: str, text: str) -> str:
        nonlocal new
        lines = _lines(name, text)
        at = _line_of(lines, user)
        new = at is None
        if at is None:
            lines.append(line)
        else:
            lines[at] = line
        return "\n".join(lines) + "\n"

    edit(WHAT, path, change)
    return new


def delete_user(path: Path, user: str) -> None:
    """Take a user out of the file."""

    def change(name: str, text: str) -> str:
        lines = _lines(name, text)
        at = _line_of(lines, user)
        if at is None:
            raise RequestError(f"{name} has no user {user!r}; `holdfast password ls` shows those it has")
        del lines[at]
        return "".join(f"{line}\n" for line in lines)

    edit(WHAT, path, change)


def list_users(path: Path) -> list[User]:
    """Every user of the file, in the file's order, with how the password is hashed."""
    found = []
    for user, encoded in Watched(WHAT, path, _parse).value.items():
        memory, passes, lanes = _parameters(encoded)
        found.append(User(user, memory, passes, lanes))
    return found


def _parse(name: str, content: bytes) -> dict[str, str]:
    users: dict[str, str] = {}
    for number, line in meaningful_lines(decode(name, content)):
        user, colon, encoded = line.partition(":")
        where = f"{name}, line {number}"
        # What follows the colon is never shown: it may be a password that somebody typed there.
        if not colon:
            raise RequestError(f"{where}: there is no ':'; a line is `user:hash`, as `holdfast password set` writes it")
        if not is_name(user):
            raise RequestError(
                f"{where}: {user!r} is not a user name; a name is printable and has no space at its ends"
            )
        if not _is_hash(encoded):
            raise RequestError(
                f"{where}: what follows '{user}:' is not an argon2id hash; write it with `holdfast password set {user}`"
            )
        if user in users:
            raise RequestError(f"{where}: user {user!r} is there already; leave one line for each user")
        users[user] = encoded
    return users


def _lines(name: str, text: str) -> list[str]:
    _parse(name, text.encode())  # a file that is not understood is not rewritten
    return text.rstrip("\n").split("\n") if text.strip() else []


def _line_of(lines: list[str], user: str) -> int | None:
    for at, line in enumerate(lines):
        if not line.strip().startswith("#") and line.strip().partition(":")[0] == user:
            return at
    return None


def _is_hash(encoded: str) -> bool:
    found = _HASH.fullmatch(encoded)
    if found is None:
        return False
    memory, passes, lanes = _parameters(encoded)
    try:
        salt, digest = (base64.b64decode(part + "=" * (-len(part) % 4)) for part in found.group(4, 5))
    except binascii.Error:
        return False
    # The least that argon2 itself takes: a line that passes here can always be verified against.
    return passes >= 1 and lanes >= 1 and memory >= 8 * lanes and len(salt) >= 8 and len(digest) >= 4


def _parameters(encoded: str) -> tuple[int, int, int]:
    found = _HASH.fullmatch(encoded)
    if found is None:
        return HASHER.memory_cost, HASHER.time_cost, HASHER.parallelism
    memory, passes, lanes = (int(number) for number in found.group(1, 2, 3))
    return memory, passes, lanes


def _nobody(users: dict[str, str]) -> str:
    """A hash that no password has, costing what the file's own cost: the clock must not tell who is in the file."""
    memory, passes, lanes = _parameters(next(iter(users.values()), ""))
    salt, digest = (base64.b64encode(secrets.token_bytes(size)).decode().rstrip("=") for size in (16, 32))
    return f"$argon2id$v=19$m={memory},t={passes},p={lanes}${salt}${digest}"
