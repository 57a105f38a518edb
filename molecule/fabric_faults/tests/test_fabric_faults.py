# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the fabric, each with its own message before anything is stopped; then nodes whose fabric has different names. In this order."""

from __future__ import annotations

import pytest
import spark
import yaml

PORT1 = "enp1s0f1np1"
PORT0 = "enp1s0f0np0"
HEAD, WORKER = (f"{node} ({spark.NODES[node]})" for node in (spark.HEAD, spark.WORKER))


def rule(node: str, chain: str, match: str):
    """A firewall rule of a node for the time of a test."""
    return spark.undone(node, f"iptables -I {chain} {match}", f"iptables -D {chain} {match}")


class TestRefused:
    def test_mtu_that_differs(self) -> None:
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

    def test_an_address_that_the_node_does_not_have(self, tmp_path) -> None:
        path = tmp_path / "hosts.yml"
        path.write_text(yaml.safe_dump({"sparks": {"hosts": {"spark-2": {"spark_fabric_address": str(spark.FABRIC[99])}}}}), encoding="utf-8")
        run = spark.site(inventory=[spark.LAB, path])
        spark.refused(run, "spark-2", str(spark.FABRIC[99]), spark.NODES[spark.WORKER], "spark_fabric_address")

    def test_a_head_that_lost_its_address(self) -> None:
        """Then nobody reaches the worker either, whose only way is through the head."""
        address = f"{spark.NODES[spark.HEAD]}/24 dev {PORT1}"
        with spark.undone("spark-1", f"ip addr del {address}", f"ip addr add {address}"):
            run = spark.site(new_connections=True)
        spark.refused(run, "spark-2", spark.NODES[spark.WORKER], "through spark-1", "cable")

    def test_another_interface_with_an_address_in_the_subnet(self) -> None:
        """Not the twin (that is in the scenario input) but a bridge, as Docker makes them."""
        address = f"{spark.FABRIC[1]}/24 dev br-5ba4c0de0000"
        with spark.undone("spark-2", f"ip addr add {address}", f"ip addr del {address}"):
            run = spark.site()
        assert run.rc == 0 or spark.refused(run, "spark-2", "br-5ba4c0de0000") is None

    def test_no_rdma_where_it_is_required(self) -> None:
        run = spark.site(spark_require_rdma=True)
        spark.refused(run, ["spark-1", "spark-2"], "without usable RDMA", "spark_require_rdma")

    def test_an_override_that_gloo_does_not_understand(self) -> None:
        run = spark.site(spark_env={"GLOO_SOCKET_IFNAME": "^docker0"})
        spark.refused(run, "spark-1", "GLOO_SOCKET_IFNAME", "^docker0", "plain interface names")
