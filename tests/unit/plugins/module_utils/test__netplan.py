# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils._netplan import netplan_file, netplan_line

TWINS = [
    {"name": "enp1s0f1np1", "addresses": ["192.168.200.12/24"], "mtu": 9000},
    {"name": "enP2p1s0f1np1", "addresses": ["192.168.201.12/24"], "mtu": 9000},
]

FILE = """\
network:
  version: 2
  ethernets:
    enp1s0f1np1:
      dhcp4: false
      dhcp6: false
      link-local: [ipv6]
      mtu: 9000
      optional: true
      addresses:
        - 192.168.200.12/24
    enP2p1s0f1np1:
      dhcp4: false
      dhcp6: false
      link-local: [ipv6]
      mtu: 9000
      optional: true
      addresses:
        - 192.168.201.12/24
"""


def test_file_of_twins():
    assert netplan_file(TWINS) == FILE


def test_without_mtu_and_address():
    port = yaml.safe_load(netplan_file([{"name": "enp1s0f1np1", "addresses": [], "mtu": 0}]))["network"]["ethernets"]["enp1s0f1np1"]
    assert port == {"dhcp4": False, "dhcp6": False, "link-local": ["ipv6"], "optional": True}


def test_the_line_says_the_same_as_the_file():
    for ports in (TWINS, [{"name": "enp1s0f1np1", "addresses": [], "mtu": 0}]):
        assert yaml.safe_load(netplan_line(ports)) == yaml.safe_load(netplan_file(ports))
