"""Every setting, its default and its meaning; file < environment < flag.

A bad value says which key, what it got and what it takes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    shards: int = 16
    """Streams of a new log, and of the next generation of an old one."""
    shard_by: str = "publisher"
    """publisher (one vehicle's messages keep their order across topics) or topic."""
    generation_secs: float = 0.0
    """Seal the open generation after this long; 0: never by age."""
    generation_bytes: int = 0
    """Seal the open generation at this size; 0: never by size."""
    keep_secs: float = 0.0
    """Drop sealed generations whose newest message is older; 0: keep."""
    keep_bytes: int = 0
    """Drop the oldest sealed generations beyond this size; 0: keep."""
    upkeep_secs: float = 10.0
    """How often small blocks are merged, full ones indexed and retention is applied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MqttSettings:
    listen: str = "127.0.0.1:1883"
    """HOST:PORT for plain TCP; empty: none."""
    tls: str = ""
    """HOST:PORT for TLS; empty: none."""
    websocket: str = ""
    """HOST:PORT for WebSocket; empty: none."""
    websocket_tls: str = ""
    """HOST:PORT for WebSocket over TLS; empty: none."""
    advertise: str = ""
    """Where clients reach this node, if that is not where it listens (behind a proxy, say), for `holdfast node ls`."""
    tls_certificate: str = ""
    """PEM file with the server's certificate chain."""
    tls_key: str = ""
    """PEM file with its key."""
    tls_client_ca: str = ""
    """PEM file of the authority whose client certificates are asked for and required; empty: none asked for."""
    keep_alive_secs_max: int = 65_535
    """Longer keep-alives are cut to this (told to MQTT 5 clients as server keep-alive)."""
    receive_maximum: int = 1000
    """How many unacknowledged QoS 1 and 2 publishes a client may have under way to us."""
    inflight_max: int = 10_000
    """How many unacknowledged deliveries a client may have, where it does not ask for fewer."""
    topic_alias_maximum: int = 10
    """How many topic aliases a client may use towards us."""
    response_prefix: str = "response/"
    """What a client that asks for response information is told, followed by its client id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    packet_bytes_max: int = 1 << 20
    """Larger packets are refused."""
    connect_secs: float = 10.0
    """How long a new connection may take to send its CONNECT, handshakes included."""
    connections_per_sec: int = 0
    """How many new connections are accepted a second; the rest wait. 0: any number."""
    connections_max: int = 100_000
    """More connections than this are refused (server busy)."""
    sessions_max: int = 1_000_000
    """More sessions than this are refused (quota exceeded)."""
    subscriptions_max: int = 1000
    """Subscriptions of one session; more are refused (quota exceeded)."""
    pending_bytes_max: int = 1 << 20
    """What may wait unsent for one client in memory; beyond it, messages wait in the log."""
    batch_bytes_max: int = 8 << 20
    """What may wait for the next commit; beyond it, publishers are not read from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    expiry_secs_max: int = 0
    """Longer session expiries (and those of MQTT 3, which never end) are cut to this; 0: as the client says."""
    on_trimmed: str = "earliest"
    """What a session does of whose unread messages retention dropped some: error (it is refused until the policy is
    another one), earliest or latest (it goes on with what is there; if its cursors cannot be read, with everything
    or with what comes next)."""
    lease_secs: float = 5.0
    """How long a node that has fallen silent keeps its sessions."""
    grace_secs: float = 15.0
    """How long the clients of a node that ended have to come back before they count as gone."""
    drain_per_sec: float = 500.0
    """How many clients a second `holdfast node drain` sends away, unless it says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorSettings:
    subscription_progress_flush_secs: float = 5.0
    """How often changed cursors are saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    enabled: bool = True
    """False: shared subscriptions are refused."""
    lease_secs: float = 5.0
    """How long a leader, or a batch member, that has fallen silent keeps what it holds."""
    ping_secs: float = 2.0
    """How often a borrower and its leader tell each other that they are there."""
    ping_timeout_secs: float = 3.0
    """How long an answer may take before the other side counts as gone."""
    revoke_secs: float = 10.0
    """How long a member that is asked to give a stream back may take to finish what is in flight."""
    on_trimmed: str = "earliest"
    """What a group does whose unread messages were dropped by retention: error (it is paused), earliest (it goes on
    with what is there) or latest (it goes on with what comes next). A record of what is gone is kept in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanoutSettings:
    enabled: bool = True
    """False: requests are refused, and nothing is sent."""
    vehicle: str = "subscription"
    """How a session is known to be a vehicle's: subscription (it is subscribed to a topic with its VIN), client_id or
    username (that is its VIN)."""
    request_topic: str = "agent/{VIN}/proxy/request/{request_id}"
    """Where deliveries go."""
    result_topic: str = "agent/{VIN}/proxy/ack/{request_id}"
    """Where vehicles publish how it went."""
    heartbeat_topics: str = "ecp/{VIN}/online"
    """Topics on which vehicles say that they are there, with commas between them."""
    dispatchers: int = 2
    """How many shares of the vehicles are looked after side by side."""
    attempts_max: int = 5
    """A delivery that a vehicle has refused so often has failed."""
    backoff_secs: float = 1.0
    """How long the second attempt waits; each further one twice as long, up to backoff_secs_max."""
    backoff_secs_max: float = 300.0
    """No attempt waits longer than this for the next one."""
    ack_secs: float = 0.0
    """A delivery that is not answered for so long is sent anew; 0: as long as the connection lasts."""
    result_secs: float = 3600.0
    """How long a campaign that wants results waits for one."""
    sweep_secs: float = 5.0
    """How often what other nodes have added or left behind is looked for."""
    campaign_idle_secs: float = 3600.0
    """A campaign with nothing to do and no new batch for so long is closed."""
    keep_secs: float = 604_800.0
    """How long closed campaigns and ended deliveries are kept."""
    collect_secs: float = 60.0
    """How often what is old is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    listen: str = "127.0.0.1:8083"
    """HOST:PORT for the HTTP API; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthSettings:
    password_file: str = ""
    """user:hash lines, kept with `holdfast password`."""
    jwt_algorithm: str = ""
    """HS256, RS256 or ES256: accept tokens of this kind as passwords; empty: none."""
    jwt_key_file: str = ""
    """The secret (HS256) or the PEM public key (RS256, ES256)."""
    jwt_issuer: str = ""
    """If set, a token's `iss` must be this."""
    jwt_audience: str = ""
    """If set, a token's `aud` must hold this."""
    jwt_user_claim: str = "sub"
    """Which claim of a token is the user's name."""
    jwt_leeway_seconds: float = 10.0
    """How far the issuer's clock may be from ours."""
    client_id_must_be_user: bool = False
    """Each user has one client id, the user name: nobody can take over another's session."""
    acl_file: str = ""
    """Who may publish and subscribe to what; empty: everyone to everything."""
    http_tokens_file: str = ""
    """Tokens for the HTTP API."""
    allow_anonymous: str = "loopback"
    """Clients without credentials: loopback (from this machine only), never or always."""
    certificate_user: bool = False
    """The common name of a verified client certificate is the user's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All of them, by section."""

    data: str = "holdfast-data"
    """Folder for what is stored on this machine."""
    store: str = ""
    """Where the log is kept; empty: SQLite in the data folder."""
    metadata: str = ""
    """Where groups, leases and copies of cursors are kept; empty: in the store."""
    node_id: str = ""
    """This node's name, which no other node of the cluster has; empty: one is made up with every start."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log: LogSettings = field(default_factory=LogSettings)
    mqtt: MqttSettings = field(default_factory=MqttSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    cursors: CursorSettings = field(default_factory=CursorSettings)
    groups: GroupSettings = field(default_factory=GroupSettings)
    fanout: FanoutSettings = field(default_factory=FanoutSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:///{self.data}/holdfast.db"


CHOICES = {
    "log.shard_by": ("publisher", "topic"),
    "sessions.on_trimmed": ("error", "earliest", "latest"),
    "groups.on_trimmed": ("error", "earliest", "latest"),
    "fanout.vehicle": ("subscription", "client_id", "username"),
    "auth.allow_anonymous": ("loopback", "never", "always"),
    "auth.jwt_algorithm": ("", "HS256", "RS256", "ES256"),
    "log_level": ("debug", "info", "warning", "error"),
}


def load(file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> Settings:
    """Defaults, then the file, then HOLDFAST_SECTION_KEY variables, then `section.key=value` flags."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    known = {name.replace(".", "_").upper(): name for name in _names(Settings)}
    for variable, text in (environment or {}).items():
        if name := known.get(variable.removeprefix("HOLDFAST_")) if variable.startswith("HOLDFAST_") else None:
            values[name] = text
    for flag in flags:
        name, equals, text = flag.partition("=")
        if not equals:
            raise RequestError(f"--set {flag!r} has no value; write section.key=value")
        values[name.strip()] = text.strip()
    return _build(Settings, "", values)


def from_environment(file: Path | None, flags: Sequence[str]) -> Settings:
    return load(file, os.environ, flags)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text())
    except OSError as error:
        raise RequestError(f"cannot read settings from {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{file} is not TOML: {error}") from error
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": v for inner, v in value.items()})
        else:
            found[name] = value
    return found


