"""From what a peer shows to who it is: certificate, then token or password, then, where allowed, nobody in particular.

Nothing falls back: a certificate, token or password that is shown and wrong is refused, also where showing none
would have been let in.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from holdfast.auth.acl import Acl
from holdfast.auth.files import Watched
from holdfast.auth.http_tokens import HttpTokens
from holdfast.auth.identity import ROLES, CertificateSubject, Credentials, Identity, Refusal, is_name
from holdfast.auth.passwords import Passwords
from holdfast.auth.tokens import ALGORITHMS, Algorithm, BadToken, Tokens, looks_like_token
from holdfast.errors import RequestError
from holdfast.mqtt.reasons import Reason

AllowAnonymous = Literal["loopback", "never", "always"]
FilePath: TypeAlias = str | os.PathLike[str]

_WRONG = Refusal(Reason.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong")
"""The same words for an unknown user and for a wrong password."""


@dataclass(frozen=True, kw_only=True)
class AuthOptions:
    """How peers prove who they are, and what they may do."""

    password_file: FilePath | None = None
    """`user:argon2id-hash` lines, as `holdfast password` writes them."""

    jwt_algorithm: Algorithm | None = None
    """Tokens are taken as passwords if this is set; only those signed with this algorithm."""
    jwt_key_file: FilePath | None = None
    """The shared secret for HS256; the public key in PEM form for RS256 and ES256."""
    jwt_issuer: str | None = None
    """If set, a token's `iss` must be this."""
    jwt_audience: str | None = None
    """If set, a token's `aud` must hold this. A token with an `aud` is refused where this is not set."""
    jwt_user_claim: str = "sub"
    """Which claim is the user name."""
    jwt_leeway_seconds: float = 10.0
    """How far the issuer's clock may be from ours."""

    certificate_user: bool = False
    """A verified client certificate is enough, and its common name is the user name."""

    allow_anonymous: AllowAnonymous = "loopback"
    """From where a peer that shows nothing is let in: `loopback`, `never`, or `always` (from anywhere)."""
    client_id_must_be_user: bool = False
    """Each user has one client id, the user name: nobody can take over another user's session."""

    acl_file: FilePath | None = None
    """Who may publish and subscribe to what. Without one, whoever is connected may do everything."""

    http_tokens_file: FilePath | None = None
    """`name:role:sha256` lines. With this, HTTP takes a token from everyone, on loopback too."""

    def __post_init__(self) -> None:
        if self.allow_anonymous not in get_args(AllowAnonymous):
            raise RequestError(f"allow_anonymous: got {self.allow_anonymous!r}; takes loopback, never or always")
        if self.jwt_algorithm not in (None, *ALGORITHMS):
            raise RequestError(f"jwt_algorithm: got {self.jwt_algorithm!r}; takes {', '.join(ALGORITHMS)}")
        if (self.jwt_algorithm is None) != (self.jwt_key_file is None):
            there, missing = ("jwt_key_file", "jwt_algorithm")[:: 1 if self.jwt_key_file is not None else -1]
            raise RequestError(f"{there} is set but {missing} is not; tokens need both")
        if self.jwt_algorithm is None and (self.jwt_issuer is not None or self.jwt_audience is not None):
            raise RequestError("jwt_issuer or jwt_audience is set but jwt_algorithm is not; no token would be taken")
        if not self.jwt_user_claim:
            raise RequestError("jwt_user_claim: got ''; takes the name of a claim, such as sub")
        if not math.isfinite(self.jwt_leeway_seconds) or self.jwt_leeway_seconds < 0:
            raise RequestError(f"jwt_leeway_seconds: got {self.jwt_leeway_seconds}; takes 0 or more")

    @property
    def can_authenticate(self) -> bool:
        """Is there any way for an MQTT client to prove who it is?"""
        return self.password_file is not None or self.jwt_algorithm is not None or self.certificate_user


