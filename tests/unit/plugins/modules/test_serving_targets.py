# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _monitoring
from ansible_collections.dgxspark.serving.plugins.modules import serving_targets


def test_a_port_for_every_job():
    options = yaml.safe_load(serving_targets.DOCUMENTATION)["options"]
    assert sorted(options) == sorted(["facts", *(f"{job}_port" for job in _monitoring.JOBS)])
