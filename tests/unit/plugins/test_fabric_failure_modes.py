# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One test for each failure of the network and of NCCL in docs/failure-modes.md: what a user of such nodes gets."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _diagnosis, _plan, _probe, _vllm
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import nccl_interface_info
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes
from ansible_collections.dgxspark.serving.tests.unit.plugins import fabric_gang, gang

F0, F1, T1 = "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"
NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include")


def environments(shape, root, **values):
    members = fabric_gang.found(shape, root)
    settings = gang.settings(**values)
    return [_plan.environment(settings, member, members) for member in members]


def refused(shape, root, node, **given):
    """The Problem of one node with the subnet named."""
    choice = fabric_gang.Gang(shape, root).choices([fabric_gang.SUBNET], given)[node]
    assert isinstance(choice, Problem) and choice.node == node
    return choice


def told(members):
    return [(problem.id, problem.node) for problem in gang.gang_problems(members)]


@pytest.mark.parametrize("shape", ["docker_overlap", "wifi_default", "two_cables_lan"])
def test_fabric_net_01_no_other_interface_can_be_taken(shape, tmp_path):
    """Management, Wi-Fi with the default route, bridges, veth, a VPN: every consumer gets one exact name, on both nodes."""
    whole = fabric_gang.Gang(shape, tmp_path)
    fabric = F0 if shape == "two_cables_lan" else F1
    for choice in whole.choices([fabric_gang.SUBNET], {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}).values():
        assert {choice["env"][name].removeprefix("=") for name in NAMES} == {fabric}
        assert choice["env"]["NCCL_SOCKET_IFNAME"].startswith("=")


def test_fabric_net_02_gloo_is_never_left_to_the_host_name(tmp_path):
    for env in environments("one_cable", tmp_path):
        assert env["GLOO_SOCKET_IFNAME"] == env["TP_SOCKET_IFNAME"] == F1
    line = "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] remote=[127.0.1.1]:4242"
    cause = _diagnosis.first_cause({"spark-1": line})
    assert (cause["id"], "GLOO_SOCKET_IFNAME" in cause["remedy"]) == ("NET-02", True)


def test_fabric_net_05_twins_in_one_subnet(tmp_path):
    for member in fabric_gang.found("twins_same_subnet", tmp_path):
        assert member["fabric"]["env"]["NCCL_SOCKET_IFNAME"] == f"={F1}"
        assert member["fabric"]["hcas"] == ["rocep1s0f1:1", "roceP2p1s0f1:1"]
        assert any("halves of one port in the same subnet" in text for text in member["fabric"]["warnings"])


def test_fabric_net_07_nothing_that_an_image_bakes_in_gets_through(tmp_path):
    baked = dict.fromkeys((*NAMES, "VLLM_HOST_IP", "MASTER_ADDR", "NCCL_IB_HCA", "NCCL_IB_DISABLE"), "enP7s7")
    image = {
        "reference": "i",
        "fingerprint": "f",
        "entrypoint": [],
        "cmd": [],
        "env": {**baked, "NCCL_NET": "Socket", "OMPI_MCA_pml": "ucx"},
    }
    probe = _probe.new_probe(image, environments("one_cable", tmp_path)[0])
    assert probe["inherited"] == {"NCCL_NET": "Socket", "OMPI_MCA_pml": "ucx"}
    assert any("sets NCCL_NET=Socket, OMPI_MCA_pml=ucx; set it in spark_env" in text for text in _probe.warnings(probe, "spark-1"))


def test_fabric_net_09_a_vlan_whose_name_begins_alike(tmp_path):
    choices = fabric_gang.Gang("vlan_beside", tmp_path / "a").choices([fabric_gang.SUBNET], {})
    for choice in choices.values():
        assert choice["env"]["NCCL_SOCKET_IFNAME"] == f"={F1}" and choice["env"]["NCCL_IB_HCA"] == "=rocep1s0f1:1"
        assert any(f"{F1}.100 begins with {F1}" in text for text in choice["warnings"])


def test_fabric_net_10_link_local_only(tmp_path):
    problem = refused("link_local", tmp_path / "a", "spark-2", **{"spark-2": "192.168.200.13"})
    assert problem.id == "NET-10"
    port = yaml.safe_load(problem.details["netplan"])["network"]["ethernets"][F1]
    assert (port["addresses"], port["dhcp4"]) == (["192.168.200.13/24"], False)
    with pytest.raises(Problem) as caught:
        fabric_gang.Gang("link_local", tmp_path / "b").find()
    assert caught.value.id == "NET-10" and set(caught.value.details["netplan"]) == {"spark-1", "spark-2"}


def test_fabric_net_11_an_address_from_dhcp(tmp_path):
    for member in fabric_gang.found("dynamic", tmp_path):
        assert any("is dynamic (DHCP): it may go away while serving" in text for text in member["fabric"]["warnings"])


