# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A new server that cannot start: the old service is back on both nodes, and the play ends with the first cause."""

from __future__ import annotations

import time
import typing as t
from pathlib import Path

import pytest
import spark
from rolled_back import TOO_LONG, identities, last_message, previous_is_back, record_is_there


def log(node: str, name: str) -> str:
    """What was kept of the log of a container that failed."""
    return spark.on(node, "cat", f"{spark.STATE}/failed/{name}.log")


def old_service_is_back() -> None:
    spark.old_service_answers(seconds=30)
    spark.nothing_of_ours()
    for node in spark.NODES:
        assert not record_is_there(node)


def test_without_rollback_things_stay_as_they_are() -> None:
    run = spark.site(spark_max_model_len=TOO_LONG, spark_rollback=False)
    assert run.rc != 0
    assert "max_model_len 200000" in last_message(run)
    assert "Nothing was rolled back (spark_rollback is false)." in last_message(run)
    assert spark.containers("spark-1") == ["glm-sglang", "spark-ray", "spark-vllm"]
    for node in spark.NODES:
        assert "spark-ray" in spark.running(node)
        assert "glm-sglang" not in spark.running(node)
    assert all(record_is_there(node) for node in spark.NODES)


def test_what_an_earlier_run_stopped_comes_back_too() -> None:
    """The run before left the old service stopped; this one stops nothing itself, and fails when the server starts."""
    assert all(record_is_there(node) for node in spark.NODES)
    run = spark.site(spark_max_model_len=TOO_LONG)
    assert run.rc != 0
    message = last_message(run)
    for word in (
        "spark-1",
        "max_model_len 200000 is more than the model's max_position_embeddings 2048",
        "Remedy: ",
        "spark_max_model_len",
        "The old service serves again.",
    ):
        assert word in message
    old_service_is_back()
    assert "User-specified max_model_len (200000)" in log("spark-1", "spark-vllm")
    assert all("Ray runtime started" in log(node, "spark-ray") for node in spark.NODES)
    assert spark.on("spark-1", "stat", "-c", "%a %U", f"{spark.STATE}/failed/spark-vllm.log").split() == ["600", "root"]


def test_the_ray_container_of_the_worker_dies(tmp_path: Path) -> None:
    """The server on the head only sees that a node is gone; the message names the container that ended, on the other node. What is needed to
    understand it lies on the controller."""

    def kill() -> bool:
        if "spark-vllm" not in spark.running("spark-1"):
            return False
        spark.on("spark-2", "docker", "kill", "spark-ray", check=False)
        return True

    hidden = "not-for-others-1"
    with spark.meanwhile(kill) as killed:
        run = spark.site(
            spark_env={**spark.settings()["spark_env"], "LAB_KEY_MATERIAL": hidden}, spark_diagnostics_dir=str(tmp_path / "kept")
        )
    assert killed and run.rc != 0
    message = last_message(run)
    for word in ("found container spark-ray exited with code 137", "The old service serves again."):
        assert word in message
    assert message.index("spark-2: ") == 0
    old_service_is_back()
    files = run.bundle
    assert {"settings.json", "node_info.json", "node_info_before.json", "diagnosis.json"} <= set(files)
    assert all({f"{node}/spark-ray.log", f"{node}/inspect.json"} <= set(files) for node in spark.NODES)
    assert "LAB_KEY_MATERIAL" in files["spark-1/inspect.json"] and [name for name, text in files.items() if hidden in text] == []
    assert files["message.txt"].startswith("spark-2: ")


# --- old services of every kind: a unit, a unit of a user, a compose project, a container that removes itself, a server run with docker exec

KINDS = {
    "containers": [spark.OLD, "old-exec", "old-rm"],
    "units": ["old-unit", "spark/old-user"],
    "compose_projects": ["old-glm"],
}
PORTS = range(30011, 30016)


def old_services(*arguments: str) -> None:
    script = (Path(spark.ROOT) / "molecule" / "shared" / "old_services").read_text(encoding="utf-8")
    for node in spark.NODES:
        spark.on(node, "sh", "-c", script, "old_services", *arguments)


@pytest.fixture
def all_kinds() -> t.Iterator[None]:
    old_services()
    time.sleep(10)  # what has been in a container for less is taken for a passing command
    try:
        yield
    finally:
        old_services("remove")


def answering(node: str) -> list[int]:
    script = f"for port in {' '.join(map(str, PORTS))}; do curl -s -m 5 -o /dev/null http://127.0.0.1:$port/ && echo $port; done"
    return [int(port) for port in spark.shell(node, script, check=False).split()]


def test_old_services_of_every_kind_come_back(all_kinds: None) -> None:
    secrets = {node: spark.shell(node, "docker inspect -f '{{json .Config.Env}}' old-rm") for node in spark.NODES}
    run = spark.site(spark_max_model_len=TOO_LONG, spark_stop=KINDS, spark_stop_timeout=3)
    assert run.rc != 0 and "The old service serves again." in last_message(run)
    assert "hush" not in run.output
    old_service_is_back()
    for node in spark.NODES:
        assert answering(node) == list(PORTS)
        assert spark.shell(node, "docker inspect -f '{{json .Config.Env}}' old-rm") == secrets[node]


# --- our own version of before: the whole gang of it


def test_an_upgrade_that_replaces_ray_too_and_fails_gives_the_version_before_back() -> None:
    assert spark.site().rc == 0
    before = identities()
    previous_is_back(spark.site(spark_ray_num_cpus=3, spark_max_model_len=TOO_LONG), before)
    assert spark.site().changed == 0
