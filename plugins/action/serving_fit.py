# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plans a model: its config.json and the size of its weights from files, from the head's cache, or from the hub through the head; _fit
computes."""

from __future__ import annotations

import json
import os
import typing as t
import urllib.parse

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.action import serving_recipes
from ansible_collections.dgxspark.serving.plugins.action.node_info import unreachable
from ansible_collections.dgxspark.serving.plugins.module_utils import _fit, _snapshot
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

display = Display()

HUB = "https://huggingface.co"
TIMEOUT = 30  # seconds for one answer of the hub


def source_problem(found: str) -> Problem:
    """What the plan needs could not be had."""
    return Problem(
        "plan-source",
        stage="plan",
        found=found,
        expected="config.json of the model, and the size of its weights",
        remedy="give files: -e spark_config=.../config.json -e spark_index=.../model.safetensors.index.json (or -e spark_weights_gib=...)",
    )


def read_json(path: str) -> dict[str, t.Any]:
    """A JSON object from a file on the controller. Raises Problem."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError) as exc:
        raise source_problem(f"{path}, which cannot be read ({exc})")
    if not isinstance(data, dict):
        raise source_problem(f"{path}, which is no JSON object")
    return data


def local_weights(folder: str) -> int | None:
    """Bytes of the weights beside a config.json: from their index, else their files; None when there are none."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(index):
        return _fit.index_bytes(read_json(index))
    rows = [{"path": name, "size": os.path.getsize(os.path.join(folder, name))} for name in os.listdir(folder)]
    return _snapshot.weight_bytes(rows) or None


class ActionModule(ActionBase):
    """Asks a node only for what no file and no argument says."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        variables = task_vars or {}
        arguments = self._task.args
        settings = arguments["settings"]
        groups = variables.get("groups", {})
        names = [name for group in ("ray_head", "ray_workers") for name in groups.get(group, [])]
        try:
            config, weights = self._model(settings, variables)
            memory = (
                int(arguments.get("memory") or 0) or serving_recipes.memory_of(variables.get("hostvars", {}), names) or _fit.SPARK_MEMORY
            )
            counts = sorted({int(count) for count in arguments.get("nodes") or []} or {1, 2, 4, len(names) or 1})
            rows = [self._row(config, weights, count, settings, memory, len(names)) for count in counts]
        except Problem as problem:
            problem.node = problem.node or variables.get("inventory_hostname", "")
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        output = str(arguments.get("output", "table"))
        plan = {"model": settings["model"], "weights": weights, "memory": memory, "rows": rows, "remarks": _fit.remarks(config)}
        if output == "json":
            display.display(json.dumps(plan, indent=1, sort_keys=True))
        elif output == "table":
            display.display("\n" + _fit.table(settings["model"], weights, rows, plan["remarks"]))
        result["plan"] = plan
        return result

    @staticmethod
    def _row(config: dict[str, t.Any], weights: int, nodes: int, settings: dict[str, t.Any], memory: int, planned: int) -> dict[str, t.Any]:
        """One number of nodes: split as the inventory says where it is the inventory's number, else as the model's heads allow."""
        gpus = int(settings["gpus_per_node"])
        tensor, pipeline, data = (int(settings[f"{kind}_parallel"]) for kind in ("tensor", "pipeline", "data"))
        if nodes != planned or tensor * pipeline * data != nodes * gpus:
            tensor, pipeline = _fit.split(config, nodes * gpus)
            data = 1
        row = _fit.fit(
            config,
            weights,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=data,
            memory=memory // gpus,
            **_fit.options(settings),
        )
        return {"nodes": nodes, "gpus": gpus, **row}

    def _model(self, settings: dict[str, t.Any], variables: dict[str, t.Any]) -> tuple[dict[str, t.Any], int]:
        """config.json and the bytes of the weights. Raises Problem."""
        arguments = self._task.args
        weights: int | None = int(float(arguments.get("weights_gib") or 0) * _fit.GIB)
        if arguments.get("index"):
            weights = _fit.index_bytes(read_json(str(arguments["index"])))
        if arguments.get("config"):
            path = os.path.expanduser(str(arguments["config"]))
            path = os.path.join(path, "config.json") if os.path.isdir(path) else path
            weights = weights or local_weights(os.path.dirname(path) or ".")
            if not weights:
                raise source_problem(f"{path} and no weights beside it")
            return read_json(path), weights
        snapshot = self._on_head(settings, variables)
        weights = weights or (int(snapshot.get("weights") or 0) if snapshot.get("complete") else 0)
        if snapshot.get("config") and weights:
            return snapshot["config"], weights
        if _snapshot.is_plain(settings["model"]):  # a path: no hub knows it
            lacks = "no config.json" if weights else "no weights beside its config.json"
            raise source_problem(f"{settings['model']} on the head: {snapshot.get('reason') or (lacks if snapshot else 'no look at it')}")
        config, size = self._from_hub(settings, variables)
        return config, weights or size

    def _module(self, name: str, variables: dict[str, t.Any], **values: t.Any) -> dict[str, t.Any]:
        try:
            return self._execute_module(module_name=name, module_args=values, task_vars=variables)
        except AnsibleConnectionFailure as exc:
            node = variables.get("inventory_hostname", "")
            raise unreachable(node, exc.message, str(self._play_context.remote_addr or node), "")

    def _on_head(self, settings: dict[str, t.Any], variables: dict[str, t.Any]) -> dict[str, t.Any]:
        """The snapshot in the head's cache, as far as it is there."""
        place = {"cache_dir": settings["model_cache"], "repo_id": settings["model"], "revision": settings["model_revision"]}
        facts = self._module("dgxspark.serving.node_info", variables, node=variables.get("inventory_hostname", ""), model=place)
        return (facts.get("node") or {}).get("snapshot") or {}

    def _from_hub(self, settings: dict[str, t.Any], variables: dict[str, t.Any]) -> tuple[dict[str, t.Any], int]:
        """From the hub of the inventory, asked by the head. Without a token: a gated model has to be given as files."""
        if settings["model_offline"]:
            raise source_problem(f"no snapshot of {settings['model']} on the head, and spark_model_offline")
        base = (settings["hf_endpoint"] or HUB).rstrip("/")
        repository, revision = urllib.parse.quote(settings["model"]), urllib.parse.quote(settings["model_revision"], safe="")
        config = self._get(f"{base}/{repository}/resolve/{revision}/config.json", variables)
        listed = self._get(f"{base}/api/models/{repository}/revision/{revision}?blobs=true", variables).get("siblings") or []
        size = _snapshot.weight_bytes({"path": str(row.get("rfilename", "")), "size": row.get("size")} for row in listed)
        if not size:
            raise source_problem(f"no size of weights at {base} for {settings['model']}")
        return config, size

    def _get(self, url: str, variables: dict[str, t.Any]) -> dict[str, t.Any]:
        answer = self._module("ansible.builtin.uri", variables, url=url, return_content=True, timeout=TIMEOUT, follow_redirects="safe")
        if answer.get("failed"):
            raise source_problem(f"no answer to GET {url} on the head ({' '.join(str(answer.get('msg', '')).split())[:200]})")
        try:
            data = json.loads(answer.get("content") or "")
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise source_problem(f"an answer to GET {url} that is no JSON object")
        return data
