# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a peer is really reachable over the fabric: route, neighbour, full-size packet, TCP.

PRIVATE to the collection. What touches the network comes in as callables; every step is bounded and the whole is bounded per peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import parse_route
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

CHECKS = ("mtu", "route", "neighbour", "path_mtu", "tcp")
IP_ICMP_HEADERS = 28
RESOLVED = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT", "NOARP"}


@dataclasses.dataclass(frozen=True)
class Peer:
    """The other end: inventory name, fabric address and its MTU (0 = not known)."""

    node: str
    address: str
    mtu: int = 0

    def __str__(self) -> str:
        return f"{self.node} ({self.address})" if self.node else self.address


@dataclasses.dataclass(frozen=True)
class Ends:
    """Our end of the path."""

    node: str
    interface: str
    address: str
    mtu: int
    tcp_port: int
    timeout: float
    skip: frozenset[str] = frozenset()


@dataclasses.dataclass
class Net:
    """What touches the network. ``run(argv, seconds)`` -> (rc, out, err), rc 124 when it was too slow and 127 when the program is not there;
    ``connect(source, address, port, seconds)`` raises OSError; ``clock()`` is monotonic seconds."""

    run: t.Callable[[t.Sequence[str], float], tuple[int, str, str]]
    connect: t.Callable[[str, str, int, float], None]
    clock: t.Callable[[], float]


def parse_neighbour(out: str) -> tuple[str, str]:
    """State and link address of the first entry of ``ip -j neigh show``; ("", "") when there is none."""
    try:
        rows = json.loads(out or "[]")
    except ValueError:
        return "", ""
    for row in rows:
        state = row.get("state") or [""]
        return str(state[0] if isinstance(state, list) else state), str(row.get("lladdr") or "")
    return "", ""


def parse_ping(out: str, err: str = "") -> tuple[int, int | None]:
    """Answers received, and the smaller MTU that the kernel or a router named (None when none did), from iputils ping."""
    text = f"{out}\n{err}"
    received = re.search(r"(\d+) (?:packets )?received", text)
    smaller = re.search(r"mtu\s*[=:]\s*(\d+)", text)
    return int(received.group(1)) if received else 0, int(smaller.group(1)) if smaller else None


