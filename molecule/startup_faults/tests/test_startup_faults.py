# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes that are lost with the executor mp, where no Ray knows who is there. In this order."""

from __future__ import annotations

import spark
from power import UNIT, made, power, serves, status, until


def served_again(*nodes: str) -> None:
    """After these nodes were restarted: by the same containers, and it answers."""
    until(serves, 60)
    before = made()
    power("restart", *nodes)
    until(lambda: not serves(), 200)
    until(serves)
    spark.answers()
    assert made() == before


def test_a_worker_that_lost_power() -> None:
    """The server on the head hangs then, and does not end by itself."""
    served_again(spark.WORKER)


def test_a_head_that_lost_power() -> None:
    served_again(spark.HEAD)


def test_both_lost_power_and_the_playbook_has_nothing_to_do_afterwards() -> None:
    served_again(*spark.NODES)
    run = spark.site(spark_executor="mp", spark_boot_wait=90)
    assert (run.rc, run.changed) == (0, 0)


def test_a_rank_that_is_killed_ends_the_gang_with_the_reason() -> None:
    spark.on(spark.WORKER, "docker", "kill", "spark-vllm")
    until(lambda: all(spark.on(node, "systemctl", "is-active", UNIT, check=False).strip() == "failed" for node in spark.NODES))
    assert not any(spark.inspect(node, "spark-vllm")[0]["State"]["Running"] for node in spark.NODES)
    assert status(spark.HEAD).startswith(f"down: the rank on {spark.NODES[spark.WORKER]} (ended)")
    assert status(spark.WORKER).startswith("down: spark-vllm exited with code 137")


def test_the_playbook_brings_it_back_with_ray() -> None:
    assert spark.site(new_connections=True).rc == 0
    until(serves, 60)
    spark.answers()
