# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module is documentation only, its work is done by the action plugin of the same name: both must tell the same."""

from __future__ import annotations

import inspect
import re

import yaml

from ansible_collections.dgxspark.serving.plugins.action import serving_settings as action
from ansible_collections.dgxspark.serving.plugins.modules import serving_settings as module

DOCS = yaml.safe_load(module.DOCUMENTATION)
RESULTS = yaml.safe_load(module.RETURN)


def test_documented_are_the_arguments_that_are_read():
    """The inputs themselves come from the inventory."""
    source = inspect.getsource(action)
    read = re.findall(r"_task\.args\.get\(\"(\w+)\"\)", source)
    assert sorted(read) == sorted(DOCS["options"]) and source.count("_task.args") == len(read)


def test_documented_are_the_results():
    source = inspect.getsource(action)
    assert set(RESULTS) == {"settings", "gang", "peers", "recipe", "topology", "began", "problem"}
    assert "settings=_settings.resolve(settings), gang=gang, peers=peers, recipe=self._report" in source


def test_the_sample_is_made_of_inputs():
    assert set(RESULTS["settings"]["sample"]) <= {name.removeprefix("spark_") for name in action.load_spec()}
