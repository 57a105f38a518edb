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


def test_a_blocked_port(run_module):
    def connect(source, address, port, timeout):
        if port == 6380:
            raise TimeoutError("timed out")
        return False

    result = run_module(peers=peers(2, ports=[22, 6380]), connect=connect)
    assert result["problem"]["id"] == "NET-13" and "port 6380: no answer (open: port 22)" in result["msg"]


def test_a_further_rail(run_module):
    """The peer's second half answers nothing; the fake kernel routes everything by the first, so the way is what fails."""
    second = {"interface": "enP2p1s0f1np1", "subnet": "192.168.201.0/24"}
    given = peers(2, rails=[{**second, "address": "192.168.201.13"}])
    result = run_module(peers=given, rails=[{**second, "address": "192.168.201.12"}])
    assert result["problem"]["id"] == "fabric-route" and "spark-2 (192.168.201.13) leaves by enp1s0f1np1" in result["msg"]
    assert {row["interface"] for row in result["checks"]} == {"enp1s0f1np1", "enP2p1s0f1np1"}


class TestThroughput:
    """Over loopback, where this node and its peer are two addresses; the receiver of the own address takes what comes."""

    GIVEN = {"address": "127.0.0.1", "mtu": 9000, "throughput": 0.2}

    @pytest.fixture(autouse=True)
    def _port(self, monkeypatch):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        monkeypatch.setattr(module._throughput, "RETRY", 0.01)

    def test_measures_and_warns(self, run_module, monkeypatch):
        warned = []
        monkeypatch.setattr(AnsibleModule, "warn", lambda self, text: warned.append(text))
        there = module._throughput.Receiver(["127.0.0.2"], self.port)

        def back():
            module._throughput.send("127.0.0.2", "127.0.0.1", self.port, 0.1)

        import threading

        thread = threading.Thread(target=back)
        thread.start()
        try:
            result = run_module(
                peers=[{"node": "spark-2", "address": "127.0.0.2"}], throughput_port=self.port, throughput_min=10000, **self.GIVEN
            )
        finally:
            thread.join()
            there.close()
        (row,) = result["throughput"]
        assert row["node"] == "spark-2" and row["interface"] == "enp1s0f1np1" and row["gbits"] > 0
        assert not result.get("failed") and [f"spark-1: {note}" for note in result["notes"]] == warned
        assert warned[0].startswith("spark-1: only ") and "NCL-06" in warned[0]

    def test_a_port_that_is_taken_is_told(self, run_module):
        taken = module._throughput.Receiver(["127.0.0.1"], self.port)
        try:
            result = run_module(peers=[{"node": "spark-2", "address": "127.0.0.2"}], throughput_port=self.port, **self.GIVEN)
        finally:
            taken.close()
        assert not result.get("failed") and f"port {self.port} of this node" in result["notes"][0] and result["throughput"] == []

    def test_a_peer_that_does_not_take_part_is_told(self, run_module, monkeypatch):
        monkeypatch.setattr(module._throughput.send, "__defaults__", (0.05,))
        monkeypatch.setattr(module._throughput.Receiver, "wait", lambda self, streams, seconds: False)
        result = run_module(peers=[{"node": "spark-2", "address": "127.0.0.2"}], throughput_port=self.port, **self.GIVEN)
        assert not result.get("failed") and "does this check run on it at the same time?" in result["notes"][0]


def test_unknown_interface(run_module):
    result = run_module(peers=peers(2), interface="no-such-port", mtu=0)
    assert result["problem"]["id"] == "fabric-interface" and "no interface 'no-such-port'" in result["msg"]


def test_connect_over_loopback():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert module.tcp_connect("127.0.0.1", "127.0.0.1", port, 2) is True
    assert module.tcp_connect("127.0.0.1", "127.0.0.1", port, 2) is False


class Refused:
    """A socket that a firewall refused (recorded: iptables -j REJECT between two network namespaces), or a host without a listener."""

    def __init__(self, *queue):
        self.queue = list(queue)

    def setblocking(self, flag):
        assert flag is False

    def recvmsg(self, size, extra, flags):
        if not self.queue:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return b"", [self.queue.pop()], flags, None


def test_a_firewall_that_refuses_is_told_from_a_host_that_does():
    rejected = (0, 11, bytes.fromhex("6f000000020303000000000000000000020000000a4200020000000000000000"))
    assert module.refused_by_icmp(Refused(rejected)) is True
    assert module.refused_by_icmp(Refused()) is False
