#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_interface_info
short_description: Finds the fabric interface, its RDMA devices and the environment for NCCL and its neighbours
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Chooses the network interface that carries traffic between the nodes, by evidence. It owns an IPv4 address in O(subnets), is up, has carrier, and the
    kernel's route to every one of O(peers) leaves by it. Names, exclusion lists and the default route are never used.
  - Ties it to its RDMA device and to the second half (twin) of the same physical port through sysfs. A DGX Spark shows each QSFP port as two interfaces and
    two RDMA devices on two PCI domains; both are rails when their port is ACTIVE and has an IPv4 RoCE v2 GID.
  - Returns the environment for every consumer in its own syntax, and every rejected interface with the reason.
  - Fails with one message when no interface qualifies, or more than one does.
  - For a gang whose subnet nobody named, O(survey) lists what each node has, and M(dgxspark.serving.serving_settings) finds what all nodes have in common.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: This module only reads.
  diff_mode:
    support: N/A
    details: This module does not change anything.
  idempotent:
    support: full
    details: This module never reports a change. What it returns changes with cables and addresses.
options:
  subnets:
    description:
      - IPv4 networks of the fabric in CIDR form. The socket interface is looked for in the first one in which this node has a usable interface; ports in the
        others become further rails. In a ring the first one is the network that carries the sockets, and the rails are all in others.
      - Empty takes the interface that has O(address); without that the only fast port (25 Gb/s or RDMA) that has an address, its twin apart. With several it
        fails with the list of them.
    type: list
    elements: str
    default: []
  address:
    description: Fabric address that this node must have. Empty takes the one that is found.
    type: str
    default: ""
  peers:
    description: Fabric addresses of the other nodes. The own address may be among them. No packet is sent, the kernel is asked for the route.
    type: list
    elements: str
    default: []
  interface:
    description:
      - Interface to use instead of looking for one. It must exist, be up with carrier and have an IPv4 address (in O(subnets), when these are given).
      - A plain name. V(^) and V(=) are NCCL's syntax and are refused, since Gloo and TensorPipe do not know them.
    type: str
    default: ""
  hcas:
    description: RDMA devices to use instead of looking for them, as V(name) or V(name:port). Each must be ACTIVE.
    type: list
    elements: str
    default: []
  require_rdma:
    description: Whether to fail when RDMA cannot be used on the chosen interface.
    type: bool
    default: false
  survey:
    description: Choose nothing and only return RV(ports), what could be a fabric or carry its sockets.
    type: bool
    default: false
  wait:
    description:
      - Seconds to look again, once a second, while no interface qualifies or a route is missing. For use after a change of the network, when addresses go
        away for a moment.
    type: int
    default: 0
  known:
    description:
      - The choice, where M(dgxspark.serving.node_info) has made it with the same options in this run; it is returned as it is, and the node is not asked
        again. Empty asks the node.
    type: dict
  sysfs_path:
    description: Where sysfs is mounted.
    type: path
    default: /sys
"""

EXAMPLES = r"""
- name: Find the fabric
  dgxspark.serving.nccl_interface_info:
    node: "{{ inventory_hostname }}"
    subnets: [192.168.200.0/24]
    address: 192.168.200.12
    peers: [192.168.200.12, 192.168.200.13]
    require_rdma: true
  register: network

- name: Show what a container needs to know
  ansible.builtin.debug:
    var: network.fabric.env

- name: Use one port in spite of a second one in the same subnet
  dgxspark.serving.nccl_interface_info:
    subnets: [192.168.200.0/24]
    interface: enp1s0f1np1
