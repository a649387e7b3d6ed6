"""The password file: right passwords only, no clue who is in it, and argon2 paid once."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.auth.passwords import HASHER, Passwords, delete_user, list_users, set_password
from holdfast.errors import RequestError

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
HASH = CHEAP.hash("pa55", salt=b"always the same!")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "passwords"


def test_the_right_password_and_no_other(path: Path) -> None:
    assert set_password(path, "alice", "pa55", CHEAP)
    passwords = Passwords(path)
    assert passwords.verify("alice", b"pa55") and passwords.verify("alice", b"pa55")
    assert not passwords.verify("alice", b"pa56")
    assert not passwords.verify("alice", b"")
    assert not passwords.verify("bob", b"pa55")
    assert not passwords.verify("", b"pa55")


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), st.binary(max_size=60))
def test_any_password_any_bytes(tmp_path_factory: pytest.TempPathFactory, password: str, other: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "passwords"
    set_password(path, "alice", password, CHEAP)
    passwords = Passwords(path)
    assert passwords.verify("alice", other) == (other == password.encode())
    assert passwords.verify("alice", password.encode())


def test_a_right_password_is_remembered_until_it_changes(path: Path) -> None:
    set_password(path, "alice", "one", CHEAP)
    passwords = Passwords(path)
    assert not passwords.remembers("alice", b"one")
    assert passwords.verify("alice", b"one")
    assert passwords.remembers("alice", b"one")
    assert not passwords.remembers("alice", b"two") and not passwords.remembers("bob", b"one")
    assert not set_password(path, "alice", "two", CHEAP)
    assert not passwords.remembers("alice", b"one") and not passwords.verify("alice", b"one")
    assert passwords.verify("alice", b"two")
    delete_user(path, "alice")
    assert not passwords.remembers("alice", b"two") and not passwords.verify("alice", b"two")


def test_wrong_passwords_are_not_remembered_and_right_ones_are_bounded(path: Path) -> None:
    for user in "abcd":
        set_password(path, user, "pa55", CHEAP)
    passwords = Passwords(path, remembered_max=2)
    for user in "abcd":
        assert not passwords.verify(user, b"wrong")
    assert len(passwords._right) == 0
    for user in "abcd":
        assert passwords.verify(user, b"pa55")
    assert len(passwords._right) == 2
    assert passwords.remembers("d", b"pa55") and not passwords.remembers("a", b"pa55")


def test_nothing_in_memory_is_the_password(path: Path) -> None:
    set_password(path, "alice", "a long pass phrase", CHEAP)
    one, other = Passwords(path), Passwords(path)
    assert one.verify("alice", b"a long pass phrase") and other.verify("alice", b"a long pass phrase")
    (key_one,), (key_other,) = one._right._entries, other._right._entries
    assert b"phrase" not in key_one[1] and key_one != key_other, "the digest is keyed by the process"


def test_an_unknown_user_takes_as_long_as_a_wrong_password(path: Path) -> None:
    set_password(path, "alice", "pa55")
    passwords = Passwords(path)

    def seconds(user: str) -> float:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            assert not passwords.verify(user, b"wrong")
            taken.append(time.perf_counter() - began)
        return min(taken)

    known, unknown = seconds("alice"), seconds("bob")
    assert 1 / 3 < known / unknown < 3
    assert unknown > 0.002, "argon2 was not run"


def test_what_an_unknown_user_costs_follows_the_file(path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    passwords = Passwords(path)
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        assert not passwords.verify("bob", b"wrong")
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.004
    path.write_text("")
    assert not Passwords(path).verify("bob", b"x")


def test_the_cost_is_what_it_is_meant_to_be() -> None:
    assert (HASHER.memory_cost, HASHER.time_cost, HASHER.parallelism) == (19456, 2, 1)
    assert HASHER.hash("x").startswith("$argon2id$")


def test_comments_blank_lines_and_windows_line_ends(path: Path) -> None:
    path.write_bytes(f"\ufeff# ours\r\n\r\n  alice:{HASH}\r\n\n# b\nbob:{HASH}".encode())
    passwords = Passwords(path)
    assert passwords.verify("alice", b"pa55") and passwords.verify("bob", b"pa55")
    set_password(path, "bob", "new", CHEAP)
    set_password(path, "carol", "new", CHEAP)
    delete_user(path, "alice")
    assert "# ours" in path.read_text() and "# b" in path.read_text()
    assert [user.user for user in list_users(path)] == ["bob", "carol"]
    assert passwords.verify("bob", b"new") and not passwords.verify("bob", b"pa55")


def test_list_shows_how_passwords_are_hashed(path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    (user,) = list_users(path)
    assert (user.user, user.memory_kib, user.passes, user.lanes) == ("alice", 8, 1, 1)


def test_deleting_the_last_user_leaves_a_file(path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    delete_user(path, "alice")
    assert list_users(path) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("alice", "there is no ':'"),
        ("alice:hunter2", "what follows 'alice:' is not an argon2id hash; write it with `holdfast password set alice`"),
        ("alice:" + HASH.replace("argon2id", "argon2i"), "is not an argon2id hash"),
        ("alice:" + HASH.replace("m=8", "m=7"), "is not an argon2id hash"),
        ("alice:" + HASH.replace("t=1", "t=0"), "is not an argon2id hash"),
        ("alice:" + HASH.replace("p=1", "p=0"), "is not an argon2id hash"),
        ("alice:$argon2id$v=19$m=8,t=1,p=1$c2hvcnQ$" + "A" * 43, "is not an argon2id hash"),
        ("alice:$argon2id$v=19$m=8,t=1,p=1$AAAAA$" + "A" * 43, "is not an argon2id hash"),
        (f"ali\tce:{HASH}", "is not a user name"),
        (f"alice :{HASH}", "is not a user name"),
        (f":{HASH}", "'' is not a user name"),
        (f"bob:{HASH}", "user 'bob' is there already"),
    ],
)
def test_a_bad_line_is_named_but_never_shown(path: Path, line: str, says: str) -> None:
    path.write_text(f"# two\nbob:{HASH}\n{line}\n")
    before = path.read_bytes()
    for use in (lambda: Passwords(path), lambda: set_password(path, "carol", "x", CHEAP), lambda: list_users(path)):
        with pytest.raises(RequestError) as error:
            use()
        assert f"password file {path}, line 3: " in str(error.value) and says in str(error.value)
        assert "hunter2" not in str(error.value) and HASH not in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("user", ["", "a:b", "#a", " a", "a ", "a\nb:c", "a\u2028b", "a\0"])
def test_bad_names_are_refused(path: Path, user: str) -> None:
    with pytest.raises(RequestError, match=r"user name .* cannot stand in a password file"):
        set_password(path, user, "pa55", CHEAP)
    assert not path.exists()


def test_other_refusals(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="password for 'alice' is empty"):
        set_password(path, "alice", "", CHEAP)
    with pytest.raises(RequestError, match="password for 'alice' is not valid Unicode"):
        set_password(path, "alice", "\udcff", CHEAP)
    with pytest.raises(RequestError, match="has no user 'alice'"):
        delete_user(path, "alice")
    with pytest.raises(RequestError, match="cannot be written: No such file or directory; check that the folder"):
        set_password(tmp_path / "no" / "folder", "alice", "x", CHEAP)
    with pytest.raises(RequestError, match="cannot be read: Is a directory"):
        Passwords(tmp_path)
    with pytest.raises(RequestError, match="cannot be written: Is a directory"):
        set_password(tmp_path, "alice", "x", CHEAP)
    path.write_bytes(b"\xff\n")
    with pytest.raises(RequestError, match="line 1: not UTF-8"):
        set_password(path, "alice", "x", CHEAP)


def test_the_file_is_its_owners_alone_and_links_stay_links(path: Path, tmp_path: Path) -> None:
    path.write_text("")
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert Passwords(path).file.others_can_read
    set_password(link, "alice", "pa55", CHEAP)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and link.is_symlink()
    assert not Passwords(link).file.others_can_read and Passwords(link).verify("alice", b"pa55")
    assert sorted(os.listdir(tmp_path)) == ["link", "passwords"], "nothing is left lying about"


def test_a_failed_edit_changes_nothing(path: Path, tmp_path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    before = path.read_bytes()
    with pytest.raises(RequestError, match="has no user 'bob'"):
        delete_user(path, "bob")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["passwords"]


def test_edits_at_once_do_not_undo_each_other(path: Path) -> None:
    names = [f"user-{i}" for i in range(20)]
    threads = [threading.Thread(target=set_password, args=(path, name, "x", CHEAP)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(user.user for user in list_users(path)) == sorted(names)


def test_threads_may_share_one(path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    passwords = Passwords(path, remembered_max=1)
    answers: list[bool] = []

    def ask(password: bytes) -> None:
        answers.extend(passwords.verify("alice", password) == (password == b"pa55") for _ in range(50))

    threads = [threading.Thread(target=ask, args=(p,)) for p in (b"pa55", b"wrong", b"pa55", b"other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 200


def test_a_file_that_goes_bad_leaves_the_last_good_one(path: Path) -> None:
    set_password(path, "alice", "pa55", CHEAP)
    passwords = Passwords(path)
    path.write_text("alice\n")
    assert passwords.verify("alice", b"pa55") and "line 1" in str(passwords.file.problem)
    path.unlink()
    assert passwords.verify("alice", b"pa55") and "cannot be read" in str(passwords.file.problem)
    set_password(path, "bob", "pa55", CHEAP)
    assert not passwords.verify("alice", b"pa55") and passwords.verify("bob", b"pa55")
    assert passwords.file.problem is None


def test_root_does_not_take_the_file_from_the_nodes_user() -> None:
    if os.geteuid() != 0:
        return  # only root can make, or meet, somebody else's file here
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = Path(folder, "passwords")
        set_password(path, "alice", "pa55", CHEAP)
        os.chown(path, 12345, 12346)
        set_password(path, "bob", "pa55", CHEAP)
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
        path.chmod(0o644)
        before = path.read_bytes()
        os.seteuid(65_534)
        try:
            with pytest.raises(RequestError, match=r"belongs to user 12345, group 12346, .* run this as that user"):
                set_password(path, "carol", "pa55", CHEAP)
        finally:
            os.seteuid(0)
        assert path.read_bytes() == before and os.listdir(folder) == ["passwords"]
