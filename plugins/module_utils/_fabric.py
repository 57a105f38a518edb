# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which interfaces, addresses and RDMA devices of a node are the fabric, and the environment that says so to every consumer.

PRIVATE to the collection. Decided by evidence: an address in the fabric subnet, carrier, the kernel's route to the peers, the port behind the interface.
Never by a name, an exclusion list or the default route. Pure: the route comes in as a callable.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import (
    FAST_MBIT,
    LINK_LOCAL,
    Address,
    Interface,
    Network,
    Route,
    are_twins,
    in_subnet,
    is_fast,
    no_address_reason,
    not_a_fabric,
    pci_order,
    port_key,
    port_number,
)
from ansible_collections.dgxspark.serving.plugins.module_utils._netplan import NETPLAN_FILE, netplan_file, netplan_line
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import Hca, gid_index, hca_of, unusable

FABRIC_MTU = 9000  # what a new netplan file says; an MTU that is there is never changed


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user said. Empty means: find out."""

    subnets: tuple[Network, ...] = ()
    address: str = ""
    peers: tuple[str, ...] = ()
    interface: str = ""
    hcas: tuple[str, ...] = ()
    require_rdma: bool = False
    node: str = ""

    @property
    def subnet_text(self) -> str:
        """The subnets for a message."""
        return " or ".join(map(str, self.subnets))

    @property
    def link_local_allowed(self) -> bool:
        """The user named a subnet inside 169.254.0.0/16."""
        return any(net.subnet_of(LINK_LOCAL) for net in self.subnets)


def _problem(request: Request, problem_id: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
    return Problem(problem_id, found=found, expected=expected, remedy=remedy, node=request.node, stage="preflight", **details)


# --- input -------------------------------------------------------------------------------------------------------------------------------------------


def _ipv4(request: Request, what: str, text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text.strip()))
    except ValueError:
        raise _problem(
            request,
            "fabric-input",
            f"{what} '{text}'",
            "an IPv4 address such as 192.168.200.12",
            "correct spark_fabric_address in the inventory",
        ) from None


def parse_request(params: t.Mapping[str, t.Any]) -> Request:
    """A Request from module options. Raises Problem for a value that can never be right, before anything is looked at."""
    request = Request(node=params.get("node") or "")
    subnets = []
    for text in params.get("subnets") or []:
        try:
            subnets.append(Network(str(text).strip(), strict=False))
        except ValueError:
            raise _problem(
                request,
                "fabric-input",
                f"fabric subnet '{text}'",
                "an IPv4 network in CIDR form such as 192.168.200.0/24",
                "correct spark_fabric_subnet in the inventory",
            ) from None
    interface = (params.get("interface") or "").strip()
    bad = next((char for char in "^=, " if char in interface), None)
    if bad:
        raise _problem(
            request,
            "fabric-input",
            f"interface override '{interface}'",
            "the plain name of one interface: Gloo and TensorPipe take names only; '^' (exclude) and '=' (exact) exist for NCCL alone, "
            "which gets its '=' here",
            "set spark_fabric_interface to one name such as enp1s0f1np1, or leave it empty to have it found",
        )
    hcas = [str(item).strip() for item in params.get("hcas") or []]
    bad_hca = next((item for item in hcas if not item or any(char in item for char in "^=, ")), None)
    if bad_hca is not None:
        raise _problem(
            request,
            "fabric-input",
            f"RDMA device override '{bad_hca}'",
            "a list of names such as rocep1s0f1 or rocep1s0f1:1 ('=' is added here, '^' would select what is not wanted)",
            "correct spark_fabric_hcas, or leave it empty to have them found",
        )
    address = (params.get("address") or "").strip()
    return Request(
        subnets=tuple(subnets),
        address=_ipv4(request, "fabric address", address) if address else "",
        peers=tuple(dict.fromkeys(_ipv4(request, "address of a peer", str(peer)) for peer in params.get("peers") or [])),
        interface=interface,
        hcas=tuple(hcas),
        require_rdma=bool(params.get("require_rdma")),
        node=request.node,
    )


# --- the view of one node ----------------------------------------------------------------------------------------------------------------------------


class View:
    """Interfaces and RDMA ports of one node, judged for a request."""

    def __init__(self, request: Request, interfaces: t.Sequence[Interface], hcas: t.Sequence[Hca]) -> None:
        self.request = request
        self.interfaces = list(interfaces)
        self.hcas = list(hcas)
        self.by_name = {item.name: item for item in interfaces}
        self.hca = {item.name: hca_of(item, hcas) for item in interfaces}
        self.reason = {item.name: not_a_fabric(item) for item in interfaces}
        for item in interfaces:
            self.reason[item.name] = self.reason[item.name] or no_address_reason(item, request.subnets)

    def fast(self) -> list[Interface]:
        """Ports that may be meant for a fabric, whatever their state, first controller first."""
        found = [i for i in self.interfaces if not not_a_fabric(i) and is_fast(i, self.hca[i.name] is not None)]
        return sorted(found, key=pci_order)

    def owners(self, net: Network) -> list[Interface]:
        """Interfaces that could be the fabric in a subnet, first controller first."""
        return sorted((i for i in self.interfaces if not self.reason[i.name] and in_subnet(i, net)), key=pci_order)

    def twin(self, item: Interface) -> Interface | None:
        """The other half of the same physical port; RDMA devices of different cards are never twins."""
        for other in self.interfaces:
            one_hca, other_hca = self.hca[item.name], self.hca[other.name]
            same_card = not (one_hca and other_hca) or one_hca.image_guid == other_hca.image_guid
            if are_twins(item, other) and same_card:
                return other
        return None

    def listing(self) -> str:
        """Every interface with why it is not the fabric, for a message; loopback and the ports of bridges are left out."""
        parts = [f"{i.name}: {self._why(i)}" for i in self.interfaces if "LOOPBACK" not in i.flags and not i.master]
        return "; ".join(parts) or "no interface at all"

    def _why(self, item: Interface) -> str:
        reason = self.reason[item.name] or "usable"
        missing = [str(addr) for addr in item.addresses if str(addr) not in reason]
        return f"{reason} ({', '.join(missing)})" if missing else reason


def _netplan_remedy(view: View, ports: t.Sequence[Interface]) -> tuple[str, str]:
    """Remedy sentence and file text for ports that have carrier but no address in the subnet."""
    request = view.request
    net = request.subnets[0] if request.subnets else None
    address = f"{request.address or '<free address>'}/{net.prefixlen if net else 24}"
    port = {"name": ports[0].name, "addresses": [address], "mtu": FABRIC_MTU}
    where = f" ({net})" if net and not request.address else ""
    return f"write {NETPLAN_FILE} (mode 600) with {netplan_line([port])}{where} and run 'sudo netplan apply'", netplan_file([port])


# --- problems ----------------------------------------------------------------------------------------------------------------------------------------


def _no_subnet(view: View) -> Problem:
    ports = []
    for port in view.fast():
        state = ", ".join(map(str, port.addresses)) or no_address_reason(port, [])
        ports.append(f"{port.name} ({state}{f', {port.speed} Mb/s' if port.speed else ''})")
    return _problem(
        view.request,
        "fabric-subnet",
        f"no fabric subnet is set; fast ports here: {'; '.join(ports) or 'none (25 Gb/s or RDMA)'}",
        "the IPv4 subnet of the cable between the nodes",
        "set spark_fabric_subnet (for example 192.168.200.0/24)",
        candidates=candidates(view, set(), {}),
    )


def _missing(view: View) -> Problem:
    """No interface in the subnet: what each one has, and what to do about the most likely one."""
    request = view.request
    fast = view.fast()
    pool = fast or [i for i in view.interfaces if not not_a_fabric(i)]
    lit = [i for i in pool if i.up and i.carrier]
    link_local = [i for i in lit if i.addresses and all(addr.link_local for addr in i.addresses)]
    bare = [i for i in lit if not i.addresses]
    elsewhere = [i for i in lit if i.addresses and i not in link_local]
    subnet_there = [i for i in pool if any(in_subnet(i, net) for net in request.subnets)]
    details: dict[str, t.Any] = {"candidates": candidates(view, set(), {})}
    problem_id = "fabric-missing"
    found = f"no usable interface with an IPv4 address in {request.subnet_text}: {view.listing()}"
    if subnet_there:
        port = subnet_there[0]
        remedy = f"plug the cable of {port.name} in and check the other end" if port.up else f"run 'sudo ip link set {port.name} up'"
    elif link_local:
        problem_id = "NET-10"
        names = ", ".join(f"{i.name} {i.addresses[0]}" for i in link_local)
        found = f"the fabric has link-local addresses only ({names}), which change with every link event: {view.listing()}"
        remedy, details["netplan"] = _netplan_remedy(view, link_local)
    elif fast and elsewhere:
        nets = " or ".join(f"{i.addresses[0].network} ({i.name})" for i in elsewhere)
        remedy = f"set spark_fabric_subnet to the subnet of the cable between the nodes, which may be {nets}; "
        remedy += f"or give its port an address in {request.subnet_text}"
    elif fast and bare:
        off = [twin for twin in map(view.twin, bare) if twin is not None and not twin.up]  # the cable is there, so is this half
        ports = sorted([*off, *bare], key=pci_order)
        remedy, details["netplan"] = _netplan_remedy(view, ports)
        remedy = f"run 'sudo ip link set {off[0].name} up', then {remedy}" if off and ports[0] is off[0] else remedy
    elif fast and not lit:
        remedy = f"plug the cable into one of {', '.join(i.name for i in fast)} and set its address, or correct spark_fabric_subnet"
    else:
        remedy = "set spark_fabric_subnet to the subnet of the cable between the nodes, or give that port an address in it"
    return _problem(
        request, problem_id, found, f"exactly one port that is up, has carrier and an address in {request.subnet_text}", remedy, **details
    )


def _ambiguous(view: View, net: Network, owners: t.Sequence[Interface]) -> Problem:
    names = " and ".join(f"{i.name} ({', '.join(map(str, in_subnet(i, net)))})" for i in owners)
    hint = ""
    if len(owners) == 2 and are_twins(*owners):
        hint = " (halves of one port, but without RDMA on both only one of them can serve)"
    return _problem(
        view.request,
        "fabric-ambiguous",
        f"{len(owners)} interfaces in the fabric subnet {net}: {names}{hint}",
        "one interface, or the two halves of one RDMA port",
        f"set spark_fabric_interface for this node to one of {', '.join(i.name for i in owners)}, or move the other to its own subnet",
        interfaces=[i.name for i in owners],
        candidates=candidates(view, set(), {}),
    )


def _wrong_address(view: View, expected: str, found: str) -> Problem:
    return _problem(
        view.request,
        "fabric-address",
        found,
        f"the fabric address {expected} of the inventory on an interface that is up",
        "correct spark_fabric_address of this node, or give the interface that address",
        candidates=candidates(view, set(), {}),
    )


# --- the choice --------------------------------------------------------------------------------------------------------------------------------------


def _holder(view: View, address: str) -> Interface | None:
    return next((i for i in view.interfaces if any(addr.address == address for addr in i.addresses)), None)


def _check_address(view: View) -> None:
    """The expected own address must be in a fabric subnet and on a usable interface."""
    request = view.request
    if not request.address:
        return
    if request.subnets and not any(ipaddress.IPv4Address(request.address) in net for net in request.subnets):
        raise _wrong_address(view, request.address, f"spark_fabric_address {request.address}, which is outside of {request.subnet_text}")
    holder = _holder(view, request.address)
    if holder is None:
        there = [
            f"{i.name} {addr}" for i in view.interfaces for net in request.subnets for addr in in_subnet(i, net) if not view.reason[i.name]
        ]
        if there:
            raise _wrong_address(
                view, request.address, f"no interface with {request.address}; in {request.subnet_text} there is {', '.join(there)}"
            )
    elif view.reason[holder.name] and not request.interface and any(view.owners(net) for net in request.subnets):
        raise _wrong_address(view, request.address, f"{request.address} on {holder.name}: {view.reason[holder.name]}")


def _forced(view: View) -> tuple[Interface, Network]:
    """The interface that the user named, when it can serve."""
    request = view.request
    item = view.by_name.get(request.interface)
    names = ", ".join(i.name for i in view.interfaces if not not_a_fabric(i)) or "none"
    remedy = "correct spark_fabric_interface of this node, or leave it empty to have it found"
    if item is None:
        raise _problem(
            request, "fabric-interface", f"no interface '{request.interface}'; there are {names}", "an interface of this node", remedy
        )
    reason = "loopback" if "LOOPBACK" in item.flags else no_address_reason(item, request.subnets or [Network("0.0.0.0/0")])
    if reason:
        expected = f"an interface that is up with an IPv4 address{f' in {request.subnet_text}' if request.subnets else ''}"
        raise _problem(request, "fabric-interface", f"interface override {item.name}: {reason}", expected, remedy)
    if request.subnets:
        return item, next(net for net in request.subnets if in_subnet(item, net))
    usable = [addr for addr in item.addresses if request.address in ("", addr.address)] or list(item.addresses)
    return item, usable[0].network


def _found(view: View) -> tuple[Interface, Network]:
    """Without a subnet: the interface that has the node's address; without that, the only fast port (with its twin) that has a usable one."""
    request = view.request
    anything = Network("0.0.0.0/0")
    usable = [i for i in view.interfaces if not not_a_fabric(i) and not no_address_reason(i, [anything])]
    if request.address:
        holder = next((i for i in usable if any(addr.address == request.address for addr in i.addresses)), None)
        if holder is None:
            there = [f"{i.name} {', '.join(map(str, i.addresses))}" for i in usable]
            raise _wrong_address(
                view, request.address, f"no usable interface with {request.address}; there are {'; '.join(there) or 'none'}"
            )
        return holder, next(addr.network for addr in holder.addresses if addr.address == request.address)
    fast = [(i, addr) for i in view.fast() if i in usable for addr in i.addresses if not addr.link_local]
    if not fast or any(i is not fast[0][0] and view.twin(fast[0][0]) is not i for i, _addr in fast):
        raise _no_subnet(view)
    return fast[0][0], fast[0][1].network


