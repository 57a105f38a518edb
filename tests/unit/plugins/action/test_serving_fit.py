# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import serving_fit
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FIXTURES = gang.ROOT / "tests" / "unit" / "fixtures" / "fit"
CONFIG = str(FIXTURES / "qwen3.5-122b-a10b-fp8.config.json")
INDEX = str(FIXTURES / "qwen3.5-122b-a10b-fp8.index.json")
WEIGHTS = 127163011832
GROUPS = {"ray_head": ["spark-1"], "ray_workers": ["spark-2"]}


@pytest.fixture
def run(monkeypatch):
    """run(answers, values, **arguments): (result, printed, calls). ``answers``: of modules by name, of uri by the address's end."""
    monkeypatch.setattr(serving_fit.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    shown = []
    monkeypatch.setattr(serving_fit.display, "display", shown.append)

    def run(answers=None, values=None, **arguments):
        shown.clear()
        calls = []
        plugin = serving_fit.ActionModule.__new__(serving_fit.ActionModule)
        plugin._play_context = types.SimpleNamespace(remote_addr="127.0.0.1")

        def execute(module_name, module_args, task_vars):
            calls.append((module_name, module_args.get("url", module_args.get("model"))))
            for key, answer in (answers or {}).items():
                if module_name.endswith(key) or str(module_args.get("url", "")).endswith(key):
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
            raise AssertionError(f"not expected: {module_name}")

        plugin._execute_module = execute
        settings = gang.settings(max_model_len=16384, **(values or {}))
        plugin._task = types.SimpleNamespace(args={"settings": settings, **arguments})
        variables = {"inventory_hostname": "spark-1", "groups": GROUPS, "hostvars": {"spark-1": {}, "spark-2": {}}}
        return plugin.run(None, variables), "\n".join(shown), calls

    return run


def rows(result):
    return {row["nodes"]: row for row in result["plan"]["rows"]}


def test_files_need_no_node(run):
    result, text, calls = run(config=CONFIG, index=INDEX)
    assert calls == [] and result["changed"] is False and result["plan"]["weights"] == WEIGHTS
    assert {nodes: row["verdict"] for nodes, row in rows(result).items()} == {1: "weights do not fit", 2: "fits", 4: "fits"}
    assert "59.2 GiB" in text and "12.0 KiB" in text and rows(result)[2]["requests"] == 123


def test_numbers_of_nodes_and_memory(run):
    result, text, _calls = run(config=CONFIG, index=INDEX, nodes=[3], memory=64 << 30, output="none")
    assert list(rows(result)) == [3] and (rows(result)[3]["tensor_parallel"], rows(result)[3]["pipeline_parallel"]) == (1, 3)
    assert result["plan"]["memory"] == 64 << 30 and text == ""


def test_the_inventorys_own_split_is_planned(run):
    result, _text, _calls = run(None, {"tensor_parallel": 1, "pipeline_parallel": 2}, config=CONFIG, weights_gib=118.4)
    assert (rows(result)[2]["tensor_parallel"], rows(result)[2]["pipeline_parallel"]) == (1, 2)
    assert (rows(result)[4]["tensor_parallel"], rows(result)[4]["pipeline_parallel"]) == (4, 1)


def test_a_folder_with_the_model(run, tmp_path):
    (tmp_path / "config.json").write_text((FIXTURES / "qwen3.5-122b-a10b-fp8.config.json").read_text("utf-8"), "utf-8")
    assert run(config=str(tmp_path))[0]["problem"]["id"] == "plan-source"
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert run(config=str(tmp_path))[0]["plan"]["weights"] == 1000
    (tmp_path / "model.safetensors.index.json").write_text((FIXTURES / "qwen3.5-122b-a10b-fp8.index.json").read_text("utf-8"), "utf-8")
    assert run(config=str(tmp_path / "config.json"))[0]["plan"]["weights"] == WEIGHTS


def snapshot(**more):
    config = json.loads((FIXTURES / "qwen3.5-122b-a10b-fp8.config.json").read_text("utf-8"))
    return {"node": {"snapshot": {"complete": True, "bytes": WEIGHTS + 7, "weights": WEIGHTS, "config": config, **more}}}


def test_the_heads_cache(run):
    result, _text, calls = run({"node_info": snapshot()})
    place = {"cache_dir": "~/.cache/huggingface", "repo_id": gang.MODEL, "revision": gang.REVISION}
    assert calls == [("dgxspark.serving.node_info", place)] and result["plan"]["weights"] == WEIGHTS


@pytest.mark.parametrize("model", ["/models/x", "~/models/x", "/models/q.gguf"])
def test_a_path_on_the_head(run, model):
    result, _text, calls = run({"node_info": snapshot()}, {"model": model})
    assert len(calls) == 1 and result["plan"]["weights"] == WEIGHTS
    for answer, found in (
        (snapshot(complete=False, reason="there is no /models/x"), "there is no /models/x"),
        (snapshot(config=None), "no config.json"),
        (snapshot(weights=0), "no weights beside"),
        ({"node": {"snapshot": None}}, "no look at it"),
        ({"failed": True}, "no look at it"),
    ):
        result, _text, calls = run({"node_info": answer}, {"model": model})
        assert result["problem"]["id"] == "plan-source" and f"{model} on the head: {found}" in result["msg"]
        assert len(calls) == 1  # the hub is not asked for a path


HUB = {
    "node_info": {"node": {"snapshot": None}},
    "/config.json": {"content": (FIXTURES / "qwen3.5-122b-a10b-fp8.config.json").read_text("utf-8")},
    "?blobs=true": {
        "content": json.dumps(
            {
                "siblings": [
                    {"rfilename": "a.safetensors", "size": WEIGHTS},
                    {"rfilename": "original/a.safetensors", "size": 7},
                    {"rfilename": "b.safetensors"},
                ]
            }
        )
    },
}


def test_the_hub_is_asked_by_the_head(run):
    result, _text, calls = run(HUB, {"hf_endpoint": "http://127.0.0.1:9/"})
    assert result["plan"]["weights"] == WEIGHTS
    assert [url for _module, url in calls[1:]] == [
        f"http://127.0.0.1:9/{gang.MODEL}/resolve/{gang.REVISION}/config.json",
        f"http://127.0.0.1:9/api/models/{gang.MODEL}/revision/{gang.REVISION}?blobs=true",
    ]


@pytest.mark.parametrize(
    ("answers", "values", "ident", "found"),
    [
        ({**HUB, "/config.json": {"failed": True, "msg": "Status code was 401"}}, {}, "plan-source", "Status code was 401"),
        ({**HUB, "/config.json": {"content": "<html>"}}, {}, "plan-source", "no JSON object"),
        ({**HUB, "?blobs=true": {"content": "{}"}}, {}, "plan-source", "no size of weights"),
        (HUB, {"model_offline": True}, "plan-source", "spark_model_offline"),
        ({"node_info": AnsibleConnectionFailure("No route to host")}, {}, "node-unreachable", "No route to host"),
    ],
)
def test_what_cannot_be_had(run, answers, values, ident, found):
    result, text, _calls = run(answers, values)
    assert result["failed"] and result["problem"]["id"] == ident and result["problem"]["node"] == "spark-1"
    assert found in result["msg"] and text == ""


@pytest.mark.parametrize(("config", "index"), [("/nowhere/config.json", INDEX), (CONFIG, "/nowhere"), (INDEX, INDEX), (CONFIG, CONFIG)])
def test_files_that_are_not_what_they_should_be(run, config, index):
    result, _text, _calls = run(config=config, index=index)
    assert result["failed"] and result["problem"]["id"] in ("plan-source", "fit-unknown")


def test_json(run):
    result, text, _calls = run(config=CONFIG, index=INDEX, output="json")
    assert json.loads(text) == result["plan"]
