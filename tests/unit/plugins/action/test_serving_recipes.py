# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import types

import pytest

from ansible_collections.dgxspark.serving.plugins.action import serving_recipes
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

GROUPS = {"ray_head": ["spark-1"], "ray_workers": ["spark-2"]}
FOREIGN = gang.ROOT / "tests" / "unit" / "fixtures" / "recipes"


@pytest.fixture
def run(monkeypatch):
    """run(hostvars, **arguments): (result, what was printed)."""
    monkeypatch.setattr(serving_recipes.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    shown = []
    monkeypatch.setattr(serving_recipes.display, "display", shown.append)

    def run(hostvars=None, groups=None, **arguments):
        groups = groups or GROUPS
        shown.clear()
        plugin = serving_recipes.ActionModule.__new__(serving_recipes.ActionModule)
        plugin._task = types.SimpleNamespace(args=arguments)
        names = [name for members in groups.values() for name in members]
        return plugin.run(None, {"groups": groups, "hostvars": hostvars or {name: {} for name in names}}), "\n".join(shown)

    return run


def test_no_connection_is_made():
    assert serving_recipes.ActionModule._requires_connection is False


def test_the_list_for_the_nodes_of_the_inventory(run):
    result, text = run()
    rows = {row["name"]: row for row in result["recipes"]}
    assert result["changed"] is False and rows["qwen3.5-122b-a10b-fp8"]["fits"] and not rows["gpt-oss-120b"]["fits"]
    assert "2 nodes, 121.6 GiB of memory each (assumed" in text and "no: for 1 node" in text
    alone, text = run(groups={"ray_head": ["spark-1"], "ray_workers": []})
    rows = {row["name"]: row["verdict"] for row in alone["recipes"]}
    assert rows["gpt-oss-120b"] == "yes" and rows["qwen3.5-122b-a10b-fp8"] == "no: for 2 nodes" and "1 node," in text


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{"preflight_node": {"node": {"memory": {"total": 64 << 30}}}}, {"ansible_facts": {"memtotal_mb": 32768}}], 32 << 30),
        ([{"preflight_node": {"node": {"memory": {"total": 64 << 30}}}}, {}], None),
        ([{"preflight_node": {"failed": True}}, {}], None),
    ],
)
def test_memory_from_facts(facts, expected):
    assert serving_recipes.memory_of(dict(enumerate(facts)), list(range(len(facts)))) == expected


def test_known_memory_decides(run):
    node = {"preflight_node": {"node": {"memory": {"total": 64 << 30}}}}
    result, text = run({"spark-1": node, "spark-2": node})
    assert "64.0 GiB of memory each (the smallest)" in text
    assert next(row for row in result["recipes"] if row["name"] == "qwen3.5-122b-a10b-fp8")["verdict"] == "no: 59.2 GiB of 48.0 GiB"


def test_json(run):
    result, text = run(output="json")
    assert json.loads(text) == result["recipes"]
    assert run(output="none")[1] == ""


def test_what_a_foreign_recipe_becomes_is_shown_and_not_refused(run):
    result, text = run(recipe=str(FOREIGN / "sparkrun" / "hooks.yaml"))
    assert not result.get("failed") and "recipes" not in result
    assert result["recipe"]["settings"]["tensor_parallel"] == 2 and "!! pre_exec: runs commands" in text


def test_a_recipe_that_is_not_there(run):
    result, _text = run(recipe="nothing-like-it")
    assert result["failed"] and result["problem"]["id"] == "recipe-unknown"
