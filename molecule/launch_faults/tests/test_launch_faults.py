# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launch to which something happens: the error names it, soon, and what served before serves again."""

from __future__ import annotations

import contextlib
import typing as t

import pytest
import spark


@contextlib.contextmanager
def stranger(node: str, *argv: str) -> t.Iterator[None]:
    """A container of somebody else, from our image, with the node's own network."""
    image = spark.settings()["spark_image"]
    spark.on(node, "docker", "run", "-d", "--name", "stranger", "--network", "host", "--entrypoint", argv[0], image, *argv[1:])
    try:
        yield
    finally:
        spark.on(node, "docker", "rm", "-f", "stranger", check=False)


def killed(node: str, name: str, log_of: str, line: str) -> t.Callable[[], bool]:
    """Kill a container when a log on the head has this line."""

    def look() -> bool:
        if line not in spark.shell(spark.HEAD, f"docker logs {log_of} 2>&1", check=False):
            return False
        spark.on(node, "docker", "kill", name, check=False)
        return True

    return look


def ended_with(run: spark.Run, *words: str) -> None:
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message(run.failures[-1], last=True)
    for word in (*words, "The old service serves again."):
        assert word in message, f"{word!r} is not in: {message}"
    spark.old_service_answers(seconds=30)
    spark.nothing_of_ours()


def test_ray_of_somebody_else_on_our_port() -> None:
    with stranger(spark.HEAD, "ray", "start", "--head", "--block", "--port=6379", "--include-dashboard=false", "--num-gpus=0"):
        spark.shell(spark.HEAD, "for i in $(seq 60); do ss -Htln 'sport = :6379' | grep -q . && exit; sleep 0.5; done; exit 1")
        spark.refused(spark.site(), spark.HEAD, "container stranger", "6379")


@pytest.mark.parametrize(
    ("node", "name", "line"),
    [
        pytest.param(spark.WORKER, "spark-ray", "Starting to load model", id="ray of the worker in weights"),
        pytest.param(spark.HEAD, "spark-vllm", "Starting to load model", id="server of the head in weights"),
        pytest.param(spark.HEAD, "spark-ray", "Initializing a V1 LLM engine", id="ray of the head"),
    ],
)
def test_a_container_is_killed_while_the_server_starts(node: str, name: str, line: str) -> None:
    with spark.meanwhile(killed(node, name, "spark-vllm", line)) as when:
        run = spark.site()
    assert when
    ended_with(run, f"found container {name} exited with code 137")


def test_the_port_is_taken_at_the_last_moment() -> None:
    """After the old service was stopped and before the server binds it. Nothing but the server's own log can tell."""

    def take() -> bool:
        if "spark-vllm" not in spark.running(spark.HEAD):
            return False
        spark.shell(spark.HEAD, "systemd-run --quiet --collect --unit=stranger python3 -m http.server 30000")
        return True

    try:
        with spark.meanwhile(take) as when:
            run = spark.site()
        assert when and run.rc != 0
        message = run.message(run.failures[-1], last=True)
        assert "30000" in message and "could not be brought back" in message
    finally:
        spark.on(spark.HEAD, "systemctl", "stop", "stranger", check=False)


def test_the_run_after_it_brings_the_old_service_back_or_serves() -> None:
    assert spark.site().rc == 0
    spark.answers()


def test_a_worker_killed_after_ready_is_told_and_mended() -> None:
    spark.on(spark.WORKER, "docker", "kill", "spark-ray")
    told = spark.site(playbook="status.yml")
    assert told.rc == 0 and "spark-2: container spark-ray exited with code 137" in told.text
    assert spark.site().rc == 0
    spark.answers()
