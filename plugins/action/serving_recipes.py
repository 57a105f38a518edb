# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Lists the recipes of the collection, or shows what becomes of one: from files on the controller, no node is asked."""

from __future__ import annotations

import json
import os
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.action import serving_settings
from ansible_collections.dgxspark.serving.plugins.module_utils import _fit, _recipe
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

display = Display()


def memory_of(hostvars: t.Mapping[str, t.Any], names: t.Sequence[str]) -> int | None:
    """Memory of the smallest node in bytes, from facts that an earlier play (or a fact cache) left; None when a node has none."""
    found = []
    for name in names:
        variables = hostvars[name]
        known = (variables.get("preflight_node") or {}).get("node") or {}
        megabytes = (variables.get("ansible_facts") or {}).get("memtotal_mb")
        size = (known.get("memory") or {}).get("total") or (int(megabytes) << 20 if megabytes else None)
        if not size:
            return None
        found.append(int(size))
    return min(found, default=None)


class ActionModule(ActionBase):
    """Reads files on the controller; no connection is made."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        variables = task_vars or {}
        arguments = self._task.args
        output = str(arguments.get("output", "table"))
        groups = variables.get("groups", {})
        names = [name for group in ("ray_head", "ray_workers") for name in groups.get(group, [])]
        try:
            if arguments.get("recipe"):
                folders = [os.getcwd(), *[str(variables[place]) for place in ("playbook_dir", "inventory_dir") if variables.get(place)]]
                path = serving_settings.recipe_path(str(arguments["recipe"]), folders)
                recipe = serving_settings.read_recipe(path, os.path.basename(path).rpartition(".")[0])
                result["recipe"] = recipe
                text = _recipe.describe(recipe)
                shown: t.Any = recipe
            else:
                found = memory_of(variables.get("hostvars", {}), names)
                memory = found or _fit.SPARK_MEMORY
                rows = _recipe.overview(serving_settings.own_recipes(), len(names), memory)
                result["recipes"] = rows
                text = _recipe.table(rows, len(names), memory, found is None)
                shown = rows
        except Problem as problem:
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        if output == "json":
            display.display(json.dumps(shown, indent=1, sort_keys=True))
        elif output == "table":
            display.display("\n" + text)
        return result
