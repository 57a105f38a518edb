# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the fabric of a gang is: one cable, a switch or a ring, found by comparing the addresses of its nodes; and what follows for all of them.

PRIVATE to the collection. Pure functions over plain data: ``nodes`` as ``{node, head, address, ports}`` (``ports`` of nccl_interface_info with
``survey``), ``members`` as in ``_plan``.
"""

from __future__ import annotations

import ipaddress
import itertools
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import LINK_LOCAL, Network
from ansible_collections.dgxspark.serving.plugins.module_utils._netplan import NETPLAN_FILE, netplan_file, netplan_line
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

FIRST_HOST = 12  # 192.168.x.12 is the first node in a netplan file that is proposed, as in NVIDIA's performance guide
FABRIC_MTU = 9000
Nodes = t.Sequence[t.Mapping[str, t.Any]]
Members = t.Sequence[t.Mapping[str, t.Any]]
Owned = dict[Network, list[tuple[dict[str, t.Any], str]]]  # network -> ports in it with their address

# Ring of three (NCL-05): every pair of nodes has its own cable and subnets. NCCL takes the device whose subnet the peer is in (2.30 or newer, or NVIDIA's
# fork), never joins ports that lead to different nodes, and may enter a node by one port and leave by the other.
RING = {
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_CROSS_NIC": "1",
}
RING_SIZE = 3


# --- the subnet that nobody named ------------------------------------------------------------------------------------------


def _owned(ports: t.Iterable[dict[str, t.Any]]) -> Owned:
    """Networks of usable ports, in the order of the ports; link-local ones and single addresses left out."""
    found: Owned = {}
    for port in ports:
        for text in port["addresses"] if port["usable"] else []:
            own = ipaddress.IPv4Interface(text)
            if own.network.prefixlen < 32 and own.ip not in LINK_LOCAL:
                found.setdefault(own.network, []).append((port, str(own.ip)))
    return found


def _shared(owned: t.Mapping[str, Owned], given: t.Mapping[str, str]) -> list[Network]:
    """Networks that all nodes have and, where addresses are given, that hold all of them."""
    first, *rest = owned.values()
    nets = [net for net in first if all(net in other for other in rest)]
    return [net for net in nets if all(ipaddress.IPv4Address(address) in net for address in given.values() if address)]


def _state(port: t.Mapping[str, t.Any]) -> str:
    listed = ", ".join(port["addresses"])
    speed = f", {port['speed']} Mb/s" if port["speed"] else ""
    why = str(port["reason"]).partition(":")[0] or "usable"
    return f"{port['interface']} ({listed if listed and port['usable'] else why}{speed})"


def _listing(nodes: Nodes) -> str:
    """The fast ports of every node, for a message."""
    parts = []
    for node in nodes:
        ports = [_state(port) for port in node["ports"] if port["fast"]]
        parts.append(f"{node['node']}: {', '.join(ports) or 'no port with 25 Gb/s or RDMA'}")
    return "; ".join(parts)


def _free_pair(nodes: Nodes) -> int:
    """x, so that 192.168.x.0/24 and 192.168.(x+1).0/24 are free on all nodes."""
    taken = [ipaddress.IPv4Interface(text).network for node in nodes for port in node["ports"] for text in port["addresses"]]
    for x in [*range(200, 254, 2), *range(2, 200, 2)]:
        if not any(net.overlaps(Network(f"192.168.{x}.0/23")) for net in taken if net.prefixlen > 0):
            return x
    return 200


def _first_lit(node: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The halves of the first physical port of a node that has a cable; one that is only switched off counts."""
    lit = [port for port in node["ports"] if port["fast"] and port["usable"]]
    addressed = [port for port in lit if _owned([port])]
    key = (addressed or lit or [{"port": None}])[0]["port"]
    off = "administratively down"
    return [port for port in node["ports"] if port["fast"] and port["port"] == key and (port["usable"] or port["reason"].startswith(off))]


def _address_for(port: t.Mapping[str, t.Any], net: Network, number: int, taken: t.Container[str]) -> str:
    """The address of a port that is inside a subnet already; else a free one, the first node's number first."""
    for text in port["addresses"]:
        own = text.partition("/")[0]
        if ipaddress.IPv4Address(own) in net:
            return own
    last = min(net.num_addresses - 1, 1024)
    numbers = [*range(FIRST_HOST + number, last), *range(1, min(FIRST_HOST + number, last))]
    return next((str(net[host]) for host in numbers if str(net[host]) not in taken), "<free address>")


