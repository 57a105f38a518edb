# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two services on the same nodes, on a pair that serves one at first. In this order."""

from __future__ import annotations

import json
import typing as t

import spark

FIRST: dict[str, t.Any] = {"spark_gpu_memory_utilization": 0.5}
SECOND: dict[str, t.Any] = {
    "spark_service": "small",
    "spark_port_offset": 100,
    "spark_api_port": 30001,
    "spark_served_model_name": "small",
    "spark_gpu_memory_utilization": 0.3,
}
OF_FIRST = ["spark-ray", "spark-vllm"]
OF_SECOND = ["spark-ray-small", "spark-vllm-small"]


def births(names: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Id and start of these containers, on every node."""
    return {node: [(c["Id"], c["State"]["StartedAt"]) for c in spark.inspect(node, *names)] for node in spark.NODES}


def second_answers() -> None:
    """The second service's own port gives a real answer, with its own name."""
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8})
    url = "http://127.0.0.1:30001/v1/chat/completions"
    answer = json.loads(spark.on(spark.HEAD, "curl", "-s", "-m", "60", "-H", "Content-Type: application/json", "-d", body, url))
    assert answer["model"] == "small" and answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_what_two_services_cannot_share_is_refused() -> None:
    before = births(OF_FIRST)
    for wrong, words in (
        ({}, ("spark_gpu_memory_utilization 0.3 beside 0.8 of the service without a name", "at most 0.90")),
        ({"spark_api_port": 30000}, ("port 30000 of service small", "set another spark_api_port than 30000")),
        ({"spark_port_offset": 0}, ("6379", "set spark_port_offset: 100 for service small")),
    ):
        run = spark.site(**{**SECOND, **wrong})
        message = spark.refused_text(run)
        assert run.failures == [spark.HEAD] and all(word in message for word in words), message
    assert births(OF_FIRST) == before
    spark.answers()


def test_room_is_made_by_the_first() -> None:
    run = spark.site(**FIRST)
    assert run.rc == 0
    spark.answers()


def test_the_second_comes_up_beside_the_first() -> None:
    before = births(OF_FIRST)
    run = spark.site(**SECOND)
    assert run.rc == 0
    assert births(OF_FIRST) == before
    assert spark.running(spark.HEAD) == sorted(OF_FIRST + OF_SECOND)
    assert spark.running(spark.WORKER) == ["spark-ray", "spark-ray-small"]
    spark.answers()
    second_answers()
    for variables in (SECOND, FIRST):
        again = spark.site(**variables)
        assert (again.rc, again.changed) == (0, 0)


def test_status_tells_both() -> None:
    first = spark.site(playbook="status.yml", **FIRST)
    assert "SERVING: it answers" in first.output
    assert "Beside it: service small (small, port 30001) runs on spark-1, spark-2" in first.text
    second = spark.site(playbook="status.yml", **SECOND)
    assert "SERVING: it answers" in second.output and "http://spark-1:30001/v1" in second.text
    assert "Beside it: the service without a name (sparklab/tiny-qwen3, port 30000) runs on spark-1, spark-2" in second.text


def test_each_has_a_unit_for_the_boot() -> None:
    for node in spark.NODES:
        states = spark.on(node, "systemctl", "is-active", "dgxspark-serving", "dgxspark-serving-small").split()
        assert states == ["active", "active"]


def test_stopping_one_leaves_the_other() -> None:
    before = births(OF_SECOND)
    assert spark.site(playbook="stop.yml", **FIRST).rc == 0
    assert births(OF_SECOND) == before
    assert [name for name in spark.containers(spark.HEAD) if name.startswith("spark-")] == OF_SECOND
    second_answers()
    assert spark.site(**FIRST).rc == 0
    assert births(OF_SECOND) == before
    spark.answers()


def test_what_is_left_of_one_that_was_torn_down() -> None:
    before = births(OF_FIRST)
    assert spark.site(playbook="teardown.yml", **SECOND).rc == 0
    assert births(OF_FIRST) == before
    spark.answers()
    for node in spark.NODES:
        left = spark.shell(
            node, "docker ps -a --format '{{.Names}}'; docker volume ls -q; ls /var/lib/dgxspark-serving /etc/systemd/system /usr/local/lib"
        )
        assert "small" not in left
        assert "boot.json" in left and "kernels" in left and "dgxspark-serving.service" in left
    again = spark.site(**FIRST)
    assert (again.rc, again.changed) == (0, 0)
