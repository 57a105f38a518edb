#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: boot_unit
short_description: The systemd unit that brings a node's part of the served model back after a boot
version_added: 0.1.0
author:
  - dgxspark.serving contributors (!UNKNOWN)
description:
  - Manages C(dgxspark-serving.service), its program below C(/usr/local/lib/dgxspark-serving) and what it has to know in
    C(/var/lib/dgxspark-serving/boot.json).
  - The unit starts containers that exist, a few times at most, and never makes any. On the head it waits for exactly the planned workers. C(systemctl
    status dgxspark-serving) tells how far it is and why the service stays down.
  - Systemd is never reloaded, because that can take the GPUs away from running containers (NVIDIA/nvidia-container-toolkit#48). A new unit is found
    without; a changed one counts from the next boot on.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Tells what would change and changes nothing.
  diff_mode:
    support: full
    details:
      - Shows the unit and what it has to know; of the program only that it changes.
  idempotent:
    support: full
options:
  node:
    description:
      - Inventory name of the node, for messages.
    type: str
    default: ""
  state:
    description:
      - V(present) ensures the unit is there, enabled, knows O(gang) and runs.
      - V(absent) ensures nothing of it is left.
    type: str
    choices: [present, absent]
    default: present
  gang:
    description:
      - What the unit has to know, from the plan of M(dgxspark.serving.serving_plan). Needed with O(state=present).
    type: dict
  service:
    description:
      - Name of the service, as in C(spark_service). It ends the names of the unit, of its program's directory and of its file.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Ensure the gang comes back after a boot
  dgxspark.serving.boot_unit:
    gang: "{{ preflight_planned.plan.nodes[inventory_hostname].boot.gang }}"

- name: Ensure nothing starts at boot
  dgxspark.serving.boot_unit:
    state: absent
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
problem:
  description: Id, node, stage, found, expected and remedy of a failure.
  returned: failure
  type: dict
"""

import os
import shutil
import tempfile
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot, _boot_files
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded

PROGRAM = _boot  # travels to the node with this module, and from there into the unit's program


class BootUnit:
    """Brings the files and the unit into a state. ``root`` is put before every path (for tests)."""

    def __init__(self, node: str, run: Run, write: t.Callable[[str, str], None], check: bool, root: str = "", service: str = "") -> None:
        self.paths = _boot_files.Paths(service)
        self.node = node
        self.run = run
        self.write = write
        self.check = check
        self.root = root
        self.actions: list[str] = []
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}

    def fail(self, found: str, remedy: str) -> t.NoReturn:
        raise Problem("boot-unit", node=self.node, stage="boot", found=found, expected="the unit for the boot in place", remedy=remedy)

    def systemctl(self, *arguments: str) -> str:
        rc, out, err = self.run(["systemctl", *arguments], timeout=60)
        if rc and arguments[0] != "is-active":
            self.fail(
                f"systemctl {' '.join(arguments)} ended with {rc}: {err.strip() or out.strip()}",
                f"see systemctl status {self.paths.unit_name}; spark_boot: false does without it",
            )
        return out.strip()

    def read(self, path: str) -> str | None:
        try:
            with open(self.root + path, encoding="utf-8") as handle:
                return handle.read()
        except OSError:
            return None

    def ensure_file(self, path: str, content: str | None) -> bool:
        """True when it had to change; None = it must not exist."""
        present = self.read(path)
        if present == content:
            return False
        if path.startswith(self.paths.program):  # one line for all of it: code is no diff that a person reads
            action = f"write the program in {self.paths.program}"
        else:
            action = f"{'remove' if content is None else 'write'} {path}"
            self.before[path], self.after[path] = present or "", content or ""
        if action not in self.actions:
            self.actions.append(action)
        if self.check:
            return True
        try:
            if content is None:
                os.unlink(self.root + path)
            else:
                os.makedirs(os.path.dirname(self.root + path), mode=0o755, exist_ok=True)
                self.write(self.root + path, content)
        except OSError as exc:
            self.fail(f"{path} cannot be changed: {exc}", "run with become, on a file system that can be written")
        return True

    def ensure_link(self, wanted: bool) -> bool:
        path = self.root + self.paths.wants
        target = os.readlink(path) if os.path.islink(path) else None
        if target == (self.paths.unit if wanted else None):
            return False
        self.actions.append("enable the unit" if wanted else "disable the unit")
        if not self.check:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if target is not None:
                os.unlink(path)
            if wanted:
                os.symlink(self.paths.unit, path)
        return True

    def present(self, program: t.Mapping[str, str], gang: t.Mapping[str, t.Any]) -> None:
        wanted = {**program, self.paths.gang: _boot_files.gang_text(gang)}
        stale = [path for path, content in wanted.items() if self.ensure_file(path, content)]
        self.ensure_link(True)
        running = self.systemctl("is-active", self.paths.unit_name) == "active"
        if stale or not running:
            self.actions.append(f"{'restart' if running else 'start'} the unit")
            if not self.check:
                self.systemctl("restart", self.paths.unit_name)

    def absent(self) -> None:
        if self.systemctl("is-active", self.paths.unit_name) in ("active", "activating", "deactivating"):
            self.actions.append("stop the unit")
            if not self.check:
                self.systemctl("stop", self.paths.unit_name)
        self.ensure_link(False)
        for path in (self.paths.unit, self.paths.gang):
            self.ensure_file(path, None)
        folder = self.root + self.paths.program
        if os.path.isdir(folder):
            self.actions.append(f"remove {self.paths.program}")
            if not self.check:
                shutil.rmtree(folder)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "gang": {"type": "dict"},
            "service": {"type": "str", "default": ""},
        },
        required_if=[("state", "present", ("gang",))],
        supports_check_mode=True,
    )

    def write(path: str, content: str) -> None:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(path), prefix=".", delete=False) as handle:
            handle.write(content)
        os.chmod(handle.name, 0o644)
        module.atomic_move(handle.name, path)

    service = module.params["service"]
    unit = BootUnit(module.params["node"], bounded(module.run_command), write, module.check_mode, service=service)
    try:
        if module.params["state"] == "absent":
            unit.absent()
        else:
            unit.present(_boot_files.program(_boot_files.sources(), service), module.params["gang"])
    except Problem as problem:
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), changed=bool(unit.actions), actions=unit.actions)
    diff = [
        {"before_header": path, "after_header": path, "before": unit.before[path], "after": unit.after[path]} for path in sorted(unit.after)
    ]
    module.exit_json(changed=bool(unit.actions), actions=unit.actions, diff=diff)


if __name__ == "__main__":
    main()
