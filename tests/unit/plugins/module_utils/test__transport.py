# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""NCCL lines: see tests/unit/fixtures/nccl/README.md. The worker's log and the sockets were recorded in the lab (vLLM 0.32, Gloo, two nodes)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _transport as tp
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"
F1, P2 = "rocep1s0f1:1", "roceP2p1s0f1:1"
RAILS = [
    {"interface": "enp1s0f1np1", "hca": "rocep1s0f1", "hca_port": 1, "active": True},
    {"interface": "enP2p1s0f1np1", "hca": "roceP2p1s0f1", "hca_port": 1, "active": True},
]
FABRIC = {"interface": "enp1s0f1np1", "hcas": [F1, P2], "rails": RAILS}
TCP_FABRIC = {
    "interface": "enp1s0f1np1",
    "hcas": [],
    "rails": [{"interface": "enp1s0f1np1", "hca": None, "hca_port": None, "active": True}],
}
WORKER = (
    ":actor_name:RayWorkerProc\n(Worker pid=95) INFO 11-30 13:36:33 [parallel_state.py:1906] world_size=2 rank=1 local_rank=0 "
    "distributed_init_method=tcp://192.168.210.12:46409 backend=gloo\n"
)
# /proc/net/tcp of a rank; the third is Ray's control store (6379), the fourth listens, the fifth belongs to another process.
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0DD2A8C0:C974 0CD2A8C0:AADB 01 00000000:00000000 00:00000000 00000000     0        0 7001 1 0 20 4 30 10 -1
   1: 0DD2A8C0:82AD 0CD2A8C0:9E70 01 00000000:00000000 00:00000000 00000000     0        0 7002 1 0 20 4 30 10 -1
   2: 0DD2A8C0:9DEA 0CD2A8C0:18EB 01 00000000:00000000 00:00000000 00000000     0        0 7003 1 0 20 4 30 10 -1
   3: 00000000:4F9B 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7004 1 0 100 0 0 10 0
   4: 0DD2A8C0:0016 0CD2A8C0:AADB 01 00000000:00000000 00:00000000 00000000     0        0 7009 1 0 20 4 30 10 -1
