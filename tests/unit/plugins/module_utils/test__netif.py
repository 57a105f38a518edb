# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _netif
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes

FABRIC = [_netif.Network("192.168.200.0/24")]


def by_name(name, tmp_path):
    interfaces, _sysfs = shapes.load(name, tmp_path)
    return {item.name: item for item in interfaces}


def test_parse_addr_and_sysfs(tmp_path):
    nodes = by_name("twin_own_subnet", tmp_path)
    port = nodes["enp1s0f1np1"]
    assert [str(addr) for addr in port.addresses] == ["192.168.200.12/24"]
    assert (port.mtu, port.speed, port.driver, port.pci, port.port_name) == (9000, 200000, "mlx5_core", (0, "01:00.1"), "p1")
    assert nodes["enp1s0f0np0"].speed is None  # -1 while it is down
    assert nodes["enp1s0f0np0"].up and not nodes["enp1s0f0np0"].carrier
    assert nodes["wlP9s9"].wireless
    assert not nodes["docker0"].hardware


@pytest.mark.parametrize("text", ["{}", "nonsense"])
def test_parse_addr_refuses_other_output(text):
    with pytest.raises(ValueError):
        _netif.parse_addr(text)


def test_parse_addr_empty_objects():
    assert _netif.parse_addr('[{},{"ifname":"a"}]')[0].name == "a"
    assert _netif.parse_addr("") == []


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ("docker_overlap", "lo", "loopback"),
        ("docker_overlap", "docker0", "a bridge of containers"),
        ("docker_overlap", "br-1a2b3c4d5e6f", "a bridge of containers"),
        ("docker_overlap", "veth9f8e7d6", "a member of br-1a2b3c4d5e6f"),
        ("docker_overlap", "tailscale0", "a tunnel"),
        ("docker_overlap", "wlP9s9", "Wi-Fi"),
        ("docker_overlap", "enp1s0f1np1", ""),
        ("bond", "enp1s0f0np0", "a member of bond0"),
        ("bond", "bond0", ""),
        ("vlan_fabric", "enp1s0f1np1.200", ""),
        ("simulated", "enp1s0f1np1", ""),
    ],
)
def test_not_a_fabric(shape, name, expected, tmp_path):
    found = _netif.not_a_fabric(by_name(shape, tmp_path)[name])
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_bridge_with_a_port_may_be_a_fabric():
    bridge = _netif.Interface("br0", ("UP", "LOWER_UP"), kind="bridge")
    port = _netif.Interface("anything", ("UP", "LOWER_UP"), master="br0", device="0000:01:00.1")
    _netif.add_sysfs([bridge, port], _netif.Sysfs("/none", lambda path: "", lambda path: [], lambda path: path))
    assert _netif.not_a_fabric(bridge)  # nothing known about the port
    bridge.physical_members = ("anything",)
    assert _netif.not_a_fabric(bridge) == ""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("one_cable", ""),
        ("admin_down", "administratively down"),
        ("no_cable", "no carrier"),
        ("cable_out", "no carrier: no cable, or the other end is off (address 192.168.200.12/24)"),
        ("bare", "up, but without IPv4 (only IPv6 link-local)"),
        ("ipv6_only", "up, but without IPv4 (only IPv6 fd00:200::12)"),
        ("other_subnet", "IPv4 in another subnet: 192.168.100.10/24"),
        ("link_local", "link-local address only: 169.254.127.30/16"),
    ],
)
def test_reasons_are_kept_apart(shape, expected, tmp_path):
    found = _netif.no_address_reason(by_name(shape, tmp_path)["enp1s0f1np1"], FABRIC)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_twins_by_pci_not_by_name(tmp_path):
    nodes = by_name("one_cable", tmp_path)
    assert _netif.are_twins(nodes["enp1s0f1np1"], nodes["enP2p1s0f1np1"])
    assert not _netif.are_twins(nodes["enp1s0f1np1"], nodes["enP2p1s0f0np0"])
    assert not _netif.are_twins(nodes["enP7s7"], nodes["wlP9s9"])
    # same bus, device and function in another domain, but another driver
    assert not _netif.are_twins(nodes["enP7s7"], nodes["enp1s0f0np0"])
    renamed = [
        _netif.Interface("fab0", device="0000:01:00.1", driver="mlx5_core"),
        _netif.Interface("fab1", device="0002:01:00.1", driver="mlx5_core"),
    ]
    assert _netif.are_twins(*renamed)
    assert sorted(reversed(renamed), key=_netif.pci_order)[0].name == "fab0"


def test_devices_without_pci_have_no_twin():
    one, other = (_netif.Interface(name, device="virtio2", driver="virtio_net") for name in ("eth0", "eth1"))
    assert not _netif.are_twins(one, other)
    assert _netif.pci_order(one) == (0, "eth0")


def test_simulated_twins_by_name(tmp_path):
    nodes = by_name("simulated", tmp_path)
    assert _netif.are_twins(nodes["enp1s0f1np1"], nodes["enP2p1s0f1np1"])
    assert _netif.pci_order(nodes["enp1s0f1np1"]) < _netif.pci_order(nodes["enP2p1s0f1np1"])


@pytest.mark.parametrize(
    ("rc", "out", "err", "expected"),
    [
        (
            0,
            '[{"dst":"192.168.200.13","dev":"enp1s0f1np1","prefsrc":"192.168.200.12","flags":[],"uid":0,"cache":[]}]',
            "",
            ("enp1s0f1np1", "192.168.200.12", "", ""),
        ),
        (
            0,
            '[{"dst":"8.8.8.8","gateway":"10.1.230.1","dev":"enP7s7","prefsrc":"10.1.230.180"}]',
            "",
            ("enP7s7", "10.1.230.180", "10.1.230.1", ""),
        ),
        (2, "", "RTNETLINK answers: Network is unreachable\n", ("", "", "", "RTNETLINK answers: Network is unreachable")),
        (124, "", "", ("", "", "", "ip route get failed with code 124")),
        (0, "[]", "", ("", "", "", "ip route get answered '[]'")),
    ],
)
def test_parse_route(rc, out, err, expected):
    route = _netif.parse_route("192.168.200.13", rc, out, err)
    assert (route.dev, route.source, route.gateway, route.error) == expected
