# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is served after nodes lost power: the same again, or nothing and the reason. In this order."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time

import spark
from power import UNIT, made, power, serves, status, until


def told() -> str:
    """What ``status.yml`` shows; it never fails and never changes anything, whatever is down."""
    run = spark.site(playbook="status.yml", new_connections=True)
    assert (run.rc, run.changed, run.failures) == (0, 0, [])
    return run.output


def cells(table: str, node: str) -> list[str]:
    """The line of a node, and the heading, cut where the heading's words begin."""
    heading = re.search(r"^NODE .*$", table, re.MULTILINE)
    line = re.search(rf"^{node} .*$", table, re.MULTILINE)
    assert heading and line, table
    begins = [found.start() for found in re.finditer(r"\S+( USED)?", heading[0])]
    return [line[0][begin:end].strip() for begin, end in zip(begins, [*begins[1:], None], strict=True)]


def test_a_worker_that_lost_power() -> None:
    until(serves, 60)
    table = told()
    assert "SERVING: it answers" in table
    assert [(cells(table, node)[5], cells(table, node)[-1]) for node in spark.NODES] == [
        ("spark-vllm spark-ray", "on"),
        ("spark-ray", "on"),
    ]
    before = made()
    power("restart", spark.WORKER)
    until(lambda: status(spark.HEAD) != "serves")  # it takes a while until Ray misses the worker, and the server ends
    until(serves)
    spark.answers()
    assert spark.ray_nodes() == [[address, 1.0] for address in spark.NODES.values()]
    assert made() == before


def test_both_lost_power_and_the_playbook_has_nothing_to_do_afterwards() -> None:
    before = made()
    power("restart", *spark.NODES)
    until(lambda: re.search(r"^LOADING: stage \w+", told(), re.MULTILINE) is not None)
    until(serves)
    spark.answers()
    assert made() == before
    run = spark.site(spark_boot_wait=90)
    assert (run.rc, run.changed) == (0, 0)


def test_a_head_alone_stays_down_and_says_why() -> None:
    power("stop", spark.WORKER)
    power("restart", spark.HEAD)
    until(lambda: spark.on(spark.HEAD, "systemctl", "is-active", UNIT, check=False).strip() == "failed")
    told = spark.on(spark.HEAD, "systemctl", "status", "--no-pager", UNIT, check=False)
    assert f"down: the gang is not complete: {spark.NODES[spark.WORKER]} is not in the cluster" in told
    assert [c["State"]["Running"] for c in spark.inspect(spark.HEAD, "spark-vllm")] == [False]


def test_status_tells_of_a_worker_that_is_down() -> None:
    table = told()
    assert "FAILED: container spark-vllm exited" in table
    assert cells(table, spark.WORKER)[5] == "NO ANSWER"
    assert cells(table, spark.HEAD)[-1] == "FAILED"
    assert "spark-1: the unit for the boot has failed: down: the gang is not complete" in table


def test_status_tells_of_a_head_that_is_down() -> None:
    power("stop", spark.HEAD)
    table = told()
    assert f"UNKNOWN: the head {spark.HEAD} does not answer" in table
    assert cells(table, spark.HEAD)[5] == "NO ANSWER"
    power("start", spark.HEAD)


def test_the_playbook_brings_it_back_and_the_unit_with_it() -> None:
    power("start", spark.WORKER)
    for node in spark.NODES:
        until(lambda node=node: spark.on(node, "systemctl", "is-active", "docker", "ssh", check=False).split() == ["active"] * 2, 60)
    assert spark.site(new_connections=True).rc == 0
    spark.answers()
    assert spark.on(spark.HEAD, "systemctl", "is-active", UNIT).strip() == "active"
    assert "SERVING: it answers" in told()


def test_off_by_a_variable() -> None:
    run = spark.site("--tags", "boot", spark_boot=False)
    assert run.rc == 0 and run.changed == 2
    for node in spark.NODES:
        assert spark.on(node, "systemctl", "is-active", UNIT, check=False).strip() == "inactive"
        assert spark.shell(node, f"ls /etc/systemd/system | grep {UNIT}; ls /usr/local/lib", check=False).split() == ["python3.13"]
    assert spark.site("--tags", "boot", spark_boot=False).changed == 0
    spark.answers()
    table = told()
    assert [cells(table, node)[-1] for node in spark.NODES] == ["off", "off"]


def test_stop_while_somebody_waits_for_an_answer() -> None:
    """The server's engine ends at once; its API server would wait for this client until the 60 s that a container is given are over."""
    question = {"model": spark.settings()["spark_model"], "prompt": "hello", "max_tokens": 900, "ignore_eos": True}
    ended: list[float] = []

    def asks() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while True:
                spark.call("/v1/completions", question, 180)
        ended.append(time.monotonic())

    client = threading.Thread(target=asks)
    client.start()
    run = spark.site(playbook="stop.yml")
    client.join()
    assert run.rc == 0
    begin = next(at for at, line in run.times if "Stop the server" in line)
    assert 0 < ended[0] - begin < 45, run.output


def test_status_after_stop() -> None:
    table = told()
    assert "STOPPED: nothing runs and the API port is free" in table
    assert [cells(table, node)[5] for node in spark.NODES] == ["-", "-"]
