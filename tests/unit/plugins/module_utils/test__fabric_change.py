# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program on the node against a fake node."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_change
from ansible_collections.dgxspark.serving.tests.unit.plugins.fabric_node import BEFORE, NAME, PORT, Node


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def change(node, tmp_path):
    return _fabric_change.Change(str(tmp_path / "state"), str(node.etc), str(node.volatile), node.run, sleep=node.tick)


WANTED = "network:\n  mtu: 9000\n  - 192.168.200.12/24\n  - 10.0.0.1/24\n"


def begin(change, node, text=WANTED, previous="", links=None):
    """As fabric_setup begins a change."""
    if previous:
        (node.etc / NAME).write_text(previous)
    change.write(
        {
            "name": NAME,
            "text": text,
            "previous": previous,
            "before": BEFORE,
            "links": links or {},
            "ports": [],
            "phase": "pending",
            "why": "",
        }
    )
    (node.volatile / NAME).write_text(text or _fabric_change.EMPTY)


def test_applied_and_confirmed(change, node):
    begin(change, node)
    change.apply()
    assert change.read()["phase"] == "applied"
    assert node.port == {"addresses": ["192.168.200.12/24", "10.0.0.1/24"], "mtu": 9000, "up": True, "routes": []}
    assert node.files == {"run-netplan": WANTED}, "a reboot at this point is a revert"
    assert change.confirm() == ""
    assert node.files == {"etc": WANTED}
    assert (node.etc / NAME).stat().st_mode & 0o777 == 0o600
    change.revert("the timer, too late")
    assert node.files == {"etc": WANTED} and change.read()["phase"] == "confirmed"


@pytest.mark.parametrize("previous", ["", "network:\n  - 192.168.200.12/24\n"])
def test_taken_back(change, node, previous):
    """The renderer takes the address that was set by hand away; it comes back, and the file that was there is in force again."""
    begin(change, node, previous=previous)
    change.apply()
    change.revert("nobody")
    assert node.port == BEFORE[PORT]
    assert node.files == ({"etc": previous} if previous else {})
    assert (change.read()["phase"], change.read()["why"]) == ("reverted", "nobody")
    assert change.confirm() == "nobody", "too late"
    assert node.asked[-1] == "systemctl stop dgxspark-fabric-revert.timer"


def test_an_address_that_goes_a_moment_later_is_brought_back(change, node):
    begin(change, node)
    change.apply()
    node.late = "192.168.200.12/24"
    change.revert("nobody")
    node.tick()
    node.tick()
    assert node.port == BEFORE[PORT]


def test_a_change_that_netplan_refuses_is_taken_back_at_once(change, node):
    begin(change, node)
    node.netplan_rc = 78
    change.apply()
    assert node.port == BEFORE[PORT] and node.files == {}
    assert change.read()["phase"] == "reverted"
    assert change.read()["why"].startswith("netplan apply ended with code 78: Error in network definition: unknown key; netplan apply of")


def test_taken_back_before_it_was_applied(change, node):
    begin(change, node)
    change.revert("nobody")
    change.apply()
    assert node.port == BEFORE[PORT] and node.files == {} and change.read()["phase"] == "reverted"


@pytest.mark.parametrize("previous", ["", "network:\n  - 192.168.200.12/24\n"])
def test_a_confirmed_change_is_undone_only_when_asked(change, node, previous):
    begin(change, node, previous=previous)
    change.apply()
    change.confirm()
    change.revert("the timer")
    assert node.files == {"etc": WANTED}
    change.revert("a node of the gang failed", confirmed=True)
    assert node.port == BEFORE[PORT] and node.files == ({"etc": previous} if previous else {})


def test_the_file_goes_and_the_port_is_as_before_it_came(change, node):
    begin(change, node, text="", previous=WANTED, links=BEFORE)
    node.port.update(addresses=["192.168.200.12/24", "10.0.0.1/24"], mtu=9000)
    change.apply()
    assert node.port == BEFORE[PORT]
    assert node.files == {"etc": WANTED, "run-netplan": _fabric_change.EMPTY}
    assert change.confirm() == "" and node.files == {}


@pytest.mark.parametrize(
    ("now", "steps"),
    [
        ({}, []),
        ({"mtu": 9000}, ["ip link set p mtu 1500"]),
        ({"up": False}, ["ip link set p up"]),
        ({"addresses": []}, ["ip addr add 10.0.0.1/24 broadcast 10.0.0.255 dev p"]),
        ({"addresses": ["10.0.0.1/24", "10.0.0.9/24"]}, ["ip addr del 10.0.0.9/24 dev p"]),
        # first what is missing, then what is too much: the way in never goes
        ({"addresses": ["10.0.0.9/24"]}, ["ip addr add 10.0.0.1/24 broadcast 10.0.0.255 dev p", "ip addr del 10.0.0.9/24 dev p"]),
        ({"routes": []}, ["ip route replace 10.9.0.0/16 via 10.0.0.2 dev p metric 5"]),
    ],
)
def test_steps_to(now, steps):
    target = {"addresses": ["10.0.0.1/24"], "mtu": 1500, "up": True, "routes": [{"dst": "10.9.0.0/16", "gateway": "10.0.0.2", "metric": 5}]}
    assert [" ".join(step) for step in _fabric_change.steps_to({**target, **now}, target, "p")] == steps


def test_links_of_leaves_leased_addresses_and_the_kernels_routes_out():
    info = [
        {"family": "inet", "local": "10.0.0.1", "prefixlen": 24},
        {"family": "inet", "local": "10.0.0.2", "prefixlen": 24, "dynamic": True},
        {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
    ]
    addr = json.dumps([{"ifname": "p", "mtu": 1500, "flags": ["UP", "LOWER_UP"], "addr_info": info}, {"ifname": "lo"}, {}])
    routes = [{"dst": "10.0.0.0/24", "protocol": "kernel"}, {"dst": "default", "gateway": "10.0.0.9", "protocol": "static", "flags": []}]
    assert _fabric_change.links_of(addr, {"p": json.dumps(routes)}, ["p", "gone"]) == {
        "p": {"addresses": ["10.0.0.1/24"], "mtu": 1500, "up": True, "routes": [{"dst": "default", "gateway": "10.0.0.9"}]}
    }


def test_the_program_needs_nothing_of_the_collection(tmp_path):
    """It runs from a copy, with Python's isolated mode."""
    copy = tmp_path / "change.py"
    copy.write_text(_fabric_change.__loader__.get_source(_fabric_change.__name__))
    assert subprocess.run([sys.executable, "-I", str(copy), "other"], check=False, timeout=30).returncode == 64


@pytest.mark.parametrize(("argv", "rc"), [(["true"], 0), (["false"], 1), (["sleep", "9"], 124), (["no-such-program"], 127)])
def test_command_is_bounded(argv, rc):
    assert _fabric_change.command(argv, 0.2)[0] == rc
