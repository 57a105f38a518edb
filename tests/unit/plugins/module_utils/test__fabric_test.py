# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_test as test
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Address, Interface
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import Hca

LIT = ("UP", "LOWER_UP")


def link(rail, interface, address, speed=200000, rdma="", state="ACTIVE", mtu=9000, fast=True):
    return {
        "interface": interface,
        "addresses": [address] if address else [],
        "mtu": mtu,
        "speed": speed,
        "up": True,
        "carrier": True,
        "fast": fast,
        "rdma": rdma,
        "rdma_state": state if rdma else "",
        "rail": rail,
    }


def look(number, *links, **tools):
    return {"node": f"spark-{number}", "links": list(links), "tools": {"iperf3": "node", "ib_write_bw": "", **tools}}


def node(number, rdma=True, **tools):
    names = ("rocep1s0f1:1", "roceP2p1s0f1:1") if rdma else ("", "")
    return look(
        number,
        link(1, "enp1s0f1np1", f"192.168.200.{11 + number}/24", rdma=names[0]),
        link(2, "enP2p1s0f1np1", f"192.168.201.{11 + number}/24", rdma=names[1]),
        **tools,
    )


PAIR = {
    "rail": 1,
    "source": "spark-1",
    "target": "spark-2",
    "interface": "enp1s0f1np1",
    "address": "192.168.200.12",
    "peer": "192.168.200.13",
    "mtu": 9000,
    "tool": "iperf3",
    "why": "",
    "expected": 90.0,
    "source_in": "node",
    "target_in": "node",
    "devices": ["", ""],
}


def test_the_fabric_address_comes_first():
    """A port may have a link-local address or an alias beside it."""
    port = Interface(
        "enp1s0f1np1", flags=LIT, mtu=9000, device="0000:01:00.1", driver="mlx5_core",
        addresses=(Address("169.254.35.62", 16), Address("192.168.200.112", 24), Address("192.168.200.12", 24)),
    )  # fmt: skip
    (row,) = test.links([port], [], "192.168.200.12", "192.168.200.0/24")
    assert row["addresses"] == ["192.168.200.12/24", "192.168.200.112/24", "169.254.35.62/16"]


def test_links_of_a_spark():
    hcas = [
        Hca("rocep1s0f1", 1, "ACTIVE", "Ethernet", ("enp1s0f1np1",), ()),
        Hca("rocep1s0f0", 1, "DOWN", "Ethernet", ("enp1s0f0np0",), ()),
    ]
    interfaces = [
        Interface("lo", flags=("LOOPBACK", "UP")),
        Interface(
            "enP7s7", flags=LIT, mtu=1500, device="0007:01:00.0", driver="r8127", speed=10000, addresses=(Address("10.1.230.180", 24),)
        ),
        Interface("enp1s0f0np0", flags=("UP", "NO-CARRIER"), mtu=1500, device="0000:01:00.0", driver="mlx5_core"),
        Interface(
            "enP2p1s0f1np1", flags=LIT, mtu=9000, device="0002:01:00.1", driver="mlx5_core", addresses=(Address("192.168.201.12", 24),)
        ),
        Interface(
            "enp1s0f1np1",
            flags=LIT,
            mtu=9000,
            device="0000:01:00.1",
            driver="mlx5_core",
            speed=200000,
            addresses=(Address("192.168.200.12", 24),),
        ),
        Interface("docker0", kind="bridge", flags=LIT),
    ]
    rows = test.links(interfaces, hcas, "192.168.200.12", "192.168.200.0/24")
    assert [(row["interface"], row["rail"], row["carrier"], row["rdma"], row["rdma_state"]) for row in rows] == [
        ("enp1s0f1np1", 1, True, "rocep1s0f1:1", "ACTIVE"),
        ("enP2p1s0f1np1", 2, True, "", ""),
        ("enp1s0f0np0", 0, False, "rocep1s0f0:1", "DOWN"),
        ("enP7s7", 0, True, "", ""),
    ]
    assert [row["rail"] for row in test.links(interfaces, hcas, "", "192.168.200.0/24")][:2] == [1, 2], (
        "without the address the subnet says it"
    )
    assert {row["rail"] for row in test.links(interfaces, hcas, "", "")} == {0}


def test_each_node_sends_to_the_next_over_each_rail():
    plan, rows = test.pairs([node(1), node(2), node(3)])
    assert [(item["source"], item["target"], item["rail"], item["peer"], item["tool"]) for item in plan] == [
        ("spark-1", "spark-2", 1, "192.168.200.13", "iperf3"),
        ("spark-1", "spark-2", 2, "192.168.201.13", "iperf3"),
        ("spark-2", "spark-3", 1, "192.168.200.14", "iperf3"),
        ("spark-2", "spark-3", 2, "192.168.201.14", "iperf3"),
        ("spark-3", "spark-1", 1, "192.168.200.12", "iperf3"),
        ("spark-3", "spark-1", 2, "192.168.201.12", "iperf3"),
    ]
    assert rows == []


