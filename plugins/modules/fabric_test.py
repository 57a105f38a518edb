#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_test
short_description: Measures the links between the nodes
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - The steps of C(playbooks/fabric_test.yml). V(look) says what ports, tools and GPUs a node has. V(plan) says on the controller what can be measured. V(serve)
    starts the server of one measurement as a transient systemd unit with a time limit, V(measure) pings with full-size packets and measures one rail in one
    direction, V(stop) ends a server that is left. V(all_gather) runs one rank of NCCL's all_gather in the serving image. V(report) prints the tables on the
    controller and fails for a figure that is below the expected one.
  - Takes C(ib_write_bw) where both ends have an active RDMA device and the program, else C(iperf3), each from the node or from the serving image. Nothing is
    installed or downloaded. What cannot be measured is said with its reason.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: The same is measured in check mode; nothing is changed.
  diff_mode:
    support: none
    details: Nothing is changed.
  idempotent:
    support: full
    details: It never reports a change.
options:
  step:
    description: What to do.
    type: str
    choices: [look, plan, serve, measure, stop, all_gather, report]
    required: true
  image:
    description: The serving image.
    type: str
    default: ""
  address:
    description: This node's fabric address. For O(step=look).
    type: str
    default: ""
  subnet:
    description: Subnet of the fabric. For O(step=look).
    type: str
    default: ""
  pair:
    description: One of RV(plan), what is measured. For O(step=serve) and O(step=measure).
    type: dict
    default: {}
  seconds:
    description: Seconds of one measurement.
    type: int
    default: 4
  looks:
    description: RV(look) of all nodes, the head first. For O(step=plan), O(step=all_gather) and O(step=report).
    type: list
    elements: dict
    default: []
  rows:
    description: RV(rows) of all measurements. For O(step=report).
    type: list
    elements: dict
    default: []
  answers:
    description: RV(answer) of all ranks. For O(step=report); empty when there were none.
    type: list
    elements: dict
    default: []
  gather_skip:
    description: Why all_gather was not run. For O(step=report).
    type: str
    default: ""
  head:
    description: Fabric address of the head. For O(step=all_gather).
    type: str
    default: ""
  env:
    description: Environment for NCCL on this node. For O(step=all_gather).
    type: dict
    default: {}
  ulimits:
    description: Limits of the container, C(name:soft:hard). For O(step=all_gather).
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Look at the ports
  dgxspark.serving.fabric_test:
    node: "{{ inventory_hostname }}"
    step: look
    address: 192.168.200.12
  register: look

- name: Show them
  dgxspark.serving.fabric_test:
    step: report
    looks: "{{ groups['sparks'] | map('extract', hostvars, ['look', 'look']) }}"
    gather_skip: not asked for
  run_once: true
"""

RETURN = r"""
look:
  description: C(node), C(links), C(tools) (V(node), V(image) or empty for each), C(image), C(gpus) and C(memory) (free, bytes); or C(node) and C(error).
  returned: with O(step=look)
  type: dict
plan:
  description: What can be measured, one after the other.
  returned: with O(step=plan)
  type: list
  elements: dict
rows:
  description: What cannot be measured, with O(step=plan); both results of a measurement, with O(step=measure).
  returned: with O(step=plan) and O(step=measure)
  type: list
  elements: dict
gather_skip:
  description: Why all_gather cannot be run; empty when it can.
  returned: with O(step=plan)
  type: str
head:
  description: Fabric address of the first node.
  returned: with O(step=plan)
  type: str
answer:
  description: What this rank of all_gather measured, as C(node) and C(gbytes), C(skip) or C(error).
  returned: with O(step=all_gather)
  type: dict
problem:
  description: The first figure that is below the expected one.
  returned: failure
  type: dict
"""

import json
import os
import shutil
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_test
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Sysfs, add_sysfs, parse_addr
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded

UNIT = "dgxspark-fabric-test"
TOOLS = ("iperf3", "ib_write_bw")
GATHER_SECONDS = 150


def read_file(path: str) -> str:
    """Text of a small file."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()


