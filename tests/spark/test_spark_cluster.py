"""A real cluster: a master, two workers and a driver, each a process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyspark
from driver_processes import DRIVER, process

from holdfast.spark import java
from servers import _free_ports


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
        "SPARK_DAEMON_JAVA_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
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
    assert fleet.log.manifest.totals("messages")[1] == 5000
    assert [g.number for g in fleet.log.generations("messages")] == [2]
    fleet.close()
