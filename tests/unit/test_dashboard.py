# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Grafana dashboard of the role monitoring: whole, up to date, and asking only for metrics that are there (or need hardware)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "roles" / "monitoring" / "files" / "dashboard.json"
SEEN = ROOT / "tests" / "unit" / "fixtures" / "monitoring"
HARDWARE = "Needs hardware"
# Names that newer vLLM has no more; each stands behind an "or".
OLDER = {
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:time_per_output_token_seconds_bucket",
}
NAME = re.compile(r"\b(?:vllm:|ray_|node_|http_|up\b|DCGM_)[A-Za-z0-9_]*(?=\{)")


def dashboard() -> dict[str, t.Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def panels() -> list[tuple[str, dict[str, t.Any]]]:
    """(title of the row, panel)."""
    result, row = [], ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            result.append((row, panel))
    return result


def queries() -> list[tuple[str, str, str]]:
    """(title of the row, of the panel, query)."""
    return [(row, panel["title"], target["expr"]) for row, panel in panels() for target in panel["targets"]]


def seen() -> set[str]:
    """Names in recorded answers of /metrics: vLLM, Ray and the node exporter; "up" is Prometheus' own."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SEEN.glob("*.txt"))]
    return {"up"} | {match for text in texts for match in re.findall(r"^([A-Za-z_:][\w:]*)", text, re.MULTILINE)}


def test_it_is_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dashboard.py"), "--check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_panels_do_not_overlap() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, f"{panel['title']} lies on {cells.get((x, y))}"
                cells[x, y] = panel["title"]


def test_numbers_and_titles_are_unique() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    titles = [panel["title"] for panel in dashboard()["panels"]]
    assert sorted(set(ids)) == sorted(ids) and sorted(set(titles)) == sorted(titles)


def test_every_query_is_of_the_chosen_cluster() -> None:
    """Two gangs in one Prometheus must not be added up."""
    assert [title for _row, title, query in queries() if query.count("{") != query.count('cluster="$cluster"')] == []


def test_what_needs_hardware_says_why() -> None:
    texts = [panel["description"] for row, panel in panels() if row.startswith(HARDWARE)]
    assert texts and [text for text in texts if "eeds" not in text] == []


@pytest.mark.parametrize(("row", "title", "query"), queries())
def test_metrics_are_real(row: str, title: str, query: str) -> None:
    names = set(NAME.findall(query))
    assert names, query
    if row.startswith(HARDWARE):
        return
    assert names - seen() - OLDER == set()
    assert names - OLDER and all(name in query.partition(" or ")[2] for name in names & OLDER)


def test_variables_are_defined() -> None:
    defined = {entry["name"] for entry in dashboard()["templating"]["list"]}
    used = {name for name in re.findall(r"\$\{?(\w+)", FILE.read_text(encoding="utf-8")) if not name.startswith("__")}
    assert used == defined
