# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import json
import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _ray

TABLE = json.loads((pathlib.Path(__file__).parents[2] / "fixtures/life/ray_2.60_two_nodes.json").read_text())
PLAN = {"nodes": ["192.168.200.12", "192.168.200.13"], "gpus": 2, "gpus_per_node": 1, "require_idle": True}


def changed(**changes):
    table = copy.deepcopy(TABLE)
    table["nodes"][1].update(changes)
    return table


def without_worker():
    return {**TABLE, "nodes": TABLE["nodes"][:1]}


def test_ready():
    state = _ray.cluster_state(TABLE, PLAN)
    assert state["ready"] and state["gpus"] == 2 and state["reasons"] == [] and state["newest"] == 1796028530.1
    assert _ray.is_stable(state, 2, 1796028533) and not _ray.is_stable(state, 2, 1796028531)


STRANGER = {**TABLE["nodes"][1], "address": "192.168.200.99", "resources": {"CPU": 1.0}}
CASES = {
    "worker missing": (without_worker(), "RAY-13", "192.168.200.13 is not in the cluster; the cluster has 1 GPU instead of 2 after 30 s"),
    "worker died": (
        changed(alive=False, death="health check failed"),
        "RAY-13",
        "192.168.200.13 is not in the cluster (it was: health check failed)",
    ),
    "wrong address": (
        changed(address="10.0.0.11"),
        "RAY-01",
        "192.168.200.13 is not in the cluster; 10.0.0.11 is in the cluster and not in the plan",
    ),
    "stranger": ({**TABLE, "nodes": [*TABLE["nodes"], STRANGER]}, "RAY-05", "192.168.200.99 is in the cluster and not in the plan"),
    "worker without GPU": (changed(resources={"CPU": 2.0}, available={"CPU": 2.0}), "RAY-07", "192.168.200.13 offers 0 GPU instead of 1"),
    "GPU reserved": (changed(available={"CPU": 1.0}), "RAY-12", "1 GPU of 192.168.200.13 is reserved"),
    "there twice": ({**TABLE, "nodes": [*TABLE["nodes"], TABLE["nodes"][1]]}, "RAY-07", "192.168.200.13 is there 2 times"),
    "other session": (changed(socket="/tmp/ray/session_old/sockets/raylet"), "RAY-07", "nodes of different Ray sessions"),
    "nobody": (
        {"nodes": [], "errors": ["no Ray head answers at x:6379: refused"], "via": "tcp"},
        "RAY-13",
        "no Ray cluster after 30 s: no Ray head answers",
    ),
    "no Ray": ({"nodes": [], "errors": ["no Ray in this container: x"], "via": "import"}, "RAY-02", "no Ray in this container"),
}


@pytest.mark.parametrize("name", CASES)
def test_not_ready(name):
    table, ident, found = CASES[name]
    state = _ray.cluster_state(table, PLAN)
    problem = _ray.problem(state, table, PLAN, "spark-1", 30)
    assert not state["ready"] and problem.id == ident and found in problem.found


@pytest.mark.parametrize(
    ("name", "hopeless"),
    [
        ("worker missing", False),
        ("GPU reserved", False),
        ("stranger", True),
        ("wrong address", True),
        ("worker without GPU", True),
        ("no Ray", True),
    ],
)
def test_what_waiting_does_not_mend(name, hopeless):
    table = CASES[name][0]
    assert _ray.is_hopeless(_ray.cluster_state(table, PLAN), table) is hopeless


def test_a_reserved_gpu_matters_only_when_asked():
    assert _ray.cluster_state(CASES["GPU reserved"][0], {**PLAN, "require_idle": False})["ready"]


@pytest.mark.parametrize(
    ("answer", "nodes", "error"),
    [
        ((0, "noise\n" + _ray.MARK + '{"nodes": [1]}\n', ""), [1], None),
        ((124, "", ""), [], "did not answer in time"),
        ((1, "", "Error response from daemon: container is not running"), [], "container is not running"),
        ((0, _ray.MARK + "{broken", ""), [], "the probe ended with 0"),
    ],
)
def test_parse(answer, nodes, error):
    table = _ray.parse(*answer)
    assert table["nodes"] == nodes
    assert error is None or error in table["errors"][0]


def test_the_program_compiles_and_answers_without_a_head():
    compile(_ray.PROGRAM, "program", "exec")
    assert _ray.MARK in _ray.PROGRAM
