# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.action import hf_snapshot
from ansible_collections.dgxspark.serving.plugins.plugin_utils import _progress


@pytest.mark.parametrize("check", [False, True])
def test_the_result_is_the_module_s(monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    calls: list[dict[str, t.Any]] = []
    plugin = hf_snapshot.ActionModule.__new__(hf_snapshot.ActionModule)
    plugin._task = types.SimpleNamespace(args={"repo_id": "org/m"}, check_mode=check, async_val=0)
    plugin._connection = types.SimpleNamespace(exec_command=lambda *args, **kwargs: (1, b"", b""))

    def execute(module_args: dict[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        calls.append(module_args)
        return {"changed": True}

    plugin._execute_module = execute
    monkeypatch.setattr(_progress.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    assert plugin.run(None, {"inventory_hostname": "spark-2"}) == {"changed": True}
    assert calls[0]["repo_id"] == "org/m"
    # nothing to show in check mode
    assert ("progress" in calls[0]) is not check
