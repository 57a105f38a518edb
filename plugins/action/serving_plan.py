# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import yaml
from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot_files, _fit, _plan, _snapshot
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem


class ActionModule(ActionBase):
    """Computes the plan on the controller from the facts of all nodes; no connection is made."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        variables = task_vars or {}
        name = variables.get("inventory_hostname", "")
        arguments = self._task.args
        try:
            settings = variables["preflight_inputs"]["settings"]
            members = _plan.members(variables["groups"], variables["hostvars"])
            told: list[str] = []
            if arguments.get("check", True):
                self._refuse(settings, members, name)
                told = self._memory(settings, members, name, variables)
            plan = _plan.serving_plan(settings, members, arguments.get("image_fingerprint") or "", arguments.get("revision") or "")
            texts = _boot_files.sources()
            for member in members:
                plan["nodes"][member["name"]]["boot"] = _boot_files.boot_plan(settings, plan, member["name"], member["node"], texts)
            if plan["head"] == name:
                told = [] if plan["server_in_place"] else told  # what serves has shown that it fits
                told += (
                    _plan.fabric_warnings(members, settings) + _plan.service_warnings(settings, members) if arguments.get("warn") else []
                )
                if told or arguments.get("warn"):
                    result["warnings"] = told
            if arguments.get("show"):
                self._show(result, plan, members, name, arguments["show"])
            if arguments.get("outline"):
                result["outline"] = _plan.outline([m["name"] for m in members], variables["hostvars"])
        except Problem as problem:
            if not problem.node and name not in variables["groups"].get("ray_head", [name]):
                return result  # about the inputs of the gang: the head tells it
            problem.node = problem.node or name
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        result["plan"] = plan
        return result

    def _show(self, result: dict[str, t.Any], plan: dict[str, t.Any], members: list[dict[str, t.Any]], name: str, container: str) -> None:
        """Check mode cannot create the container: the definition itself is the diff."""
        definition = plan["nodes"][name]["containers"].get(container)
        if definition is None:
            return
        shown = json.loads(json.dumps(_plan.container_diff(next(m for m in members if m["name"] == name)["node"], definition)))
        result.update(changed=shown["changed"], actions=shown["actions"])
        if shown["changed"]:
            result["diff"] = {
                "before_header": f"{name}: {container} now",
                "after_header": f"{name}: {container} as planned",
                **{key: yaml.safe_dump(shown[key], sort_keys=True, width=1000) if shown[key] else "" for key in ("before", "after")},
            }

    @staticmethod
    def _memory(settings: dict[str, t.Any], members: list[dict[str, t.Any]], name: str, variables: t.Mapping[str, t.Any]) -> list[str]:
        """The model against the memory of the nodes: what was just downloaded, else the snapshot on the head, else what the recipe says.

        The head tells it.
        """
        head = next((m for m in members if m["head"]), None)
        if head is None or head["name"] != name:
            return []
        snapshot = head["node"].get("snapshot") or {}
        weights = _snapshot.weight_bytes((variables.get("model_download_snapshot") or {}).get("manifest") or [])
        weights = weights or (int(snapshot.get("weights") or 0) if snapshot.get("complete") else 0)
        recipe = variables["preflight_inputs"].get("recipe") or {}
        weights = weights or int((recipe.get("weights_gib") or 0) * _fit.GIB)
        memories = {m["name"]: m["node"]["memory"]["total"] for m in members if m["node"].get("memory")}
        problem, told = _fit.gate(settings, memories, weights, snapshot.get("config"))
        if problem:
            raise problem
        return told

    @staticmethod
    def _refuse(settings: dict[str, t.Any], members: list[dict[str, t.Any]], name: str) -> None:
        """Raises the first problem of this node; what concerns the whole gang is told by the head alone."""
        me = next((m for m in members if m["name"] == name), None)
        problems = _plan.node_problems(settings, me) if me else []
        if me and me["head"]:
            problems += _plan.input_problems(settings, members) + _plan.gang_problems(members, settings.get("gid_index") or "")
            problems += _plan.service_problems(settings, members)
            problems += _plan.model_problems(settings, (me["node"].get("snapshot") or {}).get("config"))
        if problems:
            if not problems[0].node:
                problems[0].node = name
            raise problems[0]
