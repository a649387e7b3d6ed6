"""The wall clock of one process, to be set by a test."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "campaign" / "clock"


class SettableClock:
    """`environment` is for the process; what is set holds at once."""

    def __init__(self, file: Path):
        self._file = file
        file.write_text(f"{0.0:<32}")
        path = os.pathsep.join(each for each in (str(FOLDER), os.environ.get("PYTHONPATH", "")) if each)
        self.environment = {"PYTHONPATH": path, "HOLDFAST_TEST_CLOCK": str(file)}

    def set(self, ahead_seconds: float) -> None:
        with self._file.open("r+") as file:
            file.write(f"{ahead_seconds:<32}")