def proposed_files(nodes: Nodes) -> tuple[dict[str, list[dict[str, t.Any]]], list[str]]:
    """Ports of a netplan file for every node that needs one, and the nodes that have no cable.

    A subnet that a node has on such a port already is kept and the others join it; otherwise both halves of the port get a subnet of their own.
    """
    ports = {str(node["node"]): _first_lit(node) for node in nodes}
    there = {name: next(iter(_owned(halves).items()), None) for name, halves in ports.items()}
    base, owners = next((entry for entry in there.values() if entry), (None, []))
    mtu = owners[0][0]["mtu"] if owners else FABRIC_MTU
    free = _free_pair(nodes)
    subnets = [base] if base else [Network(f"192.168.{free + index}.0/24") for index in (0, 1)]
    taken = {text.partition("/")[0] for node in nodes for port in node["ports"] for text in port["addresses"]}
    files: dict[str, list[dict[str, t.Any]]] = {}
    for number, (name, halves) in enumerate(ports.items()):
        own = there[name]
        if not halves or (own and own[0] == base):
            continue
        files[name] = []
        for half, net in zip(halves, subnets, strict=False):
            address = _address_for(half, net, number, taken)
            taken.add(address)
            files[name].append({"name": half["interface"], "addresses": [f"{address}/{net.prefixlen}"], "mtu": mtu})
    return files, [name for name, halves in ports.items() if not halves]


def _none_shared(nodes: Nodes) -> Problem:
    files, dark = proposed_files(nodes)
    lit = [port for node in nodes for port in node["ports"] if port["fast"] and port["usable"]]
    addresses = [ipaddress.IPv4Interface(text).ip for port in lit for text in port["addresses"]]
    link_local = bool(addresses) and all(address in LINK_LOCAL for address in addresses)
    steps = []
    if dark:
        steps.append(
            f"plug a cable into a fast port of {' and of '.join(dark)}, and give that port an address in the same subnet as the others"
        )
    if files:
        written = "; on ".join(f"{node}: {netplan_line(ports)}" for node, ports in files.items())
        steps.append(f"write {NETPLAN_FILE} (mode 600) on {written}; and run 'sudo netplan apply' there")
    remedy = f"{'; then '.join(steps)}; or set spark_fabric_subnet where the fabric is slower than that"
    return Problem(
        "NET-10" if link_local else "fabric-subnet",
        stage="preflight",
        found=f"{'link-local addresses only' if link_local else 'no subnet that all nodes share'} on fast ports: {_listing(nodes)}",
        expected="one IPv4 subnet that all nodes have on a port with 25 Gb/s or RDMA",
        remedy=remedy,
        netplan={node: netplan_file(ports) for node, ports in files.items()},
        nodes={node["node"]: node["ports"] for node in nodes},
    )


def _ring(nodes: Nodes, owned: t.Mapping[str, Owned], given: t.Mapping[str, str]) -> dict[str, t.Any]:
    """The sockets' subnet and the rails of a ring. Raises Problem for one that cannot work (NCL-05)."""
    links = {(a, b): [net for net in owned[a] if net in owned[b]] for a, b in itertools.combinations(owned, 2)}
    apart = [pair for pair, nets in links.items() if not nets]

    def refuse(found: str, remedy: str) -> Problem:
        return Problem(
            "NCL-05",
            stage="preflight",
            found=f"{found}: {_listing(nodes)}",
            expected="all nodes in one fabric subnet (one cable, or a switch), or three nodes in a ring with a cable and a subnet for each pair",
            remedy=remedy,
            nodes={node["node"]: node["ports"] for node in nodes},
        )

    if apart:
        pairs = ", ".join(f"{a} and {b}" for a, b in apart)
        kind = f"a ring of {len(owned)} nodes" if len(owned) > RING_SIZE else "nodes without a switch"
        raise refuse(
            f"{kind} in which {pairs} share no subnet on fast ports",
            "use a switch: NCCL needs a path between every two nodes"
            if len(owned) > RING_SIZE
            else f"join {pairs} by a cable with a subnet of its own, or use a switch",
        )
    lan = {node["node"]: _owned(port for port in node["ports"] if not port["fast"]) for node in nodes}
    sockets = _shared(lan, given)
    if len(sockets) != 1:
        many = ", ".join(map(str, sockets))
        raise refuse(
            f"a ring in which all nodes share {'several other networks (' + many + ')' if sockets else 'no other network'}",
            "give spark_fabric_address of every node its address in the network that carries the sockets"
            if sockets
            else "connect the nodes to one LAN: in a ring no fabric subnet reaches all nodes, so Ray and NCCL's bootstrap need another network",
        )
    rails = list(dict.fromkeys(net for nets in links.values() for net in nets))
    return {"topology": "ring", "subnet": sockets[0], "rails": rails, "owned": lan}