def choose(view: View, warnings: list[str]) -> tuple[Interface, Network]:
    """The socket interface and its subnet. Raises Problem when there is none, or more than one."""
    request = view.request
    if request.interface:
        return _forced(view)
    if not request.subnets:
        return _found(view)
    _check_address(view)
    order = sorted(request.subnets, key=lambda net: bool(request.address) and ipaddress.IPv4Address(request.address) not in net)
    for net in order:
        owners = view.owners(net)
        if not owners:
            continue
        if len(owners) == 1:
            return owners[0], net
        twins = len(owners) == 2 and view.twin(owners[0]) is owners[1] and all(view.hca[i.name] for i in owners)
        if not twins:
            raise _ambiguous(view, net, owners)
        chosen = next((i for i in owners if any(addr.address == request.address for addr in i.addresses)), owners[0])
        warnings.append(
            f"{owners[0].name} and {owners[1].name} are halves of one port in the same subnet {net} (NET-05): sockets use {chosen.name} only; "
            "a subnet for each half is safer"
        )
        return chosen, net
    raise _missing(view)


def _own_address(view: View, item: Interface, net: Network, warnings: list[str]) -> Address:
    """The address that this node has on the fabric."""
    found = in_subnet(item, net)
    wanted = view.request.address
    if wanted:
        match = next((addr for addr in found if addr.address == wanted), None)
        if match is None:
            raise _wrong_address(view, wanted, f"{item.name} with {', '.join(map(str, found))}")
        return match
    if len(found) > 1:
        warnings.append(f"{item.name} has several addresses in {net}: {', '.join(map(str, found))}; {found[0].address} is used")
    return found[0]