@pytest.mark.parametrize(
    ("nodes", "tool", "why"),
    [
        ((node(1, ib_write_bw="node"), node(2, ib_write_bw="image")), "ib_write_bw", ""),
        ((node(1, ib_write_bw="node"), node(2)), "iperf3", "ib_write_bw is neither on spark-2 nor in"),
        ((node(1, rdma=False, ib_write_bw="node"), node(2, ib_write_bw="node")), "iperf3", ""),
        ((node(1, rdma=False, iperf3=""), node(2, iperf3="")), "", "iperf3 is neither on spark-1 nor on spark-2 nor in the serving image"),
    ],
)
def test_the_tool(nodes, tool, why):
    plan, dummy = test.pairs(nodes)
    assert plan[0]["tool"] == tool and (why in plan[0]["why"] if why else plan[0]["why"] == "")


@pytest.mark.parametrize(
    ("looks", "count", "details"),
    [
        ([node(1), {"node": "spark-2", "error": "no SSH connection"}], 0, ["no SSH connection", "no other node answers"]),
        ([node(1), look(2, link(1, "p", "192.168.200.13/24"))], 2, ["no address on spark-2"] * 2),
        ([look(1), look(2)], 0, ["no address on spark-1, spark-2"] * 2),
    ],
)
def test_what_cannot_be_measured_is_said(looks, count, details):
    plan, rows = test.pairs(looks)
    assert len(plan) == count and [row["detail"] for row in rows] == details and {row["verdict"] for row in rows} == {"not run"}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, 90.0),
        ({"speed": 100000}, {}, 85.0),
        ({"speed": 25000}, {}, 21.2),
        ({"speed": 0}, {"speed": 0}, 90.0),  # it has an RDMA device; its speed cannot be read
        ({"fast": False, "speed": 10000}, {}, 0.0),
    ],
)
def test_expected_rate(one, other, expected):
    ends = [link(1, "p", "10.0.0.1/24", **more) for more in (one, other)]
    assert test.expected_gbits(*ends) == expected


@pytest.mark.parametrize(
    ("pair", "server", "client"),
    [
        ({}, "iperf3 -s -1 -B 192.168.200.13 -p 29951", "iperf3 -c 192.168.200.13 -B 192.168.200.12 -p 29951 -t 4 -P 8 -J"),
        (
            {"tool": "ib_write_bw", "devices": ["rocep1s0f1:1", "mlx5_1:1"]},
            "ib_write_bw -R -F -d mlx5_1 -i 1 -q 4 -D 4 -p 29951 --report_gbits",
            "ib_write_bw -R -F -d rocep1s0f1 -i 1 -q 4 -D 4 -p 29951 --report_gbits 192.168.200.13",
        ),
        (
            {"target_in": "image"},
            "docker run --rm --name=n --network=host --ulimit=memlock=-1:-1 --pull=never --entrypoint=iperf3 i -s -1 -B 192.168.200.13 -p 29951",
            "iperf3 -c 192.168.200.13 -B 192.168.200.12 -p 29951 -t 4 -P 8 -J",
        ),
    ],
)
def test_commands(pair, server, client):
    assert " ".join(test.server_argv({**PAIR, **pair}, 4, "i", "n")) == server
    assert " ".join(test.client_argv({**PAIR, **pair}, 4, "i", "n")) == client


PING = "5 packets transmitted, {} received, {}% packet loss, time 802ms\n{}"
RTT = "rtt min/avg/max/mdev = 0.042/0.061/0.091/0.018 ms\n"


@pytest.mark.parametrize(
    ("rc", "out", "mtu", "verdict", "measured"),
    [
        (0, PING.format(5, 0, RTT), 9000, "ok", "5/5 at MTU 9000, 0.06 ms"),
        (0, PING.format(5, 0, RTT), 1500, "LOW", "5/5 at MTU 1500, 0.06 ms"),
        (1, PING.format(0, 100, ""), 9000, "FAILED", "0/5 at MTU 9000"),
        (1, PING.format(4, 20, RTT), 9000, "FAILED", "4/5 at MTU 9000, 0.06 ms"),
        (2, "", 9000, "FAILED", ""),
    ],
)
def test_ping(rc, out, mtu, verdict, measured):
    row = test.ping_row({**PAIR, "mtu": mtu}, rc, out, "ping: bind: Cannot assign requested address")
    assert (row["verdict"], row["measured"], row["over"]) == (verdict, measured, "rail 1 enp1s0f1np1")


def iperf(gbits):
    return json.dumps({"end": {"sum_sent": {"bits_per_second": 9e12}, "sum_received": {"bits_per_second": gbits * 1e9}}})


