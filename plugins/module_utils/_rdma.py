# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""RDMA devices of a node and the interfaces they belong to, from sysfs only.

PRIVATE to the collection. Device names say nothing (rocep1s0f1 on DGX OS, mlx5_1 elsewhere): the tie is the netdev of the GID table or of the PCI device.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import LINK_LOCAL, Interface, Sysfs

ROCE_V2 = "RoCE v2"


@dataclasses.dataclass(frozen=True)
class Gid:
    """One used slot of a GID table; ``ipv4`` is set for an IPv4-mapped GID (::ffff:a.b.c.d)."""

    index: int
    type: str
    netdev: str
    ipv4: str | None


@dataclasses.dataclass(frozen=True)
class Hca:
    """One port of an RDMA device."""

    name: str
    port: int
    state: str
    link_layer: str
    netdevs: tuple[str, ...]
    gids: tuple[Gid, ...]
    image_guid: str = ""

    @property
    def active(self) -> bool:
        """Port state ACTIVE."""
        return self.state == "ACTIVE"

    @property
    def selector(self) -> str:
        """``rocep1s0f1:1``, as NCCL and UCX name a port."""
        return f"{self.name}:{self.port}"


def gid_ipv4(text: str) -> str | None:
    """The IPv4 address of a GID as sysfs prints it (eight groups of four hex digits); None when it is none."""
    try:
        mapped = ipaddress.IPv6Address(text.strip()).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def _gids(sysfs: Sysfs, base: t.Sequence[str]) -> tuple[Gid, ...]:
    result = []
    for slot in sorted((name for name in sysfs.names(*base, "gids") if name.isdigit()), key=int):
        value = sysfs.text(*base, "gids", slot)
        if not value or not value.replace(":", "").strip("0"):
            continue  # an empty slot; its type and netdev cannot be read
        kind = sysfs.text(*base, "gid_attrs", "types", slot)
        if kind is None:
            continue
        result.append(Gid(int(slot), kind, sysfs.text(*base, "gid_attrs", "ndevs", slot) or "", gid_ipv4(value)))
    return tuple(result)


def read_hcas(sysfs: Sysfs) -> list[Hca]:
    """All ports of all RDMA devices; [] without /sys/class/infiniband (driver not loaded)."""
    result = []
    for name in sysfs.names("class", "infiniband"):
        by_device = sysfs.names("class", "infiniband", name, "device", "net")
        guid = sysfs.text("class", "infiniband", name, "sys_image_guid") or ""
        for port in sysfs.names("class", "infiniband", name, "ports"):
            if not port.isdigit():
                continue
            base = ("class", "infiniband", name, "ports", port)
            gids = _gids(sysfs, base)
            netdevs = dict.fromkeys([gid.netdev for gid in gids if gid.netdev] + by_device)
            state = (sysfs.text(*base, "state") or "").rpartition(":")[2].strip()
            result.append(Hca(name, int(port), state, sysfs.text(*base, "link_layer") or "", tuple(netdevs), gids, guid))
    return result


def hca_of(item: Interface, hcas: t.Iterable[Hca]) -> Hca | None:
    """The RDMA port of an interface; of a VLAN that of its parent when the GID table does not name the VLAN itself."""
    for name in filter(None, (item.name, item.parent if item.kind in ("vlan", "macvlan") else "")):
        found = [hca for hca in hcas if name in hca.netdevs]
        if found:  # a bond may be named in the tables of both its ports: the one that works counts
            return next((hca for hca in found if hca.active), found[0])
    return None


def gid_index(hca: Hca | None, address: str | None) -> int | None:
    """Slot of the RoCE v2 GID of an address (NCL-01); None when the port offers none."""
    return next((gid.index for gid in hca.gids if gid.type == ROCE_V2 and gid.ipv4 == address), None) if hca and address else None


def roce_ipv4(hca: Hca, item: Interface) -> list[str]:
    """IPv4 addresses, link-local ones left out, that the port offers as RoCE v2 for this interface."""
    own = {addr.address for addr in item.addresses}
    return [
        gid.ipv4
        for gid in hca.gids
        if gid.ipv4
        and gid.type == ROCE_V2
        and (gid.netdev == item.name or not gid.netdev or gid.ipv4 in own)
        and ipaddress.IPv4Address(gid.ipv4) not in LINK_LOCAL
    ]


def unusable(hca: Hca | None, item: Interface, allow_link_local: bool = False) -> str:
    """Why RDMA cannot be used over an interface; "" when it can: port ACTIVE and an IPv4 RoCE v2 GID (one is made per address, NCL-01)."""
    if hca is None:
        return f"{item.name} has no RDMA device"
    if not hca.active:
        return f"{hca.selector} ({item.name}) is {hca.state or 'in an unknown state'}, not ACTIVE"
    if roce_ipv4(hca, item):
        return ""
    if allow_link_local and any(gid.ipv4 and gid.type == ROCE_V2 for gid in hca.gids):
        return ""
    if not item.addresses:
        return f"{hca.selector} has no IPv4 RoCE v2 GID because {item.name} has no IPv4 address"
    listed = ", ".join(map(str, item.addresses))
    if all(addr.link_local for addr in item.addresses):
        return f"{hca.selector} has no IPv4 RoCE v2 GID but link-local ones ({item.name} {listed})"
    return f"{hca.selector} has no IPv4 RoCE v2 GID for {item.name} ({listed})"
