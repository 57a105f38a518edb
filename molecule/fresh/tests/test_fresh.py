# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""``--check --diff`` before the first real run: it tells what would happen, and nothing happens."""

from __future__ import annotations

import re

import pytest
import spark


@pytest.fixture(scope="module")
def observed() -> tuple[dict[str, str], spark.Run, dict[str, str]]:
    """(the nodes before, the run, the nodes after)."""
    before = spark.everything()
    run = spark.site("--check", "--diff")
    return before, run, spark.everything()


def test_it_does_not_fail(observed: tuple[dict[str, str], spark.Run, dict[str, str]]) -> None:
    run = observed[1]
    assert run.rc == 0
    assert run.failures == []
    assert "Traceback" not in run.output
    assert all(counts["changed"] > 0 for counts in run.recap.values())


def test_nothing_changes_on_the_nodes(observed: tuple[dict[str, str], spark.Run, dict[str, str]]) -> None:
    before, _run, after = observed
    assert after == before
    spark.old_service_answers()


def test_it_lists_what_would_happen(observed: tuple[dict[str, str], spark.Run, dict[str, str]]) -> None:
    """The summary: each step with its node, in the order of the stages."""
    text = observed[1].text
    image = re.escape(spark.settings()["spark_image"])
    steps = [
        rf"spark-1: would pull {image}",
        r"spark-1: would download \d+ files \([\d.]+ [KM]i?B\) of sparklab/tiny-qwen3 at [0-9a-f]{12}",
        rf"spark-2: would pull {image} from the head",
        r"spark-2: would copy \d+ files \([\d.]+ [KM]i?B\) of sparklab/tiny-qwen3 at [0-9a-f]{12} from the head",
        r"spark-1: would stop container glm-sglang \(127\.0\.0\.1:30000\)",
        r"spark-2: would stop container glm-sglang \(127\.0\.0\.1:30000\)",
        r"spark-1: would create container spark-ray: .*?ray start --block --node-ip-address=192\.168\.200\.12 --head",
        r"spark-2: would create container spark-ray: .*?ray start --block --node-ip-address=192\.168\.200\.13 --address=192\.168\.200\.12:6379",
        r"spark-1: would create container spark-vllm: .*?vllm serve /models/hub/",
    ]
    summary = text[text.rindex("would:") :]
    places = []
    for step in steps:
        found = re.search(step, summary)
        assert found, f"{step} is not in: {summary}"
        places.append(found.start())
    assert places == sorted(places)


def test_the_diff_shows_the_containers(observed: tuple[dict[str, str], spark.Run, dict[str, str]]) -> None:
    output = observed[1].output
    for name in ("spark-1: spark-ray", "spark-2: spark-ray", "spark-1: spark-vllm"):
        assert f"+++ after: {name} as planned" in output
    for line in (
        "+privileged: false",
        "+restart_policy: 'no'",
        "+pid_mode: container:spark-ray",
        f"+  VLLM_HOST_IP: {spark.NODES[spark.WORKER]}",
    ):
        assert line in output


def test_the_diff_shows_what_is_stopped_and_fetched(observed: tuple[dict[str, str], spark.Run, dict[str, str]]) -> None:
    output = observed[1].output
    assert output.count("-container glm-sglang: running") == 2
    assert output.count("+container glm-sglang: stopped") == 2
    assert "+    reference: " + spark.settings()["spark_image"] in output
    assert len(re.findall(r"^\+ +files: \d+", output, re.MULTILINE)) == 2


def test_nothing_to_measure() -> None:
    """benchmark.yml refuses while only the old service serves."""
    spark.refused(
        spark.site(playbook="benchmark.yml"), spark.HEAD, "old service: container glm-sglang holds the API port", "site.yml starts it"
    )
