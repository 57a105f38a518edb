# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""See test_serving_status.py for what the three modules without code have in common."""

from __future__ import annotations

import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils._plan import RAY, VLLM
from ansible_collections.dgxspark.serving.plugins.modules import serving_logs


def test_the_containers_are_those_of_the_plan():
    assert yaml.safe_load(serving_logs.DOCUMENTATION)["options"]["containers"]["default"] == [VLLM, RAY]
