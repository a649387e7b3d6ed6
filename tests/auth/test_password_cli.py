"""`holdfast password`, run as an operator runs it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from holdfast.auth.http_tokens import HttpTokens
from holdfast.auth.passwords import Passwords

HOLDFAST = Path(sys.executable).with_name("holdfast")


def run(folder: Path, *words: str, given: bytes = b"", code: int = 0) -> str:
    done = subprocess.run([HOLDFAST, "password", *words], cwd=folder, input=given, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout.decode() if code == 0 else done.stderr.decode()


def test_users(tmp_path: Path) -> None:
    assert "added alice" in run(tmp_path, "set", "alice", "--stdin", given=b"pa55 w\xc3\xb6rd\r\nmore\n")
    assert "changed the password of alice" in run(tmp_path, "set", "alice", "--stdin", given="wörd".encode())
    passwords = Passwords(tmp_path / "passwords.txt")
    assert passwords.verify("alice", "wörd".encode()) and not passwords.verify("alice", b"pa55 w\xc3\xb6rd")
    assert [row["user"] for row in json.loads(run(tmp_path, "ls", "--json"))] == ["alice"]
    assert "empty" in run(tmp_path, "set", "bob", "--stdin", code=1)
    assert "not UTF-8" in run(tmp_path, "set", "bob", "--stdin", given=b"\xff\n", code=1)
    assert "deleted alice" in run(tmp_path, "delete", "alice", "--file", "passwords.txt")
    error = run(tmp_path, "delete", "alice", code=1)
    assert error == (
        "holdfast: password file passwords.txt has no user 'alice'; `holdfast password ls` shows those it has\n"
    )


def test_tokens(tmp_path: Path) -> None:
    token = run(tmp_path, "token", "create", "dash", "--role", "reader", "--role", "publisher").strip()
    who = HttpTokens(tmp_path / "http-tokens.txt").check(f"Bearer {token}")
    assert who is not None and (who.user, who.roles) == ("dash", {"reader", "publisher"})
    assert json.loads(run(tmp_path, "token", "ls", "--json")) == [{"token": "dash", "roles": "reader, publisher"}]
    assert "got 'root'; takes reader" in run(tmp_path, "token", "create", "x", "--role", "root", code=1)
    assert "deleted dash" in run(tmp_path, "token", "delete", "dash")
    assert HttpTokens(tmp_path / "http-tokens.txt").check(f"Bearer {token}") is None


def test_the_password_is_asked_for_twice_and_not_shown(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [str(HOLDFAST), "password", "set", "alice"]
    child = subprocess.Popen(words, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    for prompt, answer in ((b"Password for alice: ", b"pa55\n"), (b"Once more: ", b"pa55\n"), (b"added alice", b"")):
        began = time.monotonic()
        while prompt not in seen:
            assert time.monotonic() - began < 30, seen
            seen += os.read(ours, 1024)
        os.write(ours, answer)
    assert child.wait(30) == 0 and b"pa55" not in seen
    os.close(ours)
    assert Passwords(tmp_path / "passwords.txt").verify("alice", b"pa55")
