# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _rdma
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Address, Interface
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes


def node(shape, tmp_path):
    interfaces, sysfs = shapes.load(shape, tmp_path)
    return {item.name: item for item in interfaces}, _rdma.read_hcas(sysfs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:0000:0000:0000:0000:ffff:c0a8:c80c", "192.168.200.12"),
        ("fe80:0000:0000:0000:4ebb:47ff:fe2f:9113", None),
        ("0000:0000:0000:0000:0000:0000:0000:0000", None),
        ("", None),
    ],
)
def test_gid_ipv4(text, expected):
    assert _rdma.gid_ipv4(text) == expected


def test_read_hcas(tmp_path):
    _interfaces, hcas = node("one_cable", tmp_path)
    assert {hca.name: (hca.active, hca.netdevs) for hca in hcas} == {
        "roceP2p1s0f0": (False, ("enP2p1s0f0np0",)),
        "roceP2p1s0f1": (True, ("enP2p1s0f1np1",)),
        "rocep1s0f0": (False, ("enp1s0f0np0",)),
        "rocep1s0f1": (True, ("enp1s0f1np1",)),
    }
    port = next(hca for hca in hcas if hca.name == "rocep1s0f1")
    assert [(gid.index, gid.type, gid.ipv4) for gid in port.gids] == [
        (0, "IB/RoCE v1", None),
        (1, "RoCE v2", None),
        (2, "IB/RoCE v1", "192.168.200.12"),
        (3, "RoCE v2", "192.168.200.12"),
    ]
    assert port.selector == "rocep1s0f1:1"


def test_no_driver(tmp_path):
    assert node("no_rdma", tmp_path)[1] == []


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ("one_cable", "enp1s0f1np1", "rocep1s0f1"),
        ("mlx5_names", "enP2p1s0f1np1", "mlx5_3"),
        ("mlx5_names", "enp1s0f1np1", "mlx5_1"),
        ("one_cable", "enP7s7", None),
    ],
)
def test_hca_of(shape, name, expected, tmp_path):
    interfaces, hcas = node(shape, tmp_path)
    found = _rdma.hca_of(interfaces[name], hcas)
    assert (found.name if found else None) == expected


def test_hca_of_vlan_and_bond():
    hca = _rdma.Hca("mlx5_bond_0", 1, "ACTIVE", "Ethernet", ("bond0",), (_rdma.Gid(3, "RoCE v2", "bond0", "192.168.200.12"),))
    address = Address("192.168.200.12", 24)
    assert _rdma.hca_of(Interface("bond0", addresses=(address,), kind="bond"), [hca]) is hca
    assert _rdma.hca_of(Interface("bond0.7", kind="vlan", parent="bond0"), [hca]) is hca
    assert _rdma.hca_of(Interface("veth1", kind="veth", parent="bond0"), [hca]) is None


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ("one_cable", "enp1s0f1np1", ""),
        ("gid_drift", "enp1s0f1np1", ""),
        ("one_cable", "enP2p1s0f1np1", "roceP2p1s0f1:1 has no IPv4 RoCE v2 GID because enP2p1s0f1np1 has no IPv4 address"),
        ("hca_down", "enp1s0f1np1", "rocep1s0f1:1 (enp1s0f1np1) is DOWN, not ACTIVE"),
        ("link_local", "enp1s0f1np1", "rocep1s0f1:1 has no IPv4 RoCE v2 GID but link-local ones (enp1s0f1np1 169.254.127.30/16)"),
        ("no_rdma", "enp1s0f1np1", "enp1s0f1np1 has no RDMA device"),
    ],
)
def test_unusable(shape, name, expected, tmp_path):
    interfaces, hcas = node(shape, tmp_path)
    assert _rdma.unusable(_rdma.hca_of(interfaces[name], hcas), interfaces[name]) == expected


def test_v1_gid_alone_is_not_enough():
    address = Address("192.168.200.12", 24)
    hca = _rdma.Hca("a", 1, "ACTIVE", "Ethernet", ("p",), (_rdma.Gid(2, "IB/RoCE v1", "p", "192.168.200.12"),))
    assert _rdma.unusable(hca, Interface("p", addresses=(address,))) == "a:1 has no IPv4 RoCE v2 GID for p (192.168.200.12/24)"


def hca(name, state, gids=()):
    return _rdma.Hca(name, 1, state, "Ethernet", ("bond0",), tuple(gids))


def test_the_active_one_of_two_devices_that_name_a_bond():
    ports = [hca("rocep1s0f0", "DOWN"), hca("rocep1s0f1", "ACTIVE")]
    assert _rdma.hca_of(Interface("bond0", kind="bond"), ports).name == "rocep1s0f1"
    assert _rdma.hca_of(Interface("bond0", kind="bond"), ports[:1]).name == "rocep1s0f0"


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        ([(2, "IB/RoCE v1", "192.168.200.12"), (3, "RoCE v2", "192.168.200.12")], 3),
        ([(3, "RoCE v2", "10.0.0.1"), (5, "RoCE v2", "192.168.200.12")], 5),
        ([(1, "RoCE v2", None)], None),
        ([], None),
    ],
)
def test_gid_index_of_an_address(gids, expected):
    port = hca("rocep1s0f1", "ACTIVE", [_rdma.Gid(index, kind, "x", ipv4) for index, kind, ipv4 in gids])
    assert _rdma.gid_index(port, "192.168.200.12") == expected
    assert _rdma.gid_index(port, None) is None and _rdma.gid_index(None, "192.168.200.12") is None
