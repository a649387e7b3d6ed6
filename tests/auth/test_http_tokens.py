"""HTTP tokens: shown once, stored as a digest, and good for their roles only."""

from __future__ import annotations

import stat
from hashlib import sha256
from pathlib import Path

import pytest

from holdfast.auth.http_tokens import HttpTokens, delete_token, list_tokens, make_token
from holdfast.errors import RequestError

DIGEST = sha256(b"x").hexdigest()


def test_a_token_gives_its_roles(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = {role: make_token(path, role, [role]) for role in ("reader", "publisher", "admin")}
    both = make_token(path, "both", ["publisher", "reader", "reader"])
    tokens = HttpTokens(path)
    found = {name: tokens.check(f"Bearer {token}") for name, token in {**made, "both": both}.items()}
    assert {name: who and set(who.roles) for name, who in found.items()} == {
        "reader": {"reader"},
        "publisher": {"publisher"},
        "admin": {"reader", "publisher", "admin"},
        "both": {"reader", "publisher"},
    }
    assert all(who is not None and who.user == name for name, who in found.items())
    assert tokens.check(f"  bearer   {both} ") is not None
    assert len(set(made.values())) == 3 and all(token.startswith("hf_") and len(token) > 40 for token in made.values())
    assert not any(token in path.read_text() for token in made.values())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_anything_else_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token = make_token(path, "a", ["admin"])
    digest = sha256(token.encode()).hexdigest()
    tokens = HttpTokens(path)
    for header in (None, "", "Bearer", "Bearer ", f"Basic {token}", token, f"Bearer {token}x", f"Bearer {token[:-1]}"):
        assert tokens.check(header) is None
    assert tokens.check(f"Bearer {digest}") is None, "whoever reads the file cannot use what it holds"
    assert tokens.check("Bearer \udcff") is None


def test_a_deleted_token_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n\nold:reader:{DIGEST}")
    token = make_token(path, "new", ["reader"])
    tokens = HttpTokens(path)
    assert tokens.check("Bearer x") is not None and tokens.check(f"Bearer {token}") is not None
    delete_token(path, "old")
    assert tokens.check("Bearer x") is None and tokens.check(f"Bearer {token}") is not None
    assert path.read_text().startswith("# ours\n\nnew:reader:")
    assert [(entry.name, entry.roles) for entry in list_tokens(path)] == [("new", ("reader",))]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a:reader", "got 2 parts"),
        ("a:b:reader:hf_secret", "got 4 parts"),
        (f":reader:{DIGEST}", "'' is not a name"),
        (f"b:root:{DIGEST}", "roles 'root'; takes reader, publisher, admin"),
        (f"b::{DIGEST}", "roles ''; takes"),
        (f"b:reader,reader:{DIGEST}", "roles 'reader,reader'; takes"),
        ("b:reader:hf_secret", "is not a SHA-256 digest"),
        (f"b:reader:{DIGEST.upper()}", "is not a SHA-256 digest"),
        (f"a:admin:{sha256(b'y').hexdigest()}", "token 'a' is there already"),
        (f"b:admin:{DIGEST}", "token 'b' is there already"),
    ],
)
def test_a_bad_line_is_named_but_the_token_never_shown(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"a:reader:{DIGEST}\n{line}\n")
    for use in (lambda: HttpTokens(path), lambda: make_token(path, "c", ["reader"]), lambda: list_tokens(path)):
        with pytest.raises(RequestError) as error:
            use()
        assert f"HTTP token file {path}, line 2: " in str(error.value) and says in str(error.value)
        assert "hf_secret" not in str(error.value)


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    make_token(path, "a", ["reader"])
    with pytest.raises(RequestError, match="has a token 'a' already"):
        make_token(path, "a", ["admin"])
    with pytest.raises(RequestError, match="has no token 'b'"):
        delete_token(path, "b")
    with pytest.raises(RequestError, match="token 'b' has no role; give one or more of reader"):
        make_token(path, "b", [])
    for name in ("", "a:b", "#a", " a", "a\n"):
        with pytest.raises(RequestError, match=r"token name .* cannot stand"):
            make_token(path, name, ["reader"])
    with pytest.raises(RequestError, match="cannot be read"):
        HttpTokens(tmp_path / "gone")
    assert len(list_tokens(path)) == 1
