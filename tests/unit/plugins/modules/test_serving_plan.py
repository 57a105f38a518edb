# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module is documentation only, its work is done by the action plugin of the same name: both must tell the same."""

from __future__ import annotations

import ast
import inspect

import yaml

from ansible_collections.dgxspark.serving.plugins.action import serving_plan as action
from ansible_collections.dgxspark.serving.plugins.modules import serving_plan as module

DOCS = yaml.safe_load(module.DOCUMENTATION)
RESULTS = yaml.safe_load(module.RETURN)


def arguments_read(source):
    """Names of ``arguments.get("...")`` and ``arguments["..."]`` in a Python source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        owner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else getattr(node, "value", None)
        key = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "slice", None)
        if isinstance(owner, ast.Name) and owner.id == "arguments" and isinstance(key, ast.Constant):
            found.add(key.value)
    return found


def results_set(source):
    """Keys that the action puts into its result, except those that every module has."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and target.value.id == "result" and isinstance(target.slice, ast.Constant):
                found.add(target.slice.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "result.update":
            found.update(keyword.arg for keyword in node.keywords)
    return found - {"changed", "failed", "msg", "diff", "warnings"}


def test_documented_are_the_arguments_that_are_read():
    assert set(DOCS["options"]) == arguments_read(inspect.getsource(action))


def test_documented_are_the_results():
    assert set(RESULTS) == results_set(inspect.getsource(action))


def test_rules_are_applied_by_default():
    assert DOCS["options"]["check"]["default"] is True


def test_readers_of_this_test():
    source = 'a = arguments.get("x", 1)\nb = arguments["y"]\nresult["z"] = 1\nresult.update(failed=True, w=2)\nother.get("no")\n'
    assert (arguments_read(source), results_set(source)) == ({"x", "y"}, {"z", "w"})
