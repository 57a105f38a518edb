# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the nodes of a gang have in common. Whole shapes: tests/unit/plugins/test_fabric_shapes.py."""

from __future__ import annotations

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _topology
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import fabric_gang

F1, T1 = "enp1s0f1np1", "enP2p1s0f1np1"


def refused(shape, root, addresses=None):
    with pytest.raises(Problem) as caught:
        fabric_gang.Gang(shape, root, addresses).find()
    return caught.value


# --- the subnet that nobody named


@pytest.mark.parametrize(
    ("shape", "addresses", "expected"),
    [
        ("one_cable", {}, ("pair", "192.168.200.0/24", [], {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"})),
        (
            "twin_own_subnet",
            {},
            ("pair", "192.168.200.0/24", ["192.168.201.0/24"], {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}),
        ),
        ("twins_same_subnet", {}, ("pair", "192.168.200.0/24", [], {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"})),
        # The addresses of the inventory tell the two cables apart.
        (
            "two_cables_lan",
            {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"},
            ("pair", "192.168.200.0/24", [], {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}),
        ),
        (
            "two_cables_both",
            {"spark-1": "192.168.178.11", "spark-2": "192.168.178.12"},
            ("pair", "192.168.178.0/24", [], {"spark-1": "192.168.178.11", "spark-2": "192.168.178.12"}),
        ),
        (
            "ring_bare_twins",
            {},
            (
                "ring",
                "10.1.230.0/24",
                ["192.168.10.0/24", "192.168.30.0/24", "192.168.20.0/24"],
                {"spark-1": "10.1.230.180", "spark-2": "10.1.230.181", "spark-3": "10.1.230.182"},
            ),
        ),
    ],
)
def test_found(shape, addresses, expected, tmp_path):
    found = fabric_gang.Gang(shape, tmp_path, addresses).find()
    assert (found["topology"], found["subnet"], found["rails"], found["addresses"]) == expected


@pytest.mark.parametrize(
    ("shape", "subnet", "expected"),
    [
        ("two_cables_lan", "192.168.200.0/24", {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}),
        ("simulated", "192.168.200.0/24", {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}),  # no port there is fast
        ("link_local", "169.254.0.0/16", {"spark-1": "169.254.127.30", "spark-2": "169.254.35.62"}),
    ],
)
def test_addresses_in_a_subnet_that_is_named(shape, subnet, expected, tmp_path):
    found = fabric_gang.Gang(shape, tmp_path).find(subnet)
    assert (found["subnet"], found["addresses"], found["rails"]) == (subnet, expected, [])


def test_a_node_without_an_address_in_the_subnet_that_is_named(tmp_path):
    with pytest.raises(Problem) as caught:
        fabric_gang.Gang("no_cable_one_node", tmp_path).find("192.168.200.0/24")
    assert caught.value.id == "fabric-missing" and "on spark-2: spark-2: " in caught.value.found and "spark-1: " not in caught.value.found


def test_addresses_on_the_management_network_are_not_a_fabric(tmp_path):
    problem = refused("one_cable", tmp_path, {"spark-1": "10.1.230.180", "spark-2": "10.1.230.181"})
    assert problem.id == "fabric-address"
    assert "spark_fabric_address outside of what all nodes share on fast ports (192.168.200.0/24)" in problem.found
    assert "spark-1 10.1.230.180, spark-2 10.1.230.181" in problem.found


@pytest.mark.parametrize(
    ("shape", "words", "remedy"),
    [
        ("two_cables_lan", "2 subnets that all nodes share on fast ports (192.168.200.0/24, 192.168.0.0/24)", "set spark_fabric_subnet"),
        ("no_cable", "spark-2: enp1s0f0np0 (no carrier), enp1s0f1np1 (no carrier)", "a fast port of spark-1 and of spark-2"),
        ("no_cable_one_node", "spark-1: enp1s0f0np0 (no carrier), enp1s0f1np1 (192.168.200.12/24, 200000 Mb/s)", "a fast port of spark-2,"),
        ("simulated", "spark-1: no port with 25 Gb/s or RDMA", "or set spark_fabric_subnet"),
        ("ring_of_four", "a ring of 4 nodes in which spark-1 and spark-3, spark-2 and spark-4 share no subnet", "use a switch"),
        ("chain", "nodes without a switch in which spark-1 and spark-3 share no subnet", "join spark-1 and spark-3 by a cable"),
        ("ring_without_lan", "a ring in which all nodes share no other network", "connect the nodes to one LAN"),
    ],
)
def test_not_found_lists_every_node(shape, words, remedy, tmp_path):
    problem = refused(shape, tmp_path)
    assert words in problem.found and remedy in problem.remedy
    assert set(problem.details["nodes"]) == set(fabric_gang.Gang(shape, tmp_path / "again").names)


def port(name, *addresses, fast=True, **more):
    """A row of a survey."""
    return {
        "interface": name,
        "addresses": list(addresses),
        "fast": fast,
        "usable": True,
        "port": name,
        "reason": "",
        "mtu": 9000,
        "speed": 200000,
        **more,
    }


def ring_nodes(*lans):
    links = {1: (10, 30), 2: (20, 10), 3: (30, 20)}
    return [
        {
            "node": f"spark-{n}",
            "address": "",
            "ports": [
                *(port(f"f{i}", f"192.168.{net}.{n}/24") for i, net in enumerate(nets)),
                *(port(f"lan{i}", f"{lan}.{n}/24", fast=False) for i, lan in enumerate(lans)),
            ],
        }
        for n, nets in links.items()
    ]


def test_a_ring_with_two_networks_for_the_sockets():
    assert _topology.find(ring_nodes("10.1.230"))["subnet"] == "10.1.230.0/24"
    nodes = ring_nodes("10.1.230", "10.1.231")
    with pytest.raises(Problem) as caught:
        _topology.find(nodes)
    assert caught.value.id == "NCL-05" and "several other networks (10.1.230.0/24, 10.1.231.0/24)" in caught.value.found
    named = [{**node, "address": f"10.1.231.{n}"} for n, node in enumerate(nodes, 1)]
    assert _topology.find(named)["subnet"] == "10.1.231.0/24"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            "bare",
            {
                "spark-1": {F1: (["192.168.200.12/24"], 9000), T1: (["192.168.201.12/24"], 9000)},
                "spark-2": {F1: (["192.168.200.13/24"], 9000), T1: (["192.168.201.13/24"], 9000)},
            },
        ),
        # What a node has is kept, the other one joins it; a half that is only switched off is used.
        ("admin_down", {"spark-1": {F1: (["192.168.200.12/24"], 9000)}}),
        ("prefix_differs", {"spark-2": {F1: (["192.168.200.13/24"], 9000)}}),
        ("no_cable_one_node", {}),
        ("no_cable", {}),
    ],
)
def test_netplan_files_to_write(shape, expected, tmp_path):
    problem = refused(shape, tmp_path)
    files = {node: yaml.safe_load(text)["network"]["ethernets"] for node, text in problem.details["netplan"].items()}
    found = {node: {name: (port["addresses"], port["mtu"]) for name, port in ports.items()} for node, ports in files.items()}
    assert found == expected
    assert all(f"{node}: network: {{" in problem.remedy for node in expected)


def test_an_address_that_is_in_use_is_not_proposed():
    nodes = [{"node": "spark-1", "ports": [port(F1, "192.168.200.13/24")]}, {"node": "spark-2", "ports": [port(F1)]}]
    files, _dark = _topology.proposed_files(nodes)
    assert files == {"spark-2": [{"name": F1, "addresses": ["192.168.200.14/24"], "mtu": 9000}]}


def test_a_subnet_that_is_in_use_is_not_proposed():
    ports = [
        {"interface": "enP7s7", "addresses": ["192.168.200.9/24"], "fast": False, "usable": True, "port": "a", "reason": "", "mtu": 1500}
    ]
    fast = {"interface": F1, "addresses": [], "fast": True, "usable": True, "port": "b", "reason": "up, but without IPv4", "mtu": 1500}
    files, dark = _topology.proposed_files([{"node": "spark-1", "ports": [*ports, fast]}, {"node": "spark-2", "ports": ports}])
    assert files == {"spark-1": [{"name": F1, "addresses": ["192.168.202.12/24"], "mtu": 9000}]}
    assert dark == ["spark-2"]


# --- a gang that was detected


def rail(subnet, number=1, gid=3, hca="rocep1s0f1"):
    return {"interface": f"if{number}", "subnet": subnet, "number": number, "hca": hca, "gid_index": gid, "active": True}


def gang(*rails, hcas=("rocep1s0f1:1",)):
    return [{"name": f"spark-{n}", "fabric": {"rails": own, "hcas": list(hcas)}} for n, own in enumerate(rails, 1)]


A, B, C = "192.168.10.0/24", "192.168.20.0/24", "192.168.30.0/24"
RING = gang([rail(A, 0), rail(C, 1)], [rail(B, 0), rail(A, 1)], [rail(C, 0), rail(B, 1)])
CROSSED = {"NCCL_CROSS_NIC": "0"}


@pytest.mark.parametrize(
    ("members", "name", "env", "ids"),
    [
        (gang([rail(A)]), "single", {}, []),
        (gang([rail(A), rail(B)]), "single", {}, []),
        (gang([rail(A)], [rail(A)]), "pair", {}, []),
        (gang([rail(A), rail(A)], [rail(A), rail(A)]), "pair", {}, []),  # twins in one subnet: every rail reaches every other
        (gang([rail(A), rail(B)], [rail(A), rail(B)]), "pair", CROSSED, []),
        (gang([rail(A), rail(B)], [rail(A), rail(B)], hcas=()), "pair", {}, []),
        (gang([rail(A), rail(B)], [rail(A), rail(B)], [rail(A), rail(B)]), "switch", CROSSED, []),
        (gang([], [], []), "switch", {}, []),
        (RING, "ring", _topology.RING, []),
        (gang([rail(A)], [rail(A), rail(B)], [rail(B)]), "ring", _topology.RING, ["NCL-05"]),
        # Every two nodes have a cable of their own, but four nodes are more than NCCL's ring settings are known for.
        (
            gang(
                [rail("ab"), rail("ac"), rail("ad")],
                [rail("ab"), rail("bc"), rail("bd")],
                [rail("ac"), rail("bc"), rail("cd")],
                [rail("ad"), rail("bd"), rail("cd")],
            ),
            "ring",
            _topology.RING,
            ["NCL-05"],
        ),
        (gang([rail(A), rail("d")], [rail(B), rail(A)], [rail(C), rail(B)], [rail("d"), rail(C)]), "ring", _topology.RING, ["NCL-05"]),
    ],
)
def test_topology(members, name, env, ids):
    assert _topology.topology(members) == name
    assert _topology.environment(members) == env
    assert [problem.id for problem in _topology.problems(members)] == ids


def test_settings_of_a_ring():
    assert _topology.environment(RING) == {
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_CROSS_NIC": "1",
    }
    (told,) = _topology.warnings(RING)
    assert told.startswith("a ring: only the collectives use the cables")
    assert _topology.warnings(gang([rail(A)], [rail(A)])) == []


def test_a_ring_with_cables_between_ports_of_the_same_number():
    told = _topology.warnings(gang([rail(A, 0), rail(C, 1)], [rail(B, 1), rail(A, 0)], [rail(C, 0), rail(B, 0)]))
    assert len(told) == 2 and told[1].startswith("spark-1 if0 and spark-2 if0 are joined at the same port number")


@pytest.mark.parametrize(
    ("wanted", "members", "value", "note", "refused_id"),
    [
        ("", gang([rail(A, gid=3)], [rail(A, gid=5)]), "", "", None),
        ("auto", gang([rail(A, gid=3)], [rail(A, gid=3)]), "3", "", None),
        ("auto", gang([rail(A, gid=3)], [rail(A, gid=5)]), "", "spark-1: rocep1s0f1 3; spark-2: rocep1s0f1 5", None),
        ("auto", gang([rail(A, hca=None)], [rail(A, hca=None)]), "", "", None),
        ("auto", gang([rail(A, gid=None)], [rail(A, gid=3)]), "", "spark-1: rocep1s0f1 None", None),
        ("3", gang([rail(A, gid=3)], [rail(A, gid=3)]), "3", "", None),
        ("5", gang([rail(A, gid=3)], [rail(A, gid=3)]), "", "", "NCL-01"),
        ("3", gang([rail(A, gid=3), rail(B, gid=5)], [rail(A, gid=3)]), "", "", "NCL-01"),
        ("3", gang([rail(A, hca=None)], [rail(A, hca=None)]), "", "", "NCL-01"),
    ],
)
def test_gid_index(wanted, members, value, note, refused_id):
    found, told, problem = _topology.gid(wanted, members)
    assert found == value and note in told and bool(told) == bool(note)
    assert (problem.id if problem else None) == refused_id


@pytest.mark.parametrize(
    ("environments", "expected"),
    [
        ([{"NCCL_IB_HCA": "=a"}, {"NCCL_IB_HCA": "=a"}], []),
        ([{"NCCL_IB_HCA": "=a", "VLLM_HOST_IP": "1"}, {"NCCL_IB_HCA": "=b", "VLLM_HOST_IP": "2"}], ["NCCL_IB_HCA"]),
        ([{"VLLM_HOST_IP": "1", "RAY_NODE_IP_ADDRESS": "1"}, {"VLLM_HOST_IP": "2", "RAY_NODE_IP_ADDRESS": "2"}], []),
        (
            [
                {"NCCL_IB_HCA": "=a", "GLOO_SOCKET_IFNAME": "x", "RAY_NODE_IP_ADDRESS": "1"},
                {"GLOO_SOCKET_IFNAME": "y", "RAY_NODE_IP_ADDRESS": "2"},
            ],
            ["GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "RAY_NODE_IP_ADDRESS"],
        ),
    ],
)
def test_variables_that_differ_between_nodes(environments, expected):
    assert _topology.carry_over(environments) == expected
