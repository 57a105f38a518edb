# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Outputs recorded with iputils 20221126 and iproute2 6.1.0 between two network namespaces joined by a veth pair."""

from __future__ import annotations

import dataclasses
import errno

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_path as path

PEER = path.Peer("spark-2", "192.168.200.13", 9000)
ROUTE = (0, '[{"dst":"192.168.200.13","dev":"enp1s0f1np1","prefsrc":"192.168.200.12","flags":[],"uid":0,"cache":[]}]', "")
HEAD = "PING 192.168.200.13 (192.168.200.13) from 192.168.200.12 enp1s0f1np1: 56(84) bytes of data.\n"
ANSWERS = (
    0,
    HEAD + "64 bytes from 192.168.200.13: icmp_seq=1 ttl=64 time=0.371 ms\n\n--- 192.168.200.13 ping statistics ---\n"
    "2 packets transmitted, 2 received, 0% packet loss, time 203ms\nrtt min/avg/max/mdev = 0.051/0.211/0.371/0.160 ms\n",
    "",
)
SILENCE = (1, HEAD + "\n--- 192.168.200.13 ping statistics ---\n2 packets transmitted, 0 received, 100% packet loss, time 201ms\n\n", "")
TOO_LONG = (
    1,
    HEAD + "\n--- 192.168.200.13 ping statistics ---\n2 packets transmitted, 0 received, +2 errors, 100% packet loss, time 201ms\n\n",
    "ping: local error: message too long, mtu=1500\nping: local error: message too long, mtu=1500\n",
)
FRAG_NEEDED = (
    1,
    HEAD + "From 192.168.200.1 icmp_seq=1 Frag needed and DF set (mtu = 1500)\n\n--- 192.168.200.13 ping statistics ---\n"
    "2 packets transmitted, 0 received, +1 errors, 100% packet loss, time 201ms\n",
    "",
)
REACHABLE = (0, '[{"dst":"192.168.200.13","lladdr":"b6:ae:ec:6b:12:5a","state":["REACHABLE"]}]\n', "")
INCOMPLETE = (0, '[{"dst":"192.168.200.13","state":["INCOMPLETE"]}]\n', "")
MISSING = (127, "", "ping is not installed")


class Network:
    """Recorded answers by kind of command; time passes one second with each."""

    def __init__(self, route=ROUTE, small=ANSWERS, big=ANSWERS, neighbour=REACHABLE, connect=None):
        self.answers = {"route": route, "neigh": neighbour, "small": small, "big": big}
        self.error = connect
        self.calls = []
        self.bounds = []
        self.now = 0.0

    def run(self, argv, seconds):
        kind = argv[2] if argv[0] == "ip" else ("big" if "do" in argv else "small")
        self.calls.append((kind, list(argv)))
        self.bounds.append(seconds)
        self.now += 1
        return self.answers[kind]

    def connect(self, source, address, port, seconds):
        self.calls.append(("tcp", [source, address, port]))
        self.bounds.append(seconds)
        error = self.error.get(port) if isinstance(self.error, dict) else self.error
        if error:
            raise error
        return port == 22


def check(net, peer=PEER, **over):
    values = {
        "node": "spark-1",
        "interface": "enp1s0f1np1",
        "address": "192.168.200.12",
        "mtu": 9000,
        "timeout": 12.0,
        **over,
    }
    return path.PathCheck(path.Ends(**values), peer, path.Net(net.run, net.connect, lambda: net.now)).run()


def results(done):
    return {row["check"]: row["result"] for row in done.rows}


def test_all_well():
    net = Network()
    done = check(net)
    assert done.problem is None and done.notes == []
    assert results(done) == dict.fromkeys(path.CHECKS, "ok")
    assert [kind for kind, argv in net.calls] == ["route", "small", "neigh", "big", "tcp"]
    big = net.calls[3][1]
    assert big[big.index("-s") + 1] == "8972" and big[big.index("-M") + 1] == "do" and big[big.index("-I") + 1] == "enp1s0f1np1"
    assert net.calls[4][1] == ["192.168.200.12", "192.168.200.13", 22]
    assert done.rows[1]["ms"] == 1000.0 and done.rows[0]["node"] == "spark-2"


