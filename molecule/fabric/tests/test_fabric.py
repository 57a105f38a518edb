# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/fabric.yml: shown, taken back when it does not work or the link is lost, applied, refused and undone. The tests follow on each other.

The worker is reached over the fabric alone, by the address that is changed here. The renderer is systemd-networkd (DGX OS has NetworkManager).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import subprocess
import threading
import time
import typing as t
from pathlib import Path

import pytest
import spark
import yaml

FILE = "/etc/netplan/99-spark-fabric.yaml"
PORT, TWIN = "enp1s0f1np1", "enP2p1s0f1np1"
RAIL = ipaddress.ip_network((int(spark.FABRIC.network_address) + spark.FABRIC.num_addresses, spark.FABRIC.prefixlen))
SECOND = {spark.HEAD: str(RAIL[12]), spark.WORKER: str(RAIL[13])}
CABLE = f"{spark.NAME}-rail"
WAIT = 12  # seconds until a node takes a change back, where that is what shall happen


def fabric(*arguments: str, wait: int = 60, **more: t.Any) -> spark.Run:
    return spark.site(*arguments, playbook="fabric.yml", spark_fabric_timeout=wait, timeout=180, **more)


def docker(*argv: str) -> None:
    subprocess.run(["docker", *argv], check=True, timeout=60, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module", autouse=True)
def second_cable() -> t.Iterator[None]:
    """The twin of the fabric port leads to the other node, as on a real pair; in the lab it ends in its own node otherwise."""
    docker(
        "network", "create", "--internal", "--subnet", str(RAIL), "--gateway", str(RAIL[-2]), "--label", f"sparklab={spark.NAME}",
        "-o", "com.docker.network.driver.mtu=9000", CABLE,
    )  # fmt: skip
    try:
        for node in spark.NODES:
            docker("network", "connect", CABLE, f"{spark.NAME}-{node}")
            spark.shell(
                node,
                f"set -e; new=$(ip -o -4 addr show to {RAIL} | awk '{{print $2; exit}}'); ip link del {TWIN}; ip link set $new down; "
                f"ip addr flush dev $new; ip link set $new name {TWIN} mtu 1500 up",
            )
        yield
    finally:
        for node in spark.NODES:
            spark.shell(node, f"ip link del {TWIN}; rm -f {FILE} /run/netplan/99-spark-fabric.yaml", check=False)
            docker("network", "disconnect", "-f", CABLE, f"{spark.NAME}-{node}")
            address = f"ip addr replace {spark.NODES[node]}/24 broadcast + dev {PORT}"  # should a test have failed on the way
            spark.shell(node, f"netplan apply; {address}; rm -rf /run/dgxspark-fabric; /usr/local/sbin/sparklab-net", check=False)
        docker("network", "rm", CABLE)


def links(node: str) -> dict[str, t.Any]:
    """IPv4 addresses and MTU of the two ports."""
    rows = json.loads(spark.on(node, "ip", "-j", "-4", "addr"))
    found = {name: {"mtu": int(spark.on(node, "cat", f"/sys/class/net/{name}/mtu")), "addresses": []} for name in (PORT, TWIN)}
    for row in rows:
        if row["ifname"] in found:
            found[row["ifname"]]["addresses"] = [f"{a['local']}/{a['prefixlen']}" for a in row["addr_info"]]
    return found


def network(node: str) -> dict[str, t.Any]:
    """All that the playbook may change: the ports, every netplan file with its mode, our timers."""
    files = "find /etc/netplan /run/netplan -name '*.yaml' -exec stat -c '%n %a' {} + -exec cat {} +"
    timers = "systemctl list-units --all --plain --no-legend 'dgxspark-fabric*'"
    return {**links(node), "files": spark.shell(node, files, check=False), "timers": spark.shell(node, timers)}


def networks() -> dict[str, t.Any]:
    return {node: network(node) for node in spark.NODES}


def wanted(node: str, mtu: int = 9000) -> dict[str, t.Any]:
    return {
        PORT: {"mtu": mtu, "addresses": [f"{spark.NODES[node]}/24"]},
        TWIN: {"mtu": mtu, "addresses": [f"{SECOND[node]}/24"]},
    }


@pytest.fixture(scope="module")
def at_first(second_cable: None) -> dict[str, t.Any]:
    """As the nodes were before the first run: the address of the fabric port was set by hand, the twin is bare."""
    found = networks()
    for node in spark.NODES:
        assert found[node][PORT] == {"mtu": 9000, "addresses": [f"{spark.NODES[node]}/24"]}
        assert found[node][TWIN] == {"mtu": 1500, "addresses": []}
    return found


def test_check_shows_the_file_and_changes_nothing(at_first: dict[str, t.Any]) -> None:
    run = fabric("--check", "--diff")
    assert run.rc == 0
    for line, times in ((f"+++ after: {FILE}", 2), (f"+    {PORT}:", 2), (f"+    {TWIN}:", 2), ("+      mtu: 9000", 4)):
        assert run.output.count(f"{line}\n") == times, line
    for address in (*spark.NODES.values(), *SECOND.values()):
        assert run.output.count(f"+        - {address}/24\n") == 1, address
    assert networks() == at_first


def test_a_rail_that_does_not_work_takes_both_nodes_back(at_first: dict[str, t.Any]) -> None:
    """Full-size packets do not pass one of the cables, as with a switch that does not know jumbo frames."""
    rule = f"INPUT -i {TWIN} -p icmp -m length --length 2000: -j DROP"
    with spark.undone(spark.WORKER, f"iptables -I {rule}", f"iptables -D {rule}"):
        run = fabric(wait=WAIT)
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message(spark.HEAD, last=True)
    for words in (
        f"{TWIN}",
        "found ",
        "expected ",
        "Remedy: ",
        *(f"{node} has its configuration from before again" for node in spark.NODES),
    ):
        assert words in message, message
    assert networks() == at_first


def test_applied(at_first: dict[str, t.Any]) -> None:
    run = fabric()
    assert run.rc == 0
    for node, other in ((spark.HEAD, spark.WORKER), (spark.WORKER, spark.HEAD)):
        assert links(node) == wanted(node)
        assert spark.on(node, "stat", "-c", "%a %U", FILE).split() == ["600", "root"]
        assert network(node)["timers"] == ""
        for source, target in ((spark.NODES[node], spark.NODES[other]), (SECOND[node], SECOND[other])):
            assert "0% packet loss" in spark.on(node, "ping", "-c1", "-W2", "-Mdo", "-s8972", "-I", source, target)


def test_second_run_changes_nothing() -> None:
    before = networks()
    assert fabric().changed == 0
    assert fabric("--check").changed == 0
    assert networks() == before


def test_measured() -> None:
    """playbooks/fabric_test.yml: ports, both rails in both directions, and truthfully what cannot be measured here."""
    before = networks()
    run = spark.site(playbook="fabric_test.yml", spark_seconds=1, timeout=180)
    assert run.rc == 0 and run.changed == 0
    for node, other in ((spark.HEAD, spark.WORKER), (spark.WORKER, spark.HEAD)):
        for rail, port, address in ((1, PORT, spark.NODES[node]), (2, TWIN, SECOND[node])):
            assert re.search(rf"^{node} +{port} +{rail} +{address}/24 +9000 ", run.output, re.MULTILINE)
            line = rf"{node} +{other} +rail {rail} {port} +"
            assert re.search(rf"^ping +{line}5/5 at MTU 9000, [\d.]+ ms +no loss at MTU 9000 +ok$", run.output, re.MULTILINE)
            assert re.search(rf"^iperf3 +{line}[1-9][\d.]* Gb/s +- +no figure: ", run.output, re.MULTILINE)
    assert "no RDMA device on spark-1, spark-2" in run.output
    assert re.search(r"^all_gather .* not run: \S", run.output, re.MULTILINE)
    assert networks() == before


def test_a_node_that_loses_its_link_comes_back_by_itself() -> None:
    """The worker's only way is cut as soon as the change is applied. Looked at from outside, not over its network."""
    before = networks()
    rule = f"INPUT -i {PORT} -j DROP"
    seen: dict[str, t.Any] = {}

    def phase() -> str:
        text = spark.shell(spark.WORKER, "cat /run/dgxspark-fabric/state.json", check=False)
        return str(json.loads(text or "{}").get("phase"))

    def until(wanted_phase: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while phase() != wanted_phase and time.monotonic() < end:
            time.sleep(0.2)
        return phase() == wanted_phase

    def cut() -> None:
        if until("applied", 30):
            seen["applied"] = links(spark.WORKER)
            spark.shell(spark.WORKER, f"iptables -I {rule}")
            seen["back"] = until("reverted", WAIT + 30)
            seen["reverted"] = network(spark.WORKER)
            spark.shell(spark.WORKER, f"iptables -D {rule}")

    with spark.undone(spark.WORKER, "true", f"iptables -D {rule} 2>/dev/null || true"):
        thread = threading.Thread(target=cut)
        thread.start()
        run = fabric(wait=WAIT, spark_fabric_mtu=8000)
        thread.join()
    assert seen["applied"] == wanted(spark.WORKER, 8000)
    assert seen["back"]
    assert {name: seen["reverted"][name] for name in (PORT, TWIN, "files")} == {
        name: before[spark.WORKER][name] for name in (PORT, TWIN, "files")
    }
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message(spark.HEAD, last=True)
    for words in ("found ", "expected ", "Remedy: ", *(f"{node} has its configuration from before again" for node in spark.NODES)):
        assert words in message, message
    assert networks() == before


@contextlib.contextmanager
def file_on(node: str, path: str, text: str) -> t.Iterator[None]:
    spark.shell(node, f"umask 077; cat > {path} <<'EOF'\n{text}\nEOF")
    try:
        yield
    finally:
        spark.on(node, "rm", "-f", path)


def refused(run: spark.Run, node: str, *words: str) -> None:
    assert run.rc != 0 and "Traceback" not in run.output
    assert run.failures == [node]
    for word in (f"{node}: fabric: found ", "expected ", "Remedy: ", *words):
        assert word in run.message(node), f"{word!r} is not in: {run.message(node)}"


def test_an_address_that_would_cut_the_way_it_comes_by(tmp_path: Path) -> None:
    before = networks()
    other = tmp_path / "hosts.yml"
    other.write_text(
        yaml.safe_dump({"sparks": {"hosts": {spark.WORKER: {"spark_fabric_address": str(spark.FABRIC[113])}}}}), encoding="utf-8"
    )
    run = fabric(inventory=[spark.LAB, other])
    refused(run, spark.WORKER, spark.NODES[spark.WORKER], "by which Ansible reaches this node", f"{spark.FABRIC[113]}/24")
    assert networks() == before


def test_another_file_about_the_same_port() -> None:
    before = networks()
    theirs = f"network: {{version: 2, ethernets: {{{PORT}: {{addresses: [10.9.9.9/24]}}}}}}"
    with file_on(spark.HEAD, "/etc/netplan/40-cx7.yaml", theirs):
        run = fabric(spark_fabric_mtu=8000)
        assert "10.9.9.9/24" in spark.on(spark.HEAD, "cat", "/etc/netplan/40-cx7.yaml")
    refused(run, spark.HEAD, "/etc/netplan/40-cx7.yaml", "10.9.9.9/24", "sudo mv")
    assert networks() == before


def test_undone(at_first: dict[str, t.Any]) -> None:
    run = fabric(spark_fabric_state="absent")
    assert run.rc == 0 and run.changed > 0
    assert networks() == at_first
    assert fabric(spark_fabric_state="absent").changed == 0
