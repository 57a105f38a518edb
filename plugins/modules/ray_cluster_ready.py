#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ray_cluster_ready
short_description: Wait until exactly the planned nodes are alive in a Ray cluster
version_added: 0.1.0
description:
  - Reads Ray's node table from inside the Ray container of the head and compares it with the plan. Every address in O(nodes) must be
    alive under exactly that
    address, with its GPUs, and nobody else.
  - On the other nodes of the same task, O(watch=true) watches the container of that node meanwhile; its end ends the wait of all within seconds, with
    the cause from its own log.
  - Fails at once when the container is not running, when a node that is not planned is in the cluster, or when a node offers another
    number of GPUs.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Asks once, does not wait, and returns RV(ready) instead of failing.
  diff_mode:
    support: none
    details:
      - Changes nothing.
  idempotent:
    support: full
    details:
      - Changes nothing.
options:
  container:
    description:
      - Name of the Ray container on the head.
    type: str
    default: spark-ray
  nodes:
    description:
      - The fabric addresses (IPv4) that must be alive in Ray.
    type: list
    elements: str
    required: true
  address:
    description:
      - Fabric address of the head.
    type: str
    required: true
  port:
    description:
      - Port of the Ray head.
    type: int
    default: 6379
  gpus:
    description:
      - GPUs of the whole cluster; V(0) means O(gpus_per_node) times the number of nodes.
    type: int
    default: 0
  gpus_per_node:
    description:
      - GPUs that each node must offer; V(0) does not look at single nodes.
    type: int
    default: 1
  require_idle:
    description:
      - Whether every GPU must be free.
    type: bool
    default: false
  timeout:
    description:
      - Seconds to wait.
    type: float
    default: 120
  settle:
    description:
      - Seconds for which the cluster must have been complete. A cluster that is complete for longer by Ray's own record is not looked
        at twice.
    type: float
    default: 2
  interval:
    description:
      - Seconds between two looks.
    type: float
    default: 0.5
  watch:
    description:
      - Ask nobody. Watch O(container) of this node until the head's part of the task is over, and fail when it ends. For the workers.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Wait for both Sparks
  dgxspark.serving.ray_cluster_ready:
    container: spark-ray
    address: 192.168.200.12
    nodes: [192.168.200.12, 192.168.200.13]
    gpus_per_node: 1
    timeout: 120
"""

RETURN = r"""
ready:
  description: Whether the cluster is as planned. Only in check mode, and with O(watch=true), it can be false without a failure.
  returned: always
  type: bool
nodes:
  description: The alive nodes.
  returned: always
  type: list
  elements: dict
  contains:
    address:
      description: Address under which Ray knows the node.
      type: str
    hostname:
      description: Its host name.
      type: str
    gpus:
      description: GPUs it offers.
      type: float
    gpus_free:
      description: GPUs that nothing has reserved.
      type: float
missing:
  description: Planned addresses that are not alive.
  returned: always
  type: list
  elements: str
unexpected:
  description: Alive addresses that are not planned.
  returned: always
  type: list
  elements: str
gpus:
  description: GPUs of the alive nodes.
  returned: always
  type: float
gpus_free:
  description: GPUs that nothing has reserved.
  returned: always
  type: float
reasons:
  description: What is not as planned, in sentences.
  returned: always
  type: list
  elements: str
ray_version:
  description: Version of Ray in the container.
  returned: when it could be asked
  type: str
python_version:
  description: Version of Python in the container.
  returned: when it could be asked
  type: str
session:
  description: Name of the Ray session.
  returned: when it could be asked
  type: str
elapsed:
  description: Seconds of the wait.
  returned: always
  type: float
problem:
  description: Id, node, stage, found, expected and remedy of a failure.
  returned: failure
  type: dict
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _diagnosis, _ray
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError, exit_text
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded, clock

PROBE = 15.0


