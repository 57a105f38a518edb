# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network interfaces of a node as iproute2 and sysfs describe them, and what each of them is.

PRIVATE to the collection. Pure: ``read`` and ``listdir`` (raise OSError) and ``realpath`` come in as callables, so a recorded tree can stand in for sysfs.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import typing as t

Read = t.Callable[[str], str]
Network = ipaddress.IPv4Network
LINK_LOCAL = Network("169.254.0.0/16")
_PCI = re.compile(r"^([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$")
FAST_MBIT = 25000  # a port that may be a fabric: 25 Gb/s and up


@dataclasses.dataclass
class Sysfs:
    """A sysfs tree below ``root``. ``realpath`` resolves links, so that the PCI address of a port is found."""

    root: str
    read: Read
    listdir: t.Callable[[str], list[str]]
    realpath: t.Callable[[str], str]

    def text(self, *parts: str) -> str | None:
        """Content of a file; None where the kernel refuses (speed of a port that is down, an empty GID slot) or it is not there."""
        try:
            return self.read("/".join((self.root, *parts))).strip()
        except (OSError, UnicodeDecodeError):
            return None

    def names(self, *parts: str) -> list[str]:
        """Sorted names in a folder; [] when it is not there."""
        try:
            return sorted(self.listdir("/".join((self.root, *parts))))
        except OSError:
            return []

    def target(self, *parts: str) -> str | None:
        """Last part of what a link points to; None when there is no such link."""
        path = "/".join((self.root, *parts))
        if not self.names(*parts[:-1]) or parts[-1] not in self.names(*parts[:-1]):
            return None
        return self.realpath(path).rstrip("/").rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Address:
    """One IPv4 address of an interface."""

    address: str
    prefixlen: int
    scope: str = "global"
    dynamic: bool = False
    secondary: bool = False

    @property
    def network(self) -> Network:
        """The network that the kernel routes to this interface because of the address."""
        return Network(f"{self.address}/{self.prefixlen}", strict=False)

    @property
    def link_local(self) -> bool:
        """169.254.0.0/16."""
        return ipaddress.IPv4Address(self.address) in LINK_LOCAL

    def __str__(self) -> str:
        return f"{self.address}/{self.prefixlen}"


@dataclasses.dataclass
class Interface:
    """One interface.

    ``kind`` is iproute2's info_kind ("" for a port of hardware), ``device`` the name of the device behind it (a PCI address for a ConnectX port),
    ``speed`` Mb/s or None when it cannot be read.
    """

    name: str
    flags: tuple[str, ...] = ()
    mtu: int = 0
    kind: str = ""
    link_type: str = ""
    master: str = ""
    parent: str = ""
    vlan: int | None = None
    addresses: tuple[Address, ...] = ()
    ipv6: tuple[str, ...] = ()
    speed: int | None = None
    device: str = ""
    driver: str = ""
    port_name: str = ""
    wireless: bool = False
    members: tuple[str, ...] = ()
    physical_members: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """Administratively up."""
        return "UP" in self.flags

    @property
    def carrier(self) -> bool:
        """The other end is there."""
        return "LOWER_UP" in self.flags and "NO-CARRIER" not in self.flags

    @property
    def hardware(self) -> bool:
        """A device stands behind it (docker0, br-*, veth*, bonds, tunnels have none)."""
        return bool(self.device)

    @property
    def pci(self) -> tuple[int, str] | None:
        """PCI domain and bus:device.function; None when the device is not on PCI (virtio, USB) or there is none."""
        match = _PCI.match(self.device)
        return (int(match.group(1), 16), match.group(2)) if match else None


def parse_addr(text: str) -> list[Interface]:
    """Interfaces from ``ip -j -d addr``, in the kernel's order, without what only sysfs knows. Raises ValueError when it is not such output."""
    data = json.loads(text or "[]")
    if not isinstance(data, list):
        raise ValueError("ip -j -d addr gave no list")
    result = []
    for row in data:
        if not row.get("ifname"):  # iproute2 prints empty objects for filtered links
            continue
        addresses, ipv6 = [], []
        for item in row.get("addr_info") or []:
            if item.get("family") == "inet" and item.get("local"):
                addresses.append(
                    Address(
                        str(item["local"]),
                        int(item.get("prefixlen", 32)),
                        str(item.get("scope", "global")),
                        bool(item.get("dynamic")),
                        bool(item.get("secondary")),
                    )
                )
            elif item.get("family") == "inet6" and item.get("local"):
                ipv6.append(str(item["local"]))
        info = row.get("linkinfo") or {}
        tag = (info.get("info_data") or {}).get("id")
        result.append(
            Interface(
                name=str(row["ifname"]),
                flags=tuple(row.get("flags") or ()),
                mtu=int(row.get("mtu") or 0),
                kind=str(info.get("info_kind") or ""),
                link_type=str(row.get("link_type") or ""),
                master=str(row.get("master") or ""),
                parent=str(row.get("link") or ""),
                vlan=int(tag) if info.get("info_kind") == "vlan" and tag is not None else None,
                addresses=tuple(addresses),
                ipv6=tuple(ipv6),
            )
        )
    return result