@pytest.mark.parametrize(
    ("net", "peer", "failed", "problem_id", "found", "remedy"),
    [
        (
            {},
            path.Peer("spark-2", "192.168.200.13", 1500),
            "mtu",
            "NET-12",
            "MTU 9000 on enp1s0f1np1 here and 1500 on spark-2 (192.168.200.13)",
            "same MTU on both",
        ),
        (
            {"route": (2, "", "RTNETLINK answers: Network is unreachable\n")},
            PEER,
            "route",
            "fabric-route",
            "no route to spark-2 (192.168.200.13): RTNETLINK",
            "Docker network",
        ),
        (
            {"route": (0, '[{"dst":"192.168.200.13","gateway":"10.1.230.1","dev":"enP7s7"}]', "")},
            PEER,
            "route",
            "fabric-route",
            "leaves by enP7s7",
            "inventory",
        ),
        (
            {"small": SILENCE, "neighbour": INCOMPLETE},
            PEER,
            "neighbour",
            "fabric-unreachable",
            "does not answer over enp1s0f1np1 (neighbour INCOMPLETE",
            "spark-2 is on",
        ),
        ({"small": SILENCE, "neighbour": (0, "[]", "")}, PEER, "neighbour", "fabric-unreachable", "neighbour unknown", "192.168.200.13"),
        ({"small": (124, "", ""), "neighbour": INCOMPLETE}, PEER, "neighbour", "fabric-unreachable", "does not answer", "cable"),
        ({"big": SILENCE}, PEER, "path_mtu", "NET-12", "packets of 9000 bytes do not", "spark-2"),
        ({"big": TOO_LONG}, PEER, "path_mtu", "NET-12", "the path takes 1500 only", "every switch port"),
        ({"big": FRAG_NEEDED}, PEER, "path_mtu", "NET-12", "the path takes 1500 only", "every switch port"),
        (
            {"connect": OSError(errno.ECONNREFUSED, "rejected by a firewall")},
            PEER,
            "tcp",
            "NET-13",
            "port 22: rejected by a firewall",
            "firewall of spark-2",
        ),
        (
            {"connect": dict.fromkeys((6380, 6381, 6382, 6384), TimeoutError("timed out"))},
            path.Peer("spark-2", "192.168.200.13", 9000, (22, 6380, 6381, 6382, 6384, 45000)),
            "tcp",
            "NET-13",
            "to spark-2 (192.168.200.13) ports 6380 to 6382, 6384: no answer (open: ports 22, 45000)",
            "ufw allow in",
        ),
        (
            {"connect": TimeoutError("timed out")},
            PEER,
            "tcp",
            "NET-13",
            "no TCP connection from 192.168.200.12 to spark-2 (192.168.200.13) port 22: no answer",
            "firewall",
        ),
        ({"connect": OSError(errno.EHOSTUNREACH, "No route to host")}, PEER, "tcp", "NET-13", "No route to host", "firewall"),
    ],
)
def test_each_failure_has_its_message(net, peer, failed, problem_id, found, remedy):
    done = check(Network(**net), peer)
    problem = done.problem
    assert problem.id == problem_id
    assert found in problem.found and remedy in problem.remedy
    assert problem.node == "spark-1" and problem.details["peer"] == "spark-2"
    after = path.CHECKS[path.CHECKS.index(failed) + 1 :]
    assert results(done)[failed] == "failed"
    assert all(results(done)[name] == "skipped" for name in after)


@pytest.mark.parametrize(("small", "note"), [(SILENCE, "answers ARP but not ping"), (MISSING, "ping is not installed here")])
def test_without_ping_tcp_decides(small, note):
    done = check(Network(small=small))
    assert done.problem is None
    assert results(done)["path_mtu"] == "skipped" and results(done)["tcp"] == "ok"
    assert len(done.notes) == 1 and note in done.notes[0]


def test_a_port_without_a_listener_is_open():
    done = check(Network(), path.Peer("spark-2", "192.168.200.13", 9000, (22, 6380)))
    assert done.problem is None and done.rows[-1]["detail"] == "open: ports 22, 6380"


def test_without_the_ping_command_a_connection_warms_the_neighbour():
    net = Network(small=MISSING, neighbour=INCOMPLETE, connect=TimeoutError())
    assert check(net).problem.id == "fabric-unreachable"
    assert [kind for kind, argv in net.calls] == ["route", "small", "tcp", "neigh"]


def test_unknown_mtu_of_the_peer_is_not_compared():
    assert results(check(Network(), path.Peer("spark-2", "192.168.200.13")))["mtu"] == "skipped"


def test_skip():
    net = Network(big=SILENCE)
    done = check(net, skip=frozenset({"path_mtu", "tcp"}))
    assert done.problem is None and [kind for kind, argv in net.calls] == ["route", "small", "neigh"]


def test_steps_are_bounded_by_the_rest_of_the_time():
    net = Network()
    check(net, timeout=2.0)
    assert max(net.bounds) <= 2.0 and net.bounds[-1] == 0.5


def test_a_pinned_rail_asks_the_way_of_its_own_interface():
    net = Network(route=(0, '[{"dst":"192.168.200.13","dev":"enP2p1s0f1np1"}]', ""))
    done = check(net, interface="enP2p1s0f1np1", address="192.168.200.112", pinned=True)
    assert done.problem is None
    assert net.calls[0][1][4:] == ["192.168.200.13", "from", "192.168.200.112", "oif", "enP2p1s0f1np1"]
    check(plain := Network())
    assert "oif" not in plain.calls[0][1]