def check_routes(view: View, item: Interface, own: Address, route: t.Callable[[str], Route], warnings: list[str]) -> None:
    """The kernel must send to every peer by the chosen interface (NET-01). Raises Problem for the first that it does not."""
    request = view.request
    for peer in request.peers:
        if peer == own.address:
            continue
        if request.subnets and not any(ipaddress.IPv4Address(peer) in net for net in request.subnets):
            raise _problem(
                request,
                "fabric-peer",
                f"peer {peer}, which is outside of {request.subnet_text}",
                "fabric addresses of one subnet",
                "correct spark_fabric_address",
            )
        way = route(peer)
        if way.error:
            found = f"no route to peer {peer}: {way.error}"
        elif way.dev == "lo":
            found = f"peer {peer} is an address of this node itself"
        elif way.dev != item.name and not (view.twin(item) and way.dev == getattr(view.twin(item), "name", "")):
            other = view.by_name.get(way.dev)
            carries = f" ({', '.join(map(str, other.addresses)) or 'no IPv4'})" if other else ""
            found = f"packets to peer {peer} leave by {way.dev}{carries}, not by {item.name} ({own})"
        else:
            if way.dev != item.name:
                warnings.append(f"packets to {peer} leave by {way.dev}, the other half of the port of {item.name}")
            if way.gateway:
                warnings.append(f"packets to {peer} leave through the gateway {way.gateway}: the fabric should be one subnet")
            elif way.source and way.source != own.address and way.dev == item.name:
                warnings.append(f"packets to {peer} leave with source address {way.source}, not {own.address}")
            continue
        raise _problem(
            request,
            "fabric-route",
            found,
            f"a route to every peer that leaves by {item.name}",
            "remove what claims the same subnet (a Docker network, a VPN, a second port), or correct spark_fabric_subnet and spark_fabric_address",
            peer=peer,
            dev=way.dev,
        )


