"""Every benchmark, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys

BENCHES = ["log", "mqtt", "groups", "sessions", "spark"]

if __name__ == "__main__":
    failed = [name for name in BENCHES if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode]
    if failed:
        print(f"\nTargets not met in: {', '.join(failed)}")
    sys.exit(1 if failed else 0)
