# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the module on the node, or with C(rows) shows the table of all nodes."""

from __future__ import annotations

import json
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _models

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        rows = arguments.pop("rows", None)
        output = str(arguments.pop("output", "table"))
        arguments["served"] = sorted({*(arguments.get("served") or []), *_models.served(arguments.pop("nodes", None) or [])})
        if rows is None:
            return self._execute_module(module_args=arguments, task_vars=task_vars)
        result["changed"] = False
        if output == "json":
            display.display(json.dumps(rows, indent=1, sort_keys=True))
        elif output == "table":
            display.display("\n" + _models.table(rows, arguments["served"], arguments.get("keep") or []))
        return result
