"""Who is let in: nothing falls back, no unchecked name is believed, and anonymous means loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jwt
import pytest
from argon2 import PasswordHasher

from holdfast.auth import Authenticator, AuthOptions, Credentials, Identity, Refusal
from holdfast.auth.http_tokens import make_token
from holdfast.auth.identity import is_loopback
from holdfast.auth.passwords import set_password
from holdfast.errors import RequestError
from holdfast.mqtt.reasons import IN_CONNACK, IN_CONNACK_3, Reason

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
NOW = 1_800_000_000.0
SECRET = b"0123456789abcdef0123456789abcdef"
TOKEN = jwt.encode({"sub": "truck", "exp": NOW + 60}, SECRET, "HS256").encode()
WRONG = (Reason.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    set_password(tmp_path / "passwords", "alice", "pa55", CHEAP)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "acl").write_text("user alice\nallow all a\n")
    return tmp_path


def with_password(files: Path, **more: Any) -> Authenticator:
    return Authenticator(AuthOptions(password_file=files / "passwords", **more))


def with_both(files: Path) -> Authenticator:
    return with_password(files, jwt_algorithm="HS256", jwt_key_file=str(files / "secret"), jwt_leeway_seconds=0)


def shown(username: str | None = None, password: bytes | None = None, **more: Any) -> Credentials:
    return Credentials(client_id="c1", username=username, password=password, **more)


def subject(*names: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    return ((("countryName", "DE"),), *((("commonName", name),) for name in names))


def refused(answer: object, reason: Reason = Reason.BAD_USER_NAME_OR_PASSWORD) -> str:
    assert isinstance(answer, Refusal)
    assert answer.reason_code == reason and reason in IN_CONNACK and reason in IN_CONNACK_3
    return answer.message


def test_password(files: Path) -> None:
    auth = with_password(files)
    assert auth.check(shown("alice", b"pa55"), NOW) == Identity(user="alice", client_id="c1")
    for wrong in (shown("alice", b"pa56"), shown("bob", b"pa55"), shown("alice"), shown(None, b"pa55"), shown("", b"")):
        assert refused(auth.check(wrong, NOW)) == WRONG[1]


def test_a_wrong_password_does_not_become_anonymous(files: Path) -> None:
    auth = with_password(files, allow_anonymous="always")
    assert refused(auth.check(shown("alice", b"pa56", peer_is_loopback=True), NOW)) == WRONG[1]
    assert refused(auth.check(shown("bob", b"x", peer_is_loopback=True), NOW)) == WRONG[1]
    assert auth.check(shown(), NOW) == Identity(user=None, client_id="c1")


def test_only_argon2_needs_patience(files: Path) -> None:
    auth = with_password(files)
    assert auth.check_at_once(shown("alice", b"pa55"), NOW) is None
    assert auth.check_at_once(shown("bob", b"pa55"), NOW) is None, "an unknown user looks like a known one"
    auth.check(shown("alice", b"pa55"), NOW)
    auth.check(shown("bob", b"pa55"), NOW)
    assert auth.check_at_once(shown("alice", b"pa55"), NOW) == Identity(user="alice", client_id="c1")
    assert auth.check_at_once(shown("alice", b"pa56"), NOW) is None
    assert auth.check_at_once(shown("bob", b"pa55"), NOW) is None
    refused(auth.check_at_once(shown(), NOW), Reason.NOT_AUTHORIZED)


def test_anonymous() -> None:
    here, there = shown(peer_is_loopback=True), shown()
    nobody = Identity(user=None, client_id="c1")
    by_default, never, always = (
        Authenticator(settings)
        for settings in (
            AuthOptions(),
            AuthOptions(allow_anonymous="never"),
            AuthOptions(allow_anonymous="always"),
        )
    )
    assert by_default.check(here, NOW) == nobody and always.check(here, NOW) == nobody
    assert always.check(there, NOW) == nobody
    assert "nothing to check with" in refused(by_default.check(there, NOW), Reason.NOT_AUTHORIZED)
    refused(never.check(here, NOW), Reason.NOT_AUTHORIZED)
    assert [bool(a.warnings()) for a in (by_default, never, always)] == [False, False, True]
    assert "'always'" in always.warnings()[0]


def test_anonymous_beside_passwords(files: Path) -> None:
    auth = with_password(files)
    assert auth.check(shown(peer_is_loopback=True), NOW) == Identity(user=None, client_id="c1")
    assert "without credentials" in refused(auth.check(shown(), NOW), Reason.NOT_AUTHORIZED)


def test_a_name_that_nothing_has_checked_is_not_believed() -> None:
    auth = Authenticator(AuthOptions())
    assert auth.check(shown("admin", b"x", peer_is_loopback=True), NOW) == Identity(user=None, client_id="c1")
    refused(auth.check(shown("admin", b"x"), NOW), Reason.NOT_AUTHORIZED)


def test_token(files: Path) -> None:
    auth = Authenticator(AuthOptions(jwt_algorithm="HS256", jwt_key_file=files / "secret", jwt_leeway_seconds=0))
    wanted = Identity(user="truck", client_id="c1", expires_at=NOW + 60)
    for username in (None, "", "truck"):
        assert auth.check_at_once(shown(username, TOKEN), NOW) == wanted == auth.check(shown(username, TOKEN), NOW)
    assert "speaks for" in refused(auth.check(shown("alice", TOKEN), NOW))
    assert "ended 0 seconds ago" in refused(auth.check(shown("truck", TOKEN), NOW + 60))
    assert "signature" in refused(auth.check(shown("truck", TOKEN[:-4] + b"AAAA"), NOW))
    assert "not a token" in refused(auth.check(shown("truck", b"pa55"), NOW))
    assert refused(auth.check(shown("truck"), NOW)) == WRONG[1]


def test_tokens_beside_passwords(files: Path) -> None:
    auth = with_both(files)
    assert auth.check(shown("alice", b"pa55"), NOW) == Identity(user="alice", client_id="c1")
    assert auth.check(shown("truck", TOKEN), NOW) == Identity(user="truck", client_id="c1", expires_at=NOW + 60)
    assert "speaks for" in refused(auth.check(shown("alice", TOKEN), NOW)), "a token is good for its own user only"
    assert refused(auth.check(shown("truck", b"pa55"), NOW)) == WRONG[1]
    assert refused(auth.check(shown(None, b"pa55"), NOW)) == WRONG[1]
    unsigned = jwt.encode({"sub": "alice", "exp": NOW + 60}, None, "none").encode()
    assert "not signed with HS256" in refused(auth.check(shown("alice", unsigned), NOW))


def test_certificate(files: Path) -> None:
    auth = with_password(files, certificate_user=True)
    truck = shown(certificate_subject=subject("truck"))
    assert auth.check(truck, NOW) == auth.check_at_once(truck, NOW) == Identity(user="truck", client_id="c1")
    same = shown("truck", b"whatever", certificate_subject=subject("truck"))
    assert auth.check(same, NOW) == Identity(user="truck", client_id="c1")
    assert "common name" in refused(auth.check(shown("alice", b"pa55", certificate_subject=subject("truck")), NOW))
    for odd in (subject(), subject("a", "b"), subject(""), subject("a\nb"), ()):
        answer = auth.check(shown(certificate_subject=odd, peer_is_loopback=True), NOW)
        assert "no common name" in refused(answer, Reason.NOT_AUTHORIZED)
    assert auth.check(shown("alice", b"pa55"), NOW) == Identity(user="alice", client_id="c1"), "no certificate shown"


def test_a_certificate_is_no_user_name_unless_settings_say_so(files: Path) -> None:
    refused(with_password(files).check(shown(certificate_subject=subject("truck")), NOW), Reason.NOT_AUTHORIZED)


def test_a_client_id_can_be_bound_to_its_user(files: Path) -> None:
    auth = with_password(files, client_id_must_be_user=True)
    assert auth.check(Credentials(client_id="alice", username="alice", password=b"pa55"), NOW) == Identity(
        user="alice", client_id="alice"
    )
    for _ in range(2):  # the second time the password is remembered
        assert "client id" in refused(auth.check(shown("alice", b"pa55"), NOW), Reason.CLIENT_ID_NOT_VALID)
    refused(auth.check(shown(peer_is_loopback=True), NOW), Reason.CLIENT_ID_NOT_VALID)


def test_http(files: Path) -> None:
    token = make_token(files / "tokens", "dashboard", ["reader"])
    auth = Authenticator(AuthOptions(http_tokens_file=files / "tokens", allow_anonymous="always"))
    who = Identity(user="dashboard", roles=frozenset({"reader"}))
    assert auth.check_token(f"Bearer {token}") == who == auth.check_http(f"Bearer {token}", peer_is_loopback=False)
    assert auth.check_token(None) is None
    assert "Bearer" in refused(auth.check_http(None, peer_is_loopback=True), Reason.NOT_AUTHORIZED)


def test_http_without_a_token_file() -> None:
    everything = Identity(user=None, roles=frozenset({"reader", "publisher", "admin"}))
    auth = Authenticator(AuthOptions())
    assert auth.check_http(None, peer_is_loopback=True) == everything
    assert "http_tokens_file" in refused(auth.check_http(None, peer_is_loopback=False), Reason.NOT_AUTHORIZED)
    assert auth.check_token("Bearer x") is None
    assert Authenticator(AuthOptions(allow_anonymous="always")).check_http(None, peer_is_loopback=False) == everything
    refused(
        Authenticator(AuthOptions(allow_anonymous="never")).check_http(None, peer_is_loopback=True),
        Reason.NOT_AUTHORIZED,
    )


def test_changes_and_troubles_are_told(files: Path) -> None:
    make_token(files / "tokens", "dashboard", ["reader"])
    auth = with_password(
        files,
        acl_file=files / "acl",
        http_tokens_file=files / "tokens",
        jwt_algorithm="HS256",
        jwt_key_file=files / "secret",
    )
    assert auth.warnings() == [] and not auth.refresh()
    (files / "acl").write_text("user alice\nallow all bb\n")
    assert auth.refresh() and auth.acl.may_publish(Identity(user="alice"), "bb")
    for name in ("passwords", "tokens", "secret"):
        (files / name).chmod(0o644)
    (files / "acl").write_text("user alice\nallow\n")
    assert not auth.refresh()
    told = auth.warnings()
    assert len(told) == 4 and "acl, line 2" in told[0]
    assert all("chmod 600" in warning for warning in told[1:])


def test_a_public_key_may_lie_open(files: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    (files / "key.pem").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (files / "key.pem").chmod(0o644)
    auth = Authenticator(AuthOptions(jwt_algorithm="ES256", jwt_key_file=files / "key.pem"))
    assert auth.warnings() == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"allow_anonymous": "yes"}, "allow_anonymous: got 'yes'; takes loopback, never or always"),
        ({"jwt_algorithm": "none", "jwt_key_file": "k"}, "jwt_algorithm: got 'none'; takes HS256, RS256, ES256"),
        ({"jwt_algorithm": "HS256"}, "jwt_algorithm is set but jwt_key_file is not"),
        ({"jwt_key_file": "k"}, "jwt_key_file is set but jwt_algorithm is not"),
        ({"jwt_issuer": "us"}, "jwt_issuer or jwt_audience is set but jwt_algorithm is not"),
        ({"jwt_user_claim": ""}, "jwt_user_claim: got ''"),
        ({"jwt_leeway_seconds": -1.0}, "jwt_leeway_seconds: got -1.0; takes 0 or more"),
        ({"jwt_leeway_seconds": float("nan")}, "jwt_leeway_seconds: got nan"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as error:
        AuthOptions(**settings)
    assert says in str(error.value)


@pytest.mark.parametrize("key", ["password_file", "acl_file", "http_tokens_file"])
def test_a_file_that_is_not_there_is_an_error_at_the_start(tmp_path: Path, key: str) -> None:
    with pytest.raises(RequestError, match="gone cannot be read: No such file"):
        Authenticator(AuthOptions(**{key: tmp_path / "gone"}))


def test_whether_anyone_can_prove_anything() -> None:
    assert not AuthOptions().can_authenticate
    assert AuthOptions(password_file="p").can_authenticate and AuthOptions(certificate_user=True).can_authenticate
    assert AuthOptions(jwt_algorithm="HS256", jwt_key_file="k").can_authenticate


def test_a_password_is_not_printed() -> None:
    assert "pa55" not in repr(shown("alice", b"pa55")) and "alice" in repr(shown("alice", b"pa55"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1"])
def test_what_comes_from_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", [None, "", "local", "127.0.0.1.example.org", "127.", "::2", "10.0.0.1", "0.0.0.0", 127]
)
def test_what_is_not_known_to_come_from_this_machine(host: object) -> None:
    assert not is_loopback(host)
