# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _overrides
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GLOO_SOCKET_IFNAME", "enp1s0f1np1", None),
        ("GLOO_SOCKET_IFNAME", "enp1s0f1np1,enp1s0f0np0", None),
        ("GLOO_SOCKET_IFNAME", "", None),  # left out of the containers
        ("GLOO_SOCKET_IFNAME", "^docker0", "Gloo knows no '^'"),
        ("GLOO_SOCKET_IFNAME", "=enp1s0f1np1", "Gloo knows no '^' (exclude) and no '=' (exact)"),
        ("GLOO_SOCKET_IFNAME", "enp1s0f1np1, enp1s0f0np0", "plain names with commas"),
        ("GLOO_SOCKET_IFNAME", "enp1s0f1np1,", "none of them empty"),
        ("TP_SOCKET_IFNAME", "=enp1s0f1np1", "TensorPipe knows no"),
        ("OMPI_MCA_btl_tcp_if_include", "^lo", "Open MPI knows no"),
        ("UCX_NET_DEVICES", "rocep1s0f1:1,enp1s0f1np1", None),
        ("UCX_NET_DEVICES", "=rocep1s0f1:1", "UCX knows no"),
        ("NCCL_SOCKET_IFNAME", "=enp1s0f1np1", None),
        ("NCCL_SOCKET_IFNAME", "enp1s0f", None),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", "an exclusion leaves every other interface to chance (NET-01)"),
        ("NCCL_SOCKET_IFNAME", "=enp1s0f1np1,=enp1s0f0np0", "one '=' in front"),
        ("NCCL_SOCKET_IFNAME", "=", "none of them empty"),
        ("NCCL_IB_HCA", "=rocep1s0f1:1,roceP2p1s0f1:1", None),
        ("NCCL_IB_HCA", "^rocep1s0f0", "an exclusion leaves"),
        ("NCCL_IB_GID_INDEX", 3, "the index differs between devices and drifts (NCL-01)"),
        ("NCCL_IB_DISABLE", "1", None),
        ("NCCL_IB_DISABLE", "yes", "one of 0, 1"),
        ("NCCL_CROSS_NIC", "2", None),
        ("NCCL_CROSS_NIC", "on", "one of 0, 1, 2"),
        ("VLLM_HOST_IP", "192.168.200.12", "each node's own address"),
        ("MASTER_ADDR", "192.168.200.12", "the head's fabric address"),
        ("NCCL_DEBUG", "INFO", None),
        ("MY_OWN", "^anything=", None),
    ],
)
def test_form(name, value, words):
    problems = _overrides.form_problems({name: value})
    assert len(problems) == (words is not None)
    if words:
        assert problems[0].id == "input" and problems[0].found == f"{name} {str(value)!r} in spark_env"
        assert words in problems[0].expected and problems[0].remedy


CANDIDATES = [
    {"interface": "enp1s0f1np1", "up": True, "carrier": True, "addresses": ["192.168.200.12/24"], "hca": "rocep1s0f1"},
    {"interface": "enP2p1s0f1np1", "up": True, "carrier": True, "addresses": [], "hca": "roceP2p1s0f1"},
    {"interface": "enp1s0f0np0", "up": True, "carrier": False, "addresses": [], "hca": "rocep1s0f0"},
]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "enp1s0f1np1"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0 is no interface that is up and has an IPv4 address here (there are enp1s0f1np1)"),
        ({"GLOO_SOCKET_IFNAME": "enP2p1s0f1np1"}, "enP2p1s0f1np1 is no interface"),
        ({"GLOO_SOCKET_IFNAME": "enp1s0f1"}, "enp1s0f1 is no interface"),  # no prefixes
        ({"NCCL_SOCKET_IFNAME": "enp1s0f1"}, None),  # a prefix
        ({"NCCL_SOCKET_IFNAME": "=enp1s0f1"}, "enp1s0f1 is no interface"),
        ({"NCCL_IB_HCA": "=rocep1s0f1:1,mlx5_0:1"}, "mlx5_0 is no RDMA device here (there are roceP2p1s0f1, rocep1s0f0, rocep1s0f1)"),
        ({"NCCL_IB_HCA": "roce"}, None),
        ({"UCX_NET_DEVICES": "rocep1s0f1:1"}, None),
        ({"UCX_NET_DEVICES": "all"}, None),
        ({"UCX_NET_DEVICES": "mlx5_9:1"}, "mlx5_9 is no interface or RDMA device here"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "=rocep1s0f1"}, "no NCCL_IB_HCA beside it"),
        ({"NCCL_DEBUG": "INFO"}, None),
    ],
)
def test_names_of_the_node(env, words):
    member = gang.member(choice=gang.fabric("192.168.200.12", candidates=CANDIDATES, hcas=["rocep1s0f1:1"]))
    problems = _overrides.node_problems(env, member)
    assert len(problems) == (words is not None)
    if words:
        assert (problems[0].id, problems[0].node, problems[0].stage) == ("input", "spark-1", "preflight")
        assert words in problems[0].expected


def test_a_node_without_candidates_is_not_judged():
    assert _overrides.node_problems({"GLOO_SOCKET_IFNAME": "eth0"}, gang.member()) == []
