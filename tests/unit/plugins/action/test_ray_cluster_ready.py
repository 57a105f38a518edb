# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import time
import types

import pytest

from ansible_collections.dgxspark.serving.plugins.action import ray_cluster_ready, vllm_ready

LOST = {"failed": True, "msg": "spark-2: ray: found container spark-ray exited with code 137", "problem": {"id": "RAY-13"}}
READY = {"ready": True, "changed": False}


@pytest.fixture
def action(monkeypatch, tmp_path):
    """run(module) -> (result, arguments of each call); ``module()`` plays the module."""

    def run(module, check=False, **args):
        calls = []
        plugin = ray_cluster_ready.ActionModule.__new__(ray_cluster_ready.ActionModule)
        plugin._task = types.SimpleNamespace(args=args, check_mode=check, _uuid="u")

        def execute(module_args, task_vars):
            calls.append(module_args)
            return dict(module())

        plugin._execute_module = execute
        return plugin.run(None, {"inventory_hostname": "spark-1"}), calls

    monkeypatch.setattr(ray_cluster_ready.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(ray_cluster_ready.C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(ray_cluster_ready, "HEAD_GRACE", 0.1)
    monkeypatch.setattr(vllm_ready, "LOOK", 0.01)
    run.board = vllm_ready.Board(str(tmp_path / "ray_cluster_ready-u"))
    return run


def held():
    time.sleep(5)
    raise AssertionError("nobody has interrupted it")


def test_the_head_asks_and_says_when_it_is_over(action):
    result, calls = action(lambda: READY, nodes=["a"])
    assert result == READY and calls == [{"nodes": ["a"], "node": "spark-1"}]
    assert action.board.read("begun") is not None and action.board.read("done") is not None


def test_a_container_that_ended_on_a_worker_ends_the_wait_of_the_head(action):
    def module():
        action.board.tell("lost-spark-2", {"at": 1.0, **LOST})
        held()

    result, dummy = action(module)
    assert result["failed"] and not result["ready"] and (result["msg"], result["problem"]) == (LOST["msg"], LOST["problem"])
    assert action.board.read("done") is not None


def test_the_watch_ends_with_the_wait_of_the_head(action):
    def module():
        action.board.tell("done", {})
        held()

    action.board.tell("begun", {})
    result, dummy = action(module, watch=True)
    assert result == {"changed": False, "ready": False} and action.board.lost_rank() is None


def test_the_end_of_a_watched_container_is_told(action):
    action.board.tell("begun", {})
    result, calls = action(lambda: LOST, watch=True)
    assert result["failed"] and action.board.lost_rank()["msg"] == LOST["msg"] and calls[0]["watch"] is True


def test_a_worker_does_not_wait_for_a_head_that_does_not_begin(action, monkeypatch):
    shown = []
    monkeypatch.setattr(ray_cluster_ready, "display", types.SimpleNamespace(warning=shown.append))
    result, calls = action(lambda: LOST, watch=True)
    assert not result.get("failed") and calls == [] and "not watched" in shown[0]


def test_check_mode_asks_once(action):
    result, calls = action(lambda: {"ready": False}, check=True)
    assert result == {"ready": False} and len(calls) == 1 and action.board.read("begun") is None
