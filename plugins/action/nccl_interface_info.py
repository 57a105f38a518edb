# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A choice that node_info has made in this run is taken as it is: asking the node a second time is a tenth of a run that has nothing to do."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        known = arguments.pop("known", None)
        if known and isinstance(known, dict):
            return {"changed": False, "fabric": known}
        answer: dict[str, t.Any] = self._execute_module(module_args=arguments, task_vars=task_vars)
        return answer
