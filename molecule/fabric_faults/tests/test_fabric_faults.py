# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the fabric, each with its own message before anything is stopped; then nodes whose fabric has different names. In this order."""

from __future__ import annotations

import contextlib
import json
import typing as t
from pathlib import Path

import pytest
import spark
import yaml

PORT1 = "enp1s0f1np1"
PORT0 = "enp1s0f0np0"
HEAD, WORKER = (f"{node} ({spark.NODES[node]})" for node in (spark.HEAD, spark.WORKER))


def rule(node: str, chain: str, match: str) -> contextlib.AbstractContextManager[None]:
    """A firewall rule of a node for the time of a test."""
    return spark.undone(node, f"iptables -I {chain} {match}", f"iptables -D {chain} {match}")


class TestRefused:
    def test_mtu_that_differs(self) -> None:
        """Also over a connection that ssh has kept from before, on which nothing long arrives any more."""
        spark.site("--tags", "preflight", "--check")
        with spark.undone("spark-2", f"ip link set {PORT1} mtu 1500", f"ip link set {PORT1} mtu 9000"):
            run = spark.site()
        spark.refused(run, "spark-1", "spark-1 9000", "spark-2 1500", "the same MTU")

    def test_a_switch_that_does_not_pass_full_packets(self) -> None:
        """Both ends have 9000, and what is longer than 1500 does not arrive."""
        with rule("spark-2", "INPUT", f"-i {PORT1} -p icmp -m length --length 1501:65535 -j DROP"):
            run = spark.site()
        spark.refused(run, ["spark-1", "spark-2"], "small packets reach spark-", "packets of 9000 bytes do not", "every switch port")

    def test_ports_that_a_firewall_drops(self) -> None:
        with rule("spark-2", "INPUT", f"-i {PORT1} -p tcp --dport 6380:6385 -j DROP"):
            run = spark.site()
        spark.refused(run, "spark-1", f"to {WORKER} ports 6380 to 6385: no answer", "open: ports 22, ", "firewall of spark-2")

    def test_a_port_that_a_firewall_rejects_in_one_direction(self) -> None:
        """The head's control store, as the worker sees it; the other direction is open."""
        with rule("spark-1", "INPUT", f"-i {PORT1} -p tcp --dport 6379 -j REJECT"):
            run = spark.site()
        spark.refused(run, "spark-2", f"to {HEAD} port 6379: rejected by a firewall", "firewall of spark-1")

    def test_an_address_that_the_node_does_not_have(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts.yml"
        path.write_text(
            yaml.safe_dump({"sparks": {"hosts": {"spark-2": {"spark_fabric_address": str(spark.FABRIC[99])}}}}), encoding="utf-8"
        )
        run = spark.site(inventory=[spark.LAB, path])
        spark.refused(run, "spark-2", str(spark.FABRIC[99]), spark.NODES[spark.WORKER], "spark_fabric_address")

    def test_a_head_that_lost_its_address(self) -> None:
        """Then nobody reaches the worker either, whose only way is through the head."""
        address = f"{spark.NODES[spark.HEAD]}/24 dev {PORT1}"
        with spark.undone("spark-1", f"ip addr del {address}", f"ip addr add {address}"):
            run = spark.site(new_connections=True)
        spark.refused(run, "spark-2", spark.NODES[spark.WORKER], "through spark-1", "cable")

    def test_no_rdma_where_it_is_required(self) -> None:
        run = spark.site(spark_require_rdma=True)
        spark.refused(run, ["spark-1", "spark-2"], "without usable RDMA", "spark_require_rdma")

    def test_an_override_that_gloo_does_not_understand(self) -> None:
        run = spark.site(spark_env={"GLOO_SOCKET_IFNAME": "^docker0"})
        spark.refused(run, "spark-1", "GLOO_SOCKET_IFNAME '^docker0' in spark_env", "plain ", "Gloo")

    def test_an_override_that_only_the_head_can_follow(self) -> None:
        run = spark.site(spark_env={"GLOO_SOCKET_IFNAME": "enP7s7"})
        spark.refused(run, "spark-2", "GLOO_SOCKET_IFNAME 'enP7s7' in spark_env", "enP7s7 is no interface")


# The worker's cable is in its other port: what was the fabric interface is called so now, and the port without a cable has the name of the head's.
OTHER_PORT = "; ".join(
    f"ip link set {old} down; ip link set {old} name {new}; ip link set {new} up"
    for old, new in ((PORT0, "swap0"), (PORT1, PORT0), ("swap0", PORT1))
)
SAME_PORT = "; ".join(
    f"ip link set {old} down; ip link set {old} name {new}; ip link set {new} up"
    for old, new in ((PORT1, "swap0"), (PORT0, PORT1), ("swap0", PORT0))
)


@pytest.fixture(scope="module")
def other_port() -> t.Iterator[None]:
    with spark.undone("spark-2", OTHER_PORT, SAME_PORT, seconds=900):
        yield


@pytest.mark.usefixtures("other_port")
class TestOtherPort:
    """From here on the server is launched."""

    def test_tcp_is_no_rdma_and_the_old_service_comes_back(self) -> None:
        """Preflight lets TCP pass here; that the ranks really use it is found after the launch."""
        run = spark.site(vllm_server_require_rdma=True)
        assert run.rc != 0
        message = run.message("spark-2", last=True) if run.failures[-1] == "spark-2" else run.message(run.failures[-1], last=True)
        for word in (
            "spark-2: transport: found rank 1: gloo over tcp, enp1s0f0np0",
            "expected every rank over RDMA",
            "Remedy: ",
            "The old service serves again.",
        ):
            assert word in message
        spark.old_service_answers(seconds=30)
        spark.nothing_of_ours()

    def test_it_serves_and_says_how(self) -> None:
        run = spark.site()
        assert run.rc == 0
        spark.answers()
        assert f"transport: - 'rank 0: gloo over tcp, {PORT1}' - 'rank 1: gloo over tcp, {PORT0}'" in run.text

    def test_the_ranks_keep_the_names_of_their_own_node(self) -> None:
        """The list for vLLM 0.17 and older, which would hand on the head's."""
        kept = spark.on(spark.HEAD, "docker", "exec", "spark-vllm", "cat", "/etc/vllm/ray_non_carry_over_env_vars.json")
        assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"} <= set(json.loads(kept))

    @pytest.mark.parametrize(("node", "port"), [("spark-1", PORT1), ("spark-2", PORT0)])
    def test_each_container_has_the_names_of_its_node(self, node: str, port: str) -> None:
        names = ["spark-ray", "spark-vllm"] if node == spark.HEAD else ["spark-ray"]
        found = spark.inspect(node, *names)
        assert len(found) == len(names)
        for container in found:
            env = dict(entry.split("=", 1) for entry in container["Config"]["Env"])
            assert {
                key: env[key] for key in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
            } == {
                "GLOO_SOCKET_IFNAME": port,
                "TP_SOCKET_IFNAME": port,
                "UCX_NET_DEVICES": port,
                "NCCL_SOCKET_IFNAME": f"={port}",
                "VLLM_HOST_IP": spark.NODES[node],
            }

    @pytest.mark.parametrize(("node", "port"), [("spark-1", PORT1), ("spark-2", PORT0)])
    def test_each_rank_has_them_too(self, node: str, port: str) -> None:
        """vLLM copies some variables of the head to the ranks: what counts is what the process of a rank has."""
        script = "tr '\\0' '\\n' < /proc/$(pgrep -f '^ray::RayWorker' | head -n 1)/environ"
        env = dict(line.split("=", 1) for line in spark.shell(node, script).splitlines() if "=" in line)
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["VLLM_HOST_IP"]) == (port, f"={port}", spark.NODES[node])

    def test_a_second_run_changes_nothing(self) -> None:
        run = spark.site("--tags", "preflight,verify")
        assert run.rc == 0 and run.changed == 0
        assert f"rank 1: gloo over tcp, {PORT0}" in run.text
        assert spark.site().changed == 0
