# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import shutil

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_change
from ansible_collections.dgxspark.serving.plugins.modules import fabric_setup as module
from ansible_collections.dgxspark.serving.tests.unit.plugins.fabric_node import BEFORE, NAME, PORT, Node

INPUTS = {"node": "spark-1", "address": "192.168.200.12", "subnet": "192.168.200.0/24", "timeout": 90}
ARMED = "systemd-run --quiet --no-ask-password --collect --unit=dgxspark-fabric-{} --on-active={}s"


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def change(node, tmp_path):
    return _fabric_change.Change(str(tmp_path / "state"), str(node.etc), str(node.volatile), node.run, sleep=lambda seconds: None)


@pytest.fixture
def run_module(monkeypatch, capsys, node, change):
    """Runs the whole module on the fake node."""
    monkeypatch.setattr(_fabric_change, "Change", lambda: change)
    monkeypatch.setattr(module, "NETPLAN_DIRS", (str(node.etc), str(node.volatile)))
    monkeypatch.setattr(module, "KEYFILES", str(node.etc / "*.nmconnection"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module.Setup, "login", lambda self: run_module.login)

    def run_module(**params):
        node.asked.clear()
        with patch_module_args({**INPUTS, **params}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    run_module.login = ""
    return run_module


def started(node):
    """What was armed, in order."""
    return [" ".join(text.split()[:6]) for text in node.asked if text.startswith("systemd-run")]


def untouched(node):
    return node.port == BEFORE[PORT] and started(node) == [] and not any("apply" in text for text in node.asked)


def present(run_module, change, **params):
    """A whole change: begun, applied by the node, confirmed."""
    assert run_module(**params)["changed"] is True
    change.apply()
    assert run_module(step="prove")["setup"]["ready"] is True
    assert run_module(step="confirm")["changed"] is True


def test_check_mode_shows_the_file(run_module, node):
    result = run_module(_ansible_check_mode=True, _ansible_diff=True)
    assert result["changed"] is True and result["diff"]["before"] == ""
    assert yaml.safe_load(result["diff"]["after"])["network"]["ethernets"][PORT]["addresses"] == ["192.168.200.12/24"]
    assert untouched(node) and node.files == {}
    assert result["setup"]["notes"] == [f"{PORT} has no other half here: one rail only"]


def test_the_timer_is_armed_before_anything_is_changed(run_module, node, change):
    result = run_module()
    assert result["changed"] is True and result["setup"]["phase"] == "pending" and 85 < result["setup"]["left"] <= 90
    assert started(node) == [ARMED.format("revert", 90), ARMED.format("apply", 1)]
    assert list(node.files) == ["run-netplan"], "nothing in /etc before it is confirmed"
    assert (node.volatile / NAME).stat().st_mode & 0o777 == 0o600
    assert run_module(step="prove")["setup"] == {
        **result["setup"],
        "notes": [],
        "why": "netplan has not finished yet",
        "left": pytest.approx(90, abs=5),
    }


def test_present_the_second_time_changes_nothing(run_module, node, change):
    present(run_module, change)
    assert list(node.files) == ["etc"] and node.port["mtu"] == 9000
    for params in ({}, {"_ansible_check_mode": True}):
        result = run_module(**params)
        assert result["changed"] is False and started(node) == []
    assert run_module(mtu=8000, _ansible_check_mode=True)["changed"] is True


@pytest.mark.parametrize("lost", [{"addresses": []}, {"mtu": 1500}])
def test_what_is_in_the_file_and_not_on_the_port_is_a_change(run_module, node, change, lost):
    present(run_module, change)
    node.port.update(lost)
    assert run_module()["changed"] is True and started(node)


def test_a_file_that_others_can_read_is_a_change(run_module, node, change):
    present(run_module, change)
    (node.etc / NAME).chmod(0o644)
    assert run_module()["changed"] is True


def test_absent_brings_back_what_was_set_by_hand(run_module, node, change):
    present(run_module, change)
    result = run_module(state="absent")
    assert result["changed"] is True and result["diff"]["after"] == ""
    change.apply()
    assert node.port == BEFORE[PORT]
    assert run_module(step="confirm")["changed"] is True
    assert node.files == {} and change.read("before.json") == {}
    assert run_module(state="absent")["changed"] is False


def test_absent_after_a_reboot_takes_only_our_own_address(run_module, node, change):
    """What was set by hand is gone with the reboot, and so is our record of it."""
    present(run_module, change)
    shutil.rmtree(change.run_dir)
    node.port["addresses"].append("10.0.0.1/24")
    run_module(state="absent")
    assert change.read()["links"][PORT]["addresses"] == ["10.0.0.1/24"]


def test_absent_after_a_reboot_leaves_what_another_file_gives_the_port(run_module, node, change):
    (node.etc / "40-cx7.yaml").write_text(f"network: {{ethernets: {{{PORT}: {{addresses: [192.168.200.12/24]}}}}}}")
    present(run_module, change)
    shutil.rmtree(change.run_dir)
    run_module.login = "192.168.200.12"
    assert run_module(state="absent")["changed"] is True
    assert change.read()["links"][PORT]["addresses"] == ["192.168.200.12/24"]


def test_a_change_that_cuts_the_way_it_comes_by(run_module, node, change):
    run_module.login = "192.168.200.12"
    result = run_module(address="192.168.200.112")
    assert result["problem"]["id"] == "fabric-cut" and untouched(node) and node.files == {}
    present(run_module, change)
    assert run_module(state="absent", _ansible_check_mode=True)["changed"] is True, "it was there before"
    shutil.rmtree(change.run_dir)
    assert run_module(state="absent")["problem"]["id"] == "fabric-cut", "after a reboot only our file has it"


@pytest.mark.parametrize(
    ("name", "text", "ident", "words"),
    [
        (NAME, "network: {version: 2}", "fabric-conflict", "not written by dgxspark.serving"),
        ("40-cx7.yaml", f"network: {{ethernets: {{{PORT}: {{addresses: [10.0.0.1/24]}}}}}}", "fabric-conflict", "10.0.0.1/24"),
        ("c.nmconnection", f"[connection]\nid=cable\ninterface-name={PORT}\n", "fabric-conflict", "profile 'cable'"),
        ("40-cx7.yaml", "network: [", "fabric-netplan", "40-cx7.yaml"),
    ],
)
def test_other_files_are_refused_and_stay_as_they_are(run_module, node, name, text, ident, words):
    (node.etc / name).write_text(text)
    result = run_module()
    assert result["problem"]["id"] == ident and words in result["msg"] and result["changed"] is False
    assert (node.etc / name).read_text() == text and untouched(node)


@pytest.mark.parametrize(("fails", "ident"), [("netplan", "fabric-netplan"), ("systemd-run", "fabric-netplan"), ("ip", "iproute2")])
def test_a_program_that_does_not_work(run_module, node, change, fails, ident):
    node.fails = {fails}
    result = run_module()
    assert result["problem"]["id"] == ident and f"{fails} does not work" in result["msg"]
    assert node.files == {} and change.read().get("phase") is None


def test_no_netplan_or_no_root(run_module, node, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "netplan" else name)
    assert "no command netplan" in run_module()["msg"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "spark_become" in run_module()["problem"]["remedy"] and untouched(node)


def test_a_change_that_nobody_has_confirmed_yet(run_module, node, change):
    run_module()
    result = run_module(mtu=8000)
    assert result["problem"]["id"] == "fabric-pending" and "wait 9" in result["problem"]["remedy"]
    node.fails = {"systemctl"}  # the timer is not there any more
    change.apply()
    assert node.port["mtu"] == 9000
    assert run_module(mtu=8000)["changed"] is True
    assert (change.read()["phase"], change.read()["before"]) == ("pending", BEFORE)


def test_confirm_comes_too_late(run_module, change):
    run_module()
    change.apply()
    change.revert("nobody confirmed the change in time")
    result = run_module(step="confirm")
    assert result["problem"]["id"] == "fabric-reverted" and "nobody confirmed" in result["problem"]["found"]
    assert run_module(step="prove")["setup"]["phase"] == "reverted"


@pytest.mark.parametrize(
    ("confirmed", "named", "told"),
    [(False, False, True), (False, True, True), (True, True, True), (True, False, False)],
)
def test_revert_is_done_by_the_node(run_module, node, change, confirmed, named, told):
    """A confirmed change only when it is named: it may be one of an earlier run."""
    ident = run_module()["setup"]["change_id"]
    change.apply()
    if confirmed:
        run_module(step="confirm")
    run_module(step="revert", change_id=ident if named else "")
    found = [text for text in node.asked if text.startswith("systemd-run")]
    assert len(found) == told
    if told:
        assert "--no-block" in found[0] and found[0].endswith("change.py undo a node of the gang failed")


def test_ready_only_when_the_port_is_as_wanted(run_module, node, change):
    run_module()
    change.apply()
    node.port["addresses"] = []
    setup = run_module(step="prove")["setup"]
    assert (setup["ready"], setup["why"]) == (False, f"{PORT} has no address 192.168.200.12/24")
