# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "benchmark"
SERVE = ["vllm", "serve", "/models/hub/snapshots/a", "--served-model-name", "m", "--port=30000"]
POINT = {"input": 128, "output": 64, "concurrency": 4, "requests": 16}


def recorded(name: str) -> dict:
    """What the program told last, recorded with vLLM 0.32 in the lab's image (the server was a stand-in that streams tokens)."""
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("concurrency", "lengths", "requests", "expected"),
    [
        ([4, 1], [{"input": 8, "output": 2}], 0, [(8, 2, 1, 16), (8, 2, 4, 16)]),
        ([16], [{"input": 8, "output": 2}], 0, [(8, 2, 16, 64)]),
        ([1, 16], [{"input": 8, "output": 2}], 10, [(8, 2, 1, 10), (8, 2, 16, 16)]),
        (["2"], [{"input": "8", "output": 2}, {"input": 4, "output": 4}], 5, [(8, 2, 2, 5), (4, 4, 2, 5)]),
        ([1, 1], [{"input": 8, "output": 2}, {"output": 2, "input": 8}], 5, [(8, 2, 1, 5)]),
    ],
)
def test_points(concurrency: list, lengths: list, requests: int, expected: list) -> None:
    found = _benchmark.points(concurrency, lengths, requests)
    assert [(p["input"], p["output"], p["concurrency"], p["requests"]) for p in found] == expected


@pytest.mark.parametrize(
    ("concurrency", "lengths", "found"),
    [
        ([0], [{"input": 8, "output": 2}], "spark_benchmark_concurrency 0"),
        ([True], [{"input": 8, "output": 2}], "spark_benchmark_concurrency True"),
        ([1], [{"input": 8}], "spark_benchmark_lengths {'input': 8}"),
        ([1], ["128"], "spark_benchmark_lengths '128'"),
        ([1], [{"input": -8, "output": 2}], "spark_benchmark_lengths {'input': -8, 'output': 2}"),
        ([], [{"input": 8, "output": 2}], "spark_benchmark_concurrency []"),
    ],
)
def test_points_that_cannot_be_meant(concurrency: list, lengths: list, found: str) -> None:
    with pytest.raises(Problem) as caught:
        _benchmark.points(concurrency, lengths)
    assert (caught.value.id, caught.value.found) == ("input", found)


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        ([{"input": 9, "output": 9}], 4, [(9, 9)]),  # what somebody asked for is not left out, it is refused
        ([], None, [(128, 128), (1024, 128)]),
        ([], 1024, [(128, 128)]),
        ([], 64, [(8, 8)]),
    ],
)
def test_lengths(given: list, limit: int | None, expected: list) -> None:
    assert [(p["input"], p["output"]) for p in _benchmark.lengths(given, limit)] == expected


@pytest.mark.parametrize(("limit", "found"), [(None, None), (192, None), (191, "128+64 tokens"), (100, "128+64 tokens")])
def test_what_is_too_long(limit: int | None, found: str | None) -> None:
    problem = _benchmark.too_long([POINT, {**POINT, "input": 36}], limit)
    assert (problem and (problem.id, problem.found)) == (found and ("benchmark-length", f"spark_benchmark_lengths {found}"))


@pytest.mark.parametrize("state", ["loading", "stopped", "old_service", "failed", "not_answering", "unknown", "ray_only"])
def test_nothing_to_measure(state: str) -> None:
    problem = _benchmark.not_serving({"state": state, "text": "because"})
    assert problem and problem.id == "benchmark-no-server"
    assert problem.found == f"{state.replace('_', ' ')}: because"


@pytest.mark.parametrize("state", ["serving", "degraded"])
def test_something_to_measure(state: str) -> None:
    assert _benchmark.not_serving({"state": state, "text": ""}) is None


