# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real Prometheus with the files of monitoring.yml: it reaches every target, and every panel of the dashboard has data."""

from __future__ import annotations

import concurrent.futures
import json
import math
import typing as t
from pathlib import Path

import pytest
import spark
import watching

HARDWARE = "Needs hardware"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this machine reaches the lab's nodes: their fabric addresses (Ansible goes through published ports)."""
    path = tmp_path_factory.mktemp("inventory") / "hosts.json"
    hosts = {node: {"monitoring_address": address} for node, address in spark.NODES.items()}
    path.write_text(json.dumps({"sparks": {"hosts": hosts}}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def exporters() -> t.Iterator[None]:
    with watching.node_exporters(), watching.ray_with_metrics():
        yield


@pytest.fixture(scope="module")
def written(addresses: Path, exporters: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, spark.Run]:
    folder = tmp_path_factory.mktemp("monitoring") / "files"
    run = monitoring(addresses, folder)
    assert run.rc == 0
    return folder, run


def monitoring(addresses: Path, folder: Path, *arguments: str) -> spark.Run:
    return spark.site(
        *arguments,
        inventory=(spark.LAB, addresses),
        playbook="monitoring.yml",
        monitoring_dir=str(folder),
        monitoring_scrape_interval="1s",
        monitoring_ray_port=watching.RAY_METRICS,
    )


@pytest.fixture(scope="module")
def server(written: tuple[Path, spark.Run], tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[watching.Prometheus]:
    """Prometheus that has seen some requests; the same text again, so that the prefix cache has a hit."""
    data = tmp_path_factory.mktemp("prometheus") / "data"
    with watching.prometheus(written[0] / "prometheus.yml", data) as running:
        assert running.wait('up{job="vllm"} == 1')
        body = {"model": spark.settings()["spark_model"], "messages": [{"role": "user", "content": "Say hello. " * 30}], "max_tokens": 24}
        for dummy in range(3):  # a rate needs samples before and after
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _n: spark.call("/v1/chat/completions", body), range(2)))
        running.wait("sum(increase(vllm:request_success_total[30s])) >= 2")
        yield running


def test_a_second_run_changes_nothing(written: tuple[Path, spark.Run], addresses: Path) -> None:
    assert written[1].changed == 3 + 1  # the directory, and three files
    again = monitoring(addresses, written[0], "--check")
    assert (again.rc, again.changed) == (0, 0)


def test_every_target_answers(server: watching.Prometheus) -> None:
    expected = {("vllm", "spark-1"), *((job, node) for job in ("ray", "node") for node in spark.NODES)}
    for job, node in sorted(expected):
        assert server.wait(f'up{{job="{job}", node="{node}", cluster="sparks"}} == 1'), (job, node)
    targets = server.get("/api/v1/targets", state="active")["activeTargets"]
    assert {(found["labels"]["job"], found["labels"]["node"]) for found in targets} == expected


def queries() -> list[tuple[str, str, str]]:
    """(row, panel and legend, query as Grafana would send it)."""
    path = spark.ROOT / "roles" / "monitoring" / "files" / "dashboard.json"
    result, row = [], ""
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "30s").replace("$__range", "30s")
            for name, value in (("$cluster", "sparks"), ("$model", ".*"), ("$node", ".*")):
                text = text.replace(name, value)
            result.append((row, f"{panel['title']}: {target['legendFormat']}", text))
    return result


@pytest.mark.parametrize(("row", "panel", "query"), queries())
def test_panel(server: watching.Prometheus, row: str, panel: str, query: str) -> None:
    """Numbers; for what needs hardware, at least a query that Prometheus understands."""
    if row.startswith(HARDWARE):
        server.value(query)
        return
    found = server.wait(query)
    assert found, f"no data for {panel}: {query}"
    assert any(math.isfinite(float(series["value"][1])) for series in found), f"no number for {panel}: {found}"


def test_the_requests_are_counted(server: watching.Prometheus) -> None:
    (total,) = server.value('sum(vllm:request_success_total{cluster="sparks"})')
    assert float(total["value"][1]) >= 6


def test_off_without_a_directory() -> None:
    run = spark.site(playbook="monitoring.yml")
    assert (run.rc, run.changed) == (0, 0)
    assert "monitoring is off: -e monitoring_dir=/path turns it on" in run.text