def add_sysfs(interfaces: t.Sequence[Interface], sysfs: Sysfs) -> None:
    """Completes interfaces with speed, PCI address, driver, port and members, all from /sys/class/net."""
    for item in interfaces:
        base = ("class", "net", item.name)
        speed = sysfs.text(*base, "speed")
        item.speed = int(speed) if speed and speed.isdigit() and int(speed) > 0 else None
        item.device = sysfs.target(*base, "device") or ""
        item.driver = (sysfs.target(*base, "device", "driver") or "") if item.device else ""
        item.port_name = sysfs.text(*base, "phys_port_name") or ""
        item.wireless = bool({"wireless", "phy80211"} & set(sysfs.names(*base)))
    by_name = {item.name: item for item in interfaces}
    for item in interfaces:
        members = [other for other in interfaces if other.master == item.name]
        item.members = tuple(other.name for other in members)
        item.physical_members = tuple(other.name for other in members if other.hardware or (by_name.get(other.parent) or other).hardware)


def not_a_fabric(item: Interface) -> str:
    """Why an interface can never carry the fabric, by what it is (never by its name); "" when it could."""
    if "LOOPBACK" in item.flags or item.link_type == "loopback":
        return "loopback"
    if item.master:
        return f"a member of {item.master}: addresses belong there"
    if item.wireless:
        return "Wi-Fi"
    if item.kind == "bridge" and not item.physical_members:
        return "a bridge of containers or virtual machines, no port of this node is in it"
    if item.kind in ("tun", "wireguard", "gre", "ipip", "sit", "vxlan", "geneve", "vti", "xfrm") or "POINTOPOINT" in item.flags:
        return "a tunnel"
    if item.link_type == "none":
        return "a tunnel"
    if item.kind in ("dummy", "ifb", "nlmon", "vcan"):
        return f"virtual ({item.kind}), no wire"
    return ""


def no_address_reason(item: Interface, subnets: t.Sequence[Network]) -> str:
    """Why an interface has no place in these subnets: admin down, no carrier, no IPv4, link-local only or other subnets (NET-15); "" when it has one."""
    if any(ipaddress.IPv4Address(addr.address) in net for addr in item.addresses for net in subnets):
        if not item.up:
            return f"administratively down (address {', '.join(map(str, item.addresses))})"
        return "" if item.carrier else f"no carrier: no cable, or the other end is off (address {', '.join(map(str, item.addresses))})"
    if not item.up:
        return "administratively down"
    if not item.carrier:
        return "no carrier: no cable, or the other end is off"
    if not item.addresses:
        routable = [addr for addr in item.ipv6 if not addr.lower().startswith("fe80")]
        if routable:
            return f"up, but without IPv4 (only IPv6 {', '.join(routable)})"
        return "up, but without IPv4 (only IPv6 link-local)" if item.ipv6 else "up, but without IPv4"
    listed = ", ".join(map(str, item.addresses))
    if all(addr.link_local for addr in item.addresses):
        return f"link-local address only: {listed}"
    return f"IPv4 in another subnet: {listed}"


def in_subnet(item: Interface, net: Network) -> list[Address]:
    """Addresses of an interface in a subnet, primary ones first."""
    found = [addr for addr in item.addresses if ipaddress.IPv4Address(addr.address) in net]
    return sorted(found, key=lambda addr: addr.secondary)


_NAME = re.compile(r"^en(P\d+)?(p\d+s\d+f\d+(?:np\d+)?)$")


def port_key(item: Interface) -> tuple[str, str] | None:
    """What the two halves (twins) of one physical port have in common: driver and PCI bus:device.function, the PCI domain left out.

    On a GB10, 0000:01:00.1 and 0002:01:00.1 are two PCIe functions of one QSFP port. Where nothing stands behind the interfaces (simulated ports) the
    udev name without its domain is used. None when it cannot have a twin.
    """
    if item.device:
        return (item.driver, item.pci[1]) if item.pci else None
    match = _NAME.match(item.name)
    return ("name", match.group(2)) if match else None


def pci_order(item: Interface) -> tuple[int, str]:
    """Sort key: PCI domain first, so that the half of the first controller (enp1...) comes before its twin (enP2p1...)."""
    if item.pci:
        return item.pci[0], item.name
    match = re.match(r"^enP(\d+)p", item.name)
    return int(match.group(1)) if match else 0, item.name


def are_twins(one: Interface, other: Interface) -> bool:
    """Two halves of one physical port."""
    return one.name != other.name and port_key(one) is not None and port_key(one) == port_key(other)


def port_number(item: Interface) -> int | None:
    """Number of the physical port on its card (the PCI function, which is the last digit of rocep1s0f1); None where it is not known."""
    if item.pci:
        return int(item.pci[1][-1])
    match = re.search(r"f(\d+)(?:np\d+)?$", item.name)
    return int(match.group(1)) if match and not item.device else None


def is_fast(item: Interface, has_rdma: bool) -> bool:
    """A port that a fabric may be meant for: not Wi-Fi, and RDMA-capable or 25 Gb/s and more (hardware, or a bond or VLAN upon it)."""
    wire = item.hardware or item.kind in ("bond", "team", "vlan", "macvlan")
    return not item.wireless and (has_rdma or (wire and (item.speed or 0) >= FAST_MBIT))


@dataclasses.dataclass(frozen=True)
class Route:
    """How the kernel would send to a peer. ``error`` is set when it would not."""

    peer: str
    dev: str = ""
    source: str = ""
    gateway: str = ""
    error: str = ""


def parse_route(peer: str, rc: int, out: str, err: str) -> Route:
    """The answer of ``ip -j route get <peer>``."""
    if rc != 0:
        return Route(peer, error=" ".join((err or out).split()) or f"ip route get failed with code {rc}")
    try:
        row = json.loads(out)[0]
        return Route(peer, str(row.get("dev", "")), str(row.get("prefsrc", "")), str(row.get("gateway", "")))
    except (ValueError, LookupError, AttributeError):
        return Route(peer, error=f"ip route get answered '{' '.join(out.split())[:80]}'")