def test_fabric_net_12_mtu_of_the_ends_differs(tmp_path):
    members = fabric_gang.found("mtu_differs", tmp_path)
    problems = gang.gang_problems(members)
    assert [problem.id for problem in problems] == ["NET-12"]
    assert "spark-1 9000, spark-2 1500" in problems[0].found


def test_fabric_net_13_the_address_of_a_peer_is_one_that_reaches_it(tmp_path):
    """In a ring a node has four fabric addresses, and none of them is right for everybody."""
    found = fabric_gang.Gang("ring", tmp_path).find()
    assert found["addresses"] == {"spark-1": "10.1.230.180", "spark-2": "10.1.230.181", "spark-3": "10.1.230.182"}
    whole = fabric_gang.Gang("one_cable", tmp_path / "pair")
    choices = whole.choices([fabric_gang.SUBNET], {"spark-1": "192.168.200.12", "spark-2": "10.1.230.181"})
    assert choices["spark-1"].id == "fabric-peer" and "10.1.230.181" in choices["spark-1"].found


@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ("admin_down", f"{F1}: administratively down"),
        ("no_cable", f"{F1}: no carrier"),
        ("bare", f"{F1}: up, but without IPv4"),
        ("other_subnet", f"{F1}: IPv4 in another subnet: 192.168.100.10/24"),
        ("cable_out", f"{F1}: no carrier: no cable, or the other end is off (address 192.168.200.12/24)"),
    ],
)
def test_fabric_net_15_link_and_address_are_told_apart(shape, state, tmp_path):
    problem = refused(shape, tmp_path, "spark-1")
    assert problem.id == "fabric-missing" and state in problem.found and problem.msg.startswith("spark-1: ")


def test_fabric_net_15_only_one_half_is_up(tmp_path):
    first, second = fabric_gang.found("twin_down", tmp_path)
    assert (first["fabric"]["rail_count"], second["fabric"]["rail_count"]) == (1, 1)
    assert any("roceP2p1s0f1:1 (enP2p1s0f1np1) is DOWN, not ACTIVE" in text for text in first["fabric"]["warnings"])


def test_fabric_net_16_an_address_that_blinks_is_waited_for():
    looks = iter([Problem("fabric-missing", found="f", expected="e", remedy="r")] * 2)

    def look():
        problem = next(looks, None)
        if problem:
            raise problem
        return {"fabric": {"interface": F1}}

    passed: list[float] = []
    assert nccl_interface_info.patiently(look, 30, lambda: float(len(passed)), passed.append) == {"fabric": {"interface": F1}}
    assert passed == [1, 1]


def test_fabric_net_17_ipv6(tmp_path):
    problem = refused("ipv6_only", tmp_path / "a", "spark-2")
    assert "up, but without IPv4 (only IPv6 fd00:200::13)" in problem.found
    assert [m["address"] for m in fabric_gang.found("ipv6_beside", tmp_path / "b")] == ["192.168.200.12", "192.168.200.13"]


def test_fabric_net_18_the_environment_is_part_of_the_container(tmp_path):
    """Nothing that a shell or a file of the host sets: another value is another container."""
    members = fabric_gang.found("one_cable", tmp_path)
    one, other = (
        _plan.serving_plan(gang.settings(env=env), members)["nodes"]["spark-2"]["containers"]["spark-ray"]
        for env in ({}, {"NCCL_BUFFSIZE": "8388608"})
    )
    assert other["env"]["NCCL_BUFFSIZE"] == "8388608" and one["env"]["NCCL_SOCKET_IFNAME"] == f"={F1}"
    assert one["labels"]["dgxspark.serving.definition"] != other["labels"]["dgxspark.serving.definition"]


def test_fabric_ncl_01_gid_index_differs(tmp_path):
    members = fabric_gang.found("gid_drift", tmp_path)
    assert [[rail["gid_index"] for rail in member["fabric"]["rails"]] for member in members] == [[3, 5], [4, 3]]
    for wanted in ("", "auto"):
        settings = gang.settings(gid_index=wanted)
        assert all("NCCL_IB_GID_INDEX" not in _plan.environment(settings, member, members) for member in members)
    assert any("no one value is right for all" in text for text in _plan.fabric_warnings(members, gang.settings(gid_index="auto")))
    problems = gang.gang_problems(members, "3")
    assert [problem.id for problem in problems] == ["NCL-01"]
    assert "spark-1: rocep1s0f1 3, roceP2p1s0f1 5; spark-2: rocep1s0f1 4, roceP2p1s0f1 3" in problems[0].found
    alike = fabric_gang.found("one_cable", tmp_path / "alike")
    assert _plan.environment(gang.settings(gid_index="auto"), alike[1], alike)["NCCL_IB_GID_INDEX"] == "3"


