# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module is documentation only, its work is done by the action plugin of the same name: both must tell the same."""

from __future__ import annotations

import yaml

from ansible_collections.dgxspark.serving.plugins.action import diagnostics_bundle as action
from ansible_collections.dgxspark.serving.plugins.modules import diagnostics_bundle as module


def test_documented_are_the_arguments_that_are_read():
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    for option in documented.values():
        option.pop("description")
    assert documented == action.SPEC
