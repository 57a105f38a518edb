# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every shape of a gang that real machines have: what each node takes, and what the gang is, with the subnet named and with it left empty."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _topology
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes
from ansible_collections.dgxspark.serving.tests.unit.plugins import fabric_gang, gang

F0, T0, F1, T1 = "enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"
SUBNET = fabric_gang.SUBNET
LAN = "10.1.230.0/24"
ONE = (F1, ["rocep1s0f1:1"])
BOTH = (F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"])
TCP = (F1, [])
APART = {"NCCL_CROSS_NIC": "0"}
PORTS = {"UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME"}


@dataclasses.dataclass
class Shape:
    """``nodes``: by number (interface, HCAs), or the id of the problem that the node has. One entry stands for all nodes.
    ``found``: the subnet that is found when none is named, or the id of the problem. ``gang``: ids of what is wrong between the nodes.
    ``subnet``: the one that is named; "" where none can be (a ring)."""

    nodes: tuple[t.Any, ...]
    found: str
    topology: str = "pair"
    gang: tuple[str, ...] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    subnet: str = SUBNET
    kept_apart: frozenset[str] = frozenset()


RING = Shape(
    (("enP7s7", ["rocep1s0f0:1", "roceP2p1s0f0:1", "rocep1s0f1:1", "roceP2p1s0f1:1"]),), LAN, "ring", env=_topology.RING, subnet=""
)
RING_ONE_RAIL = dataclasses.replace(RING, nodes=(("enP7s7", ["rocep1s0f0:1", "rocep1s0f1:1"]),))

EXPECTED = {
    "one_cable": Shape((ONE,), SUBNET),
    "twin_own_subnet": Shape((BOTH,), SUBNET, env=APART),
    "twins_same_subnet": Shape((BOTH,), SUBNET),
    "link_local": Shape(("NET-10",), "NET-10"),
    "different_port": Shape(
        (BOTH, (F0, ["rocep1s0f0:1", "roceP2p1s0f0:1"])), SUBNET, env=APART, kept_apart=frozenset(PORTS | {"OMPI_MCA_btl_tcp_if_include"})
    ),
    "different_names": Shape(
        (BOTH, ("eth3", ["mlx5_1:1", "mlx5_3:1"])), SUBNET, env=APART, kept_apart=frozenset(PORTS | {"OMPI_MCA_btl_tcp_if_include"})
    ),
    "two_cables_lan": Shape(((F0, ["rocep1s0f0:1"]),), "fabric-subnet"),
    "two_cables_elsewhere": Shape((ONE,), SUBNET),
    "two_cables_both": Shape((ONE,), "fabric-subnet", subnet="192.168.177.0/24"),
    "no_cable": Shape(("fabric-missing",), "fabric-subnet"),
    "no_cable_one_node": Shape((ONE, "fabric-missing"), "fabric-subnet"),
    "mlx5_names": Shape(((F1, ["mlx5_1:1", "mlx5_3:1"]),), SUBNET, env=APART),
    "gid_drift": Shape((BOTH,), SUBNET, env=APART),
    "bond": Shape((("bond0", []),), SUBNET),
    "bond_lag": Shape((("bond0", ["mlx5_bond_0:1"]),), SUBNET),
    "vlan_beside": Shape((ONE,), "fabric-subnet"),
    "vlan_fabric": Shape((("enp1s0f1np1.200", ["rocep1s0f1:1"]),), SUBNET),
    "switch_100g": Shape((BOTH,), SUBNET, "switch", env=APART),
    "no_rdma": Shape((TCP,), SUBNET),
    "docker_overlap": Shape((ONE,), SUBNET),
    "docker_clash": Shape(("fabric-route", ONE), SUBNET),
    "wifi_default": Shape((ONE,), SUBNET),
    "ipv6_beside": Shape((BOTH,), SUBNET, env=APART),
    "ipv6_only": Shape(("fabric-missing",), "fabric-subnet"),
    "dynamic": Shape((ONE,), SUBNET),
    "no_default_route": Shape((ONE,), SUBNET),
    "admin_down": Shape(("fabric-missing", ONE), "fabric-subnet"),
    "bare": Shape(("fabric-missing",), "fabric-subnet"),
    "cable_out": Shape(("fabric-missing",), "fabric-subnet"),
    "hca_down": Shape((TCP,), SUBNET),
    "other_subnet": Shape(("fabric-missing",), "192.168.100.0/24"),
    "twin_down": Shape((ONE,), SUBNET),
    "two_in_subnet": Shape(("fabric-ambiguous",), SUBNET),
    "prefix_differs": Shape((ONE,), "fabric-subnet", gang=("NCL-02", "NCL-02")),
    "mtu_differs": Shape((ONE,), SUBNET, gang=("NET-12",)),
    "rails_apart": Shape((BOTH,), SUBNET, gang=("NCL-02", "NCL-02"), env=APART),
    "simulated": Shape((TCP,), "fabric-subnet"),
    "simulated_two": Shape(("fabric-ambiguous",), "fabric-subnet"),
    "ring": RING,
    "ring_bare_twins": RING_ONE_RAIL,
    "ring_parallel": RING_ONE_RAIL,
    "chain": Shape((), "NCL-05", subnet=""),
    "ring_of_four": Shape((), "NCL-05", subnet=""),
    "ring_without_lan": Shape((), "NCL-05", subnet=""),
}


def test_every_recorded_shape_of_a_fabric_is_expected_here() -> None:
    assert sorted(EXPECTED) == shapes.SHAPES


def check(whole, expected, choices):
    per_node = expected.nodes * (len(whole.names) if len(expected.nodes) == 1 else 1)
    told = {
        name: choice.id if isinstance(choice, Problem) else (choice["interface"], sorted(choice["hcas"]))
        for name, choice in choices.items()
    }
    assert told == {
        name: want if isinstance(want, str) else (want[0], sorted(want[1])) for name, want in zip(whole.names, per_node, strict=True)
    }
    for choice in choices.values():
        if isinstance(choice, Problem):
            assert choice.node in whole.names and choice.stage == "preflight" and choice.expected and choice.remedy
        else:
            assert all(row["reason"] for row in choice["candidates"])
            assert {row["interface"] for row in choice["candidates"]} >= {"docker0", choice["interface"]}
    if any(isinstance(choice, Problem) for choice in choices.values()):
        return
    members = whole.members(choices)
    assert _topology.topology(members) == expected.topology
    assert tuple(problem.id for problem in gang.gang_problems(members)) == expected.gang
    assert _topology.environment(members) == expected.env
    environments = [{**member["fabric"]["env"], **expected.env} for member in members]
    assert frozenset(_topology.carry_over(environments)) == expected.kept_apart
    for member in members:
        env, interface, hcas = member["fabric"]["env"], member["fabric"]["interface"], member["fabric"]["hcas"]
        assert env["NCCL_SOCKET_IFNAME"] == f"={interface}" and env["GLOO_SOCKET_IFNAME"] == env["TP_SOCKET_IFNAME"] == interface
        assert env.get("NCCL_IB_HCA") == ("=" + ",".join(hcas) if hcas else None)
        assert env["VLLM_HOST_IP"] == member["address"]


@pytest.mark.parametrize("name", EXPECTED)
def test_fabric_shape(name, tmp_path):
    expected = EXPECTED[name]
    whole = fabric_gang.Gang(name, tmp_path)
    if expected.subnet:
        bare = whole.choices([expected.subnet], {})
        addresses = {node: "" if isinstance(choice, Problem) else choice["address"] for node, choice in bare.items()}
        # As preflight does it: every node knows the addresses of the others.
        peers = {node: address or f"192.168.200.{11 + number}" for number, (node, address) in enumerate(addresses.items(), 1)}
        check(
            whole,
            expected,
            whole.choices(
                [expected.subnet], {n: "" if isinstance(bare[n], Problem) else a for n, a in peers.items()}, peers=list(peers.values())
            ),
        )
    if expected.found[0].isdigit():
        fabric = whole.find()
        assert (fabric["subnet"], fabric["topology"]) == (expected.found, expected.topology)
        if expected.found == (expected.subnet or LAN):
            check(whole, expected, whole.choices([fabric["subnet"], *fabric["rails"]], fabric["addresses"]))
        return
    with pytest.raises(Problem) as caught:
        whole.find()
    assert caught.value.id == expected.found and caught.value.stage == "preflight"
    assert all(f"{node}: " in caught.value.found for node in whole.names), "each node is listed with what it has"
    assert caught.value.expected and caught.value.remedy
