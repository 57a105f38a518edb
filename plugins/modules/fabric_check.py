#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_check
short_description: Proves that each peer is reachable over the fabric
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - From this node, checks each of O(peers) over O(interface) only, in this order. C(mtu), both ends have the same MTU. C(route), the kernel sends by the
    interface. C(neighbour), the peer answers on the wire (which also warms the entry). C(path_mtu), a packet of full size passes unfragmented. C(tcp), a
    connection from O(address) to each of the peer's ports gets an answer, be it that nobody listens there yet; silence and the refusal of a firewall
    are failures.
  - The same for each of O(rails), between the addresses of the same subnet.
  - Optionally measures for a few seconds how fast bytes go to the next node (O(throughput)). A low rate is a warning, never a failure.
  - Paths are checked at the same time. The first failure of a path ends its checks.
  - Run it on every node at the same time, so that both directions are covered. Only O(throughput) needs the other nodes' runs.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: The same packets are sent in check mode; nothing is changed.
  diff_mode:
    support: N/A
    details: This module does not change anything.
  idempotent:
    support: full
    details: This module never reports a change.
options:
  interface:
    description: Fabric interface of this node, as RV(dgxspark.serving.nccl_interface_info#module:fabric.interface).
    type: str
    required: true
  address:
    description: Fabric address of this node.
    type: str
    required: true
  peers:
    description: The other nodes. An entry with the own O(address) is left out.
    type: list
    elements: dict
    required: true
    suboptions:
      node:
        description: Inventory name, for messages.
        type: str
        default: ""
      address:
        description: Its fabric address.
        type: str
        required: true
      peer_mtu:
        description: MTU of its fabric interface; V(0) when it is not known, then it is not compared.
        type: int
        default: 0
      ports:
        description: TCP ports that must be open on its fabric address; on its further rails the first one.
        type: list
        elements: int
        default: [22]
      rails:
        description: Its further rails, as O(rails).
        type: list
        elements: dict
        default: []
        suboptions: &rail
          interface:
            description: Interface of the rail.
            type: str
            required: true
          address:
            description: Its IPv4 address there.
            type: str
            required: true
          subnet:
            description: Subnet of that address in CIDR form; rails of the same subnet belong together.
            type: str
            required: true
          mtu:
            description: MTU of the interface; V(0) when it is not known.
            type: int
            default: 0
  rails:
    description: The rails of this node beside O(interface) that have an address of their own.
    type: list
    elements: dict
    default: []
    suboptions: *rail
  mtu:
    description: MTU of O(interface); V(0) reads it from the kernel.
    type: int
    default: 0
  throughput:
    description:
      - Seconds to send to the next node (in the order of the addresses), on all rails at once, while the one before sends here; V(0) does not.
      - It needs this module to run on all nodes at the same time, O(throughput_port) free, and takes what bandwidth it can get from whatever
        serves meanwhile.
    type: float
    default: 0
  throughput_min:
    description: Rate of one rail in Gb/s below which a warning is given.
    type: float
    default: 20
  throughput_port:
    description: TCP port on which each node receives meanwhile.
    type: int
    default: 20001
  timeout:
    description: Seconds for all checks of one path.
    type: float
    default: 12
  skip:
    description: Checks to leave out.
    type: list
    elements: str
    choices: [mtu, route, neighbour, path_mtu, tcp]
    default: []
"""

EXAMPLES = r"""
- name: Prove the fabric from this node
  dgxspark.serving.fabric_check:
    node: "{{ inventory_hostname }}"
    interface: enp1s0f1np1
    address: 192.168.200.12
    mtu: 9000
    peers:
      - node: spark-2
        address: 192.168.200.13
        peer_mtu: 9000

- name: Prove both halves of the port, and measure them
  dgxspark.serving.fabric_check:
    node: "{{ inventory_hostname }}"
    interface: enp1s0f1np1
    address: 192.168.200.12
    rails:
      - interface: enP2p1s0f1np1
        address: 192.168.201.12
        subnet: 192.168.201.0/24
    peers:
      - node: spark-2
        address: 192.168.200.13
        ports: [22, 6380]
        rails:
          - interface: enP2p1s0f1np1
            address: 192.168.201.13
            subnet: 192.168.201.0/24
    throughput: 3
"""

RETURN = r"""
checks:
  description:
    - One entry for each path and check, with C(node), C(address) and C(interface) (ours), C(check), C(result) (V(ok), V(failed) or V(skipped)), C(ms)
      and C(detail).
  returned: always
  type: list
  elements: dict
  sample:
    - node: spark-2
      address: 192.168.200.13
      interface: enp1s0f1np1
      check: path_mtu
      result: ok
      ms: 204.1
      detail: 8972 bytes of payload pass unfragmented
notes:
  description: What could not be proven, such as the path MTU to a peer that drops ping; and a rail that is slow. Also given as warnings.
  returned: always
  type: list
  elements: str
throughput:
  description: One entry for each rail that was measured, with C(node), C(address), C(interface) and C(gbits).
  returned: with O(throughput)
  type: list
  elements: dict
  sample:
    - node: spark-2
      address: 192.168.200.13
      interface: enp1s0f1np1
      gbits: 92.4
mtu:
  description: The MTU that was used for O(interface).
  returned: always
  type: int
problem:
  description: The first failure, with C(id), C(node), C(stage), C(found), C(expected), C(remedy) and C(details) (C(peer), C(peer_address), C(others)).
  returned: failure
  type: dict
"""

import concurrent.futures
import errno
import os
import shutil
import socket
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _throughput
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_path import (
    CHECKS,
    Ends,
    Net,
    PathCheck,
    Peer,
    Rail,
    bound,
    legs,
    receiver_of,
    slow,
    summary,
)
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

MOST_PATHS_AT_ONCE = 16
IP_RECVERR = 11  # linux/in.h; Python has no name for these two
SO_EE_ORIGIN_ICMP = 2


def tcp_connect(source: str, address: str, port: int, timeout: float) -> bool:
    """Opens and closes one connection from a source address: whether somebody listens there. Raises OSError when nothing came back, or a firewall refused.

    A host without a listener and a firewall that rejects are both "connection refused": only the latter says so by ICMP.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        sock.settimeout(timeout)
        sock.bind((source, 0))
        try:
            sock.connect((address, port))
        except ConnectionRefusedError:
            if refused_by_icmp(sock):
                raise OSError(errno.ECONNREFUSED, "rejected by a firewall") from None
            return False
        return True


def refused_by_icmp(sock: socket.socket) -> bool:
    """Whether the error of this socket came as an ICMP message."""
    sock.setblocking(False)
    try:
        _data, extra, _flags, _address = sock.recvmsg(1, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return False
    return any(level == socket.IPPROTO_IP and kind == IP_RECVERR and data[4] == SO_EE_ORIGIN_ICMP for level, kind, data in extra)


def measure(paths: t.Sequence[tuple[Ends, Peer]], params: dict[str, t.Any], result: dict[str, t.Any]) -> list[str]:
    """Fills ``throughput`` and ``notes`` of the result; returns the warnings. Never fails: it is the path that had to be proven."""
    own = params["address"]
    target = receiver_of(own, [peer.address for ends, peer in paths if ends.address == own])
    node = next((peer.node for ends, peer in paths if ends.address == own and peer.address == target), "")
    ways = [(ends, peer) for ends, peer in paths if peer.address == target or (ends.address != own and peer.node == node)]
    seconds, port = params["throughput"], params["throughput_port"]
    try:
        receiver = _throughput.Receiver({ends.address for ends, _peer in ways}, port)
    except OSError as exc:
        result["notes"].append(f"the throughput could not be measured: port {port} of this node: {exc.strerror or exc}")
        return []
    warnings = []

    def rate(way: tuple[Ends, Peer]) -> float | OSError:
        try:
            return _throughput.send(way[0].address, way[1].address, port, seconds)
        except OSError as exc:
            return exc

    try:
        with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
            rates = list(pool.map(rate, ways))
        for (ends, peer), gbits in zip(ways, rates, strict=True):
            if isinstance(gbits, OSError):
                result["notes"].append(
                    f"the throughput to {peer} could not be measured: {gbits.strerror or gbits} (does this check run on it at the same time?)"
                )
                continue
            result["throughput"].append({"node": peer.node, "address": peer.address, "interface": ends.interface, "gbits": round(gbits, 1)})
            warning = slow(str(peer), ends.interface, gbits, params["throughput_min"])
            warnings += [warning] if warning else []
        receiver.wait(_throughput.STREAMS * len(ways), seconds + 8)
    finally:
        receiver.close()
    return warnings


def interface_mtu(interface: str, node: str) -> int:
    """MTU of an interface as the kernel has it. Raises Problem when there is no such interface."""
    path = os.path.join("/sys/class/net", os.path.basename(interface), "mtu")
    try:
        with open(path, encoding="utf-8") as handle:
            return int(handle.read())
    except (OSError, ValueError):
        raise Problem(
            "fabric-interface",
            found=f"no interface '{interface}'",
            expected="the fabric interface of this node",
            remedy="take it from nccl_interface_info, or correct spark_fabric_interface",
            node=node,
            stage="preflight",
        ) from None


def main() -> None:
    """Entry point."""
    rail = {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "interface": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "subnet": {"type": "str", "required": True},
            "mtu": {"type": "int", "default": 0},
        },
    }
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "interface": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "peers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "node": {"type": "str", "default": ""},
                    "address": {"type": "str", "required": True},
                    "peer_mtu": {"type": "int", "default": 0},
                    "ports": {"type": "list", "elements": "int", "default": [22]},
                    "rails": rail,
                },
            },
            "rails": rail,
            "mtu": {"type": "int", "default": 0},
            "throughput": {"type": "float", "default": 0},
            "throughput_min": {"type": "float", "default": 20},
            "throughput_port": {"type": "int", "default": 20001},
            "timeout": {"type": "float", "default": 12},
            "skip": {"type": "list", "elements": "str", "choices": list(CHECKS), "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    result: dict[str, t.Any] = {"changed": False, "checks": [], "notes": [], "mtu": params["mtu"]}

    def run(argv: t.Sequence[str], seconds: float) -> tuple[int, str, str]:
        if not shutil.which(argv[0]):
            return 127, "", f"{argv[0]} is not installed"
        rc, out, err = module.run_command(["timeout", bound(seconds), *argv], environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        return rc, out, err

    net = Net(run=run, connect=tcp_connect, clock=time.monotonic)
    try:
        result["mtu"] = params["mtu"] or interface_mtu(params["interface"], params["node"])
        ends = Ends(
            node=params["node"],
            interface=params["interface"],
            address=params["address"],
            mtu=result["mtu"],
            timeout=params["timeout"],
            skip=frozenset(params["skip"]),
        )
        peers = [
            Peer(item["node"], item["address"], item["peer_mtu"], tuple(item["ports"]), tuple(Rail(**other) for other in item["rails"]))
            for item in params["peers"]
            if item["address"] != params["address"]
        ]
        paths = legs(ends, [Rail(**item) for item in params["rails"]], peers)
        with concurrent.futures.ThreadPoolExecutor(MOST_PATHS_AT_ONCE) as pool:
            checks = list(pool.map(lambda path: PathCheck(path[0], path[1], net).run(), paths))
        result["checks"] = [row for check in checks for row in check.rows]
        result["notes"] = [note for check in checks for note in check.notes]
        problem = summary(checks)
        if problem:
            raise problem
        if params["throughput"] > 0 and paths:
            result["throughput"] = []
            result["notes"] += measure(paths, params, result)
        for note in result["notes"]:
            module.warn(f"{params['node']}: {note}" if params["node"] else note)
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
