#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_room
short_description: Ensures that the memory which a server asks for is free, right before it is launched
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Compares C(MemFree) and C(MemAvailable) of the node with what the server will ask for. Where only the page cache is in the way, it is dropped
    (C(sync), then 3 to C(/proc/sys/vm/drop_caches)). On unified memory the page cache is GPU memory, and builds of vLLM count it as used.
  - What a stopped process held may come back some seconds later, so memory that is missing is waited for.
  - Nothing is killed. What still holds memory is named.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: partial
    details: Tells whether the page cache would be dropped by the memory of now. What the services that still run will give back is not known, so
      missing memory is no failure.
  diff_mode:
    support: full
    details: Free and available memory before and after.
  idempotent:
    support: full
    details: Reports a change only when the page cache was dropped, which is when it is in the way.
options:
  need:
    description: Bytes that must be free.
    type: int
    required: true
  short:
    description: What missing memory is. V(ignore) does not look at it.
    type: str
    choices: [error, warn, ignore]
    default: error
  cache:
    description:
      - What a page cache in the way is. V(warn) drops it, V(ignore) leaves it alone, V(error) fails.
    type: str
    choices: [error, warn, ignore]
    default: warn
  wait:
    description: Seconds that missing memory is waited for.
    type: float
    default: 20
  proc_path:
    description: Where the proc file system is, for tests.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Ensure 97 GiB are free
  dgxspark.serving.memory_room:
    node: "{{ inventory_hostname }}"
    need: "{{ 97 * 1024 ** 3 }}"
  become: true
"""

RETURN = r"""
memory:
  description: Bytes C(free) and C(available), as C(before) and C(after).
  returned: always
  type: dict
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""

import os
import re
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils._host import unaccounted
from ansible_collections.dgxspark.serving.plugins.module_utils._memory import gib, parse, room, top_users
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

INTERVAL = 0.5
SHOWN = 3
LOST = 1 << 30  # bytes below which a driver's own need is no news


class Proc:
    """The node's memory as /proc shows it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, name: str) -> str:
        """Text of a file below it; "" for a process that is gone."""
        try:
            with open(os.path.join(self.path, name), encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except OSError:
            return ""

    def memory(self) -> dict[str, int]:
        """Bytes, total, free and available."""
        return parse(self.read("meminfo"))

    def users(self) -> list[str]:
        """Who holds the most."""
        statuses = [self.read(f"{name}/status") for name in os.listdir(self.path) if re.fullmatch(r"\d+", name)]
        return top_users(statuses, SHOWN)

    def drop(self) -> None:
        """Gives the page cache back. Raises OSError."""
        os.sync()
        with open(os.path.join(self.path, "sys/vm/drop_caches"), "w", encoding="ascii") as handle:
            handle.write("3\n")


def settled(proc: Proc, need: int, wait: float) -> dict[str, int]:
    """The memory, as soon as there is enough of it or the time is over."""
    end = time.monotonic() + wait
    memory = proc.memory()
    while room(memory, need) == "short" and time.monotonic() < end:
        time.sleep(INTERVAL)
        memory = proc.memory()
    return memory


def short(node: str, memory: t.Mapping[str, int], need: int, users: list[str], lost: int) -> Problem:
    """Memory that is really missing. ``lost`` bytes are nobody's in the kernel's counters."""
    held = f"; {gib(lost)} are on the GPU or were leaked there, no counter of the kernel has them" if lost >= LOST else ""
    return Problem(
        "memory-short",
        node=node,
        stage="memory",
        found=f"{gib(memory['available'])} of memory available of {gib(memory['total'])}, and a server that asks for {gib(need)}; the most is held "
        f"by {', '.join(users) or 'nothing that shows'}{held}",
        expected="as much available memory as vLLM asks for",
        remedy="stop what holds it, lower spark_gpu_memory_utilization, or reboot the node if nothing holds it: what a process that died leaked on "
        "the GPU comes back only so (rule memory_available)",
    )


def cached(node: str, memory: t.Mapping[str, int], need: int, why: str) -> Problem:
    """Memory that the page cache holds and that may not be, or was not, taken from it."""
    return Problem(
        "MEM-01",
        node=node,
        stage="memory",
        found=f"{gib(memory['free'])} of memory free and {gib(memory['available'])} available, and a server that asks for {gib(need)}: the page "
        f"cache is in the way{why}",
        expected="free memory, because builds of vLLM count the page cache as used",
        remedy="sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches', or let the play do it with the rule page_cache on warn",
    )


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "need": {"type": "int", "required": True},
            "short": {"type": "str", "choices": ["error", "warn", "ignore"], "default": "error"},
            "cache": {"type": "str", "choices": ["error", "warn", "ignore"], "default": "warn"},
            "wait": {"type": "float", "default": 20},
            "proc_path": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    node, need = module.params["node"], module.params["need"]
    proc = Proc(module.params["proc_path"])
    waits = not module.check_mode and module.params["short"] != "ignore"
    before = settled(proc, need, module.params["wait"] if waits else 0)
    result: dict[str, t.Any] = {"changed": False, "actions": [], "memory": {"before": before, "after": before}}
    verdict = room(before, need)

    def tell(problem: Problem, level: str) -> None:
        if level == "error" and not module.check_mode:
            module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)
        elif level != "ignore":
            module.warn(problem.msg)

    if verdict == "short" and not module.check_mode and module.params["short"] != "ignore":
        tell(short(node, before, need, proc.users(), unaccounted(proc.read("meminfo"))), module.params["short"])
    if verdict == "cache" and module.params["cache"] == "error":
        tell(cached(node, before, need, ""), "error")
    elif verdict == "cache" and module.params["cache"] == "warn":
        result["changed"] = True
        verb = "would drop" if module.check_mode else "dropped"
        result["actions"] = [f"{verb} the page cache: {gib(before['free'])} are free and the server asks for {gib(need)}"]
        if not module.check_mode:
            try:
                proc.drop()
            except OSError as exc:
                result.update(changed=False, actions=[])
                tell(cached(node, before, need, f", and cannot be dropped ({exc.strerror or exc})"), "warn")
            result["memory"]["after"] = proc.memory()
        if module._diff and result["changed"]:
            result["diff"] = {
                "before": f"free {gib(before['free'])}, available {gib(before['available'])}\n",
                "after": "no page cache\n"
                if module.check_mode
                else "free {free}, available {available}\n".format(**{k: gib(v) for k, v in result["memory"]["after"].items()}),
            }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
