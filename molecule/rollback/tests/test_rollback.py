# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A new server that cannot start: the old service is back on both nodes, and the play ends with the first cause."""

from __future__ import annotations

import threading
import time

import spark

# More than the model supports: vLLM's parser takes it, so the probe of the image cannot know, and the server refuses it when it starts.
TOO_LONG = 200000
RECORD = f"{spark.STATE}/stopped.json"


def record_is_there(node: str) -> bool:
    return spark.shell(node, f"test -e {RECORD} && echo yes", check=False).strip() == "yes"


def log(node: str, name: str) -> str:
    """What was kept of the log of a container that failed."""
    return spark.on(node, "cat", f"{spark.STATE}/failed/{name}.log")


def last_message(run: spark.Run) -> str:
    """What the play ended with."""
    return run.message(run.failures[-1], last=True)


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


def test_the_ray_container_of_the_worker_dies() -> None:
    """The server on the head only sees that a node is gone; the message names the container that ended, on the other node."""
    done = threading.Event()

    def kill() -> None:
        end = time.monotonic() + 600
        while not done.is_set() and time.monotonic() < end:
            if "spark-vllm" in spark.running("spark-1"):
                spark.on("spark-2", "docker", "kill", "spark-ray", check=False)
                return
            time.sleep(0.5)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run = spark.site()
    finally:
        done.set()
        killer.join()
    assert run.rc != 0
    message = last_message(run)
    for word in ("spark-2: found container spark-ray exited with code 137", "The old service serves again."):
        assert word in message
    assert message.index("spark-2: found container spark-ray") == 0
    old_service_is_back()
