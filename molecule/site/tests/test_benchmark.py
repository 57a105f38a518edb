# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""benchmark.yml on the serving pair: two small runs, the second compared with the first, and nothing changed on the nodes."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
import spark

SMALL = {"spark_benchmark_lengths": [{"input": 16, "output": 8}], "spark_benchmark_requests": 4}


class Seen(t.NamedTuple):
    folder: Path
    before: dict[str, str]
    runs: list[spark.Run]
    after: dict[str, str]

    def documents(self) -> list[dict[str, t.Any]]:
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("*.json"))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("benchmarks")
    before = spark.everything()
    runs = [
        spark.site(playbook="benchmark.yml", spark_benchmark_dir=str(folder), spark_benchmark_concurrency=clients, **SMALL)
        for clients in ([1, 2], [2])
    ]
    return Seen(folder, before, runs, spark.everything())


def test_both_end_well(seen: Seen) -> None:
    assert [run.rc for run in seen.runs] == [0, 0]
    assert [run.changed for run in seen.runs] == [1, 1]  # the files on the controller
    assert all("Traceback" not in run.output for run in seen.runs)
    assert len(list(seen.folder.glob("*.html"))) == len(list(seen.folder.glob("*.png"))) == 2


def test_nothing_changes_on_the_nodes(seen: Seen) -> None:
    assert seen.after == seen.before
    for name in ("spark-vllm", "spark-ray"):
        assert "dgxspark-benchmark" not in spark.on(spark.HEAD, "docker", "exec", name, "ls", "/tmp")
    spark.answers()


def test_the_figures(seen: Seen) -> None:
    first, second = seen.documents()
    assert [point["concurrency"] for point in first["points"]] == [1, 2] and first["complete"]
    for point in first["points"] + second["points"]:
        result = point["result"]
        assert (result["completed"], result["total_output_tokens"]) == (4, 4 * 8)
        # Random tokens are turned into text and back, and the seed is new in every run: a prompt comes back a few tokens longer or
        # shorter (5 of 64 were seen). What a length means is told by a point's neighbours, which differ by a factor of two at least.
        assert 0.75 <= result["total_input_tokens"] / (4 * 16) <= 1.25
        for metric in ("ttft", "tpot", "itl", "e2el"):
            assert 0 < result[f"p50_{metric}_ms"] <= result[f"p99_{metric}_ms"]


def test_the_configuration(seen: Seen) -> None:
    config = seen.documents()[0]["config"]
    settings = spark.settings()
    assert (config["model"], config["served_model_name"]) == (settings["spark_model"],) * 2
    assert len(config["revision"]) == 40 and len(config["image"]["fingerprint"]) == 64
    assert config["image"]["digests"][0].partition("@")[2].startswith("sha256:")
    assert {"python", "ray", "torch", "vllm"} <= set(config["versions"])
    assert "--tensor-parallel-size" in config["command"] and config["environment"]["VLLM_HOST_IP"] == spark.NODES[spark.HEAD]
    assert [(node["node"], node["fabric"]["address"]) for node in config["nodes"]] == list(spark.NODES.items())
    assert all(node["kernel"] and node["docker"] and node["gpus"] for node in config["nodes"])


def test_the_second_is_compared_with_the_first(seen: Seen) -> None:
    first = seen.documents()[0]["id"]
    assert f"CHANGE: against {first}" in seen.runs[1].text
    assert "no earlier run of this model" in seen.runs[0].text
    newest = max(seen.folder.glob("*.html")).read_text(encoding="utf-8")
    assert f"Compared with {first}" in newest and newest.count("<figure>") == 6


def test_check_mode_tells_what_would_run(seen: Seen) -> None:
    files = sorted(path.name for path in seen.folder.iterdir())
    run = spark.site("--check", playbook="benchmark.yml", spark_benchmark_dir=str(seen.folder), **SMALL)
    assert (run.rc, run.changed) == (0, 0)
    assert run.output.count("vllm bench serve --base-url") == 3
    assert sorted(path.name for path in seen.folder.iterdir()) == files
