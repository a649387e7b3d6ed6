"""Who imports whom, kept true."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "jitter": set(),
    "restarts": set(),
    "machine": set(),
    "model": {"errors"},
    "topics": {"errors"},
    "settings": {"errors"},
    "keys": {"model"},
    "log": {"model", "errors", "topics", "restarts"},
    "metadata": {"errors", "jitter", "restarts"},
    "fanout": {"sending", "machine", "mqtt", "model", "errors", "topics"},
    "sending": {"fanout", "store", "errors"},
    "store": {"fanout", "sessions", "log", "metadata", "model", "errors", "jitter", "restarts"},
    "mqtt": {"machine", "model", "errors", "topics"},
    "cursors": {"metadata", "model", "errors"},
    "groups": {"machine", "cursors", "keys", "model", "errors", "topics"},
    "sessions": {"groups", "machine", "mqtt", "cursors", "log", "model", "errors", "topics"},
    "delivery": {"sessions", "mqtt", "machine", "model", "errors", "topics"},
    "auth": {"mqtt", "errors", "topics"},
    "sim": {
        "store",  # its decisions about deliveries, over rows in memory: the simulator of fan-out has them under test
        "fanout",
        "delivery",
        "sessions",
        "metadata",
        "mqtt",
        "groups",
        "machine",
        "cursors",
        "keys",
        "log",
        "model",
        "errors",
        "topics",
    },
    "batch": {"groups", "machine", "mqtt", "cursors", "model", "errors", "topics", "jitter"},
    "spark": {"batch", "groups", "cursors", "store", "log", "keys", "model", "errors", "topics", "jitter"},
    "ops": {"fanout", "groups", "log", "model", "errors", "topics"},
    "runtime": {
        *("web", "auth", "fanout", "delivery", "sessions", "groups", "machine", "mqtt", "cursors", "settings"),
        *("store", "log", "metadata", "keys", "model", "errors", "topics", "jitter", "restarts"),
    },
    "web": {"ops", "runtime", "auth", "fanout", "sessions", "groups", "mqtt", "model", "errors", "topics"},
    "cli": {
        "demo",
        "ops",
        "fanout",
        "sending",
        "runtime",
        "auth",
        "sim",
        "spark",
        "settings",
        "store",
        "log",
        "model",
        "errors",
    },
    "demo": {"cli", "fanout", "ops", "spark", "store"},
    "testing": {"runtime", "settings"},
    "__init__": {"store", "log", "model", "errors"},
    "__main__": {"cli"},
}
"""Package or module of holdfast -> what else of holdfast it may import; `__init__` is the public names."""

BOTH_WAYS = {("runtime", "web"), ("cli", "demo"), ("fanout", "sending")}
"""A node starts the HTTP API that shows it; the command line starts the demonstration that prints as it does; users
find `holdfast.fanout.send` where it belongs, and it is imported only when they do: it needs stores, which need fan-out.
"""

SHARED = ("holdfast.store.fanout_changes.", "holdfast.store.fanout_intake.")
"""What every store decides alike."""

ASYNC_HOSTS = {"runtime", "web", "cli", "demo", "testing"}


@cache
def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


@cache
def parts() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        found.setdefault(path.relative_to(SOURCE).parts[0].removesuffix(".py"), []).append(path)
    return found


def used(path: Path) -> set[str]:
    """The parts of holdfast that a file imports."""
    found = set()
    for name in imports(path):
        if name.startswith("holdfast."):
            part = name.split(".")[1]
            found.add(part if part in parts() else "__init__")
    return found


def test_every_part_is_listed() -> None:
    assert set(MAY_IMPORT) == set(parts())


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    for path in parts()[part]:
        stray = used(path) - MAY_IMPORT[part] - {part}
        assert not stray, f"{path.relative_to(SOURCE)} imports {sorted(stray)}"


def test_nothing_that_a_part_may_import_may_import_that_part() -> None:
    below = {part: set(may) for part, may in MAY_IMPORT.items()}
    for one, other in BOTH_WAYS:
        below[one].discard(other)
    for _ in below:
        below = {part: may.union(*(below[other] for other in may)) for part, may in below.items()}
    assert [part for part, may in below.items() if part in may] == []


def test_nobody_but_the_store_package_knows_which_store_it_is() -> None:
    for part, paths in parts().items():
        for path in paths if part != "store" else ():
            inside = {name for name in imports(path) if name.startswith("holdfast.store.") and name.count(".") > 2}
            if path.parent == SOURCE / "sim" / "fanout":
                # It gives the store in memory its own clock, and looks at its rows.
                inside = {name for name in inside if not name.startswith(("holdfast.store.memory.", *SHARED))}
            assert not inside, f"{path.relative_to(SOURCE)} imports {sorted(inside)}"


def test_only_the_public_name_of_fanout_leads_to_sending() -> None:
    named = [path.name for path in parts()["fanout"] if "sending" in used(path)]
    assert named == ["__init__.py"]


def test_asyncio_only_in_hosts() -> None:
    for part, paths in parts().items():
        if part not in ASYNC_HOSTS:
            for path in paths:
                assert not any(name.split(".")[0] in ("asyncio", "uvloop") for name in imports(path)), path


def test_every_module_says_in_its_first_sentence_what_it_is() -> None:
    for paths in parts().values():
        for path in paths:
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert text.split("\n\n")[0].rstrip().endswith((".", ":")), f"{path.relative_to(SOURCE)}: {text[:60]!r}"


def test_public_names_are_meant_to_be_public() -> None:
    public = {name for name in vars(holdfast) if not name.startswith("_")}
    modules = {path.stem for path in SOURCE.glob("*.py")} | {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert public - modules == set(holdfast.__all__) - modules
    assert sorted(holdfast.__all__) == list(holdfast.__all__)
