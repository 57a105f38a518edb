# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _report_charts
from ansible_collections.dgxspark.serving.plugins.plugin_utils._report_charts import Chart, Line


def run(factor: float = 1.0, clients: tuple[int, ...] = (1, 4, 16)) -> dict:
    points = []
    for pair in ((128, 64), (512, 32)):
        for number in clients:
            result = {"completed": 4, "output_throughput": 100 * number * factor, "request_throughput": number * factor}
            for metric in ("ttft", "itl", "tpot", "e2el"):
                result.update({f"{stat}_{metric}_ms": value * number * factor for stat, value in (("p50", 2), ("p90", 3), ("p99", 5))})
            points.append({"input": pair[0], "output": pair[1], "concurrency": number, "requests": 4, "result": result})
    return {"points": points}


def test_charts() -> None:
    found = _report_charts.charts(run(), run(1.1, (1, 4)))
    assert [chart.title for chart in found[:3]] == ["Output throughput", "Requests", "Latency of a request, median"]
    assert [chart.group for chart in found[3:]] == ["128 tokens in, 64 tokens out"] * 3 + ["512 tokens in, 32 tokens out"] * 3
    assert [(line.name, line.earlier) for line in found[0].lines] == [
        ("128 in, 64 out", True), ("128 in, 64 out", False), ("512 in, 32 out", True), ("512 in, 32 out", False),
    ]  # fmt: skip
    assert found[0].lines[1].values == {1: 100, 4: 400, 16: 1600}
    assert {line.name: line.values[16] for line in found[3].lines if not line.earlier} == {"median": 32, "p90": 48, "p99": 80}


def test_nothing_measured() -> None:
    points = [{"input": 1, "output": 1, "concurrency": 1, "requests": 1, "result": None, "problem": "x"}]
    assert _report_charts.charts({"points": points}, None) == []


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (7, [0, 2, 4, 6, 8]),
        (99, [0, 20, 40, 60, 80, 100]),
        (1234, [0, 250, 500, 750, 1000, 1250]),
        (0.013, [0, 0.005, 0.01, 0.015]),
    ],
)
def test_ticks(top: float, expected: list[float]) -> None:
    assert _report_charts.ticks(top) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "top", "text"),
    [
        (0.0, 1.0, "0"),
        (0.25, 1.0, "0.25"),
        (250.0, 1000.0, "250"),
        (0.0, 20_000.0, "0"),
        (5000.0, 20_000.0, "5k"),
        (12_500.0, 20_000.0, "12.5k"),
    ],
)
def test_tick_text(value: float, top: float, text: str) -> None:
    assert _report_charts.tick_text(value, top) == text


@pytest.mark.parametrize(
    ("xs", "expected"),
    [([1, 4, 16], [1, 4, 16]), ([5], [5]), ([1, 2, 3, 4, 5, 6, 7, 8, 256], [1, 2, 3, 4, 6, 8, 256]), ([255, 256], [255, 256])],
)
def test_labels_do_not_overlap(xs: list[int], expected: list[int]) -> None:
    assert _report_charts.shown_xs(xs, 350, 17) == expected


def test_svg_is_whole() -> None:
    chart = Chart(
        "A & <b>", "ms", [Line("p50", 0, {1: 2.0, 4: 8.0}, True), Line("p50", 0, {1: 1.0, 4: 4.0, 16: 40.0}), Line("p99", 2, {4: 50.0})]
    )
    root = ET.fromstring(_report_charts.svg(chart).replace("<svg ", '<svg xmlns="" ', 1))
    assert root.get("aria-label") == "A & <b> over concurrent requests"
    groups = root.findall("g")
    assert [group.get("class") for group in groups] == ["c0 earlier", "c0", "c2"]  # the newest on top
    assert [len(group.findall("polyline")) for group in groups] == [1, 1, 0]
    titles = [element.text for element in root.iter("title")]
    assert titles == [
        "p50, earlier run: 2.00 ms at 1", "p50, earlier run: 8.00 ms at 4", "p50: 1.00 ms at 1", "p50: 4.00 ms at 4", "p50: 40.0 ms at 16", "p99: 50.0 ms at 4",
    ]  # fmt: skip
    spots = [tuple(map(float, spot.split(","))) for spot in groups[1].findall("polyline")[0].get("points", "").split()]
    assert spots == sorted(spots) and [y for _x, y in spots] == sorted((y for _x, y in spots), reverse=True)
    for text in root.iter("text"):
        assert 0 <= float(text.get("x", "")) <= _report_charts.WIDTH and 0 <= float(text.get("y", "")) <= _report_charts.HEIGHT


def test_one_point_stands_in_the_middle() -> None:
    text = _report_charts.svg(Chart("T", "ms", [Line("a", 0, {8: 3.0})]))
    (x,) = re.findall(r'<circle cx="([\d.]+)"', text)
    middle = _report_charts.LEFT + (_report_charts.WIDTH - _report_charts.LEFT - _report_charts.RIGHT) / 2
    assert float(x) == pytest.approx(middle)


def test_legend() -> None:
    text = _report_charts.legend(Chart("T", "ms", [Line("a<b", 0, {1: 1.0}), Line("a<b", 0, {1: 1.0}, True)]))
    assert re.findall(r"</svg>([^<]+)</span>", text) == ["a&lt;b", "earlier run"]
