"""Tokens: only those that the trusted key signed, with the algorithm that was configured, and only while they last."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from holdfast.auth.tokens import BadToken, Proof, Tokens, looks_like_token
from holdfast.errors import RequestError

NOW = 1_800_000_000.0
SECRET = b"0123456789abcdef0123456789abcdef"
GOOD: dict[str, Any] = {"sub": "alice", "exp": NOW + 60}

RSA = rsa.generate_private_key(65_537, 2048)
P256 = ec.generate_private_key(ec.SECP256R1())


def public(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "secret").write_bytes(SECRET + b"\n")
    (folder / "rsa").write_bytes(public(RSA))
    (folder / "p256").write_bytes(public(P256))
    return folder


def signed(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **headers: Any) -> bytes:
    return jwt.encode(claims, key, algorithm, headers=headers or None).encode()


def by_hand(header: object, claims: object, sign_with: bytes | None = SECRET) -> bytes:
    """A token that the library would not make."""
    parts = [header if isinstance(header, bytes) else json.dumps(header).encode()]
    parts.append(claims if isinstance(claims, bytes) else json.dumps(claims).encode())
    text = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = b"" if sign_with is None else hmac.new(sign_with, text, hashlib.sha256).digest()
    return text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


def refused(tokens: Tokens, token: bytes, says: str, now: float = NOW) -> None:
    with pytest.raises(BadToken, match=says):
        tokens.verify(token, now)


def test_each_algorithm(folder: Path) -> None:
    for algorithm, file, key in (("HS256", "secret", SECRET), ("RS256", "rsa", RSA), ("ES256", "p256", P256)):
        tokens = Tokens(algorithm, folder / file, leeway_seconds=5)  # type: ignore[arg-type]
        assert tokens.verify(signed(GOOD, key, algorithm), NOW) == Proof("alice", NOW + 65)
        assert tokens.key_is_secret == (algorithm == "HS256")


def test_times_are_judged_by_the_clock_that_was_given(folder: Path) -> None:
    tokens = Tokens("HS256", folder / "secret", leeway_seconds=10)
    token = signed({"sub": "alice", "exp": NOW, "nbf": NOW - 100, "iat": NOW + 1e6})
    assert tokens.verify(token, NOW + 9.9).expires_at == NOW + 10
    refused(tokens, token, "the token ended 10 seconds ago", NOW + 10)
    assert tokens.verify(token, NOW - 110).user == "alice"
    refused(tokens, token, "valid only in 111 seconds", NOW - 211)


def test_a_token_that_never_ends_is_refused(folder: Path) -> None:
    refused(Tokens("HS256", folder / "secret"), signed({"sub": "alice"}), "does not say when it ends")


@pytest.mark.parametrize(
    ("exp", "says"),
    [("soon", "not a number"), (True, "not a number"), ([], "not a number"), (10**400, "not a time")],
)
@pytest.mark.parametrize("claim", ["exp", "nbf"])
def test_odd_times(folder: Path, claim: str, exp: object, says: str) -> None:
    token = by_hand({"alg": "HS256"}, {**GOOD, claim: exp})
    refused(Tokens("HS256", folder / "secret"), token, f"'{claim}' is {says}")


@pytest.mark.parametrize("exp", [b"Infinity", b"-Infinity", b"NaN", b"1e999"])
def test_times_that_json_does_not_know(folder: Path, exp: bytes) -> None:
    token = by_hand({"alg": "HS256"}, b'{"sub": "alice", "exp": ' + exp + b"}")
    refused(Tokens("HS256", folder / "secret"), token, "not a time|not a token")


def test_a_token_without_a_signature_is_refused(folder: Path) -> None:
    for file, algorithm in (("secret", "HS256"), ("rsa", "RS256"), ("p256", "ES256")):
        tokens = Tokens(algorithm, folder / file)  # type: ignore[arg-type]
        for alg in ("none", "None", "NONE", "", None, 0, [], ["HS256"], {"HS256": 1}):
            refused(tokens, by_hand({"alg": alg}, GOOD, None), "not signed with|not a token")
        refused(tokens, by_hand({}, GOOD, None), "not signed with|not a token")
        refused(tokens, by_hand({"alg": algorithm}, GOOD, None), "signature")


def test_a_public_key_is_no_shared_secret(folder: Path) -> None:
    """HS/RS confusion: what everybody knows is used as if it were the secret."""
    for file, algorithm in (("rsa", "RS256"), ("p256", "ES256")):
        pem = (folder / file).read_bytes()
        tokens = Tokens(algorithm, folder / file)  # type: ignore[arg-type]
        for known in (pem, pem.strip(), pem.rstrip(b"\n")):
            refused(tokens, by_hand({"alg": "HS256"}, GOOD, known), f"not signed with {algorithm}")
            refused(tokens, by_hand({"alg": algorithm}, GOOD, known), "signature")


def test_another_key_or_algorithm_is_refused(folder: Path) -> None:
    refused(Tokens("HS256", folder / "secret"), signed(GOOD, b"x" * 32), "signature does not fit")
    refused(Tokens("HS256", folder / "secret"), signed(GOOD, SECRET * 2, "HS512"), "not signed with HS256")
    refused(Tokens("HS256", folder / "secret"), signed(GOOD, RSA, "RS256"), "not signed with HS256")
    refused(Tokens("RS256", folder / "rsa"), signed(GOOD, RSA, "PS256"), "not signed with RS256")
    other = rsa.generate_private_key(65_537, 2048)
    refused(Tokens("RS256", folder / "rsa"), signed(GOOD, other, "RS256"), "signature does not fit")


def test_keys_inside_the_token_are_not_believed(folder: Path) -> None:
    own = jwt.algorithms.RSAAlgorithm.to_jwk(rsa.generate_private_key(65_537, 2048).public_key(), as_dict=True)
    mine = rsa.generate_private_key(65_537, 2048)
    token = signed(GOOD, mine, "RS256", jwk=own, jku="https://example.com/keys", kid="../../dev/null")
    refused(Tokens("RS256", folder / "rsa"), token, "signature does not fit")


def test_headers_that_must_be_understood_are_not_passed_over(folder: Path) -> None:
    refused(Tokens("HS256", folder / "secret"), by_hand({"alg": "HS256", "crit": ["x"], "x": 1}, GOOD), "not a token")


def test_issuer_and_audience(folder: Path) -> None:
    tokens = Tokens("HS256", folder / "secret", issuer="us", audience="holdfast")
    assert tokens.verify(signed({**GOOD, "iss": "us", "aud": ["x", "holdfast"]}), NOW).user == "alice"
    refused(tokens, signed({**GOOD, "iss": "us", "aud": "x"}), "meant for somebody else")
    refused(tokens, signed({**GOOD, "iss": "them", "aud": "holdfast"}), "issued by somebody else")
    refused(tokens, signed({**GOOD, "aud": "holdfast"}), "has no claim 'iss'")
    refused(tokens, signed({**GOOD, "iss": "us"}), "has no claim 'aud'")
    refused(Tokens("HS256", folder / "secret"), signed({**GOOD, "aud": "x"}), "meant for somebody else")


@pytest.mark.parametrize("user", [None, "", " ", "a\nb", 7, ["alice"], {"a": 1}])
def test_a_token_must_name_its_user(folder: Path, user: object) -> None:
    refused(Tokens("HS256", folder / "secret"), by_hand({"alg": "HS256"}, {**GOOD, "sub": user}), "names no user")


def test_the_user_may_be_in_another_claim(folder: Path) -> None:
    tokens = Tokens("HS256", folder / "secret", user_claim="vin")
    assert tokens.verify(signed({**GOOD, "vin": "WVW1"}), NOW).user == "WVW1"
    refused(tokens, signed(GOOD), "names no user .claim 'vin'")


def test_a_changed_token_is_refused(folder: Path) -> None:
    tokens = Tokens("HS256", folder / "secret")
    header, _, signature = signed(GOOD).split(b".")
    claims = base64.urlsafe_b64encode(json.dumps({**GOOD, "sub": "root"}).encode()).rstrip(b"=")
    refused(tokens, b".".join([header, claims, signature]), "signature does not fit")


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(by_hand, st.binary(max_size=80), st.binary(max_size=80)),
        st.builds(
            lambda extra, claims: by_hand({"alg": "HS256", **extra}, claims),
            st.dictionaries(st.sampled_from(["crit", "b64", "kid", "typ", "alg"]), st.sampled_from([0, [], "x", None])),
            st.recursive(
                st.none() | st.integers() | st.text(max_size=5),
                lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["exp", "nbf", "sub", "aud", "iss"]), x),
            ),
        ),
    )
)
def test_whatever_arrives_is_a_bad_token_at_worst(token: bytes) -> None:
    for tokens in _any_tokens():
        try:
            tokens.verify(token, NOW)
        except BadToken as error:
            assert len(str(error)) < 200
        looks_like_token(token)


_made: list[Tokens] = []


def _any_tokens() -> list[Tokens]:
    return _made


@pytest.fixture(scope="module", autouse=True)
def _make(folder: Path) -> None:
    _made.extend(
        [Tokens("HS256", folder / "secret"), Tokens("RS256", folder / "rsa"), Tokens("ES256", folder / "p256")]
    )


@pytest.mark.parametrize(
    "payload", [b"[" * 50_000, b"{" * 50_000, b'{"sub":' * 30_000, b"1" * 50_000, b'"\\ud800"', b"\xff", b"null", b""]
)
def test_json_that_is_no_claims(folder: Path, payload: bytes) -> None:
    refused(Tokens("HS256", folder / "secret"), by_hand({"alg": "HS256"}, payload), "not a token")
    refused(Tokens("HS256", folder / "secret"), by_hand(payload, GOOD), "not a token|not signed")


def test_what_looks_like_a_token() -> None:
    assert looks_like_token(signed(GOOD)) and looks_like_token(by_hand(b' {"alg": "none"}', GOOD, None))
    for password in (b"", b"a.b.c", b"eyJ", b"..", b"\xff.\xff.\xff", b"A.b.c", b"1.2.3.4"):
        assert not looks_like_token(password)


def pem(key: Any) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize(
    ("algorithm", "content", "says"),
    [
        ("HS256", b"too short", "holds 9 bytes; HS256 takes at least 32"),
        ("HS256", public(RSA), "holds a PEM key; HS256 takes a shared secret"),
        ("RS256", pem(RSA), "holds a private key; give the public one"),
        ("ES256", pem(P256), "holds a private key; give the public one"),
        ("RS256", SECRET, "does not hold a public key in PEM form"),
        ("RS256", b"", "does not hold a public key in PEM form"),
        ("RS256", public(P256), "does not hold an RSA key"),
        ("RS256", public(rsa.generate_private_key(65_537, 1024)), "RSA key of 1024 bits; RS256 takes at least 2048"),
        ("ES256", public(RSA), "does not hold a key on the curve P-256"),
        ("ES256", public(ec.generate_private_key(ec.SECP384R1())), "does not hold a key on the curve P-256"),
        ("ES256", public(ed25519.Ed25519PrivateKey.generate()), "does not hold a key on the curve P-256"),
    ],
)
def test_a_key_that_will_not_do_is_named(tmp_path: Path, algorithm: Any, content: bytes, says: str) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(RequestError, match=rf"{algorithm} key file .*key .*{says}"):
        Tokens(algorithm, tmp_path / "key")


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"RS256 key file .*gone cannot be read"):
        Tokens("RS256", tmp_path / "gone")


def test_a_new_key_is_used_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    tokens = Tokens("HS256", path)
    assert tokens.verify(signed(GOOD), NOW)
    (tmp_path / "next").write_bytes(b"n" * 40 + b"\r\n")
    os.replace(tmp_path / "next", path)
    refused(tokens, signed(GOOD), "signature does not fit")
    assert tokens.verify(signed(GOOD, b"n" * 40), NOW)