def addresses_in(nodes: Nodes, subnet: str) -> dict[str, t.Any]:
    """The same where the subnet is named and only the addresses are not: on whatever port they are, as ``detect`` judges that. Raises Problem."""
    net = Network(subnet, strict=False)
    inside: dict[str, str] = {}
    for node in nodes:
        texts = [text.partition("/")[0] for port in node["ports"] if port["usable"] for text in port["addresses"]]
        inside[node["node"]] = next((text for text in texts if ipaddress.IPv4Address(text) in net), "")
    without = [name for name, address in inside.items() if not address]
    if without:
        listed = "; ".join(
            f"{node['node']}: {', '.join(map(_state, node['ports'])) or 'no port'}" for node in nodes if node["node"] in without
        )
        raise Problem(
            "fabric-missing",
            stage="preflight",
            found=f"no address in spark_fabric_subnet {net} on {' and '.join(without)}: {listed}",
            expected=f"a port that is up, has carrier and an address in {net} on every node",
            remedy="give that port an address in the subnet, or correct spark_fabric_subnet",
            nodes={node["node"]: node["ports"] for node in nodes},
        )
    return {"topology": topology_name(len(nodes)), "subnet": str(net), "rails": [], "addresses": inside}


def find(nodes: Nodes, subnet: str = "") -> dict[str, t.Any]:
    """The fabric of nodes whose subnet, or whose addresses in ``subnet``, nobody named: ``{topology, subnet, rails, addresses}``.

    It is the one subnet that all nodes share on fast ports; a second one on the same physical port (its twin) is a rail. Raises Problem when there is none or
    more than one.
    """
    if subnet:
        return addresses_in(nodes, subnet)
    owned = {node["node"]: _owned(port for port in node["ports"] if port["fast"]) for node in nodes}
    given = {node["node"]: node["address"] for node in nodes}
    everything = _shared(owned, {})
    shared = _shared(owned, given)
    groups: dict[tuple[str, ...], list[Network]] = {}
    for net in everything:
        groups.setdefault(tuple(own[net][0][0]["port"] for own in owned.values()), []).append(net)
    ring = len(nodes) >= RING_SIZE and not everything and any(a.keys() & b.keys() for a, b in itertools.combinations(owned.values(), 2))
    if ring:
        found = _ring(nodes, owned, given)
    elif shared and (any(given.values()) or len(groups) == 1):
        rails = next(nets for nets in groups.values() if shared[0] in nets)
        found = {
            "topology": topology_name(len(nodes)),
            "subnet": shared[0],
            "rails": [net for net in rails if net != shared[0]],
            "owned": owned,
        }
    elif everything and any(given.values()):
        listed = ", ".join(f"{name} {address}" for name, address in given.items())
        raise Problem(
            "fabric-address",
            stage="preflight",
            found=f"spark_fabric_address outside of what all nodes share on fast ports ({', '.join(map(str, everything))}): {listed}",
            expected="the addresses of the nodes in that subnet",
            remedy="correct spark_fabric_address, leave it empty on all nodes to have it found, or set spark_fabric_subnet",
        )
    elif everything:
        raise Problem(
            "fabric-subnet",
            stage="preflight",
            found=f"{len(everything)} subnets that all nodes share on fast ports ({', '.join(map(str, everything))}): {_listing(nodes)}",
            expected="one, or those of the two halves of one port",
            remedy="set spark_fabric_subnet to the one of the cable between the nodes",
            nodes={node["node"]: node["ports"] for node in nodes},
        )
    else:
        raise _none_shared(nodes)
    addresses = {name: given[name] or own[found["subnet"]][0][1] for name, own in found.pop("owned").items()}
    return {**found, "subnet": str(found["subnet"]), "rails": [str(net) for net in found["rails"]], "addresses": addresses}


# --- the topology of a planned gang ----------------------------------------------------------------------------------------


def topology_name(count: int) -> str:
    """What nodes in one subnet are: with two it cannot be told whether a switch is between them, and it makes no difference."""
    return ("single", "pair")[count - 1] if count <= 2 else "switch"


