# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import signal
import time
import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import serving_status
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FACTS = {"node": gang.node(time=1.0, memory={"total": 8, "available": 3})}
ANSWERS = {
    "node_info": FACTS,
    "nccl_interface_info": {"fabric": gang.fabric("192.168.200.12", rdma=True)},
    "serving_info": {"server": {"healthy": False, "stage": "ray", "ray": None}},
}


class Connection:
    def __init__(self, options):
        self.options = options

    def get_option(self, name):
        return self.options[name]

    def set_option(self, name, value):
        self.options[name] = value


@pytest.fixture
def shown(monkeypatch):
    """What is printed."""
    lines = []
    monkeypatch.setattr(serving_status.display, "display", lambda text, color=None: lines.append((text, color)))
    return lines


@pytest.fixture
def run(monkeypatch, tmp_path, shown):
    """run(name, answers, **arguments): what the action answers on a host; ``asked`` are the modules that ran."""
    monkeypatch.setattr(serving_status.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def run(name="spark-1", answers=None, **arguments):
        run.asked = {}
        plugin = serving_status.ActionModule.__new__(serving_status.ActionModule)
        plugin._task = types.SimpleNamespace(args={"settings": gang.settings(fabric_address=gang.ADDRESSES[name]), **arguments})
        plugin._connection = Connection({"control_path_dir": str(tmp_path / "cp"), "ssh_args": "-o X=1", "reconnection_retries": 2})
        run.connection = plugin._connection

        def execute(module_name, module_args, task_vars):
            module = module_name.rpartition(".")[2]
            run.asked[module] = module_args
            answer = {**ANSWERS, **(answers or {})}[module]
            return answer() if callable(answer) else answer

        plugin._execute_module = execute
        hosts = {"spark-1": {"ansible_host": "10.1.230.180"}, "spark-2": {}}
        groups = {"ray_head": ["spark-1"], "ray_workers": ["spark-2"]}
        return plugin.run(None, {"inventory_hostname": name, "groups": groups, "hostvars": hosts})

    return run


def test_the_head_is_asked_for_everything(run):
    row = run("spark-1")["row"]
    assert list(run.asked) == ["node_info", "nccl_interface_info", "serving_info"]
    assert run.asked["serving_info"]["ray_address"] == "192.168.200.12:6379"
    assert run.asked["serving_info"]["url"] == "http://127.0.0.1:30000"
    assert (row["role"], row["reachable"], row["error"], row["server"]["stage"]) == ("head", True, "", "ray")


def test_a_worker_and_a_quick_look_ask_no_server(run):
    assert run("spark-2")["row"]["role"] == "worker" and "serving_info" not in run.asked
    run("spark-1", server=False)
    assert "serving_info" not in run.asked


def test_a_node_without_docker_is_asked_for_no_server(run):
    facts = {"node": {**FACTS["node"], "docker": {**FACTS["node"]["docker"], "reachable": False, "error": "not running"}}}
    assert run("spark-1", {"node_info": facts})["row"]["docker_error"] == "not running"
    assert "serving_info" not in run.asked


def refuse():
    raise AnsibleConnectionFailure("Failed to connect: ssh: connect to host 10.1.230.180 port 22:\nNo route to host")


def late():
    time.sleep(5)


@pytest.mark.parametrize(
    ("answers", "more", "reachable", "error"),
    [
        (
            {"node_info": refuse},
            {},
            False,
            "no SSH connection: Failed to connect: ssh: connect to host 10.1.230.180 port 22: No route to host",
        ),
        ({"node_info": late}, {"limit": 0.05}, False, "no answer within 0.05 s"),
        ({"node_info": {"failed": True, "msg": "sudo: a password\nis required"}}, {}, False, "no facts: sudo: a password is required"),
        ({"serving_info": late}, {"limit": 0.05}, True, "looked at only in part: no answer within 0.05 s"),
        ({"nccl_interface_info": refuse}, {}, True, "looked at only in part: no SSH connection: Failed to connect"),
    ],
)
def test_a_node_that_does_not_answer_is_a_row(run, answers, more, reachable, error):
    result = run("spark-1", answers, **more)
    assert not result.get("failed") and result["changed"] is False
    assert result["row"]["reachable"] is reachable and result["row"]["error"].startswith(error)


def test_the_alarm_is_put_back():
    before = signal.getsignal(signal.SIGALRM)
    with serving_status.limited(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_no_fabric_is_told_in_short(run):
    problem = {"failed": True, "msg": "x", "problem": {"found": "no usable interface: eth0: down; eth1: down"}}
    assert run("spark-1", {"nccl_interface_info": problem})["row"]["fabric"]["error"] == "no usable interface"


def test_connections_of_its_own(run, tmp_path):
    run("spark-1")
    options = run.connection.options
    assert options["reconnection_retries"] == 0
    assert options["ssh_args"].startswith("-o ConnectTimeout=4 ") and options["ssh_args"].endswith(" -o X=1")
    assert f"ControlPath={tmp_path}/cp/status" in options["ssh_args"]
    assert (tmp_path / "cp").stat().st_mode & 0o077 == 0


def test_another_connection_plugin_is_left_alone():
    connection = Connection({})
    serving_status.hurry(connection)
    assert connection.options == {}


@pytest.fixture
def rows(run):
    return [run("spark-2")["row"], run("spark-1")["row"]]


def test_the_table(run, rows, shown):
    result = run("spark-1", rows=rows)
    assert result["status"]["state"] == "stopped" and result["status"]["endpoint"] == "http://10.1.230.180:30000/v1"
    assert [node["node"] for node in result["status"]["nodes"]] == ["spark-1", "spark-2"]
    assert shown[0] == ("\nSTOPPED: nothing runs and the API port is free", serving_status.COLOURS["busy"])
    assert "NODE" in shown[1][0] and run.asked == {}


def test_a_run_without_the_head(run, rows, shown):
    """status.yml --limit spark-2."""
    result = run("spark-2", rows=rows[:1])
    assert result["status"]["state"] == "unknown" and result["status"]["endpoint"] == "http://10.1.230.180:30000/v1"
    assert shown[0] == ("\nUNKNOWN: the head is not in this run", serving_status.COLOURS["bad"])


def test_json_is_all_that_is_printed(run, rows, shown, tmp_path):
    path = tmp_path / "status.json"
    result = run("spark-1", rows=rows, output="json", file=str(path))
    assert len(shown) == 1 and json.loads(shown[0][0]) == result["status"] == json.loads(path.read_text())


def test_none_prints_nothing(run, rows, shown):
    assert run("spark-1", rows=rows, output="none")["status"] and shown == []
