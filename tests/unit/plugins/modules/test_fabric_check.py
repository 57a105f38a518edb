# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import shutil

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import fabric_check as module

RECEIVED = "2 packets transmitted, 2 received, 0% packet loss, time 203ms\n"
LOST = "2 packets transmitted, 0 received, 100% packet loss, time 2005ms\n"


@pytest.fixture
def run_module(monkeypatch, capsys):
    """Runs the whole module; peers in ``silent`` answer nothing."""

    def run(silent=(), connect=None, **params):
        def run_command(self, argv, **kwargs):
            assert argv[0] == "timeout" and int(argv[1]) >= 1
            if argv[2] == "ping":
                return (1, LOST, "") if argv[-1] in silent else (0, RECEIVED, "")
            if "neigh" in argv:
                peer = argv[argv.index("to") + 1]
                row = (
                    {"dst": peer, "state": ["FAILED"]}
                    if peer in silent
                    else {"dst": peer, "lladdr": "b6:ae:ec:6b:12:5a", "state": ["REACHABLE"]}
                )
                return 0, json.dumps([row]), ""
            return 0, json.dumps([{"dst": argv[-1], "dev": "enp1s0f1np1", "prefsrc": "192.168.200.12"}]), ""

        monkeypatch.setattr(AnsibleModule, "run_command", run_command)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(module, "tcp_connect", connect or (lambda source, address, port, timeout: None))
        given = {"node": "spark-1", "interface": "enp1s0f1np1", "address": "192.168.200.12", "mtu": 9000, **params}
        with patch_module_args(given), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


def peers(*numbers, **more):
    return [{"node": f"spark-{n}", "address": f"192.168.200.1{n + 1}", **more} for n in numbers]


@pytest.mark.parametrize("check_mode", [False, True])
def test_success_leaves_the_own_address_out(run_module, check_mode):
    result = run_module(peers=peers(1, 2, 3, peer_mtu=9000), _ansible_check_mode=check_mode)
    assert result["changed"] is False and result["mtu"] == 9000 and result["notes"] == []
    assert {row["node"] for row in result["checks"]} == {"spark-2", "spark-3"}
    assert {row["result"] for row in result["checks"]} == {"ok"}
    assert [row["check"] for row in result["checks"]][:5] == ["mtu", "route", "neighbour", "path_mtu", "tcp"]


def test_no_peer_is_no_check(run_module):
    assert run_module(peers=peers(1))["checks"] == []


def test_unreachable_worker(run_module):
    result = run_module(peers=peers(2, 3), silent=("192.168.200.14",))
    assert result["failed"] and result["problem"]["id"] == "fabric-unreachable"
    assert result["problem"]["details"]["peer"] == "spark-3"
    assert result["msg"].startswith("spark-1: preflight: found spark-3 (192.168.200.14) does not answer over enp1s0f1np1")
    by_node = {(row["node"], row["check"]): row["result"] for row in result["checks"]}
    assert by_node[("spark-2", "tcp")] == "ok" and by_node[("spark-3", "tcp")] == "skipped"


def test_mtu_that_differs(run_module):
    result = run_module(peers=peers(2, peer_mtu=1500))
    assert result["problem"]["id"] == "NET-12" and "MTU 9000" in result["msg"] and "1500 on spark-2" in result["msg"]


def test_refused(run_module):
    def connect(source, address, port, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    assert run_module(peers=peers(2), connect=connect)["problem"]["id"] == "NET-13"


def test_unknown_interface(run_module):
    result = run_module(peers=peers(2), interface="no-such-port", mtu=0)
    assert result["problem"]["id"] == "fabric-interface" and "no interface 'no-such-port'" in result["msg"]


def test_connect_over_loopback():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        module.tcp_connect("127.0.0.1", "127.0.0.1", port, 2)
    with pytest.raises(ConnectionRefusedError):
        module.tcp_connect("127.0.0.1", "127.0.0.1", port, 2)