def rails(member: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The rails of a node that are used and have a place."""
    return [rail for rail in member["fabric"].get("rails", []) if rail.get("active") and rail.get("subnet")]


def _subnets(member: t.Mapping[str, t.Any]) -> set[str]:
    return {str(rail["subnet"]) for rail in rails(member)}


def topology(members: Members) -> str:
    """``single``, ``pair``, ``switch`` or ``ring``, recognised from the subnets of the rails."""
    owned = [_subnets(member) for member in members]
    if len(members) >= RING_SIZE and all(owned) and not set.intersection(*owned):
        return "ring"
    return topology_name(len(members))


def problems(members: Members) -> list[Problem]:
    """A ring that cannot work (NCL-05); for one that was given subnets instead of having them found."""
    if topology(members) != "ring":
        return []
    pairs = [(a, b) for a, b in itertools.combinations(members, 2) if not _subnets(a) & _subnets(b)]
    if not pairs and len(members) == RING_SIZE:
        return []
    apart = ", ".join(f"{a['name']} and {b['name']}" for a, b in pairs) or "the nodes"
    listed = "; ".join(f"{m['name']}: {', '.join(sorted(_subnets(m)))}" for m in members)
    return [
        Problem(
            "NCL-05",
            stage="preflight",
            found=f"{len(members)} nodes without a common rail, {apart} share none at all: {listed}",
            expected="all nodes in one fabric subnet, or three nodes in a ring with a cable and a subnet for each pair",
            remedy="use a switch, or add the missing cable",
        )
    ]


def warnings(members: Members) -> list[str]:
    """What a ring sends by its slower network; and cables that join ports of the same number: NCCL pairs devices by their position."""
    if topology(members) != "ring":
        return []
    by = ", ".join(f"{m['name']} {m['fabric'].get('interface')} {m['fabric'].get('speed') or '?'} Mb/s" for m in members)
    told = [f"a ring: only the collectives use the cables; Ray, NCCL's bootstrap and the copies of model and image go by {by} (NET-13)"]
    for a, b in itertools.combinations(members, 2):
        for one, other in itertools.product(rails(a), rails(b)):
            if one["subnet"] == other["subnet"] and one.get("number") is not None and one["number"] == other.get("number"):
                told.append(
                    f"{a['name']} {one['interface']} and {b['name']} {other['interface']} are joined at the same port number: "
                    "in a ring each cable should join port 0 with port 1 (NCL-05)"
                )
    return told


# --- what follows for the environment -------------------------------------------------------------------------------------


def environment(members: Members) -> dict[str, str]:
    """NCCL settings of the topology, equal on all nodes: those of a ring; or no crossing of rails that are in different subnets (NCL-08)."""
    if topology(members) == "ring":
        return dict(RING)
    apart = len(members) > 1 and any(len(_subnets(m)) > 1 and m["fabric"].get("hcas") for m in members)
    return {"NCCL_CROSS_NIC": "0"} if apart else {}


def gid_table(members: Members) -> str:
    """The RoCE v2 IPv4 slot of every HCA, for a message."""
    told = []
    for member in members:
        slots = [f"{rail['hca']} {rail.get('gid_index')}" for rail in rails(member) if rail.get("hca")]
        told.append(f"{member['name']}: {', '.join(slots) or 'none'}")
    return "; ".join(told)


def gid(wanted: str, members: Members) -> tuple[str, str, Problem | None]:
    """(NCCL_IB_GID_INDEX or "", note, problem) for ``spark_gid_index``. It is one value for all HCAs of a process, and with Ray for all nodes (NCL-01)."""
    found = {rail.get("gid_index") for member in members for rail in rails(member) if rail.get("hca")}
    if not wanted or (wanted == "auto" and not found):
        return "", "", None
    one = next(iter(found)) if len(found) == 1 else None
    if wanted == "auto":
        if one is None:
            return (
                "",
                f"NCCL_IB_GID_INDEX is left out, no one value is right for all ({gid_table(members)}): NCCL finds them itself (NCL-01)",
                None,
            )
        return str(one), "", None
    if one is not None and str(one) == wanted:
        return wanted, "", None
    problem = Problem(
        "NCL-01",
        stage="preflight",
        found=f"spark_gid_index {wanted}, and RoCE v2 IPv4 GIDs at {gid_table(members) if found else 'no index, there is no RDMA'}",
        expected="one index that is right for every RDMA device of every node",
        remedy="leave spark_gid_index empty: NCCL 2.21 and newer finds the index of each device itself",
    )
    return "", "", problem


COPIED = ("NCCL_", "UCX_", "VLLM_", "HF_", "HUGGING_FACE_", "LMCACHE_")  # what vLLM's Ray executor copies from the head
NEVER_COPIED = {"VLLM_HOST_IP", "VLLM_HOST_PORT"}


def carry_over(environments: t.Sequence[t.Mapping[str, str]]) -> list[str]:
    """Variables that differ between the nodes although vLLM 0.17 and older, on Ray, would give every rank those of the head; [] when there are none.

    Then all that differ are listed: newer versions may copy any variable.
    """
    names = sorted({name for env in environments for name in env} - NEVER_COPIED)
    apart = [name for name in names if len({env.get(name) for env in environments}) > 1]
    return apart if any(name.startswith(COPIED) for name in apart) else []