class Authenticator:
    """Decides who a peer is. `acl` decides what it may do."""

    def __init__(self, settings: AuthOptions):
        """Reads every file that the settings name; a RequestError says which one is wrong and where."""
        self.settings = settings
        self.acl = Acl(_path(settings.acl_file))
        self._passwords = None if settings.password_file is None else Passwords(Path(settings.password_file))
        self._http = None if settings.http_tokens_file is None else HttpTokens(Path(settings.http_tokens_file))
        self._tokens: Tokens | None = None
        if settings.jwt_algorithm is not None and settings.jwt_key_file is not None:
            self._tokens = Tokens(
                settings.jwt_algorithm,
                Path(settings.jwt_key_file),
                issuer=settings.jwt_issuer,
                audience=settings.jwt_audience,
                user_claim=settings.jwt_user_claim,
                leeway_seconds=settings.jwt_leeway_seconds,
            )

    def check(self, shown: Credentials, now: float) -> Identity | Refusal:
        """Who this is, or why it is refused. May take argon2's 20 ms: call it where that holds up nobody."""
        found = self.check_at_once(shown, now)
        if found is not None:
            return found
        if self._passwords is None or shown.username is None or shown.password is None:
            return _WRONG
        if not self._passwords.verify(shown.username, shown.password):
            return _WRONG
        return self._admit(Identity(user=shown.username, client_id=shown.client_id))

    def check_at_once(self, shown: Credentials, now: float) -> Identity | Refusal | None:
        """As `check`, in microseconds; None where only `check` can tell, because argon2 has to run."""
        if self.settings.certificate_user and shown.certificate_subject is not None:
            return self._by_certificate(shown, shown.certificate_subject)
        nothing_to_check_with = self._passwords is None and self._tokens is None
        if (shown.username is None and shown.password is None) or nothing_to_check_with:
            return self._anonymous(shown)
        if shown.password is None:
            return _WRONG
        if self._tokens is not None and (self._passwords is None or looks_like_token(shown.password)):
            return self._by_token(self._tokens, shown, shown.password, now)
        if self._passwords is None or shown.username is None:
            return _WRONG
        if self._passwords.remembers(shown.username, shown.password):
            return self._admit(Identity(user=shown.username, client_id=shown.client_id))
        return None

    def check_token(self, header: str | None) -> Identity | None:
        """Whose HTTP token an `Authorization` header carries; None if nobody's."""
        return None if self._http is None else self._http.check(header)

    def check_http(self, header: str | None, *, peer_is_loopback: bool) -> Identity | Refusal:
        """Who an HTTP request is from. Without a token file, those let in as anonymous may do everything."""
        if self._http is not None:
            return self._http.check(header) or Refusal(
                Reason.NOT_AUTHORIZED, "give a token that the node knows, as `Authorization: Bearer TOKEN`"
            )
        if self._lets_in_anonymous(peer_is_loopback):
            return Identity(user=None, roles=frozenset(ROLES))
        return Refusal(Reason.NOT_AUTHORIZED, "HTTP from elsewhere needs a token, and the node has no http_tokens_file")

    def refresh(self) -> bool:
        """Look whether files have changed; call it every second or so. True when the ACL has new rules."""
        for file in self._files():
            if file is not self.acl.file:
                file.refresh()
        return self.acl.refresh()

    def warnings(self) -> list[str]:
        """What an operator should know: files that went bad, secrets that lie open, doors that stand open."""
        found = [file.problem for file in self._files() if file.problem is not None]
        secret = [part.file for part in (self._passwords, self._http) if part is not None]
        names = [file.name for file in secret if file.others_can_read]
        if self._tokens is not None and self._tokens.key_is_secret and self._tokens.file.others_can_read:
            names.append(self._tokens.file.name)
        found += [f"{name} can be read by every user of this machine; chmod 600 it" for name in names]
        if self.settings.allow_anonymous == "always":
            found.append("allow_anonymous is 'always': anyone who can reach this node may connect without a password")
        return found

    def _files(self) -> list[Watched[Any]]:
        parts = (self._passwords, self._tokens, self._http, self.acl)
        return [part.file for part in parts if part is not None and part.file is not None]

    def _by_certificate(self, shown: Credentials, subject: CertificateSubject) -> Identity | Refusal:
        names = [value for relative in subject for key, value in relative if key == "commonName"]
        if len(names) != 1 or not is_name(names[0]):
            return Refusal(Reason.NOT_AUTHORIZED, "the client certificate has no common name, or more than one")
        if shown.username not in (None, "", names[0]):
            return Refusal(
                Reason.BAD_USER_NAME_OR_PASSWORD, "the user name is not the common name of the client certificate"
            )
        return self._admit(Identity(user=names[0], client_id=shown.client_id))

    def _by_token(self, tokens: Tokens, shown: Credentials, token: bytes, now: float) -> Identity | Refusal:
        try:
            proof = tokens.verify(token, now)
        except BadToken as error:
            return Refusal(Reason.BAD_USER_NAME_OR_PASSWORD, str(error))
        if shown.username not in (None, "", proof.user):
            return Refusal(Reason.BAD_USER_NAME_OR_PASSWORD, "the user name is not the one the token speaks for")
        return self._admit(Identity(user=proof.user, client_id=shown.client_id, expires_at=proof.expires_at))

    def _anonymous(self, shown: Credentials) -> Identity | Refusal:
        if self._lets_in_anonymous(shown.peer_is_loopback):
            return self._admit(Identity(user=None, client_id=shown.client_id))
        if not self.settings.can_authenticate:
            return Refusal(Reason.NOT_AUTHORIZED, "this node takes nobody from elsewhere: it has nothing to check with")
        return Refusal(Reason.NOT_AUTHORIZED, "this node takes nobody without credentials")

    def _lets_in_anonymous(self, peer_is_loopback: bool) -> bool:
        allowed = self.settings.allow_anonymous
        return allowed == "always" or (allowed == "loopback" and peer_is_loopback)

    def _admit(self, identity: Identity) -> Identity | Refusal:
        if self.settings.client_id_must_be_user and identity.client_id != identity.user:
            return Refusal(Reason.CLIENT_ID_NOT_VALID, "the client id must be the user name on this node")
        return identity


def _path(path: FilePath | None) -> Path | None:
    return None if path is None else Path(path)
