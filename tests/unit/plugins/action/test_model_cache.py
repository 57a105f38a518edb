# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import types

import pytest

from ansible_collections.dgxspark.serving.plugins.action import model_cache
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

ROWS = [{"node": "spark-1", "models": []}, {"node": "spark-2", "models": []}]
LABELS = {"dgxspark.serving.model": "org/model", "dgxspark.serving.revision": "abc"}
NODES = [gang.node(), gang.node(containers=[gang.container("spark-vllm", labels=LABELS)])]


@pytest.fixture
def run(monkeypatch):
    """run(**arguments): (result or the arguments that the module gets, what was printed)."""
    monkeypatch.setattr(model_cache.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    shown = []
    monkeypatch.setattr(model_cache.display, "display", shown.append)

    def run(**arguments):
        shown.clear()
        plugin = model_cache.ActionModule.__new__(model_cache.ActionModule)
        plugin._task = types.SimpleNamespace(args=arguments)
        plugin._execute_module = lambda module_args, task_vars: module_args
        return plugin.run(None, {}), "\n".join(shown)

    return run


def test_the_module_gets_what_is_served_instead_of_facts(run):
    given, text = run(prune=["unused"], nodes=NODES, served=["org/other@def"])
    assert given == {"prune": ["unused"], "served": ["org/model@abc", "org/other@def"]} and text == ""


def test_rows_are_shown_and_no_node_is_asked(run):
    result, text = run(rows=ROWS, nodes=NODES, keep=[])
    assert result == {"changed": False} and "spark-2  (none)" in text
    assert json.loads(run(rows=ROWS, output="json")[1]) == ROWS
    assert run(rows=ROWS, output="none")[1] == ""
