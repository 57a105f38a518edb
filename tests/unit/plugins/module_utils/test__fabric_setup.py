# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_setup as setup
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Address, Interface
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

INPUTS = {"node": "spark-1", "address": "192.168.200.12", "subnet": "192.168.200.0/24", "rail_subnet": "", "interface": "", "mtu": 9000}
LIT, DARK, DOWN = ("UP", "LOWER_UP"), ("UP", "NO-CARRIER"), ()
PCI = {
    "enp1s0f0np0": "0000:01:00.0",
    "enp1s0f1np1": "0000:01:00.1",
    "enP2p1s0f0np0": "0002:01:00.0",
    "enP2p1s0f1np1": "0002:01:00.1",
    "enP7s7": "0007:01:00.0",
}


def port(name, flags=LIT, *addresses, **more):
    driver = "r8127" if name == "enP7s7" else "mlx5_core"
    speed = (10000 if name == "enP7s7" else 200000) if flags == LIT else None
    found = tuple(Address(*(int(x) if x.isdigit() else x for x in item.split("/"))) for item in addresses)
    return Interface(name, flags=flags, mtu=1500, device=PCI.get(name, ""), driver=driver, speed=speed, addresses=found, **more)


def spark(one=LIT, two=DARK, *more):
    """A Spark with cables in port 1 (``one``) and port 0 (``two``)."""
    return [
        port("enP7s7", LIT, "192.168.1.163/24"),
        port("enp1s0f0np0", two),
        port("enp1s0f1np1", one),
        port("enP2p1s0f0np0", two),
        port("enP2p1s0f1np1", one),
        *more,
    ]