# --- rails -------------------------------------------------------------------------------------------------------------------------------------------


def _rail(item: Interface, hca: Hca | None, nets: t.Sequence[Network], why: str = "", active: bool = True) -> dict[str, t.Any]:
    inside = [addr for net in nets for addr in in_subnet(item, net)] or [addr for addr in item.addresses if not addr.link_local]
    return {
        "interface": item.name,
        "address": inside[0].address if inside else None,
        "subnet": str(inside[0].network) if inside else None,
        "mtu": item.mtu,
        "number": port_number(item),
        "hca": hca.name if hca else None,
        "hca_port": hca.port if hca else None,
        "gid_index": gid_index(hca, inside[0].address if inside else None),
        "active": active,
        "reason": why,
    }


def _override_rails(view: View, warnings: list[str]) -> list[dict[str, t.Any]]:
    """Rails for RDMA devices that the user named: each must exist and be ACTIVE. One without a place in any subnet is warned of."""
    request = view.request
    rails = []
    for text in request.hcas:
        name, _sep, port = text.partition(":")
        hca = next((h for h in view.hcas if h.name == name and (not port or port == str(h.port))), None)
        if hca is None or not hca.active:
            there = ", ".join(f"{h.selector} {h.state}" for h in view.hcas) or "none (no /sys/class/infiniband)"
            state = f"RDMA device '{text}' is {hca.state}" if hca else f"no RDMA device '{text}'"
            raise _problem(
                request,
                "fabric-hca",
                f"{state}; there are {there}",
                "an ACTIVE RDMA device of this node",
                "correct spark_fabric_hcas, or leave it empty",
            )
        item = next((view.by_name[dev] for dev in hca.netdevs if dev in view.by_name), None)
        why = unusable(hca, item, request.link_local_allowed) if item else f"{hca.selector} has no interface on this node"
        if why:
            warnings.append(f"RDMA device {hca.selector} is used because it was named, but {why}: NCCL may hang on it (NCL-01)")
        rails.append(_rail(item or Interface(hca.netdevs[0] if hca.netdevs else ""), hca, request.subnets, "named by the user"))
    return rails


