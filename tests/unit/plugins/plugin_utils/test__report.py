# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import html.parser
import re
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _report
from ansible_collections.dgxspark.serving.tests.unit.plugins.plugin_utils import test__report_charts as charts

CONFIG = {
    "model": "a/<m>",
    "revision": "c0",
    "served_model_name": "m",
    "max_model_len": 1024,
    "image": {"reference": "r:1", "fingerprint": "5f", "id": "i", "digests": ["r@sha256:1"]},
    "versions": {"vllm": "0.32.0"},
    "executor": "ray",
    "command": ["vllm", "serve", "/m", "--x", "a b"],
    "environment": {"VLLM_HOST_IP": "1.2.3.4"},
    "started_at": "2026-11-30T18:00:00Z",
    "nodes": [
        {
            "node": "spark-1",
            "role": "head",
            "fabric": {"address": "1.2.3.4", "interface": "e", "rails": 2, "rdma": True, "mtu": 9000},
            "memory": 2**37,
            "gpus": ["NVIDIA GB10"],
        },
        {"node": "spark-2", "role": "worker", "fabric": {}, "memory": None, "gpus": []},
    ],
}  # fmt: skip


def run(name: str = "r2", **more: t.Any) -> dict[str, t.Any]:
    config = {**CONFIG, **more.pop("config", {})}
    return {
        "id": name,
        "name": "",
        "date": "2026-11-30T19:15:00+00:00",
        "complete": True,
        "notes": [],
        "config": config,
        **charts.run(),
        **more,
    }


class Checker(html.parser.HTMLParser):
    """Every element is closed in its order, and nothing is loaded from elsewhere."""

    EMPTY = {"meta", "br", "circle", "rect", "path", "line", "polyline"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.foreign += [f"{tag} {name}" for name, value in attrs if name in ("src", "href", "xlink:href") or "//" in (value or "")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", text, flags=re.DOTALL))


def test_one_file_that_needs_no_other() -> None:
    text = _report.page(run(), run("r1"))
    checker = check(text)
    assert checker.foreign == []
    assert not {"script", "link", "img", "iframe"} & set(checker.seen)
    assert "url(" not in text and "@import" not in text
    assert checker.seen.count("figure") == 9
    assert "prefers-color-scheme: dark" in text and "@LIGHT@" not in text and "@SERIES@" not in text


def test_what_it_says() -> None:
    text = plain(_report.page(run(), run("r1", config={"versions": {"vllm": "0.31.0"}}, **charts.run(0.5))))
    for words in (
        "a/&lt;m&gt;",
        "2026-11-30 19:15 UTC · 2 nodes · vLLM 0.32.0 · r2",
        "Compared with r1",
        "Most output tokens per second 1 600 tokens/s 128 in, 64 out, 16 at a time +100 % against the earlier run",
        "128 tokens in, 64 tokens out",
        "r@sha256:1",
        "spark-1: head, 1.2.3.4 on e (2 RDMA, MTU 9000), NVIDIA GB10, 128.0 GiB",
        "spark-2: worker",
        "vllm serve /m --x &#x27;a b&#x27;",
        "What changed since r1",
        "versions.vllm 0.31.0 now 0.32.0",
    ):
        assert words in text


def test_better_and_worse_are_told_apart() -> None:
    text = _report.page(run(), run("r1", **charts.run(0.5)))
    assert "<small class=better>+100 %</small>" in text  # throughput grew
    assert "<small class=worse>+100 %</small>" in text  # so did the times
    assert "class=better" not in _report.page(run(), run("r1"))


def test_without_an_earlier_run() -> None:
    text = _report.page(run(), None)
    check(text)
    assert "earlier" not in plain(text) and "What changed" not in text


def test_what_went_wrong_is_told() -> None:
    broken = run(complete=False, notes=["Other <requests> were there"])
    broken["points"][0].update(problem="128+64 tokens: <late>", result=None)
    broken["points"][1]["result"]["failed"] = 3
    text = _report.page(broken, None)
    check(text)
    for words in ("Not complete", "Other &lt;requests&gt; were there", "128+64 tokens: &lt;late&gt;", "3 failed"):
        assert words in text


@pytest.mark.parametrize("clients", [(1,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_any_number_of_points(clients: tuple[int, ...]) -> None:
    check(_report.page(run(**charts.run(1.0, clients)), None))