"""

RETURN = r"""
fabric:
  description: The choice.
  returned: success
  type: dict
  contains:
    interface:
      description: The socket interface.
      type: str
      returned: success
      sample: enp1s0f1np1
    address:
      description: Address of this node on the fabric.
      type: str
      returned: success
      sample: 192.168.200.12
    prefixlen:
      description: Its prefix length.
      type: int
      returned: success
    subnet:
      description: The fabric subnet it was found in.
      type: str
      returned: success
      sample: 192.168.200.0/24
    mtu:
      description: MTU of the interface.
      type: int
      returned: success
    speed:
      description: Speed in Mb/s; V(null) when the driver does not tell.
      type: int
      returned: success
      sample: 200000
    rails:
      description:
        - Rails in the order of RV(fabric.hcas), each with C(interface), C(address), C(subnet), C(mtu), C(number) (of the physical port), C(hca), C(hca_port),
          C(gid_index) (slot of the RoCE v2 GID of C(address)), C(active) and C(reason).
        - A twin that cannot be used is in the list with C(active=false). Without RDMA the only rail is the socket interface.
      type: list
      elements: dict
      returned: success
    rail_count:
      description: Number of rails that are used.
      type: int
      returned: success
    hcas:
      description: RDMA ports to use, as C(name:port).
      type: list
      elements: str
      returned: success
      sample: ["rocep1s0f1:1", "roceP2p1s0f1:1"]
    rdma:
      description: Whether RDMA is used.
      type: bool
      returned: success
    transport:
      description: V(ib) with RDMA, V(socket) without.
      type: str
      returned: success
    env:
      description:
        - Environment variables for this node. C(NCCL_SOCKET_IFNAME) and C(NCCL_IB_HCA) are exact selectors that start with C(=).
        - C(NCCL_IB_HCA) is there with RDMA only, C(NCCL_IB_DISABLE) is V(0) with and V(1) without. C(NCCL_IB_GID_INDEX) is never set.
      type: dict
      returned: success
      sample:
        NCCL_SOCKET_IFNAME: "=enp1s0f1np1"
        GLOO_SOCKET_IFNAME: enp1s0f1np1
        TP_SOCKET_IFNAME: enp1s0f1np1
        MN_IF_NAME: enp1s0f1np1
        UCX_NET_DEVICES: enp1s0f1np1
        OMPI_MCA_btl_tcp_if_include: enp1s0f1np1
        VLLM_HOST_IP: 192.168.200.12
        NCCL_IB_DISABLE: "0"
        NCCL_IB_HCA: "=rocep1s0f1:1,roceP2p1s0f1:1"
    candidates:
      description:
        - Every interface with C(interface), C(addresses), C(up), C(carrier), C(speed), C(mtu), C(hca), C(chosen) and C(reason).
      type: list
      elements: dict
      returned: success
    warnings:
      description: What works but should be known, such as a single rail or overlapping subnets.
      type: list
      elements: str
      returned: success
ports:
  description:
    - Every interface that could be a fabric or carry its sockets, with C(interface), C(addresses), C(usable) (up with carrier), C(reason), C(fast),
      C(speed), C(mtu), C(hca) and C(port), which is the same text for the two halves of one physical port.
  returned: with O(survey)
  type: list
  elements: dict
problem:
  description: Why it failed, with C(id), C(node), C(stage), C(found), C(expected), C(remedy) and C(details) (candidates, netplan file to write).
  returned: failure
  type: dict
"""

import shutil
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils._fabric import parse_request
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_look import Ports
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem


def runner(module: AnsibleModule) -> t.Callable[[t.Sequence[str]], tuple[int, str, str]]:
    """Bounded commands."""

    def run(argv: t.Sequence[str]) -> tuple[int, str, str]:
        if not shutil.which(argv[0]):
            return 127, "", f"no {argv[0]} command on PATH"
        rc, out, err = module.run_command(["timeout", "5", *argv], environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        return rc, out, err

    return run


PASSING = {"fabric-missing", "fabric-address", "fabric-route", "fabric-interface", "fabric-subnet", "NET-10", "rdma-missing"}


def patiently(
    look: t.Callable[[], dict[str, t.Any]], seconds: float, clock: t.Callable[[], float], sleep: t.Callable[[float], None]
) -> dict[str, t.Any]:
    """``look()``, again while it fails with what may pass after a change of the network (NET-16). Raises its last Problem when the time is over."""
    until = clock() + seconds
    while True:
        try:
            return look()
        except Problem as problem:
            if problem.id not in PASSING or clock() >= until:
                raise
        sleep(1)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "subnets": {"type": "list", "elements": "str", "default": []},
            "address": {"type": "str", "default": ""},
            "peers": {"type": "list", "elements": "str", "default": []},
            "interface": {"type": "str", "default": ""},
            "hcas": {"type": "list", "elements": "str", "default": []},
            "require_rdma": {"type": "bool", "default": False},
            "survey": {"type": "bool", "default": False},
            "wait": {"type": "int", "default": 0},
            "known": {"type": "dict"},  # taken by the action plugin
            "sysfs_path": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    ports = Ports(runner(module), module.params["node"], module.params["sysfs_path"])

    def look() -> dict[str, t.Any]:
        return {"ports": ports.survey(request)} if module.params["survey"] else {"fabric": ports.choose(request)}

    try:
        request = parse_request(module.params)
        result = patiently(look, module.params["wait"], time.monotonic, time.sleep)
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), changed=False)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