RDMA = {"enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "enP2p1s0f1np1"}


def chosen(interfaces, **inputs):
    ports = setup.choose_ports(setup.parse({**INPUTS, **inputs}), interfaces, RDMA)
    return {item["name"]: item["addresses"] for item in ports}


def replaced(interfaces, *items):
    by_name = {item.name: item for item in items}
    return [by_name.get(item.name, item) for item in interfaces]


BOTH = {"enp1s0f1np1": ["192.168.200.12/24"], "enP2p1s0f1np1": ["192.168.201.12/24"]}
FIRST = {"enp1s0f1np1": ["192.168.200.12/24"]}


@pytest.mark.parametrize(
    ("interfaces", "inputs", "expected"),
    [
        (spark(), {}, BOTH),
        (spark(), {"rail_subnet": "10.7.0.0/24"}, {**BOTH, "enP2p1s0f1np1": ["10.7.0.12/24"]}),
        (spark(), {"rail_subnet": "none"}, FIRST),
        # two cables: the address says which, else the name
        (replaced(spark(LIT, LIT), port("enp1s0f1np1", LIT, "192.168.200.12/24")), {}, BOTH),
        (replaced(spark(LIT, LIT), port("enp1s0f1np1", LIT, "192.168.200.99/24")), {}, BOTH),
        (spark(LIT, LIT), {"interface": "enp1s0f1np1"}, BOTH),
        # a link-local address, or one of another subnet, says nothing
        (replaced(spark(), port("enp1s0f1np1", LIT, "169.254.127.30/16")), {}, BOTH),
        # no PCI device behind the port (the lab): it has the address, its other half is not there
        ([port("eth1", LIT, "192.168.200.12/24")], {}, {"eth1": ["192.168.200.12/24"]}),
    ],
)
def test_ports_and_addresses(interfaces, inputs, expected):
    assert chosen(interfaces, **inputs) == expected


@pytest.mark.parametrize(
    ("interfaces", "inputs", "ident", "words"),
    [
        (spark(DARK, DARK), {}, "fabric-port", ["no ports with a cable", "enp1s0f1np1 (no cable, no IPv4)"]),
        (spark(LIT, LIT), {}, "fabric-port", ["2 ports with a cable", "set spark_fabric_interface"]),
        (spark(), {"interface": "enp9"}, "fabric-port", ["no port 'enp9'", "enP7s7 (cable, 192.168.1.163/24)"]),
        (spark(DARK), {"interface": "enp1s0f1np1"}, "NET-15", ["enp1s0f1np1 (no cable"]),
        (spark(DOWN), {"interface": "enp1s0f1np1"}, "NET-15", ["administratively down", "sudo ip link set enp1s0f1np1 up"]),
        (
            replaced(spark(), port("enP2p1s0f1np1", DARK)),
            {},
            "NET-15",
            ["its other half enP2p1s0f1np1 (no cable", "spark_fabric_rail_subnet: none"],
        ),
        (
            spark(LIT, DARK, port("br-5ba4c0de0000", LIT, "192.168.200.1/20", kind="bridge")),
            {},
            "fabric-overlap",
            ["br-5ba4c0de0000 with 192.168.200.1/20", "spark_fabric_subnet 192.168.200.0/24"],
        ),
        (
            spark(),
            {"rail_subnet": "192.168.1.0/24"},
            "fabric-overlap",
            ["enP7s7 with 192.168.1.163/24", "spark_fabric_rail_subnet 192.168.1.0/24"],
        ),
        (
            spark(),
            {"address": "192.168.201.12"},
            "input",
            ["spark_fabric_address '192.168.201.12'", "spark_fabric_subnet 192.168.200.0/24"],
        ),
        (spark(), {"address": "192.168.200.255"}, "input", ["a host in spark_fabric_subnet"]),
        (spark(), {"address": ""}, "input", ["spark_fabric_address ''"]),
        (spark(), {"subnet": ""}, "input", ["spark_fabric_subnet ''"]),
        (spark(), {"rail_subnet": "192.168.200.0/25"}, "input", ["spark_fabric_rail_subnet", "does not overlap"]),
        (spark(), {"rail_subnet": "10.0.0.0/8"}, "input", ["of the size of"]),
        (spark(), {"rail_subnet": "yes"}, "input", ["or none"]),
        (spark(), {"mtu": 90000}, "input", ["spark_fabric_mtu 90000", "1280 to 9216"]),
    ],
)
def test_refused(interfaces, inputs, ident, words):
    with pytest.raises(Problem) as caught:
        chosen(interfaces, **inputs)
    assert (caught.value.id, caught.value.node, caught.value.stage) == (ident, "spark-1", "fabric")
    for word in words:
        assert word in caught.value.msg


def test_the_whole_file():
    text = setup.file_text(setup.choose_ports(setup.parse(INPUTS), spark(), RDMA))
    assert text.startswith(
        "# Written by dgxspark.serving, which also takes it away: ansible-playbook playbooks/fabric.yml -e spark_fabric_state=absent\n"
    )
    assert text.count("mtu: 9000") == 2 and text.index("192.168.200.12/24") < text.index("enP2p1s0f1np1:") < text.index("192.168.201.12/24")


def test_peers_of_each_rail():
    ports = setup.choose_ports(setup.parse(INPUTS), spark(), RDMA)
    others = [{"node": "spark-2", "address": "192.168.200.13"}, {"node": "spark-3", "address": "192.168.200.14"}]
    found = {item["name"]: [peer["address"] for peer in peers] for item, peers in setup.rail_peers(ports, others)}
    assert found == {"enp1s0f1np1": ["192.168.200.13", "192.168.200.14"], "enP2p1s0f1np1": ["192.168.201.13", "192.168.201.14"]}
    assert setup.rail_peers([], others) == []


PORTS = [{"name": "enp1s0f1np1", "address": "192.168.200.12", "addresses": ["192.168.200.12/24"], "mtu": 9000}]
HARDWARE = {"enp1s0f1np1": ("mlx5_core", "4c:bb:47:2f:91:13")}


def ethernets(**ports):
    return {"network": {"version": 2, "ethernets": ports}}


@pytest.mark.parametrize(
    ("content", "conflict"),
    [
        (None, None),
        ({"network": {"version": 2, "renderer": "NetworkManager"}}, None),
        (ethernets(enP7s7={"dhcp4": True}), None),
        (ethernets(enp1s0f1np1={"addresses": ["10.0.0.1/24"]}), "10.0.0.1/24"),
        (ethernets(enp1s0f1np1={"addresses": ["192.168.200.12/24"], "gateway4": "192.168.200.1"}), "gateway4"),
        (ethernets(enp1s0f1np1={"addresses": ["192.168.200.12/24"], "routes": []}), "routes"),
        (ethernets(a={"match": {"name": "enp*"}, "dhcp4": True}), "a, which matches it"),
        (ethernets(a={"match": {"driver": "mlx5_*"}}), "a, which matches it"),
        (ethernets(a={"match": {"macaddress": "4C:BB:47:2F:91:13"}}), "a, which matches it"),
        (ethernets(a={"match": {"name": "enp*", "driver": ["r8127"]}}), None),
        (ethernets(a={"match": {"name": "enP7*"}}), None),
        ({"network": {"bonds": {"bond0": {"interfaces": ["enp1s0f0np0", "enp1s0f1np1"]}}}}, "member of bond0"),
        ({"network": {"bridges": {"br0": {"interfaces": ["eno1"]}}}}, None),
    ],
)
def test_other_netplan_files(content, conflict):
    conflicts, dummy = setup.netplan_conflicts({"/etc/netplan/40-cx7.yaml": content}, PORTS, HARDWARE)
    assert conflicts == ([("enp1s0f1np1", "/etc/netplan/40-cx7.yaml", conflict)] if conflict else [])


@pytest.mark.parametrize(
    ("content", "note"),
    [
        # NVIDIA's link-local file: ours is read after it and has the last word
        (ethernets(enp1s0f1np1={"link-local": ["ipv4"]}), "has enp1s0f1np1 too"),
        (ethernets(enp1s0f1np1={"addresses": ["192.168.200.12/24"], "dhcp4": False}), "has enp1s0f1np1 too"),
        (ethernets(**{"NM-1": {"match": {}, "dhcp4": True}}), "(NM-1) is for every port"),
    ],
)
def test_other_files_that_are_only_named(content, note):
    conflicts, notes = setup.netplan_conflicts({"/etc/netplan/40-cx7.yaml": content}, PORTS, HARDWARE)
    assert conflicts == [] and len(notes) == 1 and note in notes[0] and "/etc/netplan/40-cx7.yaml" in notes[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[connection]\nid=cable\ninterface-name=enp1s0f1np1\n", True),
        ("[connection]\nid=cable\ninterface-name=enp1s0f1np1\nautoconnect=false\n", False),
        ("[connection]\nid=lan\ninterface-name=enP7s7\n", False),
        ("[connection]\nid=Wired connection 1\n", False),
        ("no ini file", False),
    ],
)
def test_profiles_of_networkmanager(text, found):
    path = "/etc/NetworkManager/system-connections/cable.nmconnection"
    assert setup.keyfile_conflicts({path: text}, ["enp1s0f1np1"]) == ([("enp1s0f1np1", path, "profile 'cable'")] if found else [])