class PathCheck:
    """All checks of one peer, in order; the first failure ends it and the rest is reported as skipped."""

    def __init__(self, ends: Ends, peer: Peer, net: Net) -> None:
        self.ends = ends
        self.peer = peer
        self.net = net
        self.rows: list[dict[str, t.Any]] = []
        self.notes: list[str] = []
        self.problem: Problem | None = None
        self._answers = False
        self._until = net.clock() + ends.timeout

    def _left(self, most: float) -> float:
        return max(0.5, min(most, self._until - self.net.clock()))

    def _fail(self, problem_id: str, found: str, expected: str, remedy: str, **details: t.Any) -> str:
        self.problem = Problem(
            problem_id,
            found=found,
            expected=expected,
            remedy=remedy,
            node=self.ends.node,
            stage="preflight",
            peer=self.peer.node,
            peer_address=self.peer.address,
            **details,
        )
        return found

    def run(self) -> PathCheck:
        """Runs the checks; never raises for what the network does."""
        steps = {"mtu": self.mtu, "route": self.route, "neighbour": self.neighbour, "path_mtu": self.path_mtu, "tcp": self.tcp}
        for name in CHECKS:
            started = self.net.clock()
            if self.problem or name in self.ends.skip:
                result, detail = "skipped", "an earlier check failed" if self.problem else "skipped on request"
            else:
                detail = steps[name]()
                result = "failed" if self.problem else "ok"
                if result == "ok" and detail.startswith("not checked"):
                    result = "skipped"
            ms = round((self.net.clock() - started) * 1000, 1)
            self.rows.append(
                {"node": self.peer.node, "address": self.peer.address, "check": name, "result": result, "ms": ms, "detail": detail}
            )
        return self

    def mtu(self) -> str:
        """Both ends have the same MTU (NET-12); no packet is sent."""
        ours, theirs = self.ends.mtu, self.peer.mtu
        if not theirs:
            return "not checked: the MTU of the peer is not known"
        if ours != theirs:
            return self._fail(
                "NET-12",
                f"MTU {ours} on {self.ends.interface} here and {theirs} on {self.peer}",
                "the same MTU at both ends of the fabric",
                f"set the same MTU on both (9000 is usual, for example 'mtu: 9000' in netplan), or {min(ours, theirs)} on both",
                mtu=ours,
                peer_mtu=theirs,
            )
        return f"{ours} at both ends"

    def route(self) -> str:
        """The kernel sends to the peer by the fabric interface (NET-01)."""
        rc, out, err = self.net.run(["ip", "-j", "route", "get", self.peer.address], self._left(3))
        way = parse_route(self.peer.address, rc, out, err)
        if way.error or way.dev != self.ends.interface:
            found = f"no route to {self.peer}: {way.error}" if way.error else f"the route to {self.peer} leaves by {way.dev}"
            return self._fail(
                "fabric-route",
                found,
                f"a route by {self.ends.interface} from {self.ends.address}",
                "remove what claims the same subnet (a Docker network, a VPN, a second port), or correct the fabric addresses in the inventory",
                dev=way.dev,
            )
        return f"by {way.dev}" + (f" via {way.gateway}" if way.gateway else "")

    def _ping(self, count: int, size: int, *options: str) -> tuple[int, str, str]:
        argv = [
            "ping",
            "-n",
            "-c",
            str(count),
            "-i",
            "0.2",
            "-W",
            "1",
            *options,
            "-s",
            str(size),
            "-I",
            self.ends.interface,
            self.peer.address,
        ]
        return self.net.run(argv, self._left(count + 1.5))

    def neighbour(self) -> str:
        """The peer answers on the wire. A ping makes the kernel resolve it and warms the entry; a firewall may drop the ping, ARP decides."""
        rc, out, err = self._ping(2, 56)
        if rc == 127:
            self.notes.append("ping is not installed here: the path MTU could not be proven (install iputils-ping)")
            self._touch()
        self._answers = parse_ping(out, err)[0] > 0
        rc, out, err = self.net.run(["ip", "-j", "neigh", "show", "to", self.peer.address, "dev", self.ends.interface], self._left(3))
        state, lladdr = parse_neighbour(out)
        if self._answers or (state in RESOLVED and lladdr):
            return f"{lladdr or 'resolved'}, answers ping" if self._answers else f"{lladdr}, does not answer ping"
        return self._fail(
            "fabric-unreachable",
            f"{self.peer} does not answer over {self.ends.interface} (neighbour {state or 'unknown'}, no answer to ping)",
            f"{self.peer} reachable from {self.ends.address} over the fabric",
            f"check that {self.peer.node or 'the peer'} is on, that its fabric interface is up and has {self.peer.address}, "
            "and that both ends are on the same cable or switch",
        )

    def _touch(self) -> None:
        """Makes the kernel resolve the peer without ping."""
        with contextlib.suppress(OSError):
            self.net.connect(self.ends.address, self.peer.address, self.ends.tcp_port, self._left(2))

    def path_mtu(self) -> str:
        """A packet of full size passes unfragmented (NET-12)."""
        if not self._answers and "neighbour" not in self.ends.skip:
            if not any("ping is not installed" in note for note in self.notes):
                self.notes.append(f"{self.peer} answers ARP but not ping (a firewall?): the path MTU could not be proven")
            return "not checked: the peer does not answer ping"
        size = self.ends.mtu - IP_ICMP_HEADERS
        _rc, out, err = self._ping(2, size, "-M", "do")
        received, smaller = parse_ping(out, err)
        if received:
            return f"{size} bytes of payload pass unfragmented"
        named = f"; the path takes {smaller} only" if smaller and smaller != self.ends.mtu else ""
        return self._fail(
            "NET-12",
            f"small packets reach {self.peer}, packets of {self.ends.mtu} bytes do not{named}",
            f"the MTU {self.ends.mtu} of {self.ends.interface} on the whole path",
            f"set the same MTU on {self.peer.node or 'the peer'} and on every switch port between, or a smaller one on both nodes",
            mtu=self.ends.mtu,
            path_mtu=smaller,
        )

    def tcp(self) -> str:
        """A TCP connection from the fabric address (NET-13)."""
        port = self.ends.tcp_port
        try:
            self.net.connect(self.ends.address, self.peer.address, port, self._left(3))
        except ConnectionRefusedError:
            return self._fail(
                "NET-13",
                f"{self.peer} refuses TCP port {port} on its fabric address (the host answers)",
                f"a server that listens on {self.peer.address}:{port}",
                f"let sshd on {self.peer.node or 'the peer'} listen on its fabric address (ListenAddress), or name a port that is open there",
            )
        except OSError as exc:
            reason = "no answer in time" if isinstance(exc, TimeoutError) else (exc.strerror or str(exc))
            return self._fail(
                "NET-13",
                f"no TCP connection from {self.ends.address} to {self.peer} port {port}: {reason}",
                "TCP over the fabric between all nodes",
                f"open the fabric in the firewall of {self.peer.node or 'the peer'} (for example 'ufw allow in on <fabric interface>')",
            )
        return f"port {port} accepts"


def summary(checks: t.Sequence[PathCheck]) -> Problem | None:
    """The first failure, with the others named in its details; None when every peer is reachable."""
    failed = [check.problem for check in checks if check.problem]
    if not failed:
        return None
    first = failed[0]
    if len(failed) > 1:
        others = "; ".join(problem.found for problem in failed[1:])
        details = dict(first.details, others=[problem.as_dict() for problem in failed[1:]])
        return Problem(
            first.id,
            found=f"{first.found}; also {others}",
            expected=first.expected,
            remedy=first.remedy,
            node=first.node,
            stage=first.stage,
            **details,
        )
    return first


def bound(timeout: float) -> str:
    """Whole seconds for GNU timeout, at least one."""
    return str(max(1, math.ceil(timeout)))
