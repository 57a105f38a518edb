# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The netplan file of a node's fabric ports: the one that an error shows is the one that the role writes.

PRIVATE to the collection. Pure: text out of plain data.
"""

from __future__ import annotations

import typing as t

NETPLAN_FILE = "/etc/netplan/40-cx7.yaml"


def _port(port: t.Mapping[str, t.Any]) -> list[tuple[str, str]]:
    """Keys of one port in the order of the file; ``addresses`` apart.

    ``link-local`` is netplan's default written down: files are merged by key, and it takes NVIDIA's ``[ipv4]`` back. IPv6 stays, RoCE v2 has its first
    GIDs from it. ``optional`` is for systemd-networkd (NetworkManager never waits): a cable that is not plugged must not hold up the boot.
    """
    keys = [("dhcp4", "false"), ("dhcp6", "false"), ("link-local", "[ipv6]")]
    if port.get("mtu"):
        keys.append(("mtu", str(port["mtu"])))
    keys.append(("optional", "true"))
    return keys


def netplan_file(ports: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """Text of a netplan file, to be written with mode 600.

    ``ports``: ``name``, ``addresses`` (list of ``a.b.c.d/prefix``, may be empty) and ``mtu`` (0: not set) of each port. The renderer is left out: DGX OS
    sets it once for all files (NetworkManager), other systems have their own.
    """
    lines = ["network:", "  version: 2", "  ethernets:"]
    for port in ports:
        lines.append(f"    {port['name']}:")
        lines += [f"      {key}: {value}" for key, value in _port(port)]
        if port.get("addresses"):
            lines.append("      addresses:")
            lines += [f"        - {address}" for address in port["addresses"]]
    return "\n".join(lines) + "\n"


def netplan_line(ports: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """The same content in one line (YAML's flow form), for a sentence."""
    parts = []
    for port in ports:
        keys = [f"{key}: {value}" for key, value in _port(port)]
        if port.get("addresses"):
            keys.append(f"addresses: [{', '.join(port['addresses'])}]")
        parts.append(f"{port['name']}: {{{', '.join(keys)}}}")
    return f"network: {{version: 2, ethernets: {{{', '.join(parts)}}}}}"
