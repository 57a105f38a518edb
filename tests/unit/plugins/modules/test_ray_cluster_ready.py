# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import pathlib

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _ray
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import ray_cluster_ready

TABLE = json.loads((pathlib.Path(__file__).parents[2] / "fixtures/life/ray_2.60_two_nodes.json").read_text())
ALONE = {**TABLE, "nodes": TABLE["nodes"][:1]}
PLAN = {"container": "spark-ray", "nodes": ["192.168.200.12", "192.168.200.13"], "address": "192.168.200.12"}


class FakeRun:
    """docker inspect, logs and exec; each answer list moves on by one per call, the last one repeats."""

    def __init__(self, tables, running=(True,), log="", code=1):
        self.tables, self.running, self.log, self.code = list(tables), list(running), log, code
        self.execs = []
        self.waits = []

    @staticmethod
    def next(items):
        return items.pop(0) if len(items) > 1 else items[0]

    def __call__(self, argv, timeout=30, data=None):
        if argv[1] == "exec":
            self.execs.append((argv, data))
            return 0, "\n" + _ray.MARK + json.dumps(self.next(self.tables)) + "\n", ""
        if argv[1] == "logs":
            return 0, self.log, ""
        if argv[1] == "wait":
            self.waits.append(timeout)
            return 0, "137\n", ""
        state = self.next(self.running)
        if state is None:
            return 1, "[]", "Error: No such container: spark-ray"
        item = {
            "Id": "a" * 64,
            "Name": "/spark-ray",
            "State": {
                "Status": "running" if state else "exited",
                "Running": state,
                "ExitCode": 0 if state else self.code,
                "StartedAt": "2026-11-30T09:00:00Z",
            },
        }
        return 0, json.dumps([item]), ""


def params(**more):
    return {
        **PLAN,
        "port": 6379,
        "gpus": 0,
        "gpus_per_node": 1,
        "require_idle": False,
        "timeout": 5,
        "settle": 0,
        "interval": 0.01,
        "node": "spark-1",
        "watch": False,
        **more,
    }


def test_waits_for_the_worker():
    run = FakeRun([{"nodes": [], "errors": ["refused"], "via": "tcp"}, ALONE, TABLE])
    cluster = ray_cluster_ready.Cluster(params(), run)
    cluster.wait()
    assert cluster.state["ready"] and len(run.execs) == 3
    argv, data = run.execs[0]
    assert argv[:5] == ["docker", "exec", "-i", "spark-ray", "python3"] and argv[6] == "192.168.200.12:6379" and data == _ray.PROGRAM


def test_an_old_complete_cluster_is_looked_at_once():
    run = FakeRun([TABLE])
    ray_cluster_ready.Cluster(params(settle=60), run).wait()
    assert len(run.execs) == 1


def test_a_new_one_must_settle():
    young = {**TABLE, "nodes": [{**node, "started": None} for node in TABLE["nodes"]]}
    run = FakeRun([young, ALONE, young])
    ray_cluster_ready.Cluster(params(settle=0.05), run).wait()
    assert len(run.execs) > 3


@pytest.mark.parametrize(
    ("run", "ident", "words"),
    [
        (FakeRun([TABLE], [None]), "RAY-13", "container spark-ray is not there"),
        (FakeRun([TABLE], [False], "Exception: strange", 1), "VLL-00", "exited with code 1"),
        (FakeRun([TABLE], [False], "all was well", 3), "RAY-13", "container spark-ray exited with code 3; last lines: all was well"),
        (FakeRun([TABLE], [False], 'exec: "ray": executable file not found in $PATH', 127), "RAY-02", "the image has no Ray"),
        (FakeRun([ALONE], [True, True, False], "x", 137), "RAY-13", "exited with code 137"),
        (
            FakeRun([{**TABLE, "nodes": [*TABLE["nodes"], {**TABLE["nodes"][0], "address": "10.0.0.9"}]}]),
            "RAY-05",
            "10.0.0.9 is in the cluster and not in the plan",
        ),
    ],
)
def test_fails_at_once(run, ident, words):
    with pytest.raises(Problem) as caught:
        ray_cluster_ready.Cluster(params(timeout=3600), run).wait()
    assert caught.value.id == ident and words in caught.value.found and caught.value.node == "spark-1"


def test_timeout_names_who_is_missing():
    with pytest.raises(Problem) as caught:
        ray_cluster_ready.Cluster(params(timeout=0.05), FakeRun([ALONE])).wait()
    assert (
        caught.value.id == "RAY-13" and "192.168.200.13 is not in the cluster" in caught.value.found and "docker" not in caught.value.found
    )


class Exit(Exception):
    pass


def module(monkeypatch, run, check):
    def leave(self, **result):
        raise Exit(result)

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", lambda self, **result: leave(self, failed=True, **result))
    monkeypatch.setattr(ray_cluster_ready, "bounded", lambda run_command: run)
    with patch_module_args({**PLAN, "node": "spark-1", "timeout": 0, "_ansible_check_mode": check}), pytest.raises(Exit) as caught:
        ray_cluster_ready.main()
    return caught.value.args[0]


def test_one_slow_answer_is_no_broken_cluster(monkeypatch):
    """Callers replace a cluster that is not ready, so the look of a run that has nothing to do must not give up at once."""
    monkeypatch.setattr(ray_cluster_ready, "clock", lambda total, interval: iter([0.0, 0.1, 0.2]))
    run = FakeRun([{"error": "timed out"}, TABLE])
    assert module(monkeypatch, run, True)["ready"] is True
    assert len(run.execs) == 2


def test_a_docker_that_does_not_answer_is_a_failure_also_in_check_mode(monkeypatch):
    def run(argv, timeout=30, data=None):
        return 1, "", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"

    assert module(monkeypatch, run, True)["failed"] is True


@pytest.mark.parametrize(
    ("run", "check", "ready", "failed"),
    [
        (FakeRun([TABLE]), False, True, False),
        (FakeRun([ALONE]), False, False, True),
        (FakeRun([ALONE]), True, False, False),
        (FakeRun([ALONE], [None]), True, False, False),
        (FakeRun([TABLE]), True, True, False),
    ],
)
def test_module(monkeypatch, run, check, ready, failed):
    result = module(monkeypatch, run, check)
    assert (result["ready"], bool(result.get("failed")), result["changed"]) == (ready, failed, False)
    assert ready or result["reasons"]
    if ready:
        assert result["ray_version"] == "2.60.0" and [n["address"] for n in result["nodes"]] == PLAN["nodes"]


def test_the_watch_of_a_worker_says_how_its_container_ended():
    run = FakeRun([], running=[True, False], log="hello\nraylet: it broke\n", code=137)
    with pytest.raises(Problem) as caught:
        ray_cluster_ready.Cluster(params(node="spark-2", watch=True, timeout=7), run).watch()
    for word in ("spark-2: ray: found container spark-ray exited with code 137", "raylet: it broke", "expected its Ray to go on running"):
        assert word in caught.value.msg
    assert run.waits == [7] and run.execs == []


def test_the_watch_of_a_worker_is_bounded():
    run = FakeRun([], running=[True])
    ray_cluster_ready.Cluster(params(watch=True), run).watch()
    assert run.waits == [5]


def test_a_container_that_was_gone_before_the_watch_began():
    run = FakeRun([], running=[None])
    with pytest.raises(Problem, match="container spark-ray is not there"):
        ray_cluster_ready.Cluster(params(watch=True), run).watch()
    assert run.waits == []
