# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One stage at a time: a whole pair is left alone, a broken one is repaired, with the server that was on it. In this order."""

from __future__ import annotations

import spark

ADDRESSES = [[address, 1.0] for address in spark.NODES.values()]


def serves() -> None:
    assert spark.ray_nodes() == ADDRESSES
    spark.answers()


def test_ray_of_a_serving_pair_is_left_alone() -> None:
    before = spark.identities()
    run = spark.site("--tags", "ray")
    assert run.rc == 0
    assert run.changed == 0
    assert spark.identities() == before
    serves()


def test_preflight_alone_changes_nothing() -> None:
    before = spark.everything()
    run = spark.site("--tags", "preflight")
    assert run.rc == 0
    assert run.changed == 0
    assert spark.everything() == before


def test_check_mode_tells_a_repair_and_does_not_do_it() -> None:
    spark.on("spark-2", "docker", "rm", "-f", "spark-ray")
    before = spark.births()
    run = spark.site("--tags", "ray,verify", "--check", "--diff")
    assert run.rc == 0
    assert "spark-2: would create container spark-ray" in run.text
    assert spark.births() == before


def test_ray_without_its_worker_is_restored_and_the_answer_too() -> None:
    """The container of the worker was removed by the test before."""
    assert "spark-ray" not in spark.containers("spark-2")
    before = spark.ours()
    run = spark.site("--tags", "ray")
    assert run.rc == 0
    serves()
    after = spark.ours()
    assert all(len(after[node].splitlines()) == count for node, count in (("spark-1", 2), ("spark-2", 1)))
    assert not set(before["spark-1"].splitlines()) & set(after["spark-1"].splitlines())


def test_a_server_that_is_gone_is_launched_again_on_the_same_ray() -> None:
    ray = {node: spark.inspect(node, "spark-ray")[0]["Id"] for node in spark.NODES}
    spark.on("spark-1", "docker", "rm", "-f", "spark-vllm")
    run = spark.site("--tags", "vllm")
    assert run.rc == 0
    serves()
    assert {node: spark.inspect(node, "spark-ray")[0]["Id"] for node in spark.NODES} == ray


def test_a_server_that_was_killed_is_launched_again() -> None:
    spark.on("spark-1", "docker", "kill", "spark-vllm")
    run = spark.site()
    assert run.rc == 0
    serves()
    assert spark.site().changed == 0
