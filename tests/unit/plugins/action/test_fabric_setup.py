# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import fabric_setup

PORTS = [
    {"name": "enp1s0f1np1", "address": "192.168.200.12", "addresses": ["192.168.200.12/24"], "mtu": 9000},
    {"name": "enP2p1s0f1np1", "address": "192.168.201.12", "addresses": ["192.168.201.12/24"], "mtu": 9000},
]
GANG = [{"node": "spark-1", "address": "192.168.200.12"}, {"node": "spark-2", "address": "192.168.200.13"}]
GONE = AnsibleConnectionFailure("Failed to connect:\n No route to host")
NET12 = {
    "id": "NET-12",
    "node": "spark-1",
    "stage": "preflight",
    "found": "small packets reach",
    "expected": "MTU 9000",
    "remedy": "set it",
}


def setup(phase="applied", ready=True, why="", left=50.0):
    return {"changed": False, "setup": {"phase": phase, "ready": ready, "why": why, "left": left, "ports": PORTS}}


class Connection:
    def __init__(self):
        self.options = {"control_path_dir": "", "ssh_args": "-o X=1", "reconnection_retries": 2}
        self.resets = 0

    def get_option(self, name):
        return self.options[name]

    def set_option(self, name, value):
        self.options[name] = value

    def reset(self):
        self.resets += 1


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(answers, **arguments): what the action answers when the modules answer these in turn (the last one again and again); a second passes with
    each look at the clock.
    """
    monkeypatch.setattr(fabric_setup.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    clock = iter(range(100000))
    monkeypatch.setattr(fabric_setup.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(fabric_setup.time, "sleep", lambda seconds: None)

    def run(answers, check=False, **arguments):
        plugin = fabric_setup.ActionModule.__new__(fabric_setup.ActionModule)
        plugin._task = types.SimpleNamespace(args={"node": "spark-1", "gang": GANG, **arguments}, check_mode=check)
        plugin._play_context = types.SimpleNamespace(remote_addr="10.1.230.180")
        plugin._connection = run.connection = Connection()
        run.connection.options["control_path_dir"] = str(tmp_path)
        run.asked, run.sockets = [], []
        left = list(answers)

        def execute(module_name, module_args, task_vars):
            run.asked.append((module_name.rpartition(".")[2], module_args))
            run.sockets.append(run.connection.options["ssh_args"])
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        plugin._execute_module = execute
        return plugin.run(None, {})

    return run


OK = {"changed": False, "checks": []}


def test_proven(run):
    result = run([setup(), OK], step="prove")
    assert not result.get("failed") and result["setup"]["ready"]
    checks = [arguments for name, arguments in run.asked if name == "fabric_check"]
    assert [(item["interface"], item["address"], item["peers"], item["skip"]) for item in checks] == [
        ("enp1s0f1np1", "192.168.200.12", [{"node": "spark-2", "address": "192.168.200.13"}], []),
        ("enP2p1s0f1np1", "192.168.201.12", [{"node": "spark-2", "address": "192.168.201.13"}], ["tcp"]),
    ]
    assert run.connection.resets == 1, "the connection from before the change is not used"


def test_a_network_that_blinks(run):
    """The node does not answer, then netplan has not finished, then an address is missing, then it works (NET-16)."""
    result = run(
        [GONE, setup("pending", False, "netplan has not finished yet"), setup(ready=False, why="no address"), setup(), OK], step="prove"
    )
    assert not result.get("failed")
    attempts = run.sockets[:4]
    assert len(set(attempts)) == 4, "each attempt has a connection of its own"
    assert all(text.endswith(" -o X=1") and text.count("ControlPath=") == 1 for text in attempts)


@pytest.mark.parametrize(
    ("answers", "ident", "words"),
    [
        ([GONE], "fabric-lost", "no new SSH connection to 10.1.230.180 (Failed to connect: No route to host)"),
        ([setup(ready=False, why="enp1s0f1np1 has no address 192.168.200.12/24")], "fabric-not-live", "has no address"),
        ([setup("reverted", False, "netplan apply ended with code 78")], "fabric-reverted", "code 78"),
        ([setup(left=1.0), {"failed": True, "msg": "m", "problem": NET12}], "NET-12", "spark-1: fabric: found small packets reach"),
    ],
)
def test_not_proven(run, answers, ident, words):
    result = run(answers, step="prove", timeout=30)
    assert result["failed"] and result["problem"]["id"] == ident and words in result["msg"] and result["problem"]["stage"] == "fabric"
    assert len(run.asked) < 40


def test_a_change_that_the_node_took_back_is_not_asked_again(run):
    run([setup("reverted", False, "why")], step="prove", timeout=3000)
    assert len(run.asked) == 1


def test_a_refusal_of_the_module_is_passed_on(run):
    refused = {"failed": True, "msg": "m", "problem": {"id": "fabric-conflict"}}
    assert run([refused], step="prove") == refused
    assert run([refused], step="change") == refused and run.connection.resets == 0


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([setup(), GONE, setup("applied"), setup("reverted", False)], "spark-1 has its configuration from before again"),
        ([GONE, GONE, setup("reverted", False)], "spark-1 has its configuration from before again"),
        ([setup("none", False)], "spark-1 has its configuration from before again"),
        ([GONE], "spark-1 has not been seen with its configuration from before (Failed to connect: No route to host)"),
    ],
)
def test_revert(run, answers, text):
    result = run(answers, step="revert", timeout=5)
    assert result["text"].startswith(text) and not result.get("failed")


@pytest.mark.parametrize(("change_id", "asked"), [("", 1), ("1a", 3)])
def test_a_confirmed_change_of_an_earlier_run_is_not_waited_for(run, change_id, asked):
    result = run([setup("confirmed", False), setup("confirmed", False), setup("reverted", False)], step="revert", change_id=change_id)
    assert result["text"] == "spark-1 has its configuration from before again" and len(run.asked) == asked


def test_the_node_is_told_once(run):
    run([GONE, setup(), setup(), setup("reverted", False)], step="revert")
    assert [arguments["step"] for dummy, arguments in run.asked] == ["revert", "revert", "prove", "prove"]


def test_confirm_comes_over_a_new_connection(run):
    assert run([setup("confirmed", False)], step="confirm")["setup"]["phase"] == "confirmed"
    assert run.sockets[0] != "-o X=1" and run.connection.resets == 1
    assert run([GONE], step="confirm")["problem"]["id"] == "fabric-lost"


def test_check_mode_only_asks_the_module(run):
    assert run([setup()], check=True, step="prove") == setup()
    assert run.connection.resets == 0 and run.sockets == ["-o X=1"]
