# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fake node for the tests of the fabric: a port that ip changes, and a renderer that takes foreign addresses away."""

from __future__ import annotations

import json

NAME = "99-spark-fabric.yaml"
PORT = "enp1s0f1np1"
BEFORE = {PORT: {"addresses": ["192.168.200.12/24"], "mtu": 1500, "up": True, "routes": []}}


class Node:
    """``run`` of a node with one port. netplan takes the addresses that are in the file in force, and takes all others away as systemd-networkd does."""

    def __init__(self, folder):
        self.etc, self.volatile = folder / "etc", folder / "run-netplan"
        for path in (self.etc, self.volatile):
            path.mkdir()
        self.port = json.loads(json.dumps(BEFORE[PORT]))
        self.netplan_rc = 0
        self.late = ""  # an address that the renderer takes away after the second tick
        self.ticks = 0
        self.asked = []
        self.fails = set()  # commands

    def tick(self, seconds=0):
        """Time passes."""
        self.ticks += 1
        if self.ticks == 2 and self.late:
            self.port["addresses"].remove(self.late)

    def run(self, argv, seconds):
        self.asked.append(" ".join(argv))
        words = list(argv)
        if words[0] in self.fails:
            return 1, "", f"{words[0]} does not work"
        if words[:2] == ["netplan", "apply"]:
            shadow, real = self.volatile / NAME, self.etc / NAME
            text = (shadow if shadow.exists() else real).read_text() if shadow.exists() or real.exists() else ""
            if self.netplan_rc:
                return self.netplan_rc, "", "Error in network definition:\n unknown key"
            self.port["addresses"] = [line.split()[1] for line in text.splitlines() if line.strip().startswith("- ")]
            if "mtu: 9000" in text:
                self.port["mtu"] = 9000
        elif words[:4] == ["ip", "-j", "-4", "route"]:
            return 0, "[]", ""
        elif words[:2] == ["ip", "-j"] and words[-1] == "addr":
            addresses = [a.split("/") for a in self.port["addresses"]]
            info = [{"family": "inet", "local": local, "prefixlen": int(bits)} for local, bits in addresses]
            row = {"ifname": PORT, "mtu": self.port["mtu"], "flags": ["UP", "LOWER_UP"] if self.port["up"] else [], "addr_info": info}
            return 0, json.dumps([row]), ""
        elif words[:3] == ["ip", "addr", "add"]:
            self.port["addresses"].append(words[3])
        elif words[:3] == ["ip", "addr", "del"]:
            self.port["addresses"].remove(words[3])
        elif words[:3] == ["ip", "link", "set"] and words[4] == "mtu":
            self.port["mtu"] = int(words[5])
        return 0, "", ""

    @property
    def files(self):
        return {path.parent.name: path.read_text() for path in [*self.etc.iterdir(), *self.volatile.iterdir()]}