def test_conflicts_are_one_error():
    rows = [
        ("enp1s0f1np1", "/etc/netplan/40-cx7.yaml", "dhcp"),
        ("enp1s0f1np1", "/etc/NetworkManager/system-connections/c.nmconnection", "profile 'c'"),
    ]
    problem = setup.conflict_problem(setup.parse(INPUTS), rows)
    assert problem.id == "fabric-conflict"
    assert "sudo mv /etc/netplan/40-cx7.yaml /etc/netplan/40-cx7.yaml.off" in problem.remedy and "nmcli connection modify" in problem.remedy
    assert "mv /etc/NetworkManager" not in problem.remedy


def test_a_file_with_other_interfaces_is_not_to_be_moved_away():
    """It may hold the address by which the node is reached."""
    content = {
        "network": {"ethernets": {"enP7s7": {"addresses": ["10.0.0.13/24"]}, "enp1s0f1np1": {"dhcp4": True}}, "vlans": {"lan": {"id": 7}}}
    }
    others = {"/etc/netplan/50-site.yaml": setup.beside(content, {"enp1s0f1np1": ("mlx5_core", "")})}
    problem = setup.conflict_problem(setup.parse(INPUTS), [("enp1s0f1np1", "/etc/netplan/50-site.yaml", "dhcp")], others)
    assert "sudo mv" not in problem.remedy
    assert "take the fabric ports out of /etc/netplan/50-site.yaml and leave enP7s7, lan in it" in problem.remedy


@pytest.mark.parametrize(
    ("login", "after", "refused"),
    [
        ("192.168.200.12", {"p": ["192.168.200.12/24"]}, False),
        ("192.168.200.12", {"p": ["192.168.200.12/25", "10.0.0.1/24"]}, False),
        ("192.168.200.12", {"p": ["192.168.200.112/24"]}, True),
        ("192.168.200.12", {}, True),
        ("10.1.230.180", {}, False),
        ("", {}, False),
    ],
)
def test_the_address_that_ansible_comes_by_stays(login, after, refused):
    before = {"p": {"addresses": ["192.168.200.12/24"]}, "q": {"addresses": ["10.0.0.1/24"]}}
    if not refused:
        return setup.check_login(setup.parse(INPUTS).problem, login, before, after)
    with pytest.raises(Problem) as caught:
        setup.check_login(setup.parse(INPUTS).problem, login, before, after)
    assert caught.value.id == "fabric-cut" and "192.168.200.12 on p, by which Ansible reaches this node" in caught.value.msg
    return None


@pytest.mark.parametrize(
    ("environs", "expected"),
    [
        ({30: "PATH=/bin\0", 20: "SSH_CONNECTION=10.1.1.1 4711 192.168.200.12 22\0HOME=/root", 10: ""}, "192.168.200.12"),
        ({30: "SSH_CONNECTION=\0", 20: "", 10: ""}, ""),
        ({}, ""),
    ],
)
def test_login_address(environs, expected):
    """Python (30) under sudo, which clears the environment, under the shell (20) of sshd (10)."""
    parents = {30: 20, 20: 10, 10: 1}
    assert setup.login_address(lambda pid: environs.get(pid, ""), lambda pid: parents.get(pid, 0), 30) == expected


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ({}, ""),
        ({"addresses": ["192.168.200.12/24", "192.168.200.99/24"]}, ""),
        ({"addresses": []}, "enp1s0f1np1 has no address 192.168.200.12/24"),
        ({"mtu": 1500}, "enp1s0f1np1 has MTU 1500, not 9000"),
        ({"up": False}, "enp1s0f1np1 is down"),
    ],
)
def test_not_live(link, why):
    assert setup.not_live(PORTS[0], {"enp1s0f1np1": {"addresses": ["192.168.200.12/24"], "mtu": 9000, "up": True, **link}}) == why
    assert setup.not_live(PORTS[0], {}) == "enp1s0f1np1 is gone"