class Test:
    """One run of the module on a node."""

    def __init__(self, params: dict[str, t.Any], run: Run, sysfs: Sysfs, which: t.Callable[[str], t.Any] = shutil.which) -> None:
        self.params = params
        self.run = run
        self.sysfs = sysfs
        self.which = which

    def look(self) -> dict[str, t.Any]:
        """Ports, tools, image and GPUs."""
        node = self.params["node"]
        rc, out, err = self.run(["ip", "-j", "-d", "addr"], timeout=10)
        if rc != 0:
            return {"look": {"node": node, "error": f"'ip -j -d addr': {' '.join((err or out).split())[:200]}"}}
        interfaces = parse_addr(out)
        add_sysfs(interfaces, self.sysfs)
        rows = _fabric_test.links(interfaces, read_hcas(self.sysfs), self.params["address"], self.params["subnet"])
        tools = {tool: "node" if self.which(tool) else "" for tool in TOOLS}
        image = (
            bool(self.params["image"])
            and self.run(["docker", "image", "inspect", "-f", "{{.Id}}", self.params["image"]], timeout=20)[0] == 0
        )
        if image and not all(tools.values()):
            argv = ["docker", "run", "--rm", "--network=none", "--pull=never", "--entrypoint=sh", self.params["image"], "-c"]
            dummy, found, dummy2 = self.run([*argv, f"command -v {'; command -v '.join(TOOLS)}"], timeout=60)
            there = {os.path.basename(line.strip()) for line in found.splitlines()}
            tools.update({tool: "image" for tool in TOOLS if not tools[tool] and tool in there})
        rc, gpus, err = self.run(["nvidia-smi", "-L"], timeout=20)
        free = next((int(line.split()[1]) * 1024 for line in read_file("/proc/meminfo").splitlines() if line.startswith("MemAvailable")), 0)
        return {
            "look": {
                "node": node,
                "links": rows,
                "tools": tools,
                "image": image,
                "gpus": sum(line.startswith("GPU ") for line in gpus.splitlines()) if rc == 0 else 0,
                "memory": free,
            }
        }

    def serve(self) -> dict[str, t.Any]:
        """Start the server of a measurement."""
        self.stop()
        pair, seconds = self.params["pair"], self.params["seconds"]
        argv = ["systemd-run", "--quiet", "--no-ask-password", "--collect", f"--unit={UNIT}", f"--property=RuntimeMaxSec={seconds + 30}"]
        self.run([*argv, "--", *_fabric_test.server_argv(pair, seconds, self.params["image"], f"{UNIT}-server")], timeout=20)
        return {}

    def stop(self) -> dict[str, t.Any]:
        """End a server that is left."""
        self.run(["systemctl", "stop", f"{UNIT}.service"], timeout=20)
        return {}

    def measure(self) -> dict[str, t.Any]:
        """Ping, then throughput; a server that is not there yet is asked again."""
        pair, seconds = self.params["pair"], self.params["seconds"]
        size = str(pair["mtu"] - 28)
        argv = ["ping", "-n", "-c", "5", "-i", "0.2", "-W", "2", "-M", "do", "-s", size, "-I", pair["address"], pair["peer"]]
        rows = [_fabric_test.ping_row(pair, *self.run(argv, timeout=20))]
        if not pair["tool"]:
            over = f"rail {pair['rail']} {pair['interface']}"
            rows.append(_fabric_test.row("throughput", pair["source"], pair["target"], over, _fabric_test.NOT_RUN, pair["why"]))
            return {"rows": rows}
        if rows[0]["verdict"] == _fabric_test.FAILED and not rows[0]["measured"].partition("/")[0].strip("0"):
            over = f"rail {pair['rail']} {pair['interface']}"
            rows.append(_fabric_test.row(pair["tool"], pair["source"], pair["target"], over, _fabric_test.NOT_RUN, "no answer to ping"))
            return {"rows": rows}
        argv = _fabric_test.client_argv(pair, seconds, self.params["image"], f"{UNIT}-client")
        for dummy in range(5):
            begin = time.monotonic()
            rc, out, err = self.run(argv, timeout=seconds + 25)
            if rc == 0 or time.monotonic() - begin > seconds:
                break
            time.sleep(1)
        return {"rows": [*rows, _fabric_test.rate_row(pair, rc, out, err)]}

    def all_gather(self) -> dict[str, t.Any]:
        """One rank."""
        looks = self.params["looks"]
        nodes = [look["node"] for look in looks]
        rdma = any(link["rdma_state"] == "ACTIVE" for look in looks if look["node"] == self.params["node"] for link in look["links"])
        name = f"{UNIT}-gather"
        argv = _fabric_test.gather_argv(
            self.params["image"],
            name,
            nodes.index(self.params["node"]),
            len(nodes),
            self.params["head"],
            self.params["env"],
            rdma,
            self.params["ulimits"],
        )
        rc, out, err = self.run(argv, timeout=GATHER_SECONDS, data=_fabric_test.GATHER_PROGRAM)
        if rc != 0:
            self.run(["docker", "rm", "-f", name], timeout=30)
        return {"answer": _fabric_test.gather_answer(self.params["node"], rc, out, err)}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "step": {
                "type": "str",
                "required": True,
                "choices": ["look", "plan", "serve", "measure", "stop", "all_gather", "report"],
            },
            "image": {"type": "str", "default": ""},
            "address": {"type": "str", "default": ""},
            "subnet": {"type": "str", "default": ""},
            "pair": {"type": "dict", "default": {}},
            "seconds": {"type": "int", "default": 4},
            "looks": {"type": "list", "elements": "dict", "default": []},
            "rows": {"type": "list", "elements": "dict", "default": []},
            "answers": {"type": "list", "elements": "dict", "default": []},
            "gather_skip": {"type": "str", "default": ""},
            "head": {"type": "str", "default": ""},
            "env": {"type": "dict", "default": {}},
            "ulimits": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    step = module.params["step"]
    if step in ("plan", "report"):
        module.fail_json(msg=f"step {step} is the action plugin's: it runs on the controller", changed=False)
    test = Test(module.params, bounded(module.run_command), Sysfs("/sys", read_file, os.listdir, os.path.realpath))
    module.exit_json(changed=False, **json.loads(json.dumps(getattr(test, step)())))


if __name__ == "__main__":
    main()