OWN = path.Ends("spark-1", "enp1s0f1np1", "192.168.200.12", 9000, 12.0)


def rail(interface, address, mtu=9000):
    return path.Rail(interface, address, address.rpartition(".")[0] + ".0/24", mtu)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([], [rail("enP2p1s0f1np1", "192.168.201.13")], []),
        (
            [rail("enP2p1s0f1np1", "192.168.201.12", 1500)],
            [rail("enP2p1s0f0np0", "192.168.201.13")],
            [("enP2p1s0f1np1", "192.168.201.12", 1500, False, "192.168.201.13", 9000, (22,))],
        ),
        # Twins in one subnet: pinned to the interface.
        (
            [rail("enP2p1s0f1np1", "192.168.200.112")],
            [rail("enP2p1s0f1np1", "192.168.200.113")],
            [("enP2p1s0f1np1", "192.168.200.112", 9000, True, "192.168.200.113", 9000, (22,))],
        ),
        # Two further rails in one subnet are joined by their position; one that the peer lacks is left out.
        (
            [rail("a", "192.168.201.12"), rail("b", "192.168.201.112"), rail("c", "192.168.202.12")],
            [rail("x", "192.168.201.13"), rail("y", "192.168.201.113")],
            [("a", "192.168.201.12", 9000, True, "192.168.201.13", 9000, (22,)), ("b", "192.168.201.112", 9000, True, "192.168.201.113", 9000, (22,))],
        ),
    ],
)  # fmt: skip
def test_each_rail_is_a_path_of_its_own(ours, theirs, expected):
    peer = path.Peer("spark-2", "192.168.200.13", 9000, (22, 6380), tuple(theirs))
    first, *others = path.legs(OWN, ours, [peer])
    # The kernel may send to a peer by either half of a port when both are in one subnet (NET-05): then the main path is pinned, too.
    assert first == (dataclasses.replace(OWN, pinned=any(other.subnet == "192.168.200.0/24" for other in ours)), peer)
    assert [(e.interface, e.address, e.mtu, e.pinned, p.address, p.mtu, p.ports) for e, p in others] == expected


def test_paths_of_the_plan():
    fabric = {
        "interface": "enp1s0f1np1",
        "mtu": 9000,
        "candidates": [{"interface": "enP2p1s0f1np1", "mtu": 1500}],
        "rails": [
            {"interface": "enp1s0f1np1", "address": "192.168.200.12", "subnet": "192.168.200.0/24", "active": True},
            {"interface": "enP2p1s0f1np1", "address": "192.168.201.12", "subnet": "192.168.201.0/24", "active": True},
            {"interface": "enp1s0f0np0", "address": None, "subnet": None, "active": True},
            {"interface": "enP2p1s0f0np0", "address": "192.168.202.12", "subnet": "192.168.202.0/24", "active": False},
        ],
    }
    members = [{"name": "spark-1", "address": "192.168.200.12", "fabric": fabric}]
    assert path.paths(members, {"spark-1": [22, 6379]}) == [
        {
            "node": "spark-1",
            "address": "192.168.200.12",
            "peer_mtu": 9000,
            "ports": [22, 6379],
            "rails": [{"interface": "enP2p1s0f1np1", "address": "192.168.201.12", "subnet": "192.168.201.0/24", "mtu": 1500}],
        }
    ]


def test_every_node_sends_once_and_receives_once():
    nodes = ["192.168.200.9", "192.168.200.12", "192.168.200.100"]
    assert [path.receiver_of(node, nodes) for node in nodes] == ["192.168.200.12", "192.168.200.100", "192.168.200.9"]


@pytest.mark.parametrize(("gbits", "told"), [(13.2, True), (19.99, True), (20.0, False), (92.4, False)])
def test_a_slow_rail_is_told(gbits, told):
    text = path.slow("spark-2 (192.168.200.13)", "enp1s0f1np1", gbits, 20)
    assert bool(text) is told
    assert not told or (f"only {gbits:.1f} Gb/s" in text and "20 or more" in text and "take their power away" in text)


def test_summary_names_all():
    bad = [check(Network(small=SILENCE, neighbour=INCOMPLETE), path.Peer(f"spark-{n}", f"192.168.200.1{n}")) for n in (3, 4)]
    problem = path.summary([check(Network()), *bad])
    assert problem.found.startswith("spark-3 (192.168.200.13)") and "also spark-4 (192.168.200.14)" in problem.found
    assert [item["id"] for item in problem.details["others"]] == ["fabric-unreachable"]
    assert path.summary([check(Network())]) is None
    assert path.summary(bad[:1]) is bad[0].problem


@pytest.mark.parametrize(
    ("out", "expected"), [("[]", ("", "")), ("junk", ("", "")), ("", ("", "")), (REACHABLE[1], ("REACHABLE", "b6:ae:ec:6b:12:5a"))]
)
def test_parse_neighbour(out, expected):
    assert path.parse_neighbour(out) == expected
