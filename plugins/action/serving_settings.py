# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import difflib
import os
import time
import typing as t

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

from ansible_collections.dgxspark.serving.plugins.module_utils import _recipe, _settings, _topology
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

TOP = os.path.join(os.path.dirname(__file__), "..", "..")
SPECS = os.path.join(TOP, "roles", "preflight", "meta", "argument_specs.yml")
RECIPES = os.path.join(TOP, "playbooks", "recipes")


def load_spec(path: str = SPECS) -> dict[str, t.Any]:
    """The options of the role preflight as an argument spec (documentation left out)."""
    with open(path, encoding="utf-8") as handle:
        options = yaml.safe_load(handle)["argument_specs"]["main"]["options"]

    def strip(spec: dict[str, t.Any]) -> dict[str, t.Any]:
        kept = {key: value for key, value in spec.items() if key not in ("description", "options")}
        if "options" in spec:
            kept["options"] = {name: strip(sub) for name, sub in spec["options"].items()}
            kept["apply_defaults"] = True
        return kept

    return {name: strip(spec) for name, spec in options.items()}


def read_recipe(path: str, name: str) -> dict[str, t.Any]:
    """A recipe file of any known format. Raises Problem."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = yaml.safe_load(handle)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise _recipe.refuse(
            f"{path}, which cannot be read: {' '.join(str(exc).split())[:300]}", "a YAML file", "correct the path or the file"
        )
    return _recipe.parse(data, name)


def own_recipes() -> dict[str, dict[str, t.Any]]:
    """The recipes of this collection by their names."""
    return {name[:-4]: read_recipe(os.path.join(RECIPES, name), name[:-4]) for name in sorted(os.listdir(RECIPES)) if name.endswith(".yml")}


def recipe_path(wanted: str, folders: t.Iterable[str]) -> str:
    """The file of a recipe: a name of ours, or a path (one with a slash or a suffix), relative to the first folder that has it. Raises
    Problem."""
    if not (os.sep in wanted or wanted.endswith((".yml", ".yaml"))):
        path = os.path.join(RECIPES, f"{wanted}.yml")
        if os.path.isfile(path):
            return path
        names = [name[:-4] for name in sorted(os.listdir(RECIPES)) if name.endswith(".yml")]
        close = difflib.get_close_matches(wanted, names, n=1)
        hint = f"did you mean {close[0]}?" if close else "playbooks/recipes.yml lists them"
        raise _recipe.refuse(f"recipe {wanted!r}", f"one of {', '.join(names)}, or the path of a file", hint, "recipe-unknown")
    places = [os.path.join(folder, os.path.expanduser(wanted)) for folder in folders]
    for path in places:
        if os.path.isfile(path):
            return path
    raise _recipe.refuse(
        f"no file {wanted} (looked for {', '.join(places)})",
        "the path of a recipe file on the controller",
        "correct the path",
        "recipe-unknown",
    )


class ActionModule(ActionBase):
    """Reads the C(spark_*) variables on the controller; no connection is made."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        if self._task.args.get("find_fabric"):
            return {**result, **self._found(task_vars or {})}
        variables = task_vars or {}
        node = variables.get("inventory_hostname", "")
        result["changed"] = False
        began = round(time.time(), 2)
        self._report: dict[str, t.Any] = {}
        groups = variables.get("groups", {})
        self._nodes = sum(len(groups.get(group, [])) for group in ("ray_head", "ray_workers"))
        try:
            settings = self._settings(variables)
            self._all_or_no_address(settings, node, variables)
        except Problem as problem:
            if self._told_by_head(problem, node, variables):
                result.update(settings={}, gang=[], peers=[], began=began)
                return result
            problem.node = node
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        gang = [{"node": host, "address": str(variables["hostvars"][host].get("spark_fabric_address") or "")} for host in _hosts(variables)]
        peers = [member["address"] for member in gang if member["node"] != node]
        result.update(settings=_settings.resolve(settings), gang=gang, peers=peers, recipe=self._report, began=began)
        if self._report and node in groups.get("ray_head", []):
            result["warnings"] = _recipe.advice(self._report)
        return result

    def _found(self, variables: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """The inputs with the fabric that all nodes have in common. What is wrong with it is told by the head."""
        node = variables["inventory_hostname"]
        inputs = variables["preflight_inputs"]
        kept = {key: value for key, value in inputs.items() if key not in ("failed", "warnings", "deprecations")}
        try:
            found = _topology.find(self._surveys(variables), inputs["settings"]["fabric_subnet"])
        except Problem as problem:
            if node not in variables["groups"].get("ray_head", [node]):
                return kept
            return {"failed": True, "msg": problem.msg, "problem": problem.as_dict()}
        addresses = found["addresses"]
        return {
            **kept,
            "changed": False,
            "topology": found["topology"],
            "settings": {
                **inputs["settings"],
                "fabric_subnet": found["subnet"],
                "fabric_rails": found["rails"],
                "fabric_address": addresses[node],
            },
            "gang": [{"node": host, "address": address} for host, address in addresses.items()],
            "peers": [address for host, address in addresses.items() if host != node],
        }

    @staticmethod
    def _surveys(variables: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
        """What each node has, the head first. All or none: a subnet that a part of the gang shares would prove nothing."""
        nodes = []
        for host in _hosts(variables):
            facts = variables["hostvars"][host]
            if "ports" not in facts.get("preflight_ports", {}):
                raise Problem(
                    "gang-incomplete",
                    node=host,
                    stage="preflight",
                    found="no facts of this node in this run",
                    expected="the whole gang in one run, to find the fabric subnet that nobody named",
                    remedy="run without --limit, or set spark_fabric_subnet and spark_fabric_address",
                )
            nodes.append(
                {
                    "node": host,
                    "address": facts["preflight_inputs"]["settings"]["fabric_address"],
                    "ports": facts["preflight_ports"]["ports"],
                }
            )
        return nodes

    @staticmethod
    def _all_or_no_address(settings: t.Mapping[str, t.Any], node: str, variables: t.Mapping[str, t.Any]) -> None:
        others = [host for host in _hosts(variables) if host != node and variables["hostvars"][host].get("spark_fabric_address")]
        if not settings["fabric_address"] and others:
            raise Problem(
                "RAY-09",
                stage="inputs",
                found=f"no spark_fabric_address, which {others[0]} has",
                expected="it on every node, or on none to have it found",
                remedy="set spark_fabric_address for this host, for example 192.168.200.12",
            )

    def _settings(self, variables: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """The inputs of one host, names without the prefix. Raises the first Problem, without a node."""
        spec = {**load_spec(), **(self._task.args.get("also") or {})}
        self._nothing_cut_off()
        given = {name: self._templar.template(variables[name]) for name in variables if name.startswith(_settings.PREFIX)}
        given = {name: value for name, value in given.items() if value is not None}
        given = _settings.without_elsewhere(given, spec)
        given = self._with_recipe(given, variables, spec)
        problems = _settings.unknown_inputs(given, spec)
        if problems:
            raise problems[0]
        validated = ArgumentSpecValidator(spec).validate(given)
        if validated.error_messages:
            raise Problem(
                "input",
                stage="inputs",
                found=_settings.plain("; ".join(validated.error_messages)),
                expected="the variables documented for the role preflight",
                remedy=_settings.REMEDY,
            )
        settings = {name[len(_settings.PREFIX) :]: value for name, value in validated.validated_parameters.items()}
        problems = _settings.value_problems(settings)
        if problems:
            raise problems[0]
        return settings

    def _nothing_cut_off(self) -> None:
        """``-e name=two words`` gives the variable one word, and Ansible keeps the other where nobody looks. Raises Problem."""
        rest = " ".join(str(load_extra_vars(self._loader).get("_raw_params") or "").split())
        if rest:
            raise Problem(
                "input",
                stage="inputs",
                found=f"'{rest[:80]}' on the command line, which belongs to no variable",
                expected="every word after -e to be name=value",
                remedy="""put quotes around a value with spaces, inside those of the shell: -e 'prompt="two words"'""",
            )

    def _with_recipe(self, given: dict[str, t.Any], variables: t.Mapping[str, t.Any], spec: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """The inputs with what the recipe fills in: the one of -e recipe=..., else the inventory's spark_recipe. Raises Problem."""
        asked = self._templar.template(variables["recipe"]) if "recipe" in variables else None
        wanted = str(asked or given.get("spark_recipe") or "")
        if not wanted:
            return given
        folders = [os.getcwd(), *[str(variables[name]) for name in ("playbook_dir", "inventory_dir") if variables.get(name)]]
        path = recipe_path(wanted, folders)
        recipe = read_recipe(path, os.path.basename(path).rpartition(".")[0])
        extra = self._extra()
        merged, self._report = _recipe.apply(
            recipe,
            given,
            extra,
            asked=bool(asked) or "spark_recipe" in extra,
            nodes=self._nodes,
            executors=spec["spark_executor"]["choices"],
            known=own_recipes,
            any_nodes=bool(self._task.args.get("any_nodes")),
        )
        self._report["path"] = path
        return merged

    def _extra(self) -> set[str]:
        """Names of the variables from the command line (-e)."""
        return set(load_extra_vars(self._loader))

    def _told_by_head(self, problem: Problem, node: str, variables: t.Mapping[str, t.Any]) -> bool:
        """Whether the head fails with the same sentence: a wrong variable of the whole group is told once."""
        head = next(iter(variables.get("groups", {}).get("ray_head", [])), node)
        if head == node:
            return False
        try:
            self._settings(variables["hostvars"][head])
        except Problem as other:
            return other.msg == problem.msg
        return False


def _hosts(variables: t.Mapping[str, t.Any]) -> list[str]:
    """The nodes of the gang, the head first."""
    return [host for group in ("ray_head", "ray_workers") for host in variables["groups"].get(group, [])]
