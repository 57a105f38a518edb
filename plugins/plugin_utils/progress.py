# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An action plugin that shows how far its module is, while the module runs. See module_utils/_progress.py for the other end."""

from __future__ import annotations

import copy
import json
import secrets
import sys
import threading
import typing as t

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import connection_loader
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _progress

display = Display()

FOLDER = "/run/dgxspark-serving"


class ProgressAction(ActionBase):
    """Runs the module with an option ``progress`` and reads that file beside it, over a connection of its own, without becoming root."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """One module, and a thread that looks."""
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        if self._task.check_mode:
            return self._execute_module(module_args=args, task_vars=task_vars)
        path = f"{FOLDER}/progress-{secrets.token_hex(8)}.json"
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(path, done), daemon=True)
        watcher.start()
        try:
            return self._execute_module(module_args={**args, "progress": path}, task_vars=task_vars)
        finally:
            done.set()
            watcher.join(2)

    def _watch(self, path: str, done: threading.Event) -> None:
        before: dict[str, t.Any] | None = None
        interval = _progress.TERMINAL_SECONDS if sys.__stdout__ and sys.__stdout__.isatty() else _progress.PIPE_SECONDS
        while not done.wait(interval):
            try:
                state = self._look(path)
            except Exception as exc:  # pylint: disable=broad-except # whatever a connection plugin raises: the copy itself goes on
                display.vvv(f"progress: {exc}")
                continue
            if state and not done.is_set():
                display.display(_progress.line(state, before))
                before = state

    def _look(self, path: str) -> dict[str, t.Any]:
        """The file now; {} when the module has not begun or is done."""
        connection = connection_loader.get(self._connection.ansible_name or self._connection.transport, copy.copy(self._play_context))
        connection._options = dict(self._connection._options)  # pylint: disable=protected-access
        rc, out, dummy = connection.exec_command(f"cat {path}", in_data=None, sudoable=False)
        if rc:
            return {}
        state = json.loads(out)
        return state if isinstance(state, dict) else {}
