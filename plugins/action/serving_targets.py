# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.module_utils import _monitoring


class ActionModule(ActionBase):
    """Puts the targets of all nodes together on the controller; no connection is made."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = self._task.args
        groups, hostvars = variables["groups"], variables["hostvars"]
        heads = groups.get("ray_head", [])
        nodes = [
            {
                "node": name,
                "head": name in heads,
                "address": hostvars[name].get("monitoring_address") or hostvars[name].get("ansible_host") or name,
            }
            for name in [*heads, *groups.get("ray_workers", [])]
        ]
        ports = {job: int(arguments[f"{job}_port"]) for job in _monitoring.JOBS}
        targets, silent = _monitoring.targets(nodes, arguments.get("facts") or [], ports)
        return {**result, "changed": False, "targets": targets, "silent": silent}
