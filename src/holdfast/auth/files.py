"""The files that safety rests on: read again when they change, and rewritten whole or not at all.

One surprising rule: a file that is unreadable or wrong *at the start* is an error, but one that becomes so
while a node runs leaves the last good version in force, with `problem` saying what is wrong. A typing error
must not lock out a fleet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from holdfast.errors import RequestError

T = TypeVar("T")

Stamp = tuple[int, int, int, int]


class Watched(Generic[T]):
    """A file's meaning, as of the last time `refresh` looked."""

    def __init__(self, what: str, path: Path, parse: Callable[[str, bytes], T]):
        """`parse` takes how to call the file in an error, and its bytes."""
        self.name = f"{what} {path}"
        self.path = path
        self.problem: str | None = None
        self.generation = 0
        """Goes up each time the value is new."""
        self._parse = parse
        self._lock = Lock()
        self._stamp: Stamp | None
        self._stamp, self._mode, content = _read(self.name, path)
        self.value = parse(self.name, content)

    @property
    def others_can_read(self) -> bool:
        return bool(self._mode & 0o004)

    def refresh(self) -> bool:
        """Look whether the file has changed, and read it if so. True when there is a new value."""
        with self._lock:
            if self._stamp is not None and self._stamp == _stamp_of(self.path):
                return False
            self._stamp = None  # if it cannot be read now, it may yet come back just as it was
            try:
                self._stamp, self._mode, content = _read(self.name, self.path)
                value = self._parse(self.name, content)
            except RequestError as error:
                self.problem = f"{error}; the last good version is in force"
                return False
            # The value first: whoever sees the new generation must also see what it stands for.
            self.value, self.problem = value, None
            self.generation += 1
            return True


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _stamp_of(path: Path) -> Stamp | None:
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def _read(name: str, path: Path) -> tuple[Stamp, int, bytes]:
    try:
        with path.open("rb") as file:
            # Before reading: if it is written to meanwhile, the stamp is too old and it is read once more.
            status = os.fstat(file.fileno())
            return _stamp(status), status.st_mode, file.read()
    except OSError as error:
        raise RequestError(
            f"{name} cannot be read: {error.strerror}; check the path, and that the node's user may read it"
        ) from error


def decode(name: str, content: bytes) -> str:
    """The text of a file, or an error that names the line where it stops being text."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(f"{name}, line {line}: not UTF-8; save the file as UTF-8") from error


def meaningful_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is neither blank nor a comment."""
    # Not splitlines(): that also splits at characters which editors do not show as the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def edit(what: str, path: Path, change: Callable[[str, str], str]) -> None:
    """Rewrite a file: all of it, or, if anything goes wrong, none of it.

    `change` takes how to call the file in an error, and its text ('' if there is no file yet).

    1. lock the folder, so that two edits at once do not undo each other;
    2. write the new text beside the old, readable by its owner only, and onto the disk;
    3. rename over the old; a reader sees one or the other.
    """
    name = f"{what} {path}"
    real = Path(os.path.realpath(path))  # a symbolic link stays one
    try:
        with _locked(real.parent):
            old = real.read_bytes() if real.exists() else b""
            _replace(name, real, change(name, decode(name, old)).encode())
    except OSError as error:
        raise RequestError(
            f"{name} cannot be written: {error.strerror}; check that the folder exists and that you may write to it"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(name: str, path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            _keep_owner(name, path, file.fileno())
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _keep_owner(name: str, path: Path, handle: int) -> None:
    # Root edits the file of a node that runs as somebody else: that somebody must still be able to read it.
    if not path.exists():
        return
    was, now = path.stat(), os.fstat(handle)
    if (was.st_uid, was.st_gid) == (now.st_uid, now.st_gid):
        return
    try:
        os.fchown(handle, was.st_uid, was.st_gid)
    except PermissionError as error:
        raise RequestError(
            f"{name} belongs to user {was.st_uid}, group {was.st_gid}, and rewriting it would take it from them; "
            f"run this as that user"
        ) from error
