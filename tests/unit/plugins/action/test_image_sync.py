# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees while the module runs. The module is a stand-in that writes the file as _progress does."""

from __future__ import annotations

import json
import time
import types
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.action import image_sync
from ansible_collections.dgxspark.serving.plugins.module_utils import _progress
from ansible_collections.dgxspark.serving.plugins.plugin_utils import progress

Shown = list[str]


@pytest.fixture
def action(monkeypatch: pytest.MonkeyPatch, tmp_path: t.Any) -> t.Callable[..., tuple[dict[str, t.Any], Shown, dict[str, t.Any]]]:
    """run(states) -> (result, lines, arguments of the module). Every state stays until it was looked at."""

    def run(states: list[t.Any], check: bool = False) -> tuple[dict[str, t.Any], Shown, dict[str, t.Any]]:
        shown: Shown = []
        looks = [0]
        given: dict[str, t.Any] = {}
        plugin = image_sync.ActionModule.__new__(image_sync.ActionModule)
        plugin._task = types.SimpleNamespace(args={"reference": "org/a:1"}, check_mode=check)
        plugin._play_context = object()
        plugin._connection = types.SimpleNamespace(ansible_name="fake", transport="fake", _options={"port": 22})

        class Connection:
            _options: t.ClassVar[dict[str, t.Any]] = {}

            def exec_command(self, command: str, in_data: t.Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
                assert command == f"cat {given['progress']}" and not sudoable and self._options == {"port": 22}
                item = states[min(looks[0], len(states) - 1)]
                looks[0] += 1
                if isinstance(item, Exception):
                    raise item
                return (0, json.dumps(item).encode(), b"") if item else (1, b"", b"No such file")

        def execute(module_args: dict[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
            given.update(module_args)
            while not check and looks[0] < len(states):
                time.sleep(0.005)
            return {"changed": True}

        plugin._execute_module = execute
        monkeypatch.setattr(progress.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
        monkeypatch.setattr(progress, "connection_loader", types.SimpleNamespace(get=lambda name, context: Connection()))
        monkeypatch.setattr(progress, "display", types.SimpleNamespace(display=shown.append, vvv=lambda text: None))
        monkeypatch.setattr(_progress, "PIPE_SECONDS", 0.01)
        monkeypatch.setattr(_progress, "TERMINAL_SECONDS", 0.01)
        return plugin.run(None, {}), shown, given

    return run


def state(done: int, seconds: float) -> dict[str, t.Any]:
    return {"node": "spark-2", "what": "image org/a:1", "done": done, "total": 4_000_000, "seconds": seconds}


def test_lines_with_rate_and_time_left(action: t.Any) -> None:
    result, shown, given = action([None, state(1_000_000, 1), state(3_000_000, 2), None])
    assert result == {"changed": True}
    assert shown == [
        "spark-2: image org/a:1: 1.0 MB of 4.0 MB, 1.0 MB/s, 3 s left, 1 s so far",
        "spark-2: image org/a:1: 3.0 MB of 4.0 MB, 2.0 MB/s, 1 s left, 2 s so far",
    ]
    assert given["progress"].startswith("/run/dgxspark-serving/progress-")


def test_a_look_that_fails_ends_nothing(action: t.Any) -> None:
    result, shown, dummy = action([OSError("connection reset"), state(1_000_000, 1), None])
    assert result == {"changed": True} and len(shown) == 1


def test_check_mode_looks_at_nothing(action: t.Any) -> None:
    result, shown, given = action([state(1, 1)], check=True)
    assert result == {"changed": True} and shown == [] and "progress" not in given