def _names(kind: Any) -> dict[str, Any]:
    """Every setting's full name and type."""
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(kind):
        type_ = hints[entry.name]
        if dataclasses.is_dataclass(type_):
            found.update({f"{entry.name}.{inner}": t for inner, t in _names(type_).items()})
        else:
            found[entry.name] = type_
    return found


def _build(kind: type[T], prefix: str, values: Mapping[str, Any]) -> T:
    if not prefix:
        unknown = sorted(set(values) - set(_names(kind)))
        if unknown:
            raise RequestError(f"there is no setting {unknown[0]!r}; docs/settings.md lists them")
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = prefix + entry.name
        if dataclasses.is_dataclass(hints[entry.name]):
            given[entry.name] = _build(hints[entry.name], f"{name}.", values)
        elif name in values:
            given[entry.name] = _convert(name, values[name], hints[entry.name])
    return kind(**given)


def _convert(name: str, value: Any, type_: Any) -> Any:
    wrong = RequestError(f"setting {name} got {value!r}; it takes {_takes(name, type_)}")
    if type_ is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "on", "1"):
            return True
        if str(value).lower() in ("false", "no", "off", "0"):
            return False
        raise wrong
    if isinstance(value, bool) or isinstance(type_, types.UnionType):
        raise wrong
    if (type_ is str and not isinstance(value, str)) or (type_ is int and isinstance(value, float)):
        raise wrong  # no list as text, and nothing is rounded in silence
    try:
        converted = type_(value)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if type_ in (int, float) and not 0 <= converted < math.inf:
        raise wrong
    if name in CHOICES and converted not in CHOICES[name]:
        raise wrong
    if name == "log.shards" and not 1 <= converted <= 4096:
        raise wrong
    return converted


def _takes(name: str, type_: Any) -> str:
    if name in CHOICES:
        return " | ".join(choice or "(empty)" for choice in CHOICES[name])
    if name == "log.shards":
        return "a whole number from 1 to 4096"
    return {bool: "true or false", int: "a whole number, not negative", float: "a number, not negative"}.get(
        type_, "text"
    )


def address(name: str, text: str) -> tuple[str, int]:
    """HOST:PORT as a pair."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise RequestError(f"setting {name} got {text!r}; it takes HOST:PORT, such as 127.0.0.1:1883")
    return host.strip("[]") or "0.0.0.0", int(port)