class Cluster:
    """Asks the container; what it answers is judged in module_utils."""

    def __init__(self, params: dict[str, t.Any], run: Run) -> None:
        self.p = params
        self.run = run
        self.docker = Docker(run)
        self.table: dict[str, t.Any] = {"nodes": [], "errors": []}
        self.state = _ray.cluster_state(self.table, params)
        self.identity: tuple[str, str] | None = None

    def look_at_container(self) -> None:
        """Raise when the container does not run, or is not the one of the first look."""
        name = self.p["container"]
        container = self.docker.inspect([name]).get(name)
        if container is None:
            self.fail("RAY-13", f"container {name} is not there", "start it (--tags ray)")
        identity = (container["id"], container["started_at"])
        changed = self.identity is not None and identity != self.identity
        if container["running"] and not changed:
            self.identity = identity
            return
        log = self.docker.log_text(name, tail=200, timestamps=False)
        cause = _diagnosis.best(_diagnosis.scan(log.splitlines()))
        what = f"container {name} {'was started again' if changed else exit_text(container)}"
        if cause:
            self.fail(cause["id"], f"{what}: {_diagnosis.sentence(cause)}", cause["remedy"], cause=cause)
        self.fail(
            "RAY-13",
            f"{what}; last lines: {_diagnosis.last_lines(log) or 'the log is empty'}",
            f"read docker logs {name}",
            exit_code=container["exit_code"],
        )

    def fail(self, ident: str, found: str, remedy: str, **details: t.Any) -> t.NoReturn:
        expected = "its Ray to go on running" if self.p["watch"] else "a running Ray head"
        raise Problem(ident, node=self.p["node"], stage="ray", found=found, expected=expected, remedy=remedy, **details)

    def watch(self) -> None:
        """Raise when the container ends. Docker waits for us, so this costs nothing meanwhile."""
        self.look_at_container()
        self.run([self.docker.command, "wait", self.p["container"]], timeout=self.p["timeout"])
        self.look_at_container()

    def look(self, left: float) -> None:
        """Ask Ray once."""
        limit = max(2.0, min(PROBE, left))
        address = f"{self.p['address']}:{self.p['port']}"
        argv = ["docker", "exec", "-i", self.p["container"], "python3", "-", address, f"{limit:.0f}"]
        rc, out, err = self.run(argv, timeout=limit + 5, data=_ray.PROGRAM)
        self.table = _ray.parse(rc, out, err)
        self.state = _ray.cluster_state(self.table, self.p)

    def wait(self) -> float:
        """Seconds until the cluster was as planned; raises Problem."""
        good_since: float | None = None
        bad_since: float | None = None
        elapsed = 0.0
        for elapsed in clock(self.p["timeout"], self.p["interval"]):
            self.look_at_container()
            self.look(self.p["timeout"] - elapsed)
            if self.state["ready"]:
                good_since = elapsed if good_since is None else good_since
                if _ray.is_stable(self.state, self.p["settle"], time.time()) or elapsed - good_since >= self.p["settle"]:
                    return elapsed
            else:
                good_since = None
            if _ray.is_hopeless(self.state, self.table):
                bad_since = elapsed if bad_since is None else bad_since
                if elapsed - bad_since >= self.p["settle"]:
                    break
            else:
                bad_since = None
        raise _ray.problem(self.state, self.table, self.p, self.p["node"], elapsed)

    def result(self) -> dict[str, t.Any]:
        keys = ("ready", "nodes", "missing", "unexpected", "gpus", "gpus_free", "reasons")
        result = {key: self.state[key] for key in keys}
        names = {"ray": "ray_version", "python": "python_version", "session": "session"}
        result.update({name: self.table[key] for key, name in names.items() if self.table.get(key)})
        return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "default": "spark-ray"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "default": 6379},
            "gpus": {"type": "int", "default": 0},
            "gpus_per_node": {"type": "int", "default": 1},
            "require_idle": {"type": "bool", "default": False},
            "timeout": {"type": "float", "default": 120},
            "settle": {"type": "float", "default": 2},
            "interval": {"type": "float", "default": 0.5},
            "watch": {"type": "bool", "default": False},
            "node": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    started = time.monotonic()
    result: dict[str, t.Any] = {"changed": False}
    cluster = Cluster(module.params, bounded(module.run_command))
    try:
        if module.check_mode:
            # One slow answer of a busy node must not pass for a broken cluster: callers replace it.
            for _elapsed in clock(3 * PROBE, 2.0):
                cluster.look_at_container()
                cluster.look(PROBE)
                if cluster.table.get("nodes"):
                    break
        elif module.params["watch"]:
            cluster.watch()
        else:
            cluster.wait()
    except (Problem, DockerError) as exc:
        problem = exc if isinstance(exc, Problem) else _docker_problem(exc, module.params["node"])
        result.update(cluster.result(), ready=False, elapsed=round(time.monotonic() - started, 2))
        if module.check_mode and isinstance(exc, Problem):
            result["reasons"] = [problem.msg]
            module.exit_json(problem=problem.as_dict(), **result)
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)
    result.update(cluster.result(), elapsed=round(time.monotonic() - started, 2))
    module.exit_json(**result)


def _docker_problem(exc: DockerError, node: str) -> Problem:
    return Problem(
        "DOC-02", node=node, stage="ray", found=f"docker: {exc}", expected="an answer of docker", remedy="see systemctl status docker"
    )


if __name__ == "__main__":
    main()
