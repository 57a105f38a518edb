# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes

F0, T0, F1, T1 = "enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"
SUBNET = ["192.168.200.0/24"]
PEERS = ["192.168.200.13"]


def detect(shape, tmp_path, **params):
    interfaces, sysfs = shapes.load(shape, tmp_path)
    given = {"node": "spark-1", "subnets": SUBNET, "peers": PEERS, **params}
    return _fabric.detect(_fabric.parse_request(given), interfaces, read_hcas(sysfs), shapes.router(shape))


def failure(shape, tmp_path, **params):
    with pytest.raises(Problem) as caught:
        detect(shape, tmp_path, **params)
    return caught.value


def reason(result, name):
    return next(row["reason"] for row in result["candidates"] if row["interface"] == name)


@pytest.mark.parametrize(
    ("shape", "interface", "hcas", "warning"),
    [
        ("one_cable", F1, ["rocep1s0f1:1"], "one rail only"),
        ("twin_own_subnet", F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"], None),
        ("twins_same_subnet", F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"], "same subnet 192.168.200.0/24 (NET-05)"),
        ("two_cables_lan", F0, ["rocep1s0f0:1"], "one rail only"),
        ("mlx5_names", F1, ["mlx5_1:1", "mlx5_3:1"], None),
        ("gid_drift", F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"], None),
        ("twin_down", F1, ["rocep1s0f1:1"], "roceP2p1s0f1:1 (enP2p1s0f1np1) is DOWN, not ACTIVE"),
        ("switch_100g", F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"], None),
        ("dynamic", F1, ["rocep1s0f1:1"], "is dynamic (DHCP)"),
        ("vlan_beside", F1, ["rocep1s0f1:1"], "enp1s0f1np1.100 begins with enp1s0f1np1"),
        ("docker_overlap", F1, ["rocep1s0f1:1"], "br-1a2b3c4d5e6f carries 192.168.200.1/20, which overlaps"),
        ("no_rdma", F1, [], None),
        ("hca_down", F1, [], "RDMA is not used: rocep1s0f1:1 (enp1s0f1np1) is DOWN"),
        ("vlan_fabric", "enp1s0f1np1.200", ["rocep1s0f1:1"], None),
        ("bond", "bond0", [], None),
        ("bond_lag", "bond0", ["mlx5_bond_0:1"], None),
        ("simulated", F1, [], None),
    ],
)
def test_shapes_that_work(shape, interface, hcas, warning, tmp_path):
    result = detect(shape, tmp_path)
    assert result["interface"] == interface
    assert result["address"] == "192.168.200.12"
    assert result["prefixlen"] == 24 and result["subnet"] == "192.168.200.0/24"
    assert result["hcas"] == hcas
    assert result["rdma"] is bool(hcas)
    assert result["transport"] == ("ib" if hcas else "socket")
    assert result["rail_count"] == max(1, len(hcas))
    env = result["env"]
    assert env["NCCL_SOCKET_IFNAME"] == f"={interface}"
    assert {
        env[name] for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include")
    } == {interface}
    assert env["VLLM_HOST_IP"] == "192.168.200.12"
    assert env.get("NCCL_IB_HCA") == ("=" + ",".join(hcas) if hcas else None)
    assert env["NCCL_IB_DISABLE"] == ("0" if hcas else "1")
    assert "NCCL_IB_GID_INDEX" not in env and "" not in env.values()
    if warning is None:
        assert result["warnings"] == []
    else:
        assert any(warning in text for text in result["warnings"])


def test_rails_of_a_bare_twin(tmp_path):
    rails = detect("one_cable", tmp_path)["rails"]
    assert [(rail["interface"], rail["address"], rail["hca"], rail["hca_port"], rail["active"]) for rail in rails] == [
        (F1, "192.168.200.12", "rocep1s0f1", 1, True),
        (T1, None, "roceP2p1s0f1", 1, False),
    ]


def test_rails_of_twins(tmp_path):
    rails = detect("twin_own_subnet", tmp_path)["rails"]
    assert [(rail["interface"], rail["address"], rail["subnet"], rail["active"]) for rail in rails] == [
        (F1, "192.168.200.12", "192.168.200.0/24", True),
        (T1, "192.168.201.12", "192.168.201.0/24", True),
    ]


def test_two_subnets_give_the_same_rails(tmp_path):
    result = detect("twin_own_subnet", tmp_path, subnets=["192.168.200.0/24", "192.168.201.0/24"])
    assert (result["interface"], result["hcas"]) == (F1, ["rocep1s0f1:1", "roceP2p1s0f1:1"])


def test_every_candidate_has_its_reason(tmp_path):
    result = detect("docker_overlap", tmp_path)
    expected = {
        F1: "the address 192.168.200.12/24 is in 192.168.200.0/24, up with carrier, the route to every peer leaves by it",
        T1: "roceP2p1s0f1:1 has no IPv4 RoCE v2 GID because enP2p1s0f1np1 has no IPv4 address",
        F0: "no carrier: no cable, or the other end is off",
        "enP7s7": "IPv4 in another subnet: 10.1.230.180/24",
        "wlP9s9": "Wi-Fi",
        "docker0": "a bridge of containers or virtual machines, no port of this node is in it",
        "br-1a2b3c4d5e6f": "a bridge of containers or virtual machines, no port of this node is in it",
        "veth9f8e7d6": "a member of br-1a2b3c4d5e6f: addresses belong there",
        "tailscale0": "a tunnel",
    }
    assert {name: reason(result, name) for name in expected} == expected
    assert [row["interface"] for row in result["candidates"] if row["chosen"]] == [F1]
    assert all(row["reason"] for row in result["candidates"])
    assert next(row for row in result["candidates"] if row["interface"] == "br-1a2b3c4d5e6f")["addresses"] == ["192.168.200.1/20"]


@pytest.mark.parametrize("address", ["192.168.200.12", "192.168.200.14"])
def test_the_address_picks_the_half_when_twins_share_a_subnet(address, tmp_path):
    result = detect("twins_same_subnet", tmp_path, address=address)
    assert result["interface"] == {"192.168.200.12": F1, "192.168.200.14": T1}[address]
    assert result["env"]["VLLM_HOST_IP"] == address


@pytest.mark.parametrize(
    ("shape", "params", "problem_id", "found", "remedy"),
    [
        (
            "one_cable",
            {"subnets": ["192.168.77.0/24"], "peers": []},
            "fabric-missing",
            "enp1s0f1np1: IPv4 in another subnet: 192.168.200.12/24",
            "may be 192.168.200.0/24 (enp1s0f1np1)",
        ),
        ("other_subnet", {}, "fabric-missing", "enp1s0f1np1: IPv4 in another subnet: 192.168.100.10/24", "spark_fabric_subnet"),
        ("no_cable", {}, "fabric-missing", "enp1s0f1np1: no carrier", "plug the cable into one of enp1s0f0np0, enp1s0f1np1"),
        (
            "cable_out",
            {},
            "fabric-missing",
            "enp1s0f1np1: no carrier: no cable, or the other end is off (address 192.168.200.12/24)",
            "plug the cable of enp1s0f1np1 in",
        ),
        ("admin_down", {}, "fabric-missing", "enp1s0f1np1: administratively down", "ip link set enp1s0f1np1 up"),
        ("bare", {"address": "192.168.200.12"}, "fabric-missing", "enp1s0f1np1: up, but without IPv4", "addresses: [192.168.200.12/24]"),
        ("ipv6_only", {}, "fabric-missing", "only IPv6 fd00:200::12", "/etc/netplan/40-cx7.yaml"),
        (
            "link_local",
            {"address": "192.168.200.12"},
            "NET-10",
            "enp1s0f1np1 169.254.127.30/16",
            "enp1s0f1np1: {dhcp4: false, dhcp6: false, link-local: [ipv6], mtu: 9000, optional: true, addresses: [192.168.200.12/24]}",
        ),
        (
            "two_in_subnet",
            {},
            "fabric-ambiguous",
            "enp1s0f0np0 (192.168.200.22/24) and enp1s0f1np1 (192.168.200.12/24)",
            "spark_fabric_interface",
        ),
        ("two_in_subnet", {"address": "192.168.200.12"}, "fabric-ambiguous", "2 interfaces in the fabric subnet", "spark_fabric_interface"),
        (
            "simulated_two",
            {},
            "fabric-ambiguous",
            "enp1s0f1np1 (192.168.200.12/24) and enP2p1s0f1np1 (192.168.200.99/24)",
            "spark_fabric_interface",
        ),
        (
            "docker_clash",
            {},
            "fabric-route",
            "packets to peer 192.168.200.13 leave by br-1a2b3c4d5e6f (192.168.200.1/24), not by enp1s0f1np1",
            "Docker network",
        ),
        (
            "one_cable",
            {"subnets": ["192.168.0.0/16"], "peers": ["192.168.77.13"]},
            "fabric-route",
            "packets to peer 192.168.77.13 leave by enP7s7 (10.1.230.180/24), not by enp1s0f1np1",
            "spark_fabric_address",
        ),
        (
            "one_cable",
            {"peers": ["10.0.0.5"]},
            "fabric-peer",
            "peer 10.0.0.5, which is outside of 192.168.200.0/24",
            "spark_fabric_address",
        ),
        ("one_cable", {"address": "192.168.200.55"}, "fabric-address", "enp1s0f1np1 192.168.200.12/24", "spark_fabric_address"),
        ("one_cable", {"address": "10.1.230.180"}, "fabric-address", "outside of 192.168.200.0/24", "spark_fabric_address"),
        (
            "two_cables_lan",
            {"subnets": [], "peers": []},
            "fabric-subnet",
            "enp1s0f0np0 (192.168.200.12/24, 200000 Mb/s); enp1s0f1np1 (192.168.0.188/24, 200000 Mb/s)",
            "spark_fabric_subnet",
        ),
        ("bare", {"subnets": [], "peers": []}, "fabric-subnet", "enp1s0f1np1 (up, but without IPv4", "spark_fabric_subnet"),
        (
            "one_cable",
            {"subnets": [], "address": "192.168.200.99"},
            "fabric-address",
            "no usable interface with 192.168.200.99; there are enP7s7 10.1.230.180/24; enp1s0f1np1 192.168.200.12/24",
            "spark_fabric_address",
        ),
        ("no_rdma", {"require_rdma": True}, "rdma-missing", "no RDMA device at all", "spark_require_rdma"),
        ("hca_down", {"require_rdma": True}, "rdma-missing", "rocep1s0f1:1 (enp1s0f1np1) is DOWN", "rdma link"),
        ("simulated", {"require_rdma": True}, "rdma-missing", "no RDMA device at all", "spark_require_rdma"),
    ],
)
def test_shapes_that_stop(shape, params, problem_id, found, remedy, tmp_path):
    problem = failure(shape, tmp_path, **params)
    assert problem.id == problem_id
    assert found in problem.found
    assert remedy in problem.remedy
    assert problem.node == "spark-1" and problem.msg.startswith("spark-1: preflight: ")


def test_missing_lists_every_candidate(tmp_path):
    problem = failure("no_cable", tmp_path)
    for name in (F0, T0, F1, T1, "enP7s7", "wlP9s9", "docker0"):
        assert f"{name}: " in problem.found
    assert "10.1.230.180/24" in problem.found
    assert {row["interface"] for row in problem.details["candidates"]} >= {F0, T0, F1, T1, "enP7s7"}


def test_netplan_is_a_file_to_write(tmp_path):
    yaml = pytest.importorskip("yaml")
    problem = failure("link_local", tmp_path, address="192.168.200.12")
    port = {"dhcp4": False, "dhcp6": False, "link-local": ["ipv6"], "mtu": 9000, "optional": True, "addresses": ["192.168.200.12/24"]}
    expected = {"network": {"version": 2, "ethernets": {F1: port}}}
    assert yaml.safe_load(problem.details["netplan"]) == expected
    start = problem.remedy.index("network: {")
    assert yaml.safe_load(problem.remedy[start : problem.remedy.rindex("}") + 1]) == expected


def test_link_local_when_the_user_asks_for_it(tmp_path):
    result = detect("link_local", tmp_path, subnets=["169.254.0.0/16"], peers=[])
    assert (result["interface"], result["address"]) == (F1, "169.254.127.30")
    assert any("NET-10" in text for text in result["warnings"])


def test_own_address_among_the_peers_is_skipped(tmp_path):
    assert detect("one_cable", tmp_path, peers=["192.168.200.12", "192.168.200.13"])["interface"] == F1


@pytest.mark.parametrize("shape", ["two_in_subnet", "simulated_two"])
def test_override_resolves_two_interfaces(shape, tmp_path):
    result = detect(shape, tmp_path, interface=F1, peers=[])
    assert result["interface"] == F1
    assert reason(result, F1) == "named by the user"


def test_override_without_subnet(tmp_path):
    result = detect("one_cable", tmp_path, interface=F1, subnets=[])
    assert (result["address"], result["subnet"]) == ("192.168.200.12", "192.168.200.0/24")


@pytest.mark.parametrize(
    ("params", "problem_id", "found"),
    [
        ({"interface": "^docker0"}, "fabric-input", "interface override '^docker0'"),
        ({"interface": "=enp1s0f1np1"}, "fabric-input", "interface override '=enp1s0f1np1'"),
        ({"interface": "a,b"}, "fabric-input", "interface override 'a,b'"),
        ({"interface": "enp9s0"}, "fabric-interface", "no interface 'enp9s0'; there are enP7s7, enp1s0f0np0, enp1s0f1np1"),
        ({"interface": F0}, "fabric-interface", "interface override enp1s0f0np0: no carrier"),
        ({"interface": T1}, "fabric-interface", "interface override enP2p1s0f1np1: up, but without IPv4"),
        ({"interface": "enP7s7"}, "fabric-interface", "interface override enP7s7: IPv4 in another subnet"),
        ({"interface": F1, "address": "192.168.200.55"}, "fabric-address", "enp1s0f1np1 with 192.168.200.12/24"),
        ({"interface": "lo", "subnets": []}, "fabric-interface", "interface override lo: loopback"),
        ({"hcas": ["=rocep1s0f1"]}, "fabric-input", "RDMA device override '=rocep1s0f1'"),
        ({"hcas": ["mlx5_9"]}, "fabric-hca", "no RDMA device 'mlx5_9'; there are roceP2p1s0f0:1 DOWN"),
        ({"hcas": ["rocep1s0f0"]}, "fabric-hca", "RDMA device 'rocep1s0f0' is DOWN"),
        ({"subnets": ["192.168.200"]}, "fabric-input", "fabric subnet '192.168.200'"),
        ({"subnets": ["fd00::/64"]}, "fabric-input", "fabric subnet 'fd00::/64'"),
        ({"address": "spark-1.local"}, "fabric-input", "fabric address 'spark-1.local'"),
        ({"peers": ["spark-2"]}, "fabric-input", "address of a peer 'spark-2'"),
    ],
)
def test_overrides_and_input_are_validated(params, problem_id, found, tmp_path):
    problem = failure("one_cable", tmp_path, **params)
    assert (problem.id, found in problem.found) == (problem_id, True)
    assert problem.expected and problem.remedy


def test_hca_override(tmp_path):
    result = detect("one_cable", tmp_path, hcas=["rocep1s0f1:1", "roceP2p1s0f1"])
    assert result["env"]["NCCL_IB_HCA"] == "=rocep1s0f1:1,roceP2p1s0f1:1"
    told = [text for text in result["warnings"] if "because it was named" in text]
    assert len(told) == 1 and told[0].startswith("RDMA device roceP2p1s0f1:1 is used because it was named, but roceP2p1s0f1:1 has no IPv4")


def test_without_a_subnet_the_address_or_the_only_fast_port_decides(tmp_path):
    found = detect("twin_own_subnet", tmp_path / "a", subnets=[])
    assert (found["interface"], found["address"], found["subnet"]) == (F1, "192.168.200.12", "192.168.200.0/24")
    named = detect("two_cables_lan", tmp_path / "b", subnets=[], address="192.168.200.12")
    assert (named["interface"], named["hcas"]) == (F0, ["rocep1s0f0:1"])


def test_without_a_route_to_the_peer(tmp_path):
    interfaces, sysfs = shapes.load("no_default_route", tmp_path, "spark-2")
    request = _fabric.parse_request({"subnets": ["192.168.0.0/16"], "peers": ["192.168.77.12"]})
    with pytest.raises(Problem) as caught:
        _fabric.detect(request, interfaces, read_hcas(sysfs), shapes.router("no_default_route", "spark-2"))
    assert caught.value.id == "fabric-route" and "no route to peer 192.168.77.12: RTNETLINK answers" in caught.value.found


def test_a_ring_has_its_sockets_on_one_network_and_its_rails_on_others(tmp_path):
    subnets = ["10.1.230.0/24", *(f"192.168.{net}.0/24" for net in (10, 11, 20, 21, 30, 31))]
    for given in ({"subnets": subnets}, {"subnets": [], "address": "10.1.230.180"}):
        result = detect("ring", tmp_path / str(len(given)), peers=["10.1.230.181", "10.1.230.182"], require_rdma=True, **given)
        assert (result["interface"], result["address"], result["rdma"]) == ("enP7s7", "10.1.230.180", True)
        assert sorted(result["hcas"]) == ["roceP2p1s0f0:1", "roceP2p1s0f1:1", "rocep1s0f0:1", "rocep1s0f1:1"]
        assert {rail["subnet"] for rail in result["rails"]} == {f"192.168.{net}.0/24" for net in (10, 11, 30, 31)}
        assert (result["env"]["NCCL_SOCKET_IFNAME"], result["env"]["GLOO_SOCKET_IFNAME"]) == ("=enP7s7", "enP7s7")
        assert reason(result, F0) == "a rail: 192.168.10.1 is in 192.168.10.0/24"
        assert result["warnings"] == []  # 10000 Mb/s is not slow for what goes over the LAN there


def test_survey_tells_what_could_be_a_fabric(tmp_path):
    interfaces, sysfs = shapes.load("docker_overlap", tmp_path)
    rows = {row["interface"]: row for row in _fabric.survey(_fabric.parse_request({}), interfaces, read_hcas(sysfs))}
    assert list(rows) == [F0, F1, T0, T1, "enP7s7"]
    assert [name for name, row in rows.items() if row["fast"]] == [F0, F1, T0, T1]
    assert rows[F1]["port"] == rows[T1]["port"] != rows[F0]["port"]
    assert (rows[F1]["addresses"], rows[F1]["usable"], rows[F1]["hca"]) == (["192.168.200.12/24"], True, "rocep1s0f1")
    assert rows[F0]["usable"] is False and rows[F0]["reason"].startswith("no carrier")
