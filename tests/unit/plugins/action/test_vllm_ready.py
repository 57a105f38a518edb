# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import time
import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import vllm_ready
from ansible_collections.dgxspark.serving.plugins.module_utils import _vllm


class Clock:
    def __init__(self):
        self.at = 0.0

    def monotonic(self):
        return self.at

    time = monotonic

    def sleep(self, seconds):
        self.at += seconds


@pytest.fixture
def action(monkeypatch, tmp_path):
    """run(script) -> (result, lines shown, arguments of every slice); a script item is a result or an exception; a slice takes 5 s."""

    def run(script, check=False, **args):
        clock, shown, calls = Clock(), [], []
        script = list(script)
        plugin = vllm_ready.ActionModule.__new__(vllm_ready.ActionModule)
        plugin._task = types.SimpleNamespace(args={"served_model": "m", **args}, check_mode=check, async_val=0, _uuid="u")
        plugin._connection = types.SimpleNamespace(reset=lambda: shown.append("reset"))

        def execute(module_args, task_vars):
            calls.append(module_args)
            clock.at += 5
            item = script.pop(0) if len(script) > 1 else script[0]
            item = item() if callable(item) else item
            if isinstance(item, Exception):
                raise item
            return dict(item)

        plugin._execute_module = execute
        monkeypatch.setattr(vllm_ready.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
        monkeypatch.setattr(vllm_ready, "time", clock)
        monkeypatch.setattr(vllm_ready, "display", types.SimpleNamespace(display=shown.append, vvv=lambda text: None, warning=shown.append))
        monkeypatch.setattr(vllm_ready.C, "DEFAULT_LOCAL_TMP", str(tmp_path))
        monkeypatch.setattr(vllm_ready, "LOOK", 0.01)
        return plugin.run(None, {"inventory_hostname": "spark-1"}), shown, calls

    run.board = vllm_ready.Board(str(tmp_path / "vllm_ready-u"))
    return run


def pending(stage, line):
    return {"pending": True, "state": {**_vllm.new_state(0), "stage": stage}, "line": line}


READY = {"ready": True, "changed": False}
GONE = AnsibleConnectionFailure("Connection timed out")


def test_slices_and_lines(action):
    script = [
        pending("container", "c5"),
        pending("weights", "w10"),
        pending("weights", "w15"),
        pending("weights", "w20"),
        pending("weights", "w25"),
        READY,
    ]
    result, shown, calls = action(script)
    assert result == READY and shown == ["w10", "w25"]
    assert calls[0]["state"] == {} and calls[1]["state"]["stage"] == "container" and calls[0]["node"] == "spark-1"


def test_one_slice_when_it_serves_already(action):
    result, shown, calls = action([READY])
    assert result == READY and shown == [] and len(calls) == 1


def test_check_mode_is_one_call_without_slices(action):
    dummy, dummy2, calls = action([READY], check=True)
    assert len(calls) == 1 and "state" not in calls[0]


def test_a_short_silence_is_tolerated_and_told(action):
    result, shown, calls = action([pending("weights", "w"), GONE, GONE, READY])
    assert result["ready"] and result["connection_losses"] == 2
    assert shown[1].startswith("spark-1: does not answer (10 s): Connection timed out") and "reset" in shown
    assert calls[-1]["state"]["stage"] == "weights"


def test_a_long_silence_is_a_failure_with_a_problem(action):
    result, dummy, calls = action([pending("weights", "w"), GONE], unreachable_grace=20)
    assert result["failed"] and result["problem"]["stage"] == "weights" and result["problem"]["node"] == "spark-1"
    assert "the node did not answer for 26 s" in result["msg"] and len(calls) == 5


# --- one task over all nodes: the head waits, the others watch

LOST = {"failed": True, "msg": "spark-2: found container spark-vllm exited with code 137", "problem": {"id": "RDY-06"}}


def held():
    """A slice that hangs until it is interrupted."""
    time.sleep(5)
    raise AssertionError("nobody has interrupted it")


def test_a_rank_that_ended_on_another_node_ends_the_wait_of_the_head(action):
    def slice_of_the_head():
        action.board.tell("lost-spark-3", {"at": 2.0, "msg": "later"})
        action.board.tell("lost-spark-2", {"at": 1.0, **LOST})
        held()

    result, dummy, dummy2 = action([slice_of_the_head])
    assert result["failed"] and not result["ready"] and result["msg"] == LOST["msg"] and result["problem"] == LOST["problem"]
    assert action.board.read("done") is not None


def test_the_watch_of_a_worker_ends_with_the_wait_of_the_head(action):
    def slice_of_the_worker():
        action.board.tell("done", {})
        held()

    action.board.tell("begun", {})
    result, shown, calls = action([pending("container", "c"), slice_of_the_worker], watch=True)
    assert result == {"changed": False, "ready": False} and shown == [] and len(calls) == 2
    assert action.board.lost_rank() is None


def test_the_end_of_a_watched_container_is_told(action):
    action.board.tell("begun", {})
    result, dummy, dummy2 = action([LOST], watch=True)
    assert result["failed"] and action.board.lost_rank()["msg"] == LOST["msg"]


def test_a_worker_does_not_wait_for_a_head_that_does_not_begin(action):
    """With one fork, and the worker first, the head's part of the task comes after this one."""
    result, shown, calls = action([LOST], watch=True)
    assert not result.get("failed") and calls == [] and "not watched" in shown[0]


@pytest.mark.parametrize(
    ("result", "lost"),
    [
        ({"failed": True, "msg": "MODULE FAILURE", "module_stderr": "Shared connection to 127.0.0.1 closed. Connection to x"}, True),
        ({"failed": True, "msg": "MODULE FAILURE", "module_stderr": "Traceback (most recent call last): Connection reset"}, False),
        ({"failed": True, "msg": "spark-1: connection reset", "problem": {}}, False),
        ({"unreachable": True}, True),
        (READY, False),
    ],
)
def test_lost_connections_are_told_from_failures(result, lost):
    assert vllm_ready.lost_connection(result) is lost
