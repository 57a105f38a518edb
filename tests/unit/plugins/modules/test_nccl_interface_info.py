# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import shutil

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import nccl_interface_info as module
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes


@pytest.fixture
def run_module(monkeypatch, capsys, tmp_path):
    """Runs the whole module against a recorded shape; returns its result."""

    def run(shape, **params):
        shapes.tree(shape, tmp_path)
        data = shapes.data(shape)

        def run_command(self, argv, **kwargs):
            assert argv[:2] == ["timeout", "5"]
            if argv[2:] == ["ip", "-j", "-d", "addr"]:
                return 0, json.dumps(data["addr"]), ""
            return shapes.route_answer(shape, shapes.HEAD, argv[-1])

        monkeypatch.setattr(AnsibleModule, "run_command", run_command)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
        with patch_module_args({"sysfs_path": str(tmp_path), "node": "spark-1", **params}), pytest.raises(SystemExit) as caught:
            module.main()
        result = json.loads(capsys.readouterr().out)
        assert bool(caught.value.code) is bool(result.get("failed"))
        return result

    return run


@pytest.mark.parametrize("check_mode", [False, True])
def test_success(run_module, check_mode):
    result = run_module(
        "twin_own_subnet",
        subnets=["192.168.200.0/24"],
        address="192.168.200.12",
        peers=["192.168.200.13"],
        require_rdma=True,
        _ansible_check_mode=check_mode,
    )
    assert result["changed"] is False
    fabric = result["fabric"]
    assert fabric["interface"] == "enp1s0f1np1" and fabric["mtu"] == 9000 and fabric["speed"] == 200000
    assert fabric["env"] == {
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "TP_SOCKET_IFNAME": "enp1s0f1np1",
        "MN_IF_NAME": "enp1s0f1np1",
        "UCX_NET_DEVICES": "enp1s0f1np1",
        "OMPI_MCA_btl_tcp_if_include": "enp1s0f1np1",
        "VLLM_HOST_IP": "192.168.200.12",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=rocep1s0f1:1,roceP2p1s0f1:1",
    }


@pytest.mark.parametrize(
    ("shape", "params", "problem_id"),
    [
        ("one_cable", {"subnets": ["192.168.77.0/24"]}, "fabric-missing"),
        ("two_in_subnet", {"subnets": ["192.168.200.0/24"]}, "fabric-ambiguous"),
        ("one_cable", {"subnets": ["192.168.200.0/24"], "interface": "^lo"}, "fabric-input"),
        ("two_cables_both", {}, "fabric-subnet"),
    ],
)
def test_failure_is_one_problem(run_module, shape, params, problem_id):
    result = run_module(shape, **params)
    assert result["failed"] and result["changed"] is False
    problem = result["problem"]
    assert problem["id"] == problem_id and problem["node"] == "spark-1"
    assert all(problem[key] for key in ("found", "expected", "remedy"))
    assert result["msg"].startswith("spark-1: preflight: found ")
    assert "exception" not in result


def test_survey(run_module):
    result = run_module("twin_own_subnet", survey=True)
    assert set(result) == {"changed", "ports", "invocation"} or set(result) == {"changed", "ports"}
    assert [row["interface"] for row in result["ports"] if row["fast"] and row["usable"]] == ["enp1s0f1np1", "enP2p1s0f1np1"]


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("problem_id", "seconds", "looks"), [("fabric-missing", 10, 3), ("fabric-missing", 1, 2), ("fabric-input", 10, 1)])
def test_looks_again_after_a_change_of_the_network(problem_id, seconds, looks):
    """NET-16: the address is missing at two looks and there at the third."""
    clock, seen = Clock(), []

    def look():
        seen.append(clock.now)
        if len(seen) < 3:
            raise Problem(problem_id, found="nothing", expected="something", remedy="wait")
        return {"fabric": {}}

    if looks == 3:
        assert module.patiently(look, seconds, clock, clock.sleep) == {"fabric": {}}
    else:
        with pytest.raises(Problem):
            module.patiently(look, seconds, clock, clock.sleep)
    assert len(seen) == looks and clock.now == looks - 1


def test_without_iproute2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with patch_module_args({"subnets": ["192.168.200.0/24"], "node": "spark-1", "sysfs_path": str(tmp_path)}), pytest.raises(SystemExit):
        module.main()
    assert "install the package iproute2" in json.loads(capsys.readouterr().out)["msg"]