@pytest.mark.parametrize(
    ("command", "tokenizer", "more"),
    [
        (SERVE, "/models/hub/snapshots/a", []),
        ([*SERVE, "--tokenizer", "/models/t"], "/models/t", []),
        ([*SERVE, "--tokenizer=/models/t", "--tokenizer-mode", "mistral"], "/models/t", ["--tokenizer-mode", "mistral"]),
        ([*SERVE, "--trust-remote-code"], "/models/hub/snapshots/a", ["--trust-remote-code"]),
        (["vllm", "serve", "--model", "/models/b"], "/models/b", []),
    ],
)
def test_arguments(command: list[str], tokenizer: str, more: list[str]) -> None:
    argv = _benchmark.arguments(POINT, {"url": "http://127.0.0.1:1", "model": "m", "command": command}, 7)
    assert argv[:6] == ["--base-url", "http://127.0.0.1:1", "--model", "m", "--tokenizer", tokenizer]
    assert argv[6 : 6 + len(more)] == more
    for words in (
        ["--dataset-name", "random"],
        ["--random-input-len", "128"],
        ["--random-output-len", "64"],
        ["--num-prompts", "16"],
        ["--max-concurrency", "4"],
        ["--seed", "7"],
        ["--metric-percentiles", "50,90,99"],
        ["--percentile-metrics", "ttft,tpot,itl,e2el"],
    ):
        place = argv.index(words[0])
        assert argv[place : place + 2] == words


def test_what_the_program_told() -> None:
    mark = "@dgxspark-benchmark "
    text = f'noise\n{mark}{{"kind": "progress", "done": 1}}\n{mark}broken\n{mark}[1]\n x{mark}{{"kind": "end"}}\n{mark}{{"kind": "end", "rc": 0}}\n'
    assert _benchmark.told(text) == [{"kind": "progress", "done": 1}, {"kind": "end", "rc": 0}]


GOOD = {"rc": 0, "late": False, "result": {"completed": 16}, "seconds": 3.0, "tail": ""}


def trace(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "x.py", line 1\n{last}\n'


@pytest.mark.parametrize(
    ("end", "problem", "words"),
    [
        (GOOD, None, ""),
        (None, "benchmark-failed", "no answer of the tool (it broke)"),
        ({**GOOD, "late": True, "result": None, "rc": -15}, "benchmark-failed", "not done after 9 s, ended"),
        (
            {**GOOD, "rc": 127, "result": None, "tail": "vllm: No such file or directory"},
            "benchmark-tool",
            "vllm: No such file or directory",
        ),
        (
            {**GOOD, "rc": 1, "result": None, "tail": trace("ModuleNotFoundError: No module named 'pandas'")},
            "benchmark-tool",
            "does not run: No module named 'pandas'",
        ),
        (
            {**GOOD, "rc": 2, "result": None, "tail": "vllm bench: error: argument {a}: invalid choice: 'serve' (choose from 'latency')"},
            "benchmark-tool",
            "invalid choice: 'serve'",
        ),
        (
            {**GOOD, "rc": 2, "result": None, "tail": "usage: vllm\nvllm: error: unrecognized arguments: --max-concurrency 4"},
            "benchmark-tool",
            "unrecognized arguments: --max-concurrency 4",
        ),
        (
            {**GOOD, "rc": 1, "result": None, "tail": trace("ValueError: Initial test run failed") + "\r 0%| 0/16\n"},
            "benchmark-failed",
            "the tool ended with code 1: ValueError: Initial test run failed",
        ),
        # a library that is missed and done without is no reason
        ({**GOOD, "tail": "WARNING: ImportError: no flashinfer"}, None, ""),
        ({**GOOD, "result": {"completed": 0}}, "benchmark-failed", "none of 16 requests was answered"),
    ],
)
def test_failures(end: dict | None, problem: str | None, words: str) -> None:
    found = _benchmark.failure(end, POINT, 9.0, "it broke")
    assert (found.id if found else None) == problem
    assert words in (found.found if found else "")


def test_a_recorded_point() -> None:
    """128+64 tokens, 4 at a time."""
    end = recorded("end")
    assert any(isinstance(value, list) for value in end["result"].values())
    assert not any(isinstance(value, list) for value in (_benchmark.kept(end["result"]) or {}).values())
    assert _benchmark.figures(_benchmark.kept(end["result"]) or {}) == _benchmark.figures(end["result"])
    assert _benchmark.failure(end, POINT, 60) is None
    found = _benchmark.figures(end["result"])
    assert sorted(found) == sorted(
        [
            "output_throughput", "total_token_throughput", "request_throughput", "duration", "completed", "failed",
            *(f"{stat}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for stat in ("mean", "p50", "p90", "p99")),
        ]
    )  # fmt: skip
    assert (found["completed"], found["failed"]) == (16, 0)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"p50_{metric}_ms"] <= found[f"p90_{metric}_ms"] <= found[f"p99_{metric}_ms"]
    assert found["output_throughput"] == pytest.approx(64 * 16 / found["duration"], rel=1e-6)


@pytest.mark.parametrize("name", ["no-module", "refused", "late"])
def test_recorded_failures(name: str) -> None:
    given = recorded(name)
    found = _benchmark.failure(given["end"], POINT, 4)
    assert found and (found.id, found.found) == (given["problem"], given["found"])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"completed": 3, "num_prompts": 5}, {"completed": 3, "failed": 2}),  # vLLM 0.10 does not count what failed
        ({"median_ttft_ms": 4.5}, {"p50_ttft_ms": 4.5}),
        ({"p50_ttft_ms": float("nan"), "duration": True, "p99_ttft_ms": "x"}, {}),
    ],
)
def test_figures(result: dict, expected: dict) -> None:
    assert _benchmark.figures(result) == expected