# The columns of perftest with --report_gbits; the figure is NVIDIA's for one half of a port.
PERFTEST = """\
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      706000           0.00               92.57              0.176561
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("pair", "rc", "out", "verdict", "measured", "detail"),
    [
        ({}, 0, iperf(96.2), "ok", "96.2 Gb/s", ""),
        ({"tool": "ib_write_bw"}, 0, PERFTEST, "ok", "92.6 Gb/s", ""),
        ({}, 0, iperf(13.1), "LOW", "13.1 Gb/s", "NCL-06"),
        ({}, 0, iperf(60), "LOW", "60.0 Gb/s", "cable"),
        ({"mtu": 1500}, 0, iperf(60), "LOW", "60.0 Gb/s", "MTU 1500"),
        ({"expected": 0.0}, 0, iperf(23.2), "no figure", "23.2 Gb/s", "not a port of 25 Gb/s"),
        ({}, 1, '{"error": "unable to connect to server"}', "FAILED", "", "unable to connect to server"),
        ({}, 0, "{}", "FAILED", "", "no result"),
        ({}, 0, "", "FAILED", "", "no result"),
        ({}, 124, "", "FAILED", "", "did not end in time"),
        ({"tool": "ib_write_bw"}, 1, "", "FAILED", "", "no result"),
    ],
)
def test_rate(pair, rc, out, verdict, measured, detail):
    row = test.rate_row({**PAIR, **pair}, rc, out, "")
    assert (row["verdict"], row["measured"]) == (verdict, measured) and (detail in row["detail"] if detail else row["detail"] == "")


@pytest.mark.parametrize(
    ("answers", "rails", "verdict", "detail"),
    [
        ([{"gbytes": 20.4}, {"gbytes": 21.0}], 2, "ok", ""),
        ([{"gbytes": 20.4}, {"gbytes": 12.0}], 2, "LOW", "compare"),
        ([{"gbytes": 12.2}, {"gbytes": 12.2}], 1, "ok", ""),
        ([{"gbytes": 3.0}, {"gbytes": 3.0}], 1, "LOW", "compare"),
        ([{"skip": "PyTorch of the image sees no GPU"}, {"gbytes": 3.0}], 1, "not run", "spark-1: PyTorch of the image sees no GPU"),
        ([{"gbytes": 3.0}, {"error": "NCCL error"}], 1, "FAILED", "spark-2: NCCL error"),
    ],
)
def test_all_gather(answers, rails, verdict, detail):
    row = test.gather_row([{"node": f"spark-{number}", **answer} for number, answer in enumerate(answers, start=1)], rails)
    assert row["verdict"] == verdict and (detail in row["detail"] if detail else row["detail"] == "")


@pytest.mark.parametrize(
    ("rc", "out", "err", "answer"),
    [
        (0, 'NCCL INFO x\nRESULT {"gbytes": 20.5}\n', "", {"gbytes": 20.5}),
        (1, "", "docker: no such image\n", {"error": "docker: no such image"}),
        (124, "", "", {"error": "it did not end in time"}),
    ],
)
def test_answer_of_a_rank(rc, out, err, answer):
    assert test.gather_answer("spark-1", rc, out, err) == {"node": "spark-1", **answer}


def test_rank_of_all_gather():
    argv = test.gather_argv("i", "n", 1, 2, "192.168.200.12", {"NCCL_IB_HCA": "=a:1"}, True, ["memlock:-1:-1"])
    words = " ".join(argv)
    for part in ("--gpus=all", "--device=/dev/infiniband", "--ulimit=memlock:-1:-1", "-e NCCL_IB_HCA==a:1", "-e RANK=1", "-e WORLD_SIZE=2"):
        assert part in words
    assert words.endswith("--entrypoint=python3 i -")
    assert "/dev/infiniband" not in " ".join(test.gather_argv("i", "n", 0, 2, "h", {}, False, []))
    compile(test.GATHER_PROGRAM, "gather", "exec")


def test_table_and_verdict():
    rows = [
        test.ping_row(PAIR, 0, PING.format(5, 0, RTT), ""),
        test.rate_row(PAIR, 0, iperf(13.1), ""),
        test.rate_row(PAIR, 0, iperf(50), ""),
    ]
    rows.append(test.row("all_gather", "all", "all", "-", test.NOT_RUN, "no GPU on spark-1"))
    lines = test.table([node(1), node(2, rdma=False), {"node": "spark-3", "error": "gone"}], rows).splitlines()
    assert lines[0].split() == ["NODE", "INTERFACE", "RAIL", "ADDRESS", "MTU", "Mb/s", "CABLE", "RDMA"]
    assert lines[1].split() == ["spark-1", "enp1s0f1np1", "1", "192.168.200.12/24", "9000", "200000", "yes", "rocep1s0f1:1", "ACTIVE"]
    assert lines[5] == "no RDMA device on spark-2"
    assert lines[7].split() == ["TEST", "FROM", "TO", "OVER", "MEASURED", "EXPECTED", "RESULT"]
    assert "13.1 Gb/s" in lines[9] and ">= 90 Gb/s" in lines[9] and "LOW: the known state after a warm reboot" in lines[9]
    assert lines[11].endswith("not run: no GPU on spark-1")
    problem = test.verdict(rows)
    assert problem and problem.id == "fabric-slow" and problem.node == "spark-1"
    assert "iperf3 to spark-2 over rail 1 enp1s0f1np1: 13.1 Gb/s (and 1 more, see the table)" in problem.msg
    assert test.verdict([rows[0], rows[3]]) is None