def test_fabric_ncl_02_both_halves_or_a_warning(tmp_path):
    for member in fabric_gang.found("twin_own_subnet", tmp_path / "both"):
        assert member["fabric"]["env"]["NCCL_IB_HCA"] == "=rocep1s0f1:1,roceP2p1s0f1:1" and member["fabric"]["rail_count"] == 2
    for member in fabric_gang.found("one_cable", tmp_path / "one"):
        assert member["fabric"]["env"]["NCCL_IB_HCA"] == "=rocep1s0f1:1"
        assert any(f"an address in its own subnet makes the twin {T1} usable" in text for text in member["fabric"]["warnings"])
    assert told(fabric_gang.found("rails_apart", tmp_path / "apart")) == [("NCL-02", "spark-1"), ("NCL-02", "spark-2")]


def test_fabric_ncl_04_memory_can_be_pinned(tmp_path):
    for node in _plan.serving_plan(gang.settings(), fabric_gang.found("one_cable", tmp_path))["nodes"].values():
        for container in node["containers"].values():
            assert "memlock:-1:-1" in container["ulimits"] and "IPC_LOCK" in container["capabilities"]
    cause = _diagnosis.first_cause({"spark-1": "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"})
    assert (cause["id"], "memlock" in _diagnosis.sentence(cause)) == ("NCL-04", True)


def test_fabric_ncl_05_ring_of_three(tmp_path):
    members = fabric_gang.found("ring", tmp_path / "ring", require_rdma=True)
    for member in members:
        env = _plan.environment(gang.settings(), member, members)
        assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"], env["VLLM_HOST_IP"]) == ("=enP7s7", "enP7s7", member["address"])
        assert sorted(env["NCCL_IB_HCA"].removeprefix("=").split(",")) == [
            "roceP2p1s0f0:1",
            "roceP2p1s0f1:1",
            "rocep1s0f0:1",
            "rocep1s0f1:1",
        ]
        assert (env["NCCL_NET_PLUGIN"], env["NCCL_IB_SUBNET_AWARE_ROUTING"], env["NCCL_IB_MERGE_NICS"]) == ("none", "1", "0")
    assert told(members) == []
    plan = _plan.serving_plan(gang.settings(tensor_parallel=3), members)
    assert plan["fabric"]["topology"] == "ring" and plan["addresses"] == ["10.1.230.180", "10.1.230.181", "10.1.230.182"]
    assert any("needs 2.30 or newer" in text for text in _probe.nccl_warnings("2.28.9", ring=True))
    assert (
        _probe.nccl_warnings("2.28.9", ring=False)
        == _probe.nccl_warnings("2.30.7", ring=True)
        == _probe.nccl_warnings(None, ring=True)
        == []
    )


@pytest.mark.parametrize("shape", ["chain", "ring_of_four", "ring_without_lan"])
def test_fabric_ncl_05_what_cannot_work_is_refused_before_the_launch(shape, tmp_path):
    with pytest.raises(Problem) as caught:
        fabric_gang.found(shape, tmp_path)
    assert (caught.value.id, caught.value.stage) == ("NCL-05", "preflight") and caught.value.remedy


def test_fabric_ncl_07_known_bad_or_different_nccl():
    versions = {"vllm": "0.17.1", "nccl": "2.28.9"}
    problem = _probe.compare({"spark-1": {"versions": versions}, "spark-2": {"versions": {**versions, "nccl": "2.30.4"}}})
    assert problem.node == "spark-2" and "nccl 2.30.4" in problem.found and "nccl 2.28.9" in problem.found
    assert any("NCCL 2.30.4: it may hang at the start" in text for text in _probe.nccl_warnings("2.30.4", ring=False))
    lines = ["vLLM is using nccl==2.28.9", "CustomAllreduce is disabled because this process group spans across nodes"]
    state = _vllm.advance(_vllm.new_state(0), lines, 10)
    hang = _vllm.overdue(state, "spark-1", 10 + _vllm.STAGE_TIMEOUTS["placement"], 1e9, _vllm.STAGE_TIMEOUTS)
    assert hang.stage == "placement" and "made no progress" in hang.found and "NCCL" in hang.remedy


def test_fabric_ncl_08_rails_in_different_subnets_are_not_crossed(tmp_path):
    expected = {"twin_own_subnet": "0", "switch_100g": "0", "twins_same_subnet": None, "one_cable": None, "ring": "1"}
    assert {name: environments(name, tmp_path / name)[0].get("NCCL_CROSS_NIC") for name in expected} == expected
    assert environments("twin_own_subnet", tmp_path / "own", env={"NCCL_CROSS_NIC": "2"})[0]["NCCL_CROSS_NIC"] == "2"


# Shown elsewhere, and where.
ELSEWHERE = {"NCL-06": "the throughput of the path is measured by fabric_check"}


def test_fabric_every_failure_mode_of_the_network_has_a_test_here():
    catalogue = (shapes.HERE.parents[3] / "docs" / "failure-modes.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| ((?:NET|NCL)-\d\d) \|", catalogue, re.MULTILINE))
    here = {
        f"{area}-{number}".upper()
        for area, number in re.findall(r"def test_fabric_(net|ncl)_(\d\d)_", pathlib.Path(__file__).read_text(encoding="utf-8"))
    }
    assert here | set(ELSEWHERE) == rows and len(rows) == 20
