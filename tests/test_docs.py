"""Every command and every program in the documents is run here, as a newcomer would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

RUN_ELSEWHERE = {"make demo", "make test", "make fast", "make check", "make bench", "make soak", "make setup"}
"""These run this very test, or run for long; `.ci/run` runs check and test, and test_demo the demo."""


RUN_WITH_NODES = {"cluster.md", "fanout.md"}
"""Their commands need nodes to be run against; tests/e2e/cluster/test_document.py and tests/e2e/test_fanout_document.py
have some."""


def fenced(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    found = []
    for block in fenced(path, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                found.append(command)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_what_the_document_shows_works(path: Path, tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    for program in fenced(path, "python"):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if (promised := re.search(r"prints `(.*?)`", path.read_text())) and "print(" in program:
            assert promised[1] in done.stdout
    for command in commands(path) if path.name not in RUN_WITH_NODES else ():
        if command in RUN_ELSEWHERE:
            continue
        assert command.startswith(".venv/bin/"), f"{path.name}: how is {command!r} to be run?"
        line = command.replace(".venv/bin/", f"{bin_folder}/", 1)
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=dict(os.environ)
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_command_is_documented() -> None:
    from holdfast.cli import app

    text = "\n".join(path.read_text() for path in DOCUMENTS)

    def walk(command: object, words: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])
        if not getattr(command, "commands", {}):
            assert " ".join(words) in text or words[-1] == "demo", f"{' '.join(words)} is in no document"

    walk(get_command(app), ["holdfast"])


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*DOCUMENTS, ROOT / "ARCHITECTURE.md"]:
        for target in re.findall(r"`?make ([a-z]+)`?", path.read_text()):
            assert target in targets, f"{path.name}: make {target}"
