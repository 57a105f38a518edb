# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The example of a second service fits beside the example inventory, and the gateway's file is about those two."""

from __future__ import annotations

from pathlib import Path

import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _plan, _settings
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def settings(*files: str, **more: object) -> dict:
    given = {name.removeprefix("spark_"): value for path in files for name, value in read(path).items() if name.startswith("spark_")}
    return gang.settings(**{**given, **more})


def test_the_second_fits_beside_the_first() -> None:
    group = "inventory/sparks/group_vars/sparks.yml"
    first = _settings.resolve(settings(group, gpu_memory_utilization=0.65))
    second = settings(group, "inventory/services/second.yml")
    assert _settings.value_problems(second) == []
    second = _settings.resolve(second)
    members = gang.pair()
    for member in members:
        for definition in _plan.serving_plan(first, gang.pair())["nodes"][member["name"]]["containers"].values():
            words = [str(word) for word in definition["command"]]
            member["node"]["containers"].append(gang.container(definition["name"], labels=definition["labels"], arguments=words))
    assert gang.service_problems(second, members) == []
    assert [p.id for p in gang.service_problems({**second, "gpu_memory_utilization": 0.3}, members)] == ["service-memory"]


def test_the_gateway_knows_both() -> None:
    group, second = read("inventory/sparks/group_vars/sparks.yml"), read("inventory/services/second.yml")
    hosts = read("inventory/sparks/hosts.yml")
    gateway = {entry["model_name"]: entry["litellm_params"] for entry in read("inventory/services/litellm.yml")["model_list"]}
    assert {name: entry["model"] for name, entry in gateway.items()} == {
        "large": f"hosted_vllm/{group['spark_model']}",
        "small": f"hosted_vllm/{second['spark_served_model_name']}",
    }
    ports = {"large": group["spark_api_port"], "small": second["spark_api_port"]}
    for name, entry in gateway.items():
        host, port = entry["api_base"].removeprefix("http://").removesuffix("/v1").split(":")
        assert int(port) == ports[name] and host in str(hosts)
