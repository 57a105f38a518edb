# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Launches with the executor mp that fail, on a pair that serves with Ray at first. In this order."""

from __future__ import annotations

import spark

RAY_PAIR = {"spark-1": ["spark-ray", "spark-vllm"], "spark-2": ["spark-ray"]}
RANKS = {"spark-1": ["spark-vllm"], "spark-2": ["spark-vllm"]}


def ours() -> dict[str, list[str]]:
    """Every container of the collection, running or not, also one that was set aside."""
    return {node: [name for name in spark.containers(node) if name.startswith("spark-")] for node in spark.NODES}


def test_mp_that_cannot_start_gives_ray_back() -> None:
    before = {node: [c["Id"] for c in spark.inspect(node, *spark.OURS)] for node in spark.NODES}
    run = spark.site(spark_executor="mp", spark_max_model_len=200000)
    assert run.rc != 0
    message = run.message(run.failures[-1], last=True)
    for word in ("max_model_len 200000", "The version that ran before (sparklab/tiny-qwen3) serves again."):
        assert word in message
    assert ours() == RAY_PAIR
    assert {node: [c["Id"] for c in spark.inspect(node, *spark.OURS)] for node in spark.NODES} == before
    spark.answers()


def test_a_rank_that_ends_while_it_loads_ends_all_and_the_version_before_is_back() -> None:
    """The server on the head does not notice it by itself."""
    assert spark.site(spark_executor="mp").rc == 0
    before = {node: spark.inspect(node, "spark-vllm")[0]["Id"] for node in spark.NODES}

    def kill() -> bool:
        new = spark.inspect("spark-2", "spark-vllm")
        if "spark-vllm" not in spark.running("spark-1") or not new or new[0]["Id"] == before["spark-2"]:
            return False
        spark.on("spark-2", "docker", "kill", "spark-vllm", check=False)
        return True

    with spark.meanwhile(kill) as killed:
        run = spark.site(spark_executor="mp", spark_max_model_len=512)
    assert killed and run.rc != 0
    message = run.message(run.failures[-1], last=True)
    assert message.startswith("spark-2: ") and "found container spark-vllm exited with code 137" in message
    assert "The version that ran before (sparklab/tiny-qwen3) serves again." in message
    assert ours() == RANKS and {node: spark.inspect(node, "spark-vllm")[0]["Id"] for node in spark.NODES} == before
    spark.answers()
