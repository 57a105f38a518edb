# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import datetime
import json
import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import serving_benchmark
from ansible_collections.dgxspark.serving.plugins.module_utils import _status
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

MORE = {
    "benchmark_concurrency": [1, 2],
    "benchmark_lengths": [{"input": 8, "output": 4}],
    "benchmark_requests": 4,
    "benchmark_timeout": 60,
    "benchmark_name": "",
    "benchmark_compare": "",
}
LOOK = {
    "command": ["vllm", "serve", "/m"],
    "env": {},
    "image": "r",
    "image_id": "i",
    "digests": [],
    "versions": {"vllm": "0.32"},
    "started_at": "",
    "error": "",
}
FIGURES = {
    "completed": 4,
    "failed": 0,
    "output_throughput": 10.0,
    "request_throughput": 2.0,
    "p50_ttft_ms": 5.0,
    "p50_itl_ms": 2.0,
    "p99_itl_ms": 3.0,
}
END = {"rc": 0, "late": False, "result": FIGURES, "seconds": 1.0, "tail": ""}


def rows(healthy=True):
    def row(name, head, server):
        container = gang.container("spark-vllm" if head else "spark-ray", labels={"dgxspark.serving": "1", "dgxspark.serving.model": "a/m"})
        node = gang.node(containers=[container, gang.container("spark-ray", labels={"dgxspark.serving": "1"})] if head else [container])
        node["memory"] = {"total": 8, "available": 4}
        choice = gang.fabric(gang.ADDRESSES[name], rdma=True)
        return _status.node_row(name, head, gang.ADDRESSES[name], gang.settings(), node, choice, "", server)

    table = {"nodes": [{"address": address, "alive": True} for address in list(gang.ADDRESSES.values())[:2]], "ray": "2"}
    server = {"healthy": healthy, "models": [""], "max_model_len": 64, "metrics": [], "ray": table, "stage": "weights"}
    return [row("spark-2", False, None), row("spark-1", True, server)]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(answers, **settings): the result; ``answers`` are what measuring gives, one after the other."""
    monkeypatch.setattr(serving_benchmark.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(serving_benchmark._report_png, "draw", lambda charts, title, path: "no PNG: not here")
    moments = iter(range(100))
    monkeypatch.setattr(serving_benchmark, "now", lambda: datetime.datetime(2026, 11, 30, 12, next(moments), tzinfo=datetime.timezone.utc))

    def run(answers=(), check=False, healthy=True, look=None, **settings):
        look = LOOK if look is None else look
        run.printed, run.jobs, waiting = [], [], iter(answers)
        monkeypatch.setattr(serving_benchmark.display, "display", lambda text, color=None: run.printed.append(text))
        monkeypatch.setattr(serving_benchmark.display, "warning", lambda text: run.printed.append(f"WARNING {text}"))
        plugin = serving_benchmark.ActionModule.__new__(serving_benchmark.ActionModule)
        given = {**gang.settings(), **MORE, "benchmark_dir": str(tmp_path / "runs"), **settings}
        plugin._task = types.SimpleNamespace(args={"settings": given, "rows": rows(healthy), "node": "spark-1"}, check_mode=check)
        plugin._connection = types.SimpleNamespace(exec_command=lambda *args, **more: (1, b"", b""))

        def execute(module_name, module_args, task_vars):
            if module_args["step"] == "look":
                return {"server": look}
            run.jobs.append(module_args["job"])
            answer = next(waiting)
            if isinstance(answer, Exception):
                raise answer
            return {"end": answer, "said": "", "healthy": answer is not None} if answer is None or "rc" in answer else answer

        plugin._execute_module = execute
        return plugin.run(None, {"inventory_hostname": "spark-1"})

    run.folder = tmp_path / "runs"
    return run


def files(run):
    return sorted(path.name for path in run.folder.iterdir()) if run.folder.exists() else []


def test_a_sweep(run):
    result = run([END, END], benchmark_name="first")
    assert result["changed"] is True and not result.get("failed")
    assert files(run) == ["20261130T120000Z-m-first.html", "20261130T120000Z-m-first.json"]
    kept = json.loads((run.folder / "20261130T120000Z-m-first.json").read_text())
    assert kept == json.loads(json.dumps(result["run"]))
    assert kept["complete"] is True
    assert [(p["concurrency"], p["result"]["completed"]) for p in kept["points"]] == [(1, 4), (2, 4)]
    assert kept["config"]["command"] == ["vllm", "serve", "/m"] and kept["config"]["versions"]["vllm"] == "0.32"
    assert [node["node"] for node in kept["config"]["nodes"]] == ["spark-1", "spark-2"]
    seeds = [job["argv"][job["argv"].index("--seed") + 1] for job in run.jobs]
    assert len(set(seeds)) == 2
    shown = "\n".join(run.printed)
    assert "point 2 of 2, 8+4 tokens, 2 at a time" in shown and "no PNG: not here" in shown and "no earlier run" in shown


def test_the_second_run_is_compared_with_the_first(run):
    first = run([END, END])
    second = run([{**END, "result": {**FIGURES, "output_throughput": 12.0}}, END])
    assert f"CHANGE: against {first['run']['id']}" in "\n".join(run.printed)
    assert "+20 %" in "\n".join(run.printed)
    with open(second["report"], encoding="utf-8") as handle:
        assert f"Compared with {first['run']['id']}" in handle.read()
    seeds = {tuple(point["argv"]) for point in first["run"]["points"]} & {tuple(point["argv"]) for point in second["run"]["points"]}
    assert seeds == set()  # the same prompts would be answered from the prefix cache
    third = run([END, END], benchmark_compare="none")
    with open(third["report"], encoding="utf-8") as handle:
        assert "Compared with" not in handle.read()


def test_check_mode_measures_nothing(run):
    result = run(check=True)
    assert result["changed"] is False and len(result["would"]) == 2
    assert result["would"][0].startswith("vllm bench serve --base-url http://127.0.0.1:30000 --model")
    assert run.jobs == [] and files(run) == []


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"healthy": False}, "benchmark-no-server"),
        ({"benchmark_lengths": [{"input": 64, "output": 4}]}, "benchmark-length"),
        ({"benchmark_compare": "other"}, "benchmark-previous"),
        ({"benchmark_concurrency": [0]}, "input"),
        ({"look": {**LOOK, "error": "no python3"}}, "benchmark-tool"),
        ({"benchmark_dir": "/proc/nothing"}, "benchmark-files"),
    ],
)
def test_refused_before_anything_is_measured(run, more, problem):
    result = run(**more)
    assert (result["failed"], result["problem"]["id"], result["problem"]["node"]) == (True, problem, "spark-1")
    assert run.jobs == [] and files(run) == []


def test_a_point_that_fails_is_told_at_the_end(run):
    late = {**END, "late": True, "result": None, "rc": -15}
    result = run([late, END])
    assert (result["failed"], result["problem"]["id"], result["changed"]) == (True, "benchmark-failed", True)
    assert "8+4 tokens, 1 at a time: not done after 60 s, ended (what was measured is in" in result["msg"]
    kept = json.loads((run.folder / "20261130T120000Z-m.json").read_text())
    assert kept["complete"] is False and "not done after 60 s" in kept["points"][0]["problem"]
    assert kept["points"][1]["result"]["completed"] == 4
    assert "not done after 60 s" in (run.folder / "20261130T120000Z-m.html").read_text()


def test_a_server_that_died_ends_the_sweep(run):
    result = run([END, None], benchmark_concurrency=[1, 2, 3])
    assert (result["failed"], result["problem"]["id"]) == (True, "benchmark-failed")
    assert len(run.jobs) == 2
    assert "20261130T120000Z-m.html" in files(run)


def test_without_the_tool_nothing_more_is_tried(run):
    result = run([{**END, "rc": 1, "result": None, "tail": "ModuleNotFoundError: No module named 'pandas'"}])
    assert result["problem"]["id"] == "benchmark-tool" and "No module named 'pandas'" in result["msg"]
    assert len(run.jobs) == 1 and [name for name in files(run) if name.endswith(".html")] == []


def test_a_connection_that_is_lost(run):
    result = run([END, AnsibleConnectionFailure("Connection reset")])
    assert (result["failed"], result["problem"]["id"], result["changed"]) == (True, "benchmark-failed", True)
    assert "no SSH connection (Connection reset)" in result["msg"]


def test_other_files_are_no_runs(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.txt").write_text("x")
    (tmp_path / "d.json").write_text('{"schema": 1, "id": "d", "points": []}')
    assert [run["id"] for run in serving_benchmark.read_runs(str(tmp_path))] == ["d"]
    assert serving_benchmark.read_runs(str(tmp_path / "none")) == []
