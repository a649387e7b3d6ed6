"""The programs in the pipeline's document, run as a newcomer would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from holdfast.spark.options import READING, WRITING

DOCUMENT = Path(__file__).parents[2] / "docs" / "pipeline.md"


def test_what_the_document_shows_works(tmp_path: Path) -> None:
    # In one process, one after the other, in one folder: a session is worth keeping.
    programs = re.findall(r"^```py\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "|       v1|   7|" in done.stdout
    assert "messages=6" in done.stdout


def test_every_option_is_documented() -> None:
    named = {name.lower() for name in re.findall(r"`(\w+)", DOCUMENT.read_text())}
    internal = {"ranges", "writebatch", "position"}
    assert {*READING, *WRITING} - internal <= named