def find_rails(view: View, item: Interface, net: Network, warnings: list[str]) -> list[dict[str, t.Any]]:
    """Rails in an order that is equal on all nodes: the socket interface's port, its twin, then other ports in the order of the given subnets.

    A rail is used (``active``) when its RDMA port is ACTIVE and has an IPv4 RoCE v2 GID. A twin that is up without an address is listed, not used (NCL-02).
    Without RDMA there is one rail, the socket interface. In a ring the socket interface is on another network and is no rail.
    """
    if view.request.hcas:
        return _override_rails(view, warnings)
    further = [sub for sub in view.request.subnets if sub != net]
    nets = [net, *further]
    allow = view.request.link_local_allowed
    others: list[Interface] = []
    for sub in further:
        there = [i for i in view.interfaces if i is not item and i not in others and in_subnet(i, sub) and not view.reason[i.name]]
        others += sorted(there, key=pci_order)
    why = unusable(view.hca[item.name], item, allow)
    if why:
        # No two nodes of a ring have the same subnets: the order of the devices is what they have in common.
        others = sorted((other for other in others if not unusable(view.hca[other.name], other, allow)), key=pci_order)
        if view.hca[item.name] is not None:
            warnings.append(f"RDMA is not used{' on ' + item.name if others else ''}: {why}")
        if not others:
            return [_rail(item, None, nets, why)]
    ports: list[Interface] = []
    for port in others if why else [item, *others]:
        twin = view.twin(port)
        ports += [entry for entry in (port, twin) if entry is not None and entry not in ports]
    rails = []
    for port in ports:
        why = unusable(view.hca[port.name], port, allow)
        if not why and not (port.up and port.carrier):
            why = f"{port.name} has no carrier"
        rails.append(_rail(port, view.hca[port.name], nets, why, not why))
        if why and port is not item and port not in others:
            warnings.append(
                f"one rail only, about half of the bandwidth: {why} (NCL-02); an address in its own subnet makes the twin {port.name} usable"
            )
    return rails


