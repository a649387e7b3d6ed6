"""How the command line talks to a running node: its HTTP API, errors as one line."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from holdfast.errors import HoldfastError, RequestError

Node = Annotated[str, typer.Option("--http", help="The node's HTTP API.", envvar="HOLDFAST_HTTP")]
Token = Annotated[
    str | None, typer.Option("--token", help="HTTP token, if the node wants one.", envvar="HOLDFAST_TOKEN")
]
DEFAULT = "127.0.0.1:8083"


def call(node: str, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
    """The decoded answer; what the node refuses is a RequestError with its own words."""
    with _asked(node, method, path, body, token) as answer:
        return json.load(answer)


def lines(node: str, path: str, token: str | None = None) -> Iterator[bytes]:
    """Of a long answer, as they come."""
    with _asked(node, "GET", path, None, token) as answer:
        yield from answer


@contextlib.contextmanager
def _asked(node: str, method: str, path: str, body: Any, token: str | None) -> Iterator[Any]:
    request = urllib.request.Request(
        f"http://{node}/api/v1/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError):
            text = json.loads(text).get("error", text)
        raise RequestError(text) from error
    except OSError as error:
        raise HoldfastError(f"no node answers at {node}: {error}; is `holdfast serve` running there?") from error


def part(text: str) -> str:
    return urllib.parse.quote(text, safe="")
