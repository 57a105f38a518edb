#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: transport_info
short_description: Say which way the ranks of a running server really talk
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - For each rank of this node, reads the log that NCCL wrote when it made its connections (the plan sets C(NCCL_DEBUG=INFO) and a file for each process in
    the containers' shared C(/tmp)) and says the transport, the devices and the rails that its channels go over.
  - A rank without NCCL (Gloo on a CPU) is told by the TCP connections that its process holds to other nodes, leaving Ray's out.
  - Ask after the server has answered. NCCL connects at the first collective, not before.
  - Fails when one of O(containers) has ended, when O(require_rdma) is not met, when the ranks' traffic is not on the fabric, and when ranks differ in
    their NCCL version.
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
    details: This module never reports a change.
options:
  containers:
    description: Containers in which ranks of this node run. Those that are not there are left out.
    type: list
    elements: str
    default: [spark-ray, spark-vllm]
  ranks:
    description: How many ranks this node must have.
    type: int
    default: 1
  tensor_parallel:
    description: Tensor parallel size. With O(pipeline_parallel) it gives a rank its number where its log does not say it.
    type: int
    default: 1
  pipeline_parallel:
    description: Pipeline parallel size.
    type: int
    default: 1
  fabric:
    description: Of this node, as RV(dgxspark.serving.nccl_interface_info#module:fabric). Gives the rails that the devices belong to.
    type: dict
    default: {}
  ray_ports:
    description: Ports of Ray's own services. Connections on them are Ray's.
    type: list
    elements: int
    default: []
  ray_worker_ports:
    description: First and last port of Ray's workers.
    type: list
    elements: int
    default: [20002, 20999]
  require_rdma:
    description: Fail when a rank uses another transport than RDMA.
    type: bool
    default: false
  prove:
    description:
      - With O(require_rdma), fail also when the transport of a rank is not known. Off where the user has other settings of NCCL's log in mind than those
        that this module reads; then it is a warning.
    type: bool
    default: true
  others:
    description: RV(ranks) of the other nodes. They are compared with this node's, and are part of the result.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Ask the ranks of this node
  dgxspark.serving.transport_info:
    node: "{{ inventory_hostname }}"
    fabric: "{{ preflight_fabric.fabric }}"
    require_rdma: true
  become: true
  register: transport
"""

RETURN = r"""
transport:
  description:
    - What all ranks use, such as V(ib), V(socket) (NCCL over TCP), V(tcp) (Gloo) or V(unknown). V(mixed) when they differ.
  returned: always
  type: str
ranks:
  description: One entry for each rank, O(others) included, in the order of the ranks.
  returned: always
  type: list
  elements: dict
  contains:
    node:
      description: Its node.
      type: str
    rank:
      description: Its number; V(none) when nothing says it.
      type: int
    backend:
      description: C(nccl), C(gloo), or V(unknown).
      type: str
    transport:
      description: As RV(transport).
      type: str
    network:
      description: NCCL's own word for it, such as C(IB), C(IBext_v10) or C(Socket).
      type: str
    devices:
      description: How many channels (of NCCL) or connections (without it) go over each device; RDMA devices as C(name:port), else interfaces.
      type: dict
    rails:
      description: Interfaces of the rails that carry it.
      type: list
      elements: str
    version:
      description: Version of NCCL.
      type: str
    reason:
      description: What NCCL says about RDMA that it does not use, or its last warning.
      type: str
    evidence:
      description: From what this is known.
      type: str
    text:
      description: All of it in a few words.
      type: str
  sample:
    - node: spark-1
      rank: 0
      backend: nccl
      transport: ib
      network: IB
      devices: {"rocep1s0f1:1": 16, "roceP2p1s0f1:1": 16}
      rails: [enp1s0f1np1, enP2p1s0f1np1]
      version: 2.28.9+cuda13.0
      reason: ""
      evidence: "NCCL's log: 32 channels over rocep1s0f1:1, roceP2p1s0f1:1"
      text: "rank 0: nccl over ib, rocep1s0f1:1 and roceP2p1s0f1:1 (2 of 2 rails)"
notes:
  description: What is worth knowing, such as a rail that carries nothing. Also given as warnings.
  returned: always
  type: list
  elements: str
problem:
  description: What must not serve so, with C(id), C(node), C(stage), C(found), C(expected), C(remedy) and C(details) (C(ranks)).
  returned: failure
  type: dict
"""

import glob
import json
import os
import re
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _transport
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError, exit_text
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded

MOST_OF_A_LOG = 4 << 20  # bytes; what is said at the start of a rank is at the start of its log


class Node:
    """What this node knows of the processes in its containers. ``root`` is where /proc is."""

    def __init__(self, run: Run, root: str = "/proc") -> None:
        self.run = run
        self.root = root

    def text(self, *parts: str) -> str:
        """The beginning of a file below /proc; "" when it cannot be read (any more)."""
        try:
            with open(os.path.join(self.root, *parts), encoding="utf-8", errors="replace") as handle:
                return handle.read(MOST_OF_A_LOG)
        except OSError:
            return ""

    def namespace(self, pid: int) -> str:
        try:
            return os.readlink(os.path.join(self.root, str(pid), "ns", "pid"))
        except OSError:
            return ""

    def processes(self, inits: t.Iterable[int]) -> list[int]:
        """Processes of the same PID namespaces as these first processes of containers."""
        wanted = {self.namespace(pid) for pid in inits} - {""}
        numbers = [int(name) for name in os.listdir(self.root) if name.isdigit()]
        return sorted(pid for pid in numbers if self.namespace(pid) in wanted)

    def pid_inside(self, pid: int) -> int:
        """The process's number in its own container."""
        found = re.search(r"^NSpid:\s.*?(\d+)\s*$", self.text(str(pid), "status"), re.MULTILINE)
        return int(found.group(1)) if found else pid

    def title(self, pid: int) -> str:
        return self.text(str(pid), "cmdline").replace("\0", " ").strip()

    def first(self, pid: int, pattern: str, inside: int) -> str | None:
        """Content of the newest file of this name in the process's own file system; None when there is none."""
        found = glob.glob(os.path.join(self.root, str(pid), "root", pattern.format(pid=inside)))
        return self.text(max(found, key=os.path.getmtime)) if found else None

    def connections(self, pid: int) -> list[dict[str, t.Any]]:
        """The established TCP connections of one process."""
        folder = os.path.join(self.root, str(pid), "fd")
        inodes = set()
        try:
            for name in os.listdir(folder):
                target = os.readlink(os.path.join(folder, name))
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            pass
        return [item for table in ("tcp", "tcp6") for item in _transport.parse_tcp(self.text(str(pid), "net", table), inodes)]

    def names(self) -> dict[str, str]:
        """The interface of each IPv4 address of this node."""
        rc, out, _err = self.run(["ip", "-j", "-4", "addr"], timeout=5)
        try:
            rows = json.loads(out or "[]") if rc == 0 else []
        except ValueError:
            rows = []
        return {info["local"]: row["ifname"] for row in rows for info in row.get("addr_info", []) if "local" in info}

    def ranks(
        self,
        inits: t.Iterable[int],
        rails: t.Sequence[t.Mapping[str, t.Any]],
        ray: t.Callable[[int], bool],
        sizes: tuple[int, int] = (1, 1),
    ) -> list[dict[str, t.Any]]:
        """A record for each process that is a rank."""
        names = self.names()
        result = []
        for pid in self.processes(inits):
            inside = self.pid_inside(pid)
            title = self.title(pid)
            named = bool(_transport.RANK_PROCESS.match(title))
            nccl = self.first(pid, _transport.NCCL_FILES, inside)
            if not named and (nccl is None or _transport.parse_nccl(nccl)["nranks"] < 2):
                continue
            worker = self.first(pid, _transport.WORKER_FILES, inside) or ""
            told = _transport.parse_worker(worker, title, self.text(str(pid), "maps"), sizes)
            connections = _transport.outside(self.connections(pid), set(names), ray)
            result.append(_transport.rank_record(inside, nccl, told, connections, names, rails))
        return result


def look(params: dict[str, t.Any], docker: Docker, node: Node, result: dict[str, t.Any]) -> list[str]:
    """Fills the result; returns the warnings. Raises Problem."""
    try:
        found = docker.inspect(params["containers"])
    except DockerError as exc:
        raise Problem(
            "DOC-02",
            node=params["node"],
            stage="transport",
            found=f"docker: {exc}",
            expected="an answer of docker",
            remedy="see systemctl status docker",
        ) from exc
    for name, container in found.items():
        if not container["running"]:  # nothing else would notice: the answers came just before
            raise Problem(
                "rank-ended",
                node=params["node"],
                stage="transport",
                found=f"container {name} {exit_text(container)} after the first answers of the server",
                expected="the ranks that gave them to live",
                remedy=f"read docker logs {name} on this node, and dmesg if it was killed; then run again",
            )
    first, last = params["ray_worker_ports"][0], params["ray_worker_ports"][-1]
    fabric = params["fabric"]
    rails = [rail for rail in fabric.get("rails", []) if rail.get("active")]
    inits = [container["pid"] for container in found.values()]
    sizes = (params["tensor_parallel"], params["pipeline_parallel"])
    ranks = node.ranks(inits, rails, lambda port: port in params["ray_ports"] or first <= port <= last, sizes)
    ranks = [{"node": params["node"], **rank, "text": _transport.describe(rank, len(rails))} for rank in ranks]
    everyone = sorted([*ranks, *params["others"]], key=lambda rank: (rank["rank"] is None, rank["rank"] or 0, rank["node"]))
    ways = sorted({rank["transport"] for rank in everyone})
    result.update(ranks=everyone, transport=ways[0] if len(ways) == 1 else "mixed" if ways else "unknown")
    return _transport.verdict(ranks, params["node"], fabric, params["ranks"], params["require_rdma"], params["prove"], params["others"])


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "containers": {"type": "list", "elements": "str", "default": ["spark-ray", "spark-vllm"]},
            "ranks": {"type": "int", "default": 1},
            "tensor_parallel": {"type": "int", "default": 1},
            "pipeline_parallel": {"type": "int", "default": 1},
            "fabric": {"type": "dict", "default": {}},
            "ray_ports": {"type": "list", "elements": "int", "default": []},
            "ray_worker_ports": {"type": "list", "elements": "int", "default": [20002, 20999]},
            "require_rdma": {"type": "bool", "default": False},
            "prove": {"type": "bool", "default": True},
            "others": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    result: dict[str, t.Any] = {"changed": False, "transport": "unknown", "ranks": [], "notes": []}
    run = bounded(module.run_command)
    try:
        result["notes"] = look(module.params, Docker(run), Node(run), result)
        for note in result["notes"]:
            module.warn(note)
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
