# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import fabric_test

PAIR = {"rail": 1, "source": "spark-1", "target": "spark-2", "interface": "enp1s0f1np1"}


@pytest.fixture
def run(monkeypatch):
    """run(answer, **arguments): what the action answers; ``shown`` is what it prints."""
    monkeypatch.setattr(fabric_test.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(fabric_test.display, "display", lambda text, color=None: run.shown.append(text))

    def run(answer=None, **arguments):
        run.shown = []
        plugin = fabric_test.ActionModule.__new__(fabric_test.ActionModule)
        plugin._task = types.SimpleNamespace(args=arguments)

        def execute(module_args, task_vars):
            if isinstance(answer, Exception):
                raise answer
            return answer

        plugin._execute_module = execute
        return plugin.run(None, {"inventory_hostname": "spark-1"})

    return run


def look(number, **more):
    link = {
        "interface": "enp1s0f1np1",
        "rail": 1,
        "addresses": [f"192.168.200.{11 + number}/24"],
        "mtu": 9000,
        "speed": 200000,
        "up": True,
        "carrier": True,
        "fast": True,
        "rdma": "",
        "rdma_state": "",
    }
    tools = {"iperf3": "node", "ib_write_bw": ""}
    return {"node": f"spark-{number}", "links": [link], "tools": tools, "gpus": 1, "image": True, "memory": 100 << 30, **more}


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ([look(1), look(2)], ""),
        ([look(1)], "one node only"),
        ([look(1), {"node": "spark-2", "error": "gone"}], "no answer of spark-2"),
        ([look(1), look(2, links=[])], "no fabric address on spark-2"),
        ([look(1, gpus=0), look(2, gpus=0)], "no GPU on spark-1, spark-2"),
        ([look(1), look(2, image=False)], "the image i, which site.yml brings, is not on spark-2"),
        ([look(1, memory=1 << 30), look(2)], "less than 8 GiB of memory free on spark-1"),
    ],
)
def test_all_ranks_or_none(run, looks, reason):
    result = run(step="plan", looks=looks, image="i")
    assert result["gather_skip"] == reason and result["changed"] is False
    assert len(result["plan"]) == (2 if len([item for item in looks if item.get("links")]) == 2 else 0)
    assert result["head"] == "192.168.200.12"


GONE = AnsibleConnectionFailure("Failed to connect:\n No route to host")


@pytest.mark.parametrize(
    ("step", "key", "text"),
    [("look", "look", "error"), ("measure", "rows", "detail"), ("all_gather", "answer", "error")],
)
def test_a_node_that_does_not_answer_is_a_line(run, step, key, text):
    result = run(GONE, step=step, node="spark-2", pair=PAIR)
    found = result[key][0] if key == "rows" else result[key]
    assert found[text] == "no SSH connection: Failed to connect: No route to host" and not result.get("failed")
    assert run(GONE, step="stop") == {"changed": False}


def test_the_node_answers(run):
    assert run({"look": 1}, step="look") == {"look": 1}


def row(verdict, **more):
    return {
        "what": "iperf3",
        "from": "spark-1",
        "to": "spark-2",
        "over": "rail 1",
        "measured": "",
        "expected": "",
        "verdict": verdict,
        "detail": "d",
        **more,
    }


def test_report(run):
    result = run(step="report", looks=[look(1), look(2)], rows=[row("ok"), row("not run")], gather_skip="no GPU on spark-1")
    assert not result.get("failed") and "not run: no GPU on spark-1" in run.shown[0]
    result = run(step="report", looks=[look(1), look(2)], rows=[row("LOW", measured="13.1 Gb/s")], gather_skip="no GPU")
    assert result["failed"] and result["problem"]["id"] == "fabric-slow" and "13.1 Gb/s" in result["msg"]
    assert "13.1 Gb/s" in run.shown[0], "the tables come in any case"


def test_report_of_all_gather(run):
    answers = [{"node": f"spark-{number}", "gbytes": 12.0} for number in (1, 2)]
    result = run(step="report", looks=[look(1), look(2)], answers=answers)
    assert not result.get("failed") and (result["rows"][0]["over"], result["rows"][0]["verdict"]) == ("1 rail", "ok")
    active = {"rdma_state": "ACTIVE", "rdma": "a:1"}
    both = [{**look(n), "links": [{**look(n)["links"][0], **active}, {**look(n)["links"][0], **active, "rail": 2}]} for n in (1, 2)]
    result = run(step="report", looks=both, answers=answers)
    assert result["failed"] and result["rows"][0]["over"] == "2 rails"
