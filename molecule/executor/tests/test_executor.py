# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The executor mp beside ray, on a pair that serves with Ray at first. In this order."""

from __future__ import annotations

import spark

RAY_PAIR = {"spark-1": ["spark-ray", "spark-vllm"], "spark-2": ["spark-ray"]}
RANKS = {"spark-1": ["spark-vllm"], "spark-2": ["spark-vllm"]}


def ours() -> dict[str, list[str]]:
    """Every container of the collection, running or not, also one that was set aside."""
    return {node: [name for name in spark.containers(node) if name.startswith("spark-")] for node in spark.NODES}


def rank_of(node: str) -> list[str]:
    (found,) = spark.inspect(node, "spark-vllm")
    args = found["Args"]
    return args[args.index("--nnodes") : args.index("--nnodes") + 4]


def test_ray_to_mp() -> None:
    run = spark.site(spark_executor="mp")
    assert run.rc == 0
    assert ours() == RANKS
    assert [rank_of(node) for node in spark.NODES] == [["--nnodes", "2", "--node-rank", "0"], ["--nnodes", "2", "--node-rank", "1"]]
    spark.answers()
    again = spark.site(spark_executor="mp")
    assert (again.rc, again.changed) == (0, 0)
    status = spark.site(playbook="status.yml", spark_executor="mp")
    assert "SERVING: it answers" in status.output and "Ray " not in status.output.split("SERVING")[1].split("NODE")[0]


def test_a_rank_that_ends_later_is_told_and_mended() -> None:
    spark.on("spark-2", "docker", "kill", "spark-vllm")
    status = spark.site(playbook="status.yml", spark_executor="mp")
    assert status.rc == 0
    assert "FAILED: the server's rank on spark-2, container spark-vllm, exited with code 137" in status.text
    restart = spark.site(playbook="restart.yml", spark_executor="mp")
    assert restart.rc == 0 and ours() == RANKS
    spark.answers()


def test_mp_to_ray() -> None:
    run = spark.site()
    assert run.rc == 0 and ours() == RAY_PAIR
    spark.answers()
    assert spark.site().changed == 0
