# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""See test_serving_status.py for what the three modules without code have in common."""

from __future__ import annotations

import yaml

from ansible_collections.dgxspark.serving.plugins.modules import serving_ask


def test_prompt_and_model_have_no_default():
    options = yaml.safe_load(serving_ask.DOCUMENTATION)["options"]
    assert sorted(name for name, option in options.items() if option.get("required")) == ["model", "prompt"]
