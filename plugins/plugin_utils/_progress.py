# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugins that show how far a long module is: one line every few seconds on a terminal, every 30 s on a pipe or in CI.

PRIVATE to the collection. The module (option ``progress``) writes a small file on its node, ``_transfer.Progress``; a thread here reads it over
a second use of the same connection. Only shows something: whatever goes wrong with it, the module runs on and its result is what counts.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import sys
import threading
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils._transfer import human

display = Display()

RUN_DIR = "/run/dgxspark-serving"
TERMINAL_SECONDS = 5.0
PIPE_SECONDS = 30.0
# Ansible's workers have no terminal any more; this module is loaded before they are forked.
INTERACTIVE = sys.stdout.isatty() and not os.environ.get("CI")


def duration(seconds: float) -> str:
    """``104`` -> ``1 min 44 s``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def line(node: str, sample: t.Mapping[str, t.Any], before: t.Mapping[str, t.Any] | None) -> str:
    """One line: node, what it does, done of total, rate and time left. The rate is that since the sample before."""
    what, done, total = str(sample.get("what", "")), int(sample.get("done", 0)), int(sample.get("total", 0))
    text = f"{node}: {what}"
    if not total:
        return text
    if sample.get("unit"):
        return f"{text}: {done} of {total} {sample['unit']}"
    text += f" {human(done)} of {human(total)} ({100 * done // total} %)"
    if before and before.get("what") == what and before.get("total") == total and float(sample["at"]) > float(before["at"]):
        rate = (done - int(before["done"])) / (float(sample["at"]) - float(before["at"]))
        text += f", {human(max(0.0, rate))}/s"
        if rate > 0:
            text += f", {duration((total - done) / rate)} left"
    return text


class Watcher:
    """Reads the file again and again in a thread and shows a line each time that it changed."""

    def __init__(self, connection: t.Any, node: str, name: str, show: t.Callable[[str], None], interval: float) -> None:
        # an object of its own: nothing that the module's execution keeps in its connection is disturbed
        self.connection = copy.copy(connection)
        self.node = node
        self.path = f"{RUN_DIR}/progress-{name}"
        self.show = show
        self.interval = interval
        self._before: dict[str, t.Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        """One sample."""
        rc, out, dummy = self.connection.exec_command(f"cat {self.path}", in_data=None, sudoable=False)
        if rc:
            return
        sample = json.loads(out)
        at = sample["at"]
        if self._before and at == self._before["at"]:
            return
        self.show(line(self.node, sample, self._before))
        self._before = sample

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self.look()
            except Exception as exc:  # pylint: disable=broad-except # whatever a connection plugin raises: there is just no line
                display.vvv(f"{self.node}: no progress shown: {exc}")

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: t.Any) -> None:
        self._stop.set()
        self._thread.join(5)


class ProgressAction(ActionBase):
    """Runs the module of the same name and shows its progress."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """The module's result, unchanged."""
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        node = str(args.get("node") or (task_vars or {}).get("inventory_hostname", ""))
        if self._task.check_mode:
            return self._execute_module(module_args=args, task_vars=task_vars)
        name = secrets.token_hex(8)
        interval = TERMINAL_SECONDS if INTERACTIVE else PIPE_SECONDS
        with Watcher(self._connection, node, name, display.display, interval):
            return self._execute_module(module_args={**args, "progress": name}, task_vars=task_vars)