@pytest.mark.parametrize(
    ("name", "now", "before", "part", "verdict"),
    [
        ("output_throughput", 110, 100, 0.1, "better"),
        ("output_throughput", 90, 100, -0.1, "worse"),
        ("p99_ttft_ms", 110, 100, 0.1, "worse"),
        ("p99_ttft_ms", 90, 100, -0.1, "better"),
        ("p99_ttft_ms", 102, 100, 0.02, ""),
        ("p99_ttft_ms", 102, None, None, ""),
        ("p99_ttft_ms", 102, 0, None, ""),
    ],
)
def test_change(name: str, now: float, before: float | None, part: float | None, verdict: str) -> None:
    found = _benchmark.change(now, before)
    assert found == (None if part is None else pytest.approx(part))
    assert _benchmark.better(name, found) == verdict


def test_secrets_are_left_out() -> None:
    assert _benchmark.public_command(["vllm", "serve", "m", "--api-key", "geheim", "--api-key=geheim", "--port", "1"]) == [
        "vllm", "serve", "m", "--api-key", "(removed)", "--api-key=(removed)", "--port", "1",
    ]  # fmt: skip
    words = ["--hf-token", "geheim", "--max-num-batched-tokens", "8192", "--hf-overrides", '{"token": "geheim"}', "--x=hf_abcdefghij"]
    found = _benchmark.public_command(words)
    assert "geheim" not in str(found) and "hf_abcdefghij" not in str(found) and found[:4:2] == ["--hf-token", "--max-num-batched-tokens"]
    assert found[3] == "8192"
    assert _benchmark.public_env(["VLLM_PROXY=http://me:geheim@proxy:1"]) == {"VLLM_PROXY": "http://(removed)@proxy:1"}
    env = ["VLLM_API_KEY=geheim", "HF_TOKEN=geheim", "VLLM_HOST_IP=1.2.3.4", "PATH=/bin", "NCCL_IB_HCA==a:1,b:1", "MY_PASSWORD=geheim"]
    assert _benchmark.public_env(env) == {"NCCL_IB_HCA": "=a:1,b:1", "VLLM_HOST_IP": "1.2.3.4"}


@pytest.mark.parametrize(
    ("stamp", "model", "name", "expected"),
    [
        ("2026-11-30T19:15:00+00:00", "Qwen/Qwen3.5-122B-A10B-FP8", "", "20261130T191500Z-qwen3.5-122b-a10b-fp8"),
        ("2026-11-30T19:15:00+00:00", "/srv/models/My Model/", "With New NCCL!", "20261130T191500Z-my-model-with-new-nccl"),
        ("2026-11-30T19:15:00+00:00", "a/..", "../../etc", "20261130T191500Z-model-etc"),
    ],
)
def test_run_id(stamp: str, model: str, name: str, expected: str) -> None:
    assert _benchmark.run_id(stamp, model, name) == expected


def run(number: int, model: str = "a/m", complete: bool = True, name: str = "") -> dict:
    stamp = f"2026-11-{number:02d}T00:00:00+00:00"
    return {"schema": 1, "id": f"r{number}", "name": name, "date": stamp, "complete": complete, "config": {"model": model}, "points": []}