# --- the result --------------------------------------------------------------------------------------------------------------------------------------


def environment(interface: str, address: str, hcas: t.Sequence[str]) -> dict[str, str]:
    """Environment of one node for every consumer, each in its own syntax (facts: what each variable is for).

    NCCL matches prefixes, so its selectors start with ``=`` (NET-09). Gloo, TensorPipe, UCX and MPI (the latter two in NVIDIA's images, like MN_IF_NAME)
    take plain names. NCCL_IB_GID_INDEX is not set here: the right index differs by device and drifts (NCL-01), NCCL finds it itself.
    """
    env = {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "MN_IF_NAME": interface,
        "UCX_NET_DEVICES": interface,
        "OMPI_MCA_btl_tcp_if_include": interface,
        "VLLM_HOST_IP": address,
        "NCCL_IB_DISABLE": "0" if hcas else "1",
    }
    if hcas:
        env["NCCL_IB_HCA"] = "=" + ",".join(hcas)
    return env


def candidates(view: View, chosen: set[str], why_chosen: t.Mapping[str, str]) -> list[dict[str, t.Any]]:
    """Every interface but loopback, with the reason why it was or was not chosen."""
    result = []
    for item in view.interfaces:
        if "LOOPBACK" in item.flags:
            continue
        hca = view.hca[item.name]
        taken = item.name in chosen
        result.append(
            {
                "interface": item.name,
                "addresses": [str(addr) for addr in item.addresses],
                "up": item.up,
                "carrier": item.carrier,
                "speed": item.speed,
                "mtu": item.mtu,
                "hca": hca.name if hca else None,
                "chosen": taken,
                "reason": why_chosen.get(item.name) or view.reason[item.name] or ("" if taken else "not needed"),
            }
        )
    return result


def _notes(view: View, item: Interface, own: Address, net: Network, is_rail: bool) -> list[str]:
    """Warnings about the chosen interface and what lies beside it. It is no rail in a ring, where it carries the sockets only."""
    notes = []
    if own.dynamic:
        notes.append(f"{own} on {item.name} is dynamic (DHCP): it may go away while serving, give it a static address (NET-11)")
    if own.link_local:
        notes.append(f"{own} on {item.name} is link-local: it changes with link events (NET-10)")
    if is_rail and item.hardware and item.speed and item.speed < FAST_MBIT:
        notes.append(f"{item.name} runs at {item.speed} Mb/s only, a fabric has {FAST_MBIT} or more")
    if own.prefixlen != net.prefixlen and view.request.subnets:
        notes.append(f"{item.name} has {own}, the fabric subnet is {net}: prefix lengths differ")
    longer = sorted(i.name for i in view.interfaces if i.name != item.name and i.name.startswith(item.name))
    if longer:
        notes.append(f"{', '.join(longer)} begins with {item.name}: NCCL selectors are exact ('=') for that reason (NET-09)")
    for other in view.interfaces:
        if other is item or view.twin(item) is other:
            continue
        for addr in other.addresses:
            if addr.network.overlaps(net) and not addr.link_local:
                notes.append(f"{other.name} carries {addr}, which overlaps the fabric subnet {net}")
    return notes


