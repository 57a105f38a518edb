# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import node_info

GROUPS = {"ray_head": ["spark-1"], "ray_workers": ["spark-2"]}


@pytest.fixture
def run(monkeypatch):
    """run(answer, **variables): what the action answers when the module does; ``answer`` is a result or an exception."""
    monkeypatch.setattr(node_info.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    options = {}

    def run(answer, remote="10.1.230.180", **variables):
        plugin = node_info.ActionModule.__new__(node_info.ActionModule)
        plugin._play_context = types.SimpleNamespace(remote_addr=remote)

        answers = list(answer) if isinstance(answer, list) else [answer]

        def execute(task_vars):
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        plugin._execute_module = execute
        plugin._connection = types.SimpleNamespace(
            set_option=lambda name, value: options.update({name: value}), reset=lambda: options.update(reset=options.get("reset", 0) + 1)
        )
        return plugin.run(None, {"groups": GROUPS, **variables})

    run.options = options
    return run


GONE = AnsibleConnectionFailure("Failed to connect to the host via ssh: ssh: connect to host 192.168.200.13 port 22:\n  No route to host")
FACTS = {"changed": False, "node": {}}


def test_the_module_answers(run):
    assert run(FACTS, inventory_hostname="spark-1") == FACTS
    assert run.options == {"reconnection_retries": 0}


def test_a_worker_that_cannot_be_reached_names_the_way_to_it(run):
    result = run(GONE, "spark-2", inventory_hostname="spark-2", spark_fabric_address="192.168.200.13")
    assert result["failed"] and result["changed"] is False and not result.get("unreachable")
    assert (result["problem"]["id"], result["problem"]["node"], result["problem"]["stage"]) == ("NET-13", "spark-2", "preflight")
    assert result["problem"]["found"].startswith("no SSH connection to 192.168.200.13 (Failed to connect")
    assert result["problem"]["found"].endswith("No route to host)") and "\n" not in result["msg"]
    assert "through spark-1" in result["msg"] and "on spark-1: ping 192.168.200.13" in result["problem"]["remedy"]


STALE = 'Data could not be sent to remote host "spark-2". Make sure this host can be reached over ssh: '


@pytest.mark.parametrize(
    "text", [STALE, "mux_client_request_session: read from master failed: Broken pipe", "Shared connection to a closed."]
)
def test_a_connection_of_an_earlier_run_that_has_died_is_made_anew(run, text):
    """After a reboot of the node, or another MTU of its port, the one that ssh has kept hangs, while a new one is fine."""
    assert run([AnsibleConnectionFailure(text), FACTS], inventory_hostname="spark-2") == FACTS
    assert run.options["reset"] == 1


def test_a_node_that_is_gone_is_not_tried_a_third_time(run):
    result = run([AnsibleConnectionFailure(STALE), GONE], "spark-2", inventory_hostname="spark-2", spark_fabric_address="192.168.200.13")
    assert result["problem"]["id"] == "NET-13" and "No route to host" in result["msg"] and run.options["reset"] == 1
    run(GONE, "spark-2", inventory_hostname="spark-2")
    assert run.options["reset"] == 1  # that was no kept connection


def test_a_head_that_cannot_be_reached_has_no_way_around(run):
    result = run(GONE, inventory_hostname="spark-1", spark_fabric_address="192.168.200.12")
    assert (result["problem"]["id"], result["problem"]["node"]) == ("node-unreachable", "spark-1")
    assert "no SSH connection to 10.1.230.180" in result["msg"] and "ansible_host" in result["problem"]["remedy"]


def test_other_failures_stay_as_they_are(run):
    with pytest.raises(RuntimeError):
        run(RuntimeError("bug"), inventory_hostname="spark-1")


@pytest.mark.parametrize(
    ("text", "head", "words"),
    [
        ("", "", "spark-9: preflight: found no SSH connection to a (no answer)"),
        ("a\n\n  b", "", "(a b)"),
        ("timeout", "spark-1", "an answer over the fabric, through spark-1"),
    ],
)
def test_unreachable(text, head, words):
    assert words in node_info.unreachable("spark-9", text, "a", head).msg
