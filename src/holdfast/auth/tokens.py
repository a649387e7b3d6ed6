"""A JSON Web Token in the place of a password: signed by somebody we were told to trust, and ending by itself.

The algorithm comes from the settings and never from the token; a token that names another is refused. Every
token must say when it ends.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from holdfast.auth.files import Watched
from holdfast.auth.identity import is_name
from holdfast.errors import RequestError

Algorithm = Literal["HS256", "RS256", "ES256"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

Key: TypeAlias = bytes | RSAPublicKey | EllipticCurvePublicKey

SECRET_BYTES_MIN = 32
RSA_BITS_MIN = 2048


class BadToken(RequestError):
    """The token does not prove anything. The message says why, without repeating the token."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a good token shows."""

    user: str
    expires_at: float
    """Seconds since 1970, leeway included: from then on the token would be refused."""


class Tokens:
    """Checks tokens against one key, which is read again when its file changes."""

    def __init__(
        self,
        algorithm: Algorithm,
        key_file: Path,
        *,
        issuer: str | None = None,
        audience: str | None = None,
        user_claim: str = "sub",
        leeway_seconds: float = 10.0,
    ):
        self._algorithm = algorithm
        self._issuer, self._audience = issuer, audience
        self._user_claim = user_claim
        self._leeway = leeway_seconds
        self.file: Watched[Key] = Watched(f"{algorithm} key file", key_file, _KEY_PARSERS[algorithm])
        self.key_is_secret = algorithm == "HS256"

    def verify(self, token: bytes, now: float) -> Proof:
        """Who the token speaks for, and until when; or a BadToken that says what is wrong with it."""
        self.file.refresh()
        claims = self._signed_claims(token)
        expires = _time(claims, "exp")
        if expires is None:
            raise BadToken("the token does not say when it ends (claim 'exp')")
        if now >= expires + self._leeway:
            raise BadToken(f"the token ended {now - expires:.0f} seconds ago")
        begins = _time(claims, "nbf")
        if begins is not None and now < begins - self._leeway:
            raise BadToken(f"the token is valid only in {begins - now:.0f} seconds")
        user = claims.get(self._user_claim)
        if not isinstance(user, str) or not is_name(user):
            raise BadToken(f"the token names no user (claim {self._user_claim!r})")
        return Proof(user, expires + self._leeway)

    def _signed_claims(self, token: bytes) -> dict[str, Any]:
        try:
            return jwt.decode(
                token,
                self.file.value,
                algorithms=[self._algorithm],
                issuer=self._issuer,
                audience=self._audience,
                # Times are checked above, by the clock that was given.
                options={"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False},
            )
        except jwt.InvalidAlgorithmError as error:
            raise BadToken(f"the token is not signed with {self._algorithm}") from error
        except jwt.InvalidSignatureError as error:
            raise BadToken("the token's signature does not fit the key") from error
        except jwt.InvalidAudienceError as error:
            raise BadToken("the token is meant for somebody else (claim 'aud')") from error
        except jwt.InvalidIssuerError as error:
            raise BadToken("the token was issued by somebody else (claim 'iss')") from error
        except jwt.MissingRequiredClaimError as error:
            raise BadToken(f"the token has no claim {error.claim!r}") from error
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            # Anyone can send anything here, and JSON within base64 has many ways to be odd.
            raise BadToken("this is not a token") from error


def looks_like_token(password: bytes) -> bool:
    """Three parts, the first of them a JSON object in base64: nobody's password looks like that."""
    parts = password.split(b".")
    if len(parts) != 3:
        return False
    try:
        header = base64.urlsafe_b64decode(parts[0] + b"=" * (-len(parts[0]) % 4))
    except binascii.Error:
        return False
    return header.lstrip().startswith(b"{")


def _time(claims: dict[str, Any], claim: str) -> float | None:
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadToken(f"the token's claim {claim!r} is not a number")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise BadToken(f"the token's claim {claim!r} is not a time")
    return seconds


def _secret(name: str, content: bytes) -> bytes:
    secret = content.removesuffix(b"\n").removesuffix(b"\r")  # an editor's or echo's line end is not part of it
    if b"-----BEGIN " in secret:
        raise RequestError(f"{name} holds a PEM key; HS256 takes a shared secret, and a public key is no secret")
    if len(secret) < SECRET_BYTES_MIN:
        raise RequestError(
            f"{name} holds {len(secret)} bytes; HS256 takes at least {SECRET_BYTES_MIN}, chosen at random"
        )
    return secret


def _public_key(name: str, content: bytes) -> object:
    if b"PRIVATE KEY-----" in content:
        raise RequestError(f"{name} holds a private key; give the public one, and keep the private one with the issuer")
    try:
        return load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RequestError(
            f"{name} does not hold a public key in PEM form; it begins with '-----BEGIN PUBLIC KEY-----'"
        ) from error


def _rsa(name: str, content: bytes) -> RSAPublicKey:
    key = _public_key(name, content)
    if not isinstance(key, RSAPublicKey):
        raise RequestError(f"{name} does not hold an RSA key; RS256 takes one (or set the algorithm to ES256)")
    if key.key_size < RSA_BITS_MIN:
        raise RequestError(f"{name} holds an RSA key of {key.key_size} bits; RS256 takes at least {RSA_BITS_MIN}")
    return key


def _p256(name: str, content: bytes) -> EllipticCurvePublicKey:
    key = _public_key(name, content)
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise RequestError(f"{name} does not hold a key on the curve P-256, which is the one ES256 takes")
    return key


_KEY_PARSERS: dict[Algorithm, Any] = {"HS256": _secret, "RS256": _rsa, "ES256": _p256}
