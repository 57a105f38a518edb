# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees while the module runs."""

from __future__ import annotations

import json
import time
import types
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.action import image_sync
from ansible_collections.dgxspark.serving.plugins.plugin_utils import _progress


@pytest.mark.parametrize("check", [False, True])
def test_the_module_runs_with_a_name_for_its_progress(monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    """One line for each sample, over a connection of its own, not as root; nothing in check mode."""
    shown: list[str] = []
    given: dict[str, t.Any] = {}
    samples = [{"what": "pulls org/a:1", "done": done, "total": 4_000_000, "at": done / 1e6} for done in (1_000_000, 3_000_000)]
    left = list(samples)

    class Connection:
        def exec_command(self, command: str, in_data: t.Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
            assert command == f"cat /run/dgxspark-serving/progress-{given.get('progress')}" and not sudoable
            return (0, json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode(), b"")

    def execute(module_args: dict[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        given.update(module_args)
        while not check and len(shown) < 2:
            time.sleep(0.005)
        return {"changed": True}

    plugin = image_sync.ActionModule.__new__(image_sync.ActionModule)
    plugin._task = types.SimpleNamespace(args={"reference": "org/a:1", "node": "spark-2"}, check_mode=check)
    plugin._connection = Connection()
    plugin._execute_module = execute
    monkeypatch.setattr(_progress.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(_progress, "display", types.SimpleNamespace(display=shown.append, vvv=lambda text: None))
    monkeypatch.setattr(_progress, "PIPE_SECONDS", 0.05)
    monkeypatch.setattr(_progress, "TERMINAL_SECONDS", 0.05)
    assert plugin.run(None, {}) == {"changed": True}
    if check:
        assert shown == [] and given == {"reference": "org/a:1", "node": "spark-2"}
    else:
        assert shown[:2] == [
            "spark-2: pulls org/a:1 1.0 MB of 4.0 MB (25 %)",
            "spark-2: pulls org/a:1 3.0 MB of 4.0 MB (75 %), 1.0 MB/s, 1 s left",
        ]
