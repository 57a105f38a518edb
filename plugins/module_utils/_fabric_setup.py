# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which ports of a node get which addresses, and what stands in the way of that.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import configparser
import dataclasses
import fnmatch
import ipaddress
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import (
    Interface,
    Network,
    are_twins,
    in_subnet,
    is_fast,
    not_a_fabric,
    pci_order,
    port_key,
)
from ansible_collections.dgxspark.serving.plugins.module_utils._netplan import netplan_file
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "fabric"
NAME = "99-spark-fabric.yaml"  # last in order, so that it has the last word about its ports
HEADER = "# Written by dgxspark.serving, which also takes it away: ansible-playbook playbooks/fabric.yml -e spark_fabric_state=absent\n"
NO_RAIL = "none"
# What another file may say about a port without standing in the way: our file, which is read later, says it again.
OVERRIDDEN = {"dhcp4", "dhcp6", "link-local", "mtu", "optional", "renderer"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the inventory says about the fabric of this node."""

    node: str
    address: str
    subnet: Network
    rail: Network | None
    interface: str
    mtu: int

    def problem(self, ident: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
        """A Problem of this node."""
        return Problem(ident, node=self.node, stage=STAGE, found=found, expected=expected, remedy=remedy, **details)


# --- inputs --------------------------------------------------------------------------------------------------------------------------------


def rail_subnet(subnet: Network, text: str) -> Network | None:
    """The subnet of the second rail: the given one, none, or the next one of the same size. Raises ValueError."""
    if text == NO_RAIL:
        return None
    if text:
        return Network(text, strict=False)
    return Network((int(subnet.network_address) + subnet.num_addresses, subnet.prefixlen))


def rail_address(address: str, subnet: Network, rail: Network) -> str:
    """The same host in the subnet of the second rail: 192.168.200.12 is 192.168.201.12 there."""
    host = int(ipaddress.IPv4Address(address)) - int(subnet.network_address)
    return str(ipaddress.IPv4Address(int(rail.network_address) + host))


def parse(params: t.Mapping[str, t.Any]) -> Wanted:
    """The inputs of the module. Raises Problem for what can never be right, before anything is looked at."""
    node = str(params.get("node") or "")

    def refuse(name: str, expected: str) -> Problem:
        return Problem(
            "input",
            node=node,
            stage=STAGE,
            found=f"spark_fabric_{name} {params.get(name)!r}",
            expected=expected,
            remedy="correct it in the inventory's group_vars or host_vars",
        )

    try:
        subnet = Network(params["subnet"], strict=False)
    except ValueError:
        raise refuse("subnet", "an IPv4 subnet in CIDR form, such as 192.168.200.0/24") from None
    try:
        address = ipaddress.IPv4Address(params["address"])
    except ValueError:
        raise refuse("address", "an IPv4 address, such as 192.168.200.12") from None
    if address not in subnet or (subnet.prefixlen < 31 and address in (subnet.network_address, subnet.broadcast_address)):
        raise refuse("address", f"the address of a host in spark_fabric_subnet {subnet}")
    try:
        rail = rail_subnet(subnet, str(params.get("rail_subnet") or ""))
    except ValueError:
        raise refuse("rail_subnet", f"an IPv4 subnet in CIDR form, such as 192.168.201.0/24, or {NO_RAIL}") from None
    if rail and (rail.overlaps(subnet) or rail.prefixlen != subnet.prefixlen):
        raise refuse("rail_subnet", f"a subnet of the size of spark_fabric_subnet {subnet} that does not overlap it")
    if not 1280 <= params["mtu"] <= 9216:
        raise refuse("mtu", "1280 to 9216 (9000 is what NVIDIA and NCCL users take)")
    return Wanted(node, str(address), subnet, rail, str(params.get("interface") or ""), params["mtu"])


# --- ports ---------------------------------------------------------------------------------------------------------------------------------


def _state(item: Interface) -> str:
    where = ", ".join(map(str, item.addresses)) or "no IPv4"
    return f"{item.name} ({'cable' if item.carrier else 'no cable' if item.up else 'administratively down'}, {where})"


def choose_port(wanted: Wanted, interfaces: t.Sequence[Interface], rdma: t.Container[str], ours: t.Container[str] = ()) -> Interface:
    """The port that gets the fabric address: the one that was named, that has the address (or one in the subnet), or the only one with a cable.
    ``rdma``: interfaces with an RDMA device; ``ours``: ports to which our file gives the address already. Raises Problem.
    """
    able = [item for item in interfaces if not not_a_fabric(item)]
    named = [item for item in able if item.name == wanted.interface]
    if wanted.interface and not named:
        raise wanted.problem(
            "fabric-port",
            f"no port '{wanted.interface}'; there is {', '.join(map(_state, able)) or 'none'}",
            "a port of this node",
            "correct spark_fabric_interface of this node, or leave it empty",
        )
    holders = named or [item for item in able if any(addr.address == wanted.address for addr in item.addresses)]
    holders = holders or [item for item in able if item.carrier and (item.name in ours or in_subnet(item, wanted.subnet))]
    fast = sorted((item for item in able if is_fast(item, item.name in rdma)), key=pci_order)
    lit = holders or [item for item in fast if item.up and item.carrier]
    ports = {port_key(item) or item.name: item for item in reversed(lit)}  # of two halves the first
    if len(ports) != 1:
        raise wanted.problem(
            "fabric-port",
            f"{len(ports) or 'no'} port{'' if len(ports) == 1 else 's'} with a cable that could be the fabric: "
            f"{', '.join(map(_state, fast)) or 'no port of 25 Gb/s or with an RDMA device'}",
            "one port with a cable (its two halves count as one), or the name of it",
            "set spark_fabric_interface for this node, or plug the cable in",
        )
    port = next(iter(ports.values()))
    if not port.carrier:
        raise wanted.problem(
            "NET-15",
            _state(port),
            "a port with carrier",
            f"plug the cable in, or 'sudo ip link set {port.name} up', and check the other end",
        )
    return port


def choose_ports(
    wanted: Wanted, interfaces: t.Sequence[Interface], rdma: t.Container[str], ours: t.Container[str] = ()
) -> list[dict[str, t.Any]]:
    """Ports for ``netplan_file``: the fabric port, and its other half in the subnet of the second rail. Raises Problem."""
    first = choose_port(wanted, interfaces, rdma, ours)
    ports = [_port(first.name, wanted.address, wanted.subnet, wanted.mtu)]
    twin = next((item for item in interfaces if are_twins(first, item)), None)
    if wanted.rail and twin:
        if not twin.carrier:
            raise wanted.problem(
                "NET-15",
                f"{_state(first)}, and its other half {_state(twin)}",
                "carrier on both halves of the port",
                f"'sudo ip link set {twin.name} up' or another cable; spark_fabric_rail_subnet: {NO_RAIL} uses one half only",
            )
        ports.append(_port(twin.name, rail_address(wanted.address, wanted.subnet, wanted.rail), wanted.rail, wanted.mtu))
    _check_overlap(wanted, interfaces, {port["name"] for port in ports}, len(ports))
    return ports


def _port(name: str, address: str, subnet: Network, mtu: int) -> dict[str, t.Any]:
    return {"name": name, "address": address, "addresses": [f"{address}/{subnet.prefixlen}"], "mtu": mtu}


def _check_overlap(wanted: Wanted, interfaces: t.Sequence[Interface], ours: t.Container[str], rails: int) -> None:
    """Another interface must not own a subnet of the fabric: packets would leave by the wrong one."""
    nets = {"subnet": wanted.subnet}
    if rails > 1 and wanted.rail:
        nets["rail_subnet"] = wanted.rail
    for item in interfaces:
        for addr in item.addresses if item.name not in ours else ():
            for name, net in nets.items():
                if addr.prefixlen < 32 and addr.network.overlaps(net):
                    raise wanted.problem(
                        "fabric-overlap",
                        f"{item.name} with {addr}, and spark_fabric_{name} {net}",
                        "a subnet that no other interface of the node has",
                        f"set spark_fabric_{name} to a free subnet (on all nodes), or remove that address",
                    )


def rail_peers(
    ports: t.Sequence[t.Mapping[str, t.Any]], others: t.Sequence[t.Mapping[str, t.Any]]
) -> list[tuple[t.Mapping[str, t.Any], list[dict[str, t.Any]]]]:
    """For each port of this node the addresses of the other nodes there. ``others``: C(node) and C(address) on the fabric."""
    nets = [ipaddress.IPv4Interface(port["addresses"][0]).network for port in ports]
    return [
        (port, [{"node": member["node"], "address": rail_address(member["address"], nets[0], net)} for member in others])
        for port, net in zip(ports, nets, strict=True)
    ]


def file_text(ports: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """The whole file."""
    return HEADER + netplan_file(ports)


def not_live(port: t.Mapping[str, t.Any], links: t.Mapping[str, t.Mapping[str, t.Any]]) -> str:
    """What of a port of the file is not so at this moment (``links`` as _fabric_change.read_links has them); "" when all of it is."""
    link = links.get(port["name"])
    if not link:
        return f"{port['name']} is gone"
    missing = [address for address in port["addresses"] if address not in link["addresses"]]
    if missing:
        return f"{port['name']} has no address {', '.join(missing)}"
    if link["mtu"] != port["mtu"]:
        return f"{port['name']} has MTU {link['mtu']}, not {port['mtu']}"
    return "" if link["up"] else f"{port['name']} is down"


# --- what stands in the way ----------------------------------------------------------------------------------------------------------------


def _section(data: t.Any, *keys: str) -> dict[str, t.Any]:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _hits(match: t.Mapping[str, t.Any], port: str, driver: str, mac: str) -> bool:
    """Whether a ``match:`` of netplan means this port. One that takes every port is told apart by the caller."""
    names = match.get("name")
    drivers = match.get("driver")
    drivers = [drivers] if isinstance(drivers, str) else drivers or []
    return (
        (names is None or fnmatch.fnmatchcase(port, str(names)))
        and (not drivers or any(fnmatch.fnmatchcase(driver, str(item)) for item in drivers))
        and ("macaddress" not in match or str(match["macaddress"]).lower() == mac.lower())
    )


def _against(definition: t.Mapping[str, t.Any], port: t.Mapping[str, t.Any]) -> str:
    """What a definition of the same port in another file brings that ours does not take back; "" for nothing."""
    keys = sorted(set(definition) - OVERRIDDEN - {"addresses"})
    foreign = [str(item) for item in definition.get("addresses") or [] if item not in port["addresses"]]
    return ", ".join(keys + foreign)


def netplan_conflicts(
    files: t.Mapping[str, t.Any], ports: t.Sequence[t.Mapping[str, t.Any]], hardware: t.Mapping[str, tuple[str, str]]
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Other definitions of the ports in netplan files: what stands in the way, as (port, file, what), and notes about what does not.

    ``files``: path and parsed content of every file but ours; ``hardware``: (driver, MAC address) of each port.
    """
    conflicts: list[tuple[str, str, str]] = []
    notes: list[str] = []
    for path, content in sorted(files.items()):
        network = _section(content, "network")
        for port in ports:
            name = port["name"]
            for ident, definition in _section(network, "ethernets").items():
                definition = definition if isinstance(definition, dict) else {}
                match = definition.get("match")
                if isinstance(match, dict):
                    if not match:
                        notes.append(f"{path} ({ident}) is for every port, {name} among them")
                    elif _hits(match, name, *hardware.get(name, ("", ""))):
                        conflicts.append((name, path, f"{ident}, which matches it"))
                elif ident == name:
                    what = _against(definition, port)
                    if what:
                        conflicts.append((name, path, what))
                    else:
                        notes.append(f"{path} has {name} too; {NAME} is read after it")
            for kind in ("bonds", "bridges", "vrfs"):
                for ident, definition in _section(network, kind).items():
                    if name in (_section({"d": definition}, "d").get("interfaces") or []):
                        conflicts.append((name, path, f"member of {ident}"))
    return conflicts, notes


def keyfile_conflicts(files: t.Mapping[str, str], ports: t.Iterable[str]) -> list[tuple[str, str, str]]:
    """Profiles of NetworkManager that are bound to one of the ports and connect by themselves. ``files``: path and text of ``*.nmconnection``."""
    found = []
    for path, text in sorted(files.items()):
        profile = configparser.RawConfigParser(strict=False)
        try:
            profile.read_string(text)
        except configparser.Error:
            continue
        name = profile.get("connection", "interface-name", fallback="")
        if name in ports and profile.get("connection", "autoconnect", fallback="true").lower() != "false":
            found.append((name, path, f"profile '{profile.get('connection', 'id', fallback='?')}'"))
    return found


KINDS = ("ethernets", "wifis", "bonds", "bridges", "vlans", "tunnels", "modems")


def beside(content: t.Any, ports: t.Container[str]) -> list[str]:
    """What a netplan file defines beside these ports: such a file must not be moved away as a whole, the node could be cut off."""
    return sorted(str(name) for kind in KINDS for name in _section(content, "network", kind) if name not in ports)


def conflict_problem(
    wanted: Wanted, conflicts: t.Sequence[tuple[str, str, str]], others: t.Mapping[str, t.Sequence[str]] | None = None
) -> Problem:
    """One error for all of them. ``others``: what each file defines beside the fabric ports (see ``beside``)."""
    listed = "; ".join(f"{port} in {path} ({what})" for port, path, what in conflicts)
    paths = sorted({path for dummy, path, dummy2 in conflicts})
    profiles = [path for path in paths if path.endswith(".nmconnection")]
    shared = {path: names for path, names in (others or {}).items() if names and path in paths}
    moves = [f"sudo mv {path} {path}.off" for path in paths if path not in profiles and path not in shared]
    hints = [f"'{' && '.join(moves)}'"] if moves else []
    hints += [f"take the fabric ports out of {path} and leave {', '.join(names)} in it" for path, names in sorted(shared.items())]
    if profiles:
        hints.append("'sudo nmcli connection modify <profile> connection.autoconnect no'")
    return wanted.problem(
        "fabric-conflict",
        f"another definition of a fabric port: {listed}",
        "no other file that gives these ports addresses or a role",
        f"{' and '.join(hints)}, or keep that file and do without playbooks/fabric.yml (no file but {NAME} is ever changed)",
        conflicts=[list(item) for item in conflicts],
    )


def check_login(
    wanted_problem: t.Callable[..., Problem], login: str, before: t.Mapping[str, t.Any], after: t.Mapping[str, t.Sequence[str]]
) -> None:
    """The address that this connection came in by must still be there afterwards. ``before``: links; ``after``: addresses of each port. Raises Problem."""
    for name, link in before.items():
        for address in link["addresses"]:
            if address.partition("/")[0] == login and login not in [item.partition("/")[0] for item in after.get(name, [])]:
                raise wanted_problem(
                    "fabric-cut",
                    f"{login} on {name}, by which Ansible reaches this node, and "
                    f"{', '.join(after.get(name, [])) or 'no address'} there afterwards",
                    "a change that does not cut the way it comes by",
                    f"keep {login} (spark_fabric_address), or reach the node by another address (ansible_host) and run this again",
                )


def login_address(environ_of: t.Callable[[int], str], parent_of: t.Callable[[int], int], pid: int) -> str:
    """The own address of the SSH connection that a process runs under, out of its ancestors' environment (sudo clears it further down); "" for none."""
    for dummy in range(32):
        if pid <= 1:
            break
        for entry in environ_of(pid).split("\0"):
            key, dummy2, value = entry.partition("=")
            words = value.split()
            if key == "SSH_CONNECTION" and len(words) == 4:
                return words[2]
        pid = parent_of(pid)
    return ""
