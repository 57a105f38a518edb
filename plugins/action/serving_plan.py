# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import yaml
from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot_files, _fit, _gate, _plan, _snapshot
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem


class _Refused(Exception):
    """Everything that was found, and the one node that tells it."""

    def __init__(self, found: list[_gate.Finding], names: list[str]) -> None:
        super().__init__(_gate.message(found))
        self.teller = _gate.teller(found, names)
        self.problem = _gate.errors(found)[0].problem
        self.findings = [finding.as_dict() for finding in found]


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
                plan, told = self._judged(settings, members, name, arguments, variables)
            else:
                plan = self._plan(settings, members, arguments)
            if plan["head"] == name:
                told = told + (_plan.fabric_warnings(members, settings) if arguments.get("warn") else [])
                if told or arguments.get("warn"):
                    result["warnings"] = told
            if arguments.get("show"):
                self._show(result, plan, members, name, arguments["show"])
            if arguments.get("outline"):
                result["outline"] = _plan.outline([m["name"] for m in members], variables["hostvars"])
        except _Refused as refused:
            if refused.teller != name:
                return result  # one node tells what was found on all of them
            result.update(failed=True, msg=str(refused), problem=refused.problem.as_dict(), findings=refused.findings)
            return result
        except Problem as problem:
            if not problem.node and name not in variables["groups"].get("ray_head", [name]):
                return result  # about the inputs of the gang: the head tells it
            problem.node = problem.node or name
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        result["plan"] = plan
        return result

    @staticmethod
    def _plan(settings: dict[str, t.Any], members: list[dict[str, t.Any]], arguments: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        plan = _plan.serving_plan(settings, members, arguments.get("image_fingerprint") or "", arguments.get("revision") or "")
        texts = _boot_files.sources()
        for member in members:
            own = plan["nodes"][member["name"]]
            own["boot"] = _boot_files.boot_plan(settings, plan, member["name"], member["node"], texts)
            own["memory"] = _gate.launch(settings, member)
        return plan

    def _judged(
        self,
        settings: dict[str, t.Any],
        members: list[dict[str, t.Any]],
        name: str,
        arguments: t.Mapping[str, t.Any],
        variables: t.Mapping[str, t.Any],
    ) -> tuple[dict[str, t.Any], list[str]]:
        """The plan, and what is worth a warning. Raises _Refused with everything that any node must not be tried with."""
        head = next((m["name"] for m in members if m["head"]), members[0]["name"])
        plan: dict[str, t.Any] = {}
        problems = _plan.input_problems(settings, members)
        if not problems:
            try:
                plan = self._plan(settings, members, arguments)
            except Problem as problem:
                problems = [problem]
        weights, config = self._model(members, variables)
        in_place = bool(plan.get("server_in_place")) and not arguments.get("launch")
        found = _gate.judge(_gate.Look(settings, members, weights, config, in_place))
        found = [_gate.Finding("", _gate.ERROR, True, each) for each in problems] + found
        for finding in found:
            finding.problem.node = finding.problem.node or head
        if _gate.errors(found):
            names = [head, *(m["name"] for m in members if m["name"] != head)]
            here = variables.get("ansible_play_hosts_all") or names
            raise _Refused(found, [each for each in names if each in here] or names)
        return plan, _gate.lines(found)

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
    def _model(members: list[dict[str, t.Any]], variables: t.Mapping[str, t.Any]) -> tuple[int, dict[str, t.Any] | None]:
        """Bytes of the model's weights and its config.json: what was just downloaded, else the snapshot on the head, else what the recipe
        says."""
        head = next((m for m in members if m["head"]), None)
        if head is None:
            return 0, None
        snapshot, known = head["node"].get("snapshot") or {}, variables["hostvars"][head["name"]]
        weights = _snapshot.weight_bytes((known.get("model_download_snapshot") or {}).get("manifest") or [])
        weights = weights or (int(snapshot.get("weights") or 0) if snapshot.get("complete") else 0)
        recipe = known["preflight_inputs"].get("recipe") or {}
        return weights or int((recipe.get("weights_gib") or 0) * _fit.GIB), snapshot.get("config")