def survey(request: Request, interfaces: t.Sequence[Interface], hcas: t.Sequence[Hca]) -> list[dict[str, t.Any]]:
    """What could be a fabric or carry its sockets, with nothing chosen: enough to find what all nodes have in common (``_topology.find``)."""
    view = View(request, interfaces, hcas)
    fast = {item.name for item in view.fast()}
    rows = []
    for item in sorted((i for i in view.interfaces if not not_a_fabric(i)), key=pci_order):
        hca = view.hca[item.name]
        base = view.by_name.get(item.parent, item) if item.kind in ("vlan", "macvlan") else item
        rows.append(
            {
                "interface": item.name,
                "addresses": [str(addr) for addr in item.addresses],
                "usable": item.up and item.carrier,
                "reason": no_address_reason(item, [Network("0.0.0.0/0")]),
                "fast": item.name in fast,
                "speed": item.speed,
                "mtu": item.mtu,
                "hca": hca.name if hca else None,
                "port": "/".join([*(port_key(base) or (base.name,)), *([f"vlan {item.vlan}"] if item.vlan is not None else [])]),
            }
        )
    return rows


def detect(request: Request, interfaces: t.Sequence[Interface], hcas: t.Sequence[Hca], route: t.Callable[[str], Route]) -> dict[str, t.Any]:
    """The fabric of one node (RV ``fabric`` of nccl_interface_info). ``route(peer)`` asks the kernel. Raises Problem when it is not certain."""
    view = View(request, interfaces, hcas)
    warnings: list[str] = []
    item, net = choose(view, warnings)
    if not request.subnets and item not in view.fast():  # the sockets' network of a ring: the rails are on the fast ports
        nets = [addr.network for port in view.fast() for addr in port.addresses if not no_address_reason(port, [addr.network])]
        request = dataclasses.replace(request, subnets=(net, *dict.fromkeys(nets)))
        view = View(request, interfaces, hcas)
    elif not request.subnets:
        request = dataclasses.replace(request, subnets=(net,))
        view = View(request, interfaces, hcas)
    own = _own_address(view, item, net, warnings)
    check_routes(view, item, own, route, warnings)
    rails = find_rails(view, item, net, warnings)
    selectors = [f"{rail['hca']}:{rail['hca_port']}" for rail in rails if rail["active"] and rail["hca"]]
    if request.require_rdma and not selectors:
        reason = rails[0]["reason"] if hcas else "no RDMA device at all (/sys/class/infiniband is missing or empty: is mlx5_ib loaded?)"
        raise _problem(
            request,
            "rdma-missing",
            f"fabric interface {item.name} ({own}) without usable RDMA: {reason}",
            "an ACTIVE RDMA port with an IPv4 RoCE v2 GID on the fabric interface",
            "check 'rdma link' and the mlx5 driver, or set spark_require_rdma to false to accept TCP at a fraction of the speed",
        )
    warnings += _notes(view, item, own, net, any(rail["interface"] == item.name for rail in rails))
    used = {rail["interface"] for rail in rails if rail["active"]} | {item.name}
    twin = view.twin(item)
    second = {twin.name: f"second rail of {item.name}'s port"} if twin else {}
    why = {
        rail["interface"]: rail["reason"] or second.get(rail["interface"]) or f"a rail: {rail['address']} is in {rail['subnet']}"
        for rail in rails
        if rail["interface"] != item.name
    }
    how = "named by the user" if request.interface else f"the address {own} is in {net}, up with carrier"
    why[item.name] = how + (", the route to every peer leaves by it" if [peer for peer in request.peers if peer != own.address] else "")
    return {
        "interface": item.name,
        "address": own.address,
        "prefixlen": own.prefixlen,
        "subnet": str(net),
        "mtu": item.mtu,
        "speed": item.speed,
        "rails": rails,
        "rail_count": len([rail for rail in rails if rail["active"]]),
        "hcas": selectors,
        "rdma": bool(selectors),
        "transport": "ib" if selectors else "socket",
        "env": environment(item.name, own.address, selectors),
        "candidates": candidates(view, used, why),
        "warnings": warnings,
    }
