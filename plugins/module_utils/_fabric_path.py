# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a peer is really reachable over the fabric, on each rail: route, neighbour, full-size packet, TCP; and what a measured throughput means.

PRIVATE to the collection. What touches the network comes in as callables; every step is bounded and the whole is bounded per peer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import itertools
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
class Rail:
    """One end of a rail: an interface of the fabric with its own address."""

    interface: str
    address: str
    subnet: str = ""
    mtu: int = 0


@dataclasses.dataclass(frozen=True)
class Peer:
    """The other end: inventory name, fabric address, its MTU (0 = not known), the TCP ports that must be open there, and its further rails."""

    node: str
    address: str
    mtu: int = 0
    ports: tuple[int, ...] = (22,)
    rails: tuple[Rail, ...] = ()

    def __str__(self) -> str:
        return f"{self.node} ({self.address})" if self.node else self.address


@dataclasses.dataclass(frozen=True)
class Ends:
    """Our end of the path. ``pinned``: the rail shares its subnet with another port of this node, so the way is asked for this interface only."""

    node: str
    interface: str
    address: str
    mtu: int
    timeout: float
    skip: frozenset[str] = frozenset()
    pinned: bool = False


@dataclasses.dataclass
class Net:
    """What touches the network. ``run(argv, seconds)`` -> (rc, out, err), rc 124 when it was too slow and 127 when the program is not there;
    ``connect(source, address, port, seconds)`` -> whether somebody listens there, raises OSError when nothing came back or a firewall refused;
    ``clock()`` is monotonic seconds."""

    run: t.Callable[[t.Sequence[str], float], tuple[int, str, str]]
    connect: t.Callable[[str, str, int, float], bool]
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
                {
                    "node": self.peer.node,
                    "address": self.peer.address,
                    "interface": self.ends.interface,
                    "check": name,
                    "result": result,
                    "ms": ms,
                    "detail": detail,
                }
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
        pinned = ["oif", self.ends.interface] if self.ends.pinned else []
        rc, out, err = self.net.run(["ip", "-j", "route", "get", self.peer.address, "from", self.ends.address, *pinned], self._left(3))
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
            self.net.connect(self.ends.address, self.peer.address, self.peer.ports[0] if self.peer.ports else 22, self._left(2))

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
        """TCP from the fabric address (NET-13): every port is open, whether or not somebody listens there yet (Ray and Gloo come later)."""

        def closed(port: int) -> str:
            try:
                self.net.connect(self.ends.address, self.peer.address, port, seconds)
            except OSError as exc:
                return "no answer" if isinstance(exc, TimeoutError) else (exc.strerror or str(exc))
            return ""

        seconds = self._left(3)
        with concurrent.futures.ThreadPoolExecutor(len(self.peer.ports) or 1) as pool:
            answers = dict(zip(self.peer.ports, pool.map(closed, self.peer.ports), strict=True))
        blocked = {port: reason for port, reason in answers.items() if reason}
        if not blocked:
            return f"open: {spans(self.peer.ports)}"
        reasons = sorted(set(blocked.values()))
        found = "; ".join(f"{spans([port for port in blocked if blocked[port] == reason])}: {reason}" for reason in reasons)
        others = f" (open: {spans([port for port in answers if port not in blocked])})" if len(blocked) < len(answers) else ""
        return self._fail(
            "NET-13",
            f"no TCP connection from {self.ends.address} to {self.peer} {found}{others}",
            "TCP over the fabric between all nodes, on every port: Ray, Gloo and NCCL choose their own",
            f"open the fabric in the firewall of {self.peer.node or 'the peer'} (for example 'ufw allow in on <fabric interface>'), "
            f"and look for a rule that stops what leaves {self.ends.node or 'this node'}",
            ports=sorted(blocked),
        )


def spans(ports: t.Iterable[int]) -> str:
    """``port 22``, ``ports 22, 6380 to 6385``."""
    found = sorted(set(ports))
    parts = []
    for _key, group in itertools.groupby(enumerate(found), lambda item: item[1] - item[0]):
        run = [port for _index, port in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(port) for port in run]
    return f"{'port' if len(found) == 1 else 'ports'} {', '.join(parts)}"


def paths(members: t.Sequence[t.Mapping[str, t.Any]], ports: t.Mapping[str, t.Sequence[int]]) -> list[dict[str, t.Any]]:
    """What the others must reach on each node (option ``peers`` of fabric_check), from the plan's members. ``rails`` are those beside the fabric
    address."""
    result = []
    for member in members:
        fabric = member["fabric"]
        mtus = {item["interface"]: item["mtu"] for item in fabric.get("candidates", [])}
        rails = [
            {"interface": rail["interface"], "address": rail["address"], "subnet": rail["subnet"], "mtu": mtus.get(rail["interface"]) or 0}
            for rail in fabric.get("rails", [])
            if rail.get("active") and rail.get("address") and rail["interface"] != fabric["interface"]
        ]
        result.append(
            {
                "node": member["name"],
                "address": member["address"],
                "peer_mtu": fabric.get("mtu") or 0,
                "ports": list(ports.get(member["name"], [22])),
                "rails": rails,
            }
        )
    return result


def legs(own: Ends, rails: t.Sequence[Rail], peers: t.Sequence[Peer]) -> list[tuple[Ends, Peer]]:
    """Every path to prove: the fabric address of each peer, then each further rail of ours to the rails of the peer in the same subnet.

    Twins that share one subnet are joined by their position, as NCCL joins them, and each is pinned to its interface.
    """
    if any(_same_subnet(own.address, rail.subnet) for rail in rails):  # NET-05: the kernel may name the other half of the port
        own = dataclasses.replace(own, pinned=True)
    result = [(own, peer) for peer in peers]
    for rail in rails:
        place = [other for other in rails if other.subnet == rail.subnet].index(rail)
        shared = _same_subnet(own.address, rail.subnet) or len([other for other in rails if other.subnet == rail.subnet]) > 1
        end = dataclasses.replace(own, interface=rail.interface, address=rail.address, mtu=rail.mtu or own.mtu, pinned=shared)
        for peer in peers:
            theirs = [other for other in peer.rails if other.subnet == rail.subnet]
            if place < len(theirs):
                there = theirs[place]
                result.append((end, Peer(peer.node, there.address, there.mtu, peer.ports[:1])))
    return result


def _same_subnet(address: str, subnet: str) -> bool:
    return bool(subnet) and ipaddress.IPv4Address(address) in ipaddress.IPv4Network(subnet)


# --- throughput


def receiver_of(address: str, others: t.Iterable[str]) -> str:
    """To whom the node with ``address`` sends: the next one in the order of the addresses, so that every node sends once and receives once."""
    ring = sorted({address, *others}, key=ipaddress.IPv4Address)
    return ring[(ring.index(address) + 1) % len(ring)]


def slow(peer: str, interface: str, gbits: float, minimum: float) -> str:
    """What to tell of a rate below the minimum; "" when it is not."""
    if gbits >= minimum:
        return ""
    return (
        f"only {gbits:.1f} Gb/s to {peer} over {interface}, {minimum:g} or more are expected: a ConnectX-7 that came up degraded stays near 13 Gb/s while "
        "every link shows its full speed (NCL-06). Shut both nodes down, take their power away for a minute, and measure again"
    )


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
