# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Reads C(docker logs) of one node again and again, and prints what is new."""

from __future__ import annotations

import shlex
import time
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.action.serving_status import hurry
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import NO_SUCH, merge_streams, unread
from ansible_collections.dgxspark.serving.plugins.module_utils._diagnosis import ANSI

display = Display()

PAUSE = 1.5  # seconds between two looks
LIMIT = 20  # seconds for one


def printable(node: str, entries: t.Iterable[tuple[str, str, str]]) -> list[str]:
    """``spark-1 vllm | text`` for each (stamp, container, line), in the order of time; a bar that rewrites its line is cut into lines."""
    result = []
    for dummy, container, line in sorted(entries, key=lambda entry: entry[0]):
        for piece in ANSI.sub("", line).replace("\r\n", "\n").replace("\r", "\n").split("\n"):
            if piece.strip():
                text = "".join(char if char.isprintable() or char == "\t" else "?" for char in piece)
                result.append(f"{node} {container.removeprefix('spark-'):<4} | {text}")
    return result


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        arguments = self._task.args
        self.node = str((task_vars or {}).get("inventory_hostname", ""))
        self.cursors: dict[str, dict[str, t.Any]] = {}
        self.newest: dict[str, str] = {}  # of the first look: what --tail left out must not come with --since
        names = [str(name) for name in arguments.get("containers") or ("spark-vllm", "spark-ray")]
        lines = int(arguments.get("lines", 100))
        until = time.monotonic() + (float(arguments.get("seconds", 60)) if arguments.get("follow") else 0)
        result.update(changed=False, lines=0)
        hurry(self._connection)
        told = False
        while True:
            try:
                there, fresh = self._look(names, lines)
            except AnsibleConnectionFailure as exc:
                self._say([f"{self.node}      | (no SSH connection: {' '.join(str(exc.message).split())[:200]})"])
                return result
            if not there and not told:
                self._say([f"{self.node}      | (no container {' or '.join(names)} here)"])
            told = not there
            result["lines"] += self._say(printable(self.node, fresh))
            left = until - time.monotonic()
            if left <= 0:
                return result
            time.sleep(min(PAUSE, left))

    @staticmethod
    def _say(lines: list[str]) -> int:
        if lines:
            display.display("\n".join(lines))  # in one go: the other nodes print at the same time
        return len(lines)

    def _look(self, names: list[str], lines: int) -> tuple[bool, list[tuple[str, str, str]]]:
        """Whether a container is there, and the new (stamp, container, line) of all."""
        there, fresh = False, []
        for name in names:
            cursor = self.cursors.get(name)
            since = ["--since", cursor["since"]] if cursor and cursor["since"] else ["--tail", str(lines)]
            command = shlex.join(["timeout", str(LIMIT), "docker", "logs", "--timestamps", *since, name])
            answer = self._low_level_execute_command(command, sudoable=True)
            out, err = str(answer.get("stdout", "")), str(answer.get("stderr", ""))
            if answer.get("rc"):
                if not NO_SUCH.search(out + err):
                    self._say([f"{self.node} {name.removeprefix('spark-'):<4} | (docker logs: {' '.join((err or out).split())[-200:]})"])
                continue
            there = True
            new, self.cursors[name] = unread(merge_streams(out, err), cursor)
            floor = self.newest.setdefault(name, max((stamp for stamp, dummy in new), default="")) if cursor is None else self.newest[name]
            fresh += [(stamp, name, line) for stamp, line in new if cursor is None or stamp > floor]
        return there, fresh