RUNS = [run(1), run(3, name="before"), run(2, name="before"), run(4, "b/m"), run(5, complete=False), run(9)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("", "r3"), ("none", None), ("r1", "r1"), ("before", "r3"), ("r4", "r4"), ("r5", "r5")],
)
def test_previous(wanted: str, expected: str | None) -> None:
    found = _benchmark.previous(RUNS, "a/m", wanted, "2026-11-08T00:00:00+00:00")
    assert (found and found["id"]) == expected


def test_no_previous() -> None:
    assert _benchmark.previous([], "a/m", "", "2026") is None
    with pytest.raises(Problem, match=r"'after'.*r5, r9"):
        _benchmark.previous(RUNS, "a/m", "after", "2026")


@pytest.mark.parametrize(
    ("document", "expected"),
    [(run(1), True), ([], False), ({"schema": 2, "id": "a", "points": []}, False), ({"date": "1", "backend": "openai"}, False)],
)
def test_is_run(document: object, expected: bool) -> None:
    assert _benchmark.is_run(document) is expected


def test_differences() -> None:
    before = {"versions": {"vllm": "1"}, "command": ["a", "b"], "started_at": "1", "nodes": [{"node": "s1", "driver": "5"}], "gone": 1}
    now = {
        "versions": {"vllm": "2"},
        "command": ["a", "b"],
        "started_at": "2",
        "nodes": [{"node": "s1", "driver": "6"}, {"node": "s2", "driver": "6"}],
    }
    assert _benchmark.differences(now, before) == [
        ("versions.vllm", "1", "2"), ("nodes.s1.driver", "5", "6"), ("nodes.s2.driver", "", "6"), ("gone", "1", ""),
    ]  # fmt: skip
    assert _benchmark.differences(now, now) == []


def test_configuration() -> None:
    row = {
        "node": "spark-1", "role": "head", "reachable": True, "memory": {"total": 9}, "image": {"fingerprint": "5f", "reference": "r", "id": "i"},
        "fabric": {"address": "192.168.200.12", "interface": "e", "rails": 2, "rdma": True, "mtu": 9000},
    }  # fmt: skip
    down = {**row, "node": "spark-2", "role": "worker", "reachable": False, "memory": None, "image": None}
    status = {"model": "a/m", "revision": "c0", "served_model_name": "m", "max_model_len": 1024}
    look = {
        "command": SERVE,
        "env": {"A": "1"},
        "image": "r",
        "image_id": "i",
        "digests": ["r@sha256:1"],
        "versions": {"vllm": "0.32"},
        "started_at": "t",
    }
    facts = {**gang.node(name="spark-1"), "kernel": "6.17"}
    found = _benchmark.configuration(status, gang.settings(), look, [row, down], [facts])
    assert (found["model"], found["revision"], found["image"]["fingerprint"], found["image"]["digests"]) == (
        "a/m",
        "c0",
        "5f",
        ["r@sha256:1"],
    )
    assert (found["command"], found["versions"], found["executor"]) == (SERVE, {"vllm": "0.32"}, "ray")
    assert [(n["node"], n["kernel"], n["memory"]) for n in found["nodes"]] == [("spark-1", "6.17", 9), ("spark-2", None, None)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0.00"), (0.01234, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12 346")]
)
def test_number(value: float | None, text: str) -> None:
    assert _benchmark.number(value) == text


@pytest.mark.parametrize(("part", "text"), [(None, ""), (0.08, "+8.0 %"), (-0.031, "-3.1 %"), (1.5, "+150 %")])
def test_percent(part: float | None, text: str) -> None:
    assert _benchmark.percent(part) == text


def test_table() -> None:
    result = {"completed": 1, "output_throughput": 110.0, "request_throughput": 1.5, "p50_ttft_ms": 20.0, "p99_ttft_ms": 30.0}
    now = {"points": [{**POINT, "result": result}, {**POINT, "concurrency": 8, "problem": "it broke", "result": None}]}
    before = {"points": [{**POINT, "result": {**result, "output_throughput": 100.0}}]}
    lines = _benchmark.table(now, before)
    assert lines[1][:8] == ["128", "64", "4", "110", "+10 %", "1.50", "20.0", "30.0"]
    assert lines[2][:5] == ["128", "64", "8", "failed", ""]
    assert {len(line) for line in lines} == {len(_benchmark.HEADINGS)}
