# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module is documentation only, its work is done by the action plugin of the same name: both must tell the same."""

from __future__ import annotations

import inspect
import re

import yaml

from ansible_collections.dgxspark.serving.plugins.action import serving_fit as action
from ansible_collections.dgxspark.serving.plugins.modules import serving_fit as module

SOURCE = inspect.getsource(action)


def test_documented_are_the_arguments_that_are_read():
    read = set(re.findall(r"(?:arguments|_task\.args)(?:\.get\(|\[)\"(\w+)\"", SOURCE))
    assert read == set(yaml.safe_load(module.DOCUMENTATION)["options"])


def test_documented_are_the_results():
    named = set(re.findall(r"result\[\"(\w+)\"\]", SOURCE))
    for call in re.findall(r"result\.update\((.*)\)\n", SOURCE):
        named |= set(re.findall(r"(\w+)=", call))
    assert named - {"changed", "failed", "msg"} == set(yaml.safe_load(module.RETURN))
