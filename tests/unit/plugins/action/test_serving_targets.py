# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

from ansible_collections.dgxspark.serving.plugins.action import serving_targets


def test_addresses(monkeypatch):
    """monitoring_address goes before ansible_host, and that before the name."""
    monkeypatch.setattr(serving_targets.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    plugin = serving_targets.ActionModule.__new__(serving_targets.ActionModule)
    plugin._task = types.SimpleNamespace(args={"vllm_port": 1, "ray_port": "2", "node_port": 3, "gpu_port": 4})
    hostvars = {"a": {"ansible_host": "10.0.0.1", "monitoring_address": "10.0.0.9"}, "b": {"ansible_host": "10.0.0.2"}, "c": {}}
    result = plugin.run(None, {"groups": {"ray_head": ["a"], "ray_workers": ["b", "c"]}, "hostvars": hostvars})
    assert [entry["target"] for entry in result["targets"]] == ["10.0.0.9:1", "10.0.0.9:3", "10.0.0.2:3", "c:3"]
    assert [entry["role"] for entry in result["targets"]] == ["head", "head", "worker", "worker"]
    assert len(result["silent"]) == 4 and result["changed"] is False
