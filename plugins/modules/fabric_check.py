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
    connection from O(address) to O(tcp_port) is accepted.
  - Peers are checked at the same time. The first failure of a peer ends its checks.
  - Run it on every node, so that both directions are covered.
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
  mtu:
    description: MTU of O(interface); V(0) reads it from the kernel.
    type: int
    default: 0
  tcp_port:
    description: Port that each peer must accept on its fabric address.
    type: int
    default: 22
  timeout:
    description: Seconds for all checks of one peer.
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
"""

RETURN = r"""
checks:
  description:
    - One entry for each peer and check, with C(node), C(address), C(check), C(result) (V(ok), V(failed) or V(skipped)), C(ms) and C(detail).
  returned: always
  type: list
  elements: dict
  sample:
    - node: spark-2
      address: 192.168.200.13
      check: path_mtu
      result: ok
      ms: 204.1
      detail: 8972 bytes of payload pass unfragmented
notes:
  description: What could not be proven, such as the path MTU to a peer that drops ping.
  returned: always
  type: list
  elements: str
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
import os
import shutil
import socket
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_path import CHECKS, Ends, Net, PathCheck, Peer, bound, summary
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

MOST_PEERS_AT_ONCE = 16


def tcp_connect(source: str, address: str, port: int, timeout: float) -> None:
    """Opens and closes one connection from a source address. Raises OSError."""
    with socket.create_connection((address, port), timeout=timeout, source_address=(source, 0)):
        pass


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
                },
            },
            "mtu": {"type": "int", "default": 0},
            "tcp_port": {"type": "int", "default": 22},
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
            tcp_port=params["tcp_port"],
            timeout=params["timeout"],
            skip=frozenset(params["skip"]),
        )
        peers = [Peer(item["node"], item["address"], item["peer_mtu"]) for item in params["peers"] if item["address"] != params["address"]]
        if len(peers) == 1:
            checks = [PathCheck(ends, peers[0], net).run()]
        else:
            with concurrent.futures.ThreadPoolExecutor(MOST_PEERS_AT_ONCE) as pool:
                checks = list(pool.map(lambda peer: PathCheck(ends, peer, net).run(), peers))
        result["checks"] = [row for check in checks for row in check.rows]
        result["notes"] = [note for check in checks for note in check.notes]
        problem = summary(checks)
        if problem:
            raise problem
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
