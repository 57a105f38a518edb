# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules serving_status, serving_logs and serving_ask are documentation only, their work is done by the action plugins of the same name."""

from __future__ import annotations

import inspect
import re

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.action import serving_ask as ask_action
from ansible_collections.dgxspark.serving.plugins.action import serving_logs as logs_action
from ansible_collections.dgxspark.serving.plugins.action import serving_status as status_action
from ansible_collections.dgxspark.serving.plugins.module_utils import _status
from ansible_collections.dgxspark.serving.plugins.modules import serving_ask, serving_logs, serving_status

PAIRS = {"status": (serving_status, status_action), "logs": (serving_logs, logs_action), "ask": (serving_ask, ask_action)}


@pytest.mark.parametrize("name", PAIRS)
def test_documented_are_the_arguments_that_are_read(name):
    module, action = PAIRS[name]
    source = inspect.getsource(action)
    read = set(re.findall(r"(?:arguments|_task\.args)(?:\.get\(|\[)\"(\w+)\"", source))
    assert read == set(yaml.safe_load(module.DOCUMENTATION)["options"])


@pytest.mark.parametrize("name", PAIRS)
def test_documented_defaults_are_those_of_the_action(name):
    module, action = PAIRS[name]
    source = inspect.getsource(action)
    told = {key: option.get("default") for key, option in yaml.safe_load(module.DOCUMENTATION)["options"].items()}
    for key, value in re.findall(r"(?:arguments|_task\.args)\.get\(\"(\w+)\", ([^)]+)\)", source):
        assert yaml.safe_load(value) == told[key], key


@pytest.mark.parametrize("name", PAIRS)
def test_documented_are_the_results(name):
    module, action = PAIRS[name]
    source = inspect.getsource(action)
    named = set(re.findall(r"result\[\"(\w+)\"\]", source))
    for call in re.findall(r"result\.update\((.*)\)\n", source):
        named |= set(re.findall(r"(\w+)=", call))
    assert named - {"changed", "failed", "msg"} == set(yaml.safe_load(module.RETURN))


def test_every_state_is_documented():
    assert [state for state in _status.STATES if f"V({state})" not in serving_status.RETURN] == []
