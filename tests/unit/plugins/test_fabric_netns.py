# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules unchanged against real interfaces: network namespaces as nodes, joined by veth pairs. Root and iproute2 are needed; nothing leaves them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _topology
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes

F0, F1, T1, LAN = "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1", "enP7s7"
COLLECTIONS = shapes.HERE.parents[3] / "playbooks" / "collections"
PORT = 22
RUN = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
module = importlib.import_module("ansible_collections.dgxspark.serving.plugins.modules." + sys.argv[1])
with patch_module_args(json.loads(sys.argv[2])):
    module.main()
"""
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=10)


def unavailable() -> str:
    """Why no namespace can be made here; "" when they can."""
    if os.geteuid() != 0:
        return "not root"
    if not shutil.which("ip"):
        return "no iproute2"
    probe = f"dgxt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=10, check=False)
    if made.returncode == 0:
        inside = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True, timeout=10, check=False)
        ip("netns", "delete", probe)
        made = inside
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else ""


REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Node:
    """A namespace."""

    def __init__(self, number: int) -> None:
        self.name = f"spark-{number}"
        self.namespace = f"dgxt{os.getpid()}n{number}"
        ip("netns", "add", self.namespace)
        self.ip("link", "set", "lo", "up")

    def ip(self, *args: str) -> None:
        ip("-n", self.namespace, *args)

    def add_type(self, kind: str, *args: str) -> None:
        """An interface of a kind that not every kernel has."""
        try:
            self.ip("link", "add", *args)
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"this kernel makes no {kind}: {exc.stderr.strip()}")

    def address(self, name: str, *addresses: str) -> None:
        self.ip("link", "set", name, "up")
        for address in addresses:
            self.ip("addr", "add", address, "dev", name)

    def run(self, *args: str, **more: t.Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *args], capture_output=True, text=True, timeout=60, check=False, **more
        )

    def module(self, name: str, **params: t.Any) -> dict[str, t.Any]:
        """What a module of the collection answers on this node."""
        env = {**os.environ, "PYTHONPATH": str(COLLECTIONS)}
        done = self.run(sys.executable, "-c", RUN, name, json.dumps({"node": self.name, **params}), env=env)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def detect(self, **params: t.Any) -> dict[str, t.Any]:
        return self.module("nccl_interface_info", **{"subnets": ["192.168.200.0/24"], **params})

    def check(self, peer: str, **params: t.Any) -> dict[str, t.Any]:
        given = {
            "interface": F1,
            "address": "192.168.200.12",
            "peers": [{"node": "spark-2", "address": peer}],
            "timeout": 6,
        }
        return self.module("fabric_check", **{**given, **params})

    @contextlib.contextmanager
    def listening(self, address: str) -> t.Iterator[None]:
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", LISTEN, address, str(PORT)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout and server.stdout.readline() == "ready\n"
                yield
            finally:
                server.terminate()


@pytest.fixture
def make():
    """make(n): n namespaces."""
    nodes: list[Node] = []

    def make(count: int) -> list[Node]:
        for number in range(1, count + 1):
            nodes.append(Node(number))
        return nodes

    yield make
    for node in nodes:
        subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True, timeout=10, check=False)


def cable(one: Node, other: Node, name: str = F1, other_name: str = F1) -> None:
    one.ip("link", "add", name, "type", "veth", "peer", "name", other_name, "netns", other.namespace)


@pytest.fixture
def pair(make):
    """Two nodes with one cable, 192.168.200.12 and .13."""
    one, other = make(2)
    cable(one, other)
    one.address(F1, "192.168.200.12/24")
    other.address(F1, "192.168.200.13/24")
    return one, other


def reasons(result: dict[str, t.Any]) -> dict[str, str]:
    rows = result["fabric"]["candidates"] if "fabric" in result else result["problem"]["details"]["candidates"]
    return {row["interface"]: row["reason"] for row in rows}


def test_fabric_netns_pair(pair):
    for node, own, peer in ((pair[0], "192.168.200.12", "192.168.200.13"), (pair[1], "192.168.200.13", "192.168.200.12")):
        result = node.detect(address=own, peers=[peer])
        fabric = result["fabric"]
        assert (fabric["interface"], fabric["address"], fabric["mtu"], fabric["transport"]) == (F1, own, 1500, "socket")
        assert fabric["env"]["NCCL_SOCKET_IFNAME"] == f"={F1}" and fabric["env"]["VLLM_HOST_IP"] == own
        assert fabric["warnings"] == []


def test_fabric_netns_other_name_on_the_other_node(make):
    one, other = make(2)
    cable(one, other, F1, F0)
    one.address(F1, "192.168.200.12/24")
    other.address(F0, "192.168.200.13/24")
    assert one.detect(peers=["192.168.200.13"])["fabric"]["interface"] == F1
    assert other.detect(peers=["192.168.200.12"])["fabric"]["interface"] == F0


def test_fabric_netns_bridges_and_veths_beside_it(pair):
    one, _other = pair
    one.ip("link", "add", "br-1a2b3c4d5e6f", "type", "bridge")
    one.ip("link", "add", "veth9f8e7d6", "type", "veth", "peer", "name", "inside")
    one.ip("link", "set", "veth9f8e7d6", "master", "br-1a2b3c4d5e6f")
    for name in ("veth9f8e7d6", "inside"):
        one.address(name)
    one.address("br-1a2b3c4d5e6f", "192.168.192.1/20")
    result = one.detect(peers=["192.168.200.13"])
    assert result["fabric"]["interface"] == F1
    told = reasons(result)
    assert told["br-1a2b3c4d5e6f"].startswith("a bridge of containers") and told["veth9f8e7d6"].startswith("a member of br-")
    assert any("br-1a2b3c4d5e6f carries 192.168.192.1/20, which overlaps" in text for text in result["fabric"]["warnings"])


def test_fabric_netns_bridge_that_takes_the_packets(make):
    one, other = make(2)
    cable(one, other)
    one.ip("link", "add", "br-1a2b3c4d5e6f", "type", "bridge")
    one.address("br-1a2b3c4d5e6f", "192.168.200.1/24")  # first, so the kernel's first route is this one
    one.address(F1, "192.168.200.12/24")
    other.address(F1, "192.168.200.13/24")
    problem = one.detect(peers=["192.168.200.13"])["problem"]
    assert problem["id"] == "fabric-route" and "leave by br-1a2b3c4d5e6f (192.168.200.1/24)" in problem["found"]


def test_fabric_netns_vlan_beside_its_parent(pair):
    one, _other = pair
    one.add_type("VLAN", "link", F1, "name", f"{F1}.100", "type", "vlan", "id", "100")
    one.address(f"{F1}.100", "10.100.0.12/24")
    result = one.detect(peers=["192.168.200.13"])
    assert result["fabric"]["interface"] == F1
    assert any(f"{F1}.100 begins with {F1}" in text for text in result["fabric"]["warnings"])
    vlan = one.detect(subnets=["10.100.0.0/24"])["fabric"]
    assert (vlan["interface"], vlan["env"]["NCCL_SOCKET_IFNAME"]) == (f"{F1}.100", f"={F1}.100")


def test_fabric_netns_bond(make):
    one, other = make(2)
    cable(one, other, F0, F0)
    cable(one, other, F1, F1)
    one.add_type("bond", "bond0", "type", "bond", "mode", "active-backup")
    for name in (F0, F1):
        one.ip("link", "set", name, "master", "bond0")
        other.address(name)
        one.address(name)
    one.address("bond0", "192.168.200.12/24")
    result = one.detect(wait=5)
    assert result["fabric"]["interface"] == "bond0"
    assert reasons(result)[F1] == "a member of bond0: addresses belong there"


@pytest.mark.parametrize(
    ("commands", "problem_id", "found"),
    [
        ([("addr", "flush", "dev", F1)], "fabric-missing", f"{F1}: up, but without IPv4"),
        ([("link", "set", F1, "down")], "fabric-missing", f"{F1}: administratively down"),
        (
            [("addr", "flush", "dev", F1), ("addr", "add", "192.168.100.10/24", "dev", F1)],
            "fabric-missing",
            f"{F1}: IPv4 in another subnet: 192.168.100.10/24",
        ),
        (
            [("addr", "flush", "dev", F1), ("addr", "add", "169.254.127.30/16", "scope", "link", "dev", F1)],
            "NET-10",
            f"{F1} 169.254.127.30/16",
        ),
        (
            [("addr", "flush", "dev", F1), ("addr", "add", "fd00:200::12/64", "nodad", "dev", F1)],
            "fabric-missing",
            "up, but without IPv4 (only IPv6 fd00:200::12)",
        ),
    ],
)
def test_fabric_netns_what_is_wrong_with_an_interface_is_told_apart(pair, commands, problem_id, found):
    one, _other = pair
    for command in commands:
        one.ip(*command)
    result = one.detect(peers=["192.168.200.13"])
    assert result["problem"]["id"] == problem_id and found in result["problem"]["found"]


def test_fabric_netns_dummy_in_the_subnet(pair):
    one, _other = pair
    one.add_type("dummy", T1, "type", "dummy")
    one.address(T1, "192.168.200.99/32")
    result = one.detect(peers=["192.168.200.13"])
    assert result["fabric"]["interface"] == F1 and reasons(result)[T1] == "virtual (dummy), no wire"


def test_fabric_netns_no_carrier(pair):
    one, other = pair
    other.ip("link", "set", F1, "down")
    problem = one.detect(peers=["192.168.200.13"])["problem"]
    assert problem["id"] == "fabric-missing" and f"{F1}: no carrier: no cable, or the other end is off (address" in problem["found"]


def test_fabric_netns_second_interface_in_the_subnet(pair):
    one, other = pair
    cable(one, other, F0, F0)
    other.address(F0)
    one.address(F0, "192.168.200.22/24")
    problem = one.detect(address="192.168.200.12", peers=["192.168.200.13"])["problem"]
    assert problem["id"] == "fabric-ambiguous" and F0 in problem["found"] and F1 in problem["found"]
    assert one.detect(interface=F1, peers=["192.168.200.13"])["fabric"]["interface"] == F1


def test_fabric_netns_an_address_that_comes_back_is_waited_for(pair):
    """NET-16: an interface loses its address for a moment when the network is set up again."""
    one, _other = pair
    one.ip("addr", "flush", "dev", F1)
    later = threading.Timer(0.5, one.ip, ("addr", "add", "192.168.200.12/24", "dev", F1))
    later.start()
    try:
        assert one.detect(wait=20, peers=["192.168.200.13"])["fabric"]["address"] == "192.168.200.12"
    finally:
        later.join()


def test_fabric_netns_ring_of_three(make, tmp_path):
    nodes = make(3)
    nets = {(0, 1): 10, (1, 2): 20, (2, 0): 30}
    for (one, other), net in nets.items():  # port 0 to port 1 of the next
        cable(nodes[one], nodes[other], F0, F1)
        nodes[one].address(F0, f"192.168.{net}.{one + 1}/24")
        nodes[other].address(F1, f"192.168.{net}.{other + 1}/24")
    for number, node in enumerate(nodes):
        node.ip("link", "add", LAN, "type", "veth", "peer", "name", "switch")
        node.address("switch")
        node.address(LAN, f"10.1.230.{180 + number}/24")
    speeds = "\n".join(f"net {name} speed=200000 pci=0000:01:00.{port} driver=mlx5_core" for port, name in enumerate((F0, F1)))
    shapes.write_tree(f"{speeds}\nnet {LAN} speed=10000\n", tmp_path)
    surveys = [
        {"node": node.name, "address": "", "ports": node.module("nccl_interface_info", survey=True, sysfs_path=str(tmp_path))["ports"]}
        for node in nodes
    ]
    for survey in surveys:  # the other end of the simulated LAN is no part of a real node
        survey["ports"] = [row for row in survey["ports"] if row["interface"] != "switch"]
    found = _topology.find(surveys)
    assert (found["topology"], found["subnet"]) == ("ring", "10.1.230.0/24")
    assert sorted(found["rails"]) == ["192.168.10.0/24", "192.168.20.0/24", "192.168.30.0/24"]
    fabric = nodes[0].detect(subnets=[found["subnet"], *found["rails"]], address="10.1.230.180", peers=["10.1.230.181", "10.1.230.182"])[
        "fabric"
    ]
    assert (fabric["interface"], fabric["env"]["GLOO_SOCKET_IFNAME"]) == (LAN, LAN)


# --- the path between two nodes


def result_of(result: dict[str, t.Any], check: str) -> str:
    return next(row["result"] for row in result["checks"] if row["check"] == check)


def needs_ping() -> None:
    if not shutil.which("ping"):
        pytest.skip("no ping here: the path MTU cannot be proven")


def needs_firewall(node: Node) -> None:
    done = node.run("iptables", "-L", "-n") if shutil.which("iptables") else None
    if done is None or done.returncode:
        pytest.skip(f"no iptables in a namespace: {done.stderr.strip() if done else 'not installed'}")


def test_fabric_netns_path(pair):
    one, other = pair
    with other.listening("192.168.200.13"):
        result = one.check("192.168.200.13")
    assert not result.get("failed"), result.get("msg")
    assert (result_of(result, "route"), result_of(result, "neighbour"), result_of(result, "tcp")) == ("ok", "ok", "ok")


def test_fabric_netns_mtu_of_the_ends_differs(pair):
    one, _other = pair
    one.ip("link", "set", F1, "mtu", "9000")
    result = one.check("192.168.200.13", mtu=9000, peers=[{"node": "spark-2", "address": "192.168.200.13", "peer_mtu": 1500}])
    assert result["problem"]["id"] == "NET-12" and "9000" in result["problem"]["found"] and "1500" in result["problem"]["found"]


def test_fabric_netns_path_that_takes_small_packets_only(pair):
    needs_ping()
    one, other = pair
    one.ip("link", "set", F1, "mtu", "9000")  # the other end is left at 1500 and says nothing about it
    with other.listening("192.168.200.13"):
        result = one.check("192.168.200.13", mtu=9000)
    assert result["problem"]["id"] == "NET-12" and result_of(result, "neighbour") == "ok" and result_of(result, "path_mtu") == "failed"
    for node in pair:
        node.ip("link", "set", F1, "mtu", "9000")
    with other.listening("192.168.200.13"):
        assert result_of(one.check("192.168.200.13", mtu=9000), "path_mtu") == "ok"


def test_fabric_netns_blocked_tcp(pair):
    one, other = pair
    needs_firewall(other)
    assert other.run("iptables", "-A", "INPUT", "-p", "tcp", "-j", "DROP").returncode == 0
    with other.listening("192.168.200.13"):
        result = one.check("192.168.200.13")
    assert result["problem"]["id"] == "NET-13" and "no answer" in result["problem"]["found"]


def test_fabric_netns_firewall_in_one_direction(pair):
    """spark-1 lets nobody in: the way from spark-1 is proven, the way to it is not. Hence the check runs on every node."""
    one, other = pair
    needs_firewall(one)
    assert one.run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP").returncode == 0
    with one.listening("192.168.200.12"), other.listening("192.168.200.13"):
        out = one.check("192.168.200.13")
        back = other.check("192.168.200.12", address="192.168.200.13", peers=[{"node": "spark-1", "address": "192.168.200.12"}])
    assert result_of(out, "tcp") == "ok"
    assert back["problem"]["id"] == "NET-13" and back["problem"]["node"] == "spark-2"


def test_fabric_netns_a_peer_that_is_not_there(pair):
    one, _other = pair
    problem = one.check("192.168.200.14")["problem"]
    assert problem["id"] == "fabric-unreachable" and "192.168.200.14" in problem["found"]
