"""What the end-to-end tests share: a node for each store, and clients that are gone when the test is."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from e2e.clients import V5, V311, AioClient, Client, Dial, PahoClient
from e2e.mqttjs import CannotRun, Host, JsClient
from node import LISTENER, Node

STORES = ["sqlite", "postgres"]
VERSIONS = [pytest.param(V311, id="3.1.1"), pytest.param(V5, id="5")]
LIBRARIES = ["paho", "aiomqtt", "mqttjs"]

FLUSH_SECONDS = 0.2

NewStore = Callable[[], str | None]
Connect = Callable[..., Any]

_numbers = itertools.count(1)


@pytest.fixture(scope="session", params=STORES)
def new_store(request: pytest.FixtureRequest) -> Iterator[NewStore]:
    """Gives the URL of a new store, for one node; None is the node's own SQLite file, in its data folder."""
    if request.param == "sqlite":
        yield lambda: None
        return
    server = request.getfixturevalue("postgres_server")
    server.start()
    urls: list[str] = []

    def new() -> str:
        urls.append(server.database())
        return urls[-1]

    yield new
    for url in urls:
        server.drop(url)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for loopback, signed by itself (`cert.pem`), and its key (`key.pem`)."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


def settings(authority: Path) -> dict[str, Any]:
    return {
        "cursors.subscription_progress_flush_secs": FLUSH_SECONDS,
        "mqtt.websocket": LISTENER,
        "mqtt.tls": LISTENER,
        "mqtt.tls_certificate": authority / "cert.pem",
        "mqtt.tls_key": authority / "key.pem",
    }


@pytest.fixture(scope="session")
def node(new_store: NewStore, authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The store's node for all tests that leave it running."""
    with Node(tmp_path_factory.mktemp("node"), store=new_store(), settings=settings(authority)) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A word no other test uses, for topics and client ids."""
    return f"t{next(_numbers)}x{os.getpid()}"


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def js_host() -> Iterator[Host]:
    try:
        host = Host()
    except CannotRun as error:
        pytest.skip(str(error))
    yield host
    host.close()


class Clients:
    """Makes clients, and closes them after the test."""

    def __init__(self, request: pytest.FixtureRequest):
        self._request = request
        self._made: list[Client] = []

    def make(self, library: str, dial: Dial) -> Client:
        client: Client
        if library == "paho":
            client = PahoClient(dial)
        elif library == "aiomqtt":
            client = AioClient(dial)
        else:
            client = JsClient(dial, self._request.getfixturevalue("js_host"))
        self._made.append(client)
        return client

    def close(self) -> None:
        for client in self._made:
            client.close()


@pytest.fixture
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    made = Clients(request)
    yield made
    made.close()


@pytest.fixture
def connect(clients: Clients, node: Node) -> Connect:
    """`connect(client_id, version, library="paho", **dial)`: a client connected to the shared node."""

    def connect(client_id: str, version: int = V5, library: str = "paho", **dial: Any) -> Client:
        given = {"port": node.mqtt_port, **dial}
        return clients.make(library, Dial(client_id=client_id, version=version, **given)).connect()

    return connect


def durable(version: int, seconds: int = 3600) -> dict[str, Any]:
    """How a version asks for a session that stays."""
    return {"clean": False, **({"properties": {"SessionExpiryInterval": seconds}} if version == V5 else {})}