"""
TCP6 = "   0: 0000000000000000FFFF00000DD2A8C0:4F9B 0000000000000000FFFF00000CD2A8C0:C194 01 0:0 00:0 0 0 0 7005 1 0 20 4 30 10 -1\n"


def log(name):
    return (FIXTURES / f"{name}.log").read_text(encoding="utf-8")


def record(nccl=None, worker="", connections=(), names=None, rails=None):
    return tp.rank_record(4711, nccl, tp.parse_worker(worker), list(connections), names or {}, RAILS if rails is None else rails)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "spark_two_rails",
            {"version": "2.28.9+cuda13.0", "network": "IB", "rank": 0, "nranks": 2, "interface": "enp1s0f1np1", "devices": {F1: 2, P2: 2}, "listed": [P2, F1]},
        ),
        ("spark_vllm_plugin", {"network": "IBext_v10", "devices": {"rocep1s0f1": 1, "roceP2p1s0f1": 1}, "rank": None, "nranks": 0}),
        ("spark_merged", {"network": "IB", "devices": {"rocep1s0f0": 1, "rocep1s0f1": 1}}),
        (
            "spark_socket",
            {
                "network": "Socket",
                "rank": 0,
                "nranks": 2,
                "interface": "enp1s0f0np0",
                "devices": {"enp1s0f0np0": 1},
                "reason": "Failed to initialize NET plugin IB",
            },
        ),
        ("socket_channels", {"network": "Socket", "devices": {"Socket/0": 3}}),
        (
            "h20_socket_init",
            {"network": "Socket", "rank": 1, "nranks": 16, "devices": {}, "listed": ["eth0"], "reason": "NET/IB : No device found"},
        ),
        ("one_node", {"version": "2.20.5+cuda12.4", "rank": 3, "nranks": 4, "devices": {}, "reason": "Failed to open libibverbs.so[.1]"}),
    ],
)  # fmt: skip
def test_what_nccl_says(name, expected):
    found = tp.parse_nccl(log(name))
    assert {key: found[key] for key in expected} == expected


def test_a_device_that_routing_replaced_carries_nothing():
    """Line of NCCL from a public note about a ring of DGX Sparks."""
    text = log("spark_two_rails") + "NCCL INFO NET/IB: Subnet-aware routing: overriding dev 1 with dev 0\n"
    assert tp.parse_nccl(text)["devices"] == {F1: 4}


@pytest.mark.parametrize(
    ("given", "transport", "rails", "text"),
    [
        ({"nccl": log("spark_two_rails")}, "ib", ["enp1s0f1np1", "enP2p1s0f1np1"], f"rank 0: nccl over ib, {F1} and {P2} (2 of 2 rails)"),
        (
            {"nccl": log("spark_vllm_plugin"), "worker": WORKER.replace("gloo", "nccl")},
            "ib",
            ["enp1s0f1np1", "enP2p1s0f1np1"],
            "rank 1: nccl over ib, roceP2p1s0f1 and rocep1s0f1 (2 of 2 rails)",
        ),
        ({"nccl": log("spark_socket")}, "socket", [], "rank 0: nccl over socket, enp1s0f0np0"),
        ({"nccl": log("one_node")}, "unknown", [], "rank 3: nccl over unknown, Socket"),
        ({"worker": WORKER.replace("gloo", "nccl"), "connections": [{"local": "192.168.210.13", "remote": "192.168.210.12"}]}, "unknown", [],
         "rank 1: nccl over unknown, no device"),
        (
            {
                "worker": WORKER,
                "connections": [{"local": "192.168.210.13", "remote": "192.168.210.12"}] * 2,
                "names": {"192.168.210.13": "enp1s0f1np1"},
                "rails": TCP_FABRIC["rails"],
            },
            "tcp",
            ["enp1s0f1np1"],
            "rank 1: gloo over tcp, enp1s0f1np1",
        ),
        ({}, "unknown", [], "a rank: unknown over unknown, no device"),
    ],
)  # fmt: skip
def test_a_rank(given, transport, rails, text):
    found = record(**given)
    assert found["transport"] == transport and found["rails"] == rails
    assert tp.describe(found, 2) == text


@pytest.mark.parametrize(
    ("worker", "title", "maps", "sizes", "expected"),
    [
        (WORKER, "VLLM::Worker_TP7", "libnccl.so.2", (8, 1), {"world": 2, "rank": 1, "backend": "gloo"}),
        ("", "VLLM::Worker_TP1", "7f /usr/lib/libtorch_cpu.so\n", (2, 1), {"rank": 1, "backend": "gloo"}),
        ("", "VLLM::Worker_PP1_TP0", "7f /x/libtorch_cpu.so\n7f /x/nvidia/nccl/lib/libnccl.so.2\n", (2, 2), {"rank": 2, "backend": "nccl"}),
        ("", "VLLM::Worker_PP1_TP1_EP3", "", (2, 2), {"rank": 3}),
        ("", "VLLM::Worker_PP1", "", (1, 2), {"rank": 1}),
        ("", "VLLM::Worker_DP1_PP1_TP0", "", (2, 2), {"rank": 6}),
        ("", "VLLM::Worker_DP1", "", (1, 1), {"rank": 1}),
        ("", "VLLM::Worker", "", (1, 1), {}),
        ("", "ray::RayWorkerProc.run", "", (1, 1), {}),
    ],
)
def test_what_is_told_of_a_rank(worker, title, maps, sizes, expected):
    """Titles as vLLM sets them with the executor mp; there is no file for each rank then."""
    assert tp.parse_worker(worker, title, maps, sizes) == expected


def test_connections_that_leave_the_node_and_are_not_rays():
    found = tp.parse_tcp(TCP, {"7001", "7002", "7003", "7004"}) + tp.parse_tcp(TCP6, {"7005"})
    assert found[0] == {"local": "192.168.210.13", "local_port": 51572, "remote": "192.168.210.12", "remote_port": 43739}
    assert found[3] == {"local": "192.168.210.13", "local_port": 20379, "remote": "192.168.210.12", "remote_port": 49556}
    ours = tp.outside(found, {"192.168.210.13"}, lambda port: port == 6379 or 20002 <= port <= 20999)
    assert [item["remote_port"] for item in ours] == [43739, 40560]
    assert tp.outside(found, {"192.168.210.12"}, lambda port: False) == []


IB, SOCKET, GLOO = (
    record(log("spark_two_rails")),
    record(log("spark_socket"), rails=[{**RAILS[0], "interface": "enp1s0f0np0"}]),
    record(None, WORKER, [{"local": "a", "remote": "b"}], {"a": "enp1s0f1np1"}),
)
MISSING = record()
STRAY = record(None, WORKER, [{"local": "a", "remote": "b"}], {"a": "enP7s7"})


@pytest.mark.parametrize(
    ("ranks", "fabric", "over", "problem_id", "found", "remedy"),
    [
        ([SOCKET], FABRIC, {"require_rdma": True}, "rdma-unused", "NCCL says: Failed to initialize NET plugin IB", "/dev/infiniband"),
        ([GLOO], TCP_FABRIC, {"require_rdma": True}, "rdma-unused", "rank 1: gloo over tcp, enp1s0f1np1", "spark_require_rdma: false"),
        ([MISSING], FABRIC, {"require_rdma": True}, "transport-unknown", "no log of NCCL", "docker logs"),
        ([], FABRIC, {"require_rdma": True}, "transport-unknown", "0 of 1 rank processes", "docker logs"),
        ([STRAY], TCP_FABRIC, {}, "NET-01", "rank 1: gloo over tcp, enP7s7, not by the fabric", "GLOO_SOCKET_IFNAME"),
        ([IB], FABRIC, {"others": [{**IB, "version": "2.30.4+cuda13.3"}]}, "NCL-07", "2.28.9+cuda13.0, 2.30.4+cuda13.3", "LD_PRELOAD"),
    ],
)
def test_what_must_not_serve(ranks, fabric, over, problem_id, found, remedy):
    with pytest.raises(Problem) as caught:
        tp.verdict(ranks, "spark-2", fabric, 1, **{"require_rdma": False, **over})
    problem = caught.value
    assert problem.id == problem_id and problem.node == "spark-2" and problem.stage == "transport"
    assert found in problem.found and remedy in problem.remedy


@pytest.mark.parametrize(
    ("ranks", "fabric", "over", "warning"),
    [
        ([IB], FABRIC, {"require_rdma": True, "others": [IB]}, None),
        ([GLOO], TCP_FABRIC, {}, None),
        ([{**IB, "rails": ["enp1s0f1np1"]}], FABRIC, {"require_rdma": True}, "roceP2p1s0f1 (enP2p1s0f1np1) carries nothing"),
        ([MISSING], FABRIC, {"require_rdma": True, "prove": False}, "not known"),
        ([MISSING], FABRIC, {}, "not known"),
        ([{**GLOO, "interfaces": ["enP7s7", "enp1s0f1np1"]}], TCP_FABRIC, {}, "enP7s7 is not the fabric"),
    ],
)
def test_what_may_serve(ranks, fabric, over, warning):
    warnings = tp.verdict(ranks, "spark-2", fabric, 1, **{"require_rdma": False, **over})
    assert len(warnings) == (1 if warning else 0)
    assert not warning or warning in warnings[0]


def test_the_log_goes_to_a_file_that_the_module_finds():
    name = tp.NCCL_LOG["NCCL_DEBUG_FILE"].replace("%h", "spark-1").replace("%p", "299")
    assert name == "/tmp/nccl.spark-1.299.log"
    assert Path(name.lstrip("/")).match(tp.NCCL_FILES.format(pid=299))
    assert set(tp.NCCL_LOG["NCCL_DEBUG_SUBSYS"].split(",")) == {"INIT", "NET"}
