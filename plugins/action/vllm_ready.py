# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the module vllm_ready in slices and shows one line per stage: the module decides, this shows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import types
import typing as t

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils._vllm import should_show
from ansible_collections.dgxspark.serving.plugins.plugin_utils._connection import let_go

display = Display()

CONNECTION_LOST = ("connection closed", "connection reset", "broken pipe", "connection timed out", "connection to")


LOOK = 1.0  # seconds between two looks at what the other nodes of the task found
HEAD_GRACE = 30.0  # seconds for the head's part of the task to begin


class Interrupted(BaseException):
    """Another node has ended the wait. Not an Exception: nothing on the way may take it for a failure of its own."""


class Board:
    """What the nodes of one task tell each other: a file for each, in the controller's own temporary directory of this run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def tell(self, name: str, what: t.Mapping[str, t.Any]) -> None:
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=".", dir=self.folder)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(dict(what), stream)
        os.replace(path, os.path.join(self.folder, name))

    def read(self, name: str) -> dict[str, t.Any] | None:
        try:
            with open(os.path.join(self.folder, name), encoding="utf-8") as stream:
                return dict(json.load(stream))
        except OSError:
            return None

    def lost_rank(self) -> dict[str, t.Any] | None:
        """The failure that a watching node told first."""
        try:
            names = [name for name in os.listdir(self.folder) if name.startswith("lost-")]
        except OSError:
            return None
        lost = [found for found in map(self.read, names) if found]
        return min(lost, key=lambda found: float(found["at"]), default=None)


@contextlib.contextmanager
def unless(over: t.Callable[[], t.Any]) -> t.Iterator[None]:
    """Raise Interrupted in the block soon after ``over()`` has become true."""

    def ring(number: int, frame: types.FrameType | None) -> None:
        if over():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lost_connection(result: t.Mapping[str, t.Any]) -> bool:
    """Whether a module result only says that the connection broke while it ran."""
    if result.get("unreachable"):
        return True
    if not result.get("failed") or "problem" in result:
        return False
    text = f"{result.get('module_stderr', '')} {result.get('module_stdout', '')} {result.get('msg', '')}".lower()
    return "traceback" not in text and any(sign in text for sign in CONNECTION_LOST)


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = {key: value for key, value in self._task.args.items() if key != "state"}
        args["node"] = args.get("node") or str(task_vars.get("inventory_hostname", ""))
        if self._task.check_mode:
            return self._execute_module(module_args=args, task_vars=task_vars)
        board = Board(os.path.join(str(C.DEFAULT_LOCAL_TMP), f"vllm_ready-{self._task._uuid}"))
        if boolean(args.get("watch", False), strict=False):
            return self._watch(board, args, task_vars, str(args["node"]))
        board.tell("begun", {})
        try:
            with unless(board.lost_rank):
                return self._wait(args, task_vars, str(args["node"]))
        except Interrupted:
            lost = board.lost_rank() or {}
            return {"failed": True, "changed": False, "ready": False, "stages": [], **{key: lost.get(key) for key in ("msg", "problem")}}
        finally:
            board.tell("done", {})

    def _watch(self, board: Board, args: dict[str, t.Any], task_vars: dict[str, t.Any], node: str) -> dict[str, t.Any]:
        """Watch a container of this node until the head's wait is over; tell it when the container ended."""
        end = time.monotonic() + HEAD_GRACE
        while board.read("begun") is None:
            if time.monotonic() > end:
                display.warning(f"{node}: its ranks are not watched: the head's part of the task does not run at the same time (forks)")
                return {"changed": False, "ready": False}
            time.sleep(0.2)
        try:
            with unless(lambda: board.read("done") is not None):
                result = self._wait(args, task_vars, node)
        except Interrupted:
            return {"changed": False, "ready": False}
        if result.get("failed"):
            board.tell(f"lost-{node}", {"at": time.time(), "msg": result.get("msg"), "problem": result.get("problem")})
        return result

    def _wait(self, args: dict[str, t.Any], task_vars: dict[str, t.Any], node: str) -> dict[str, t.Any]:
        grace = float(args.get("unreachable_grace", 60))
        state: dict[str, t.Any] = {}
        shown: dict[str, t.Any] = {"stage": "container", "at": 0.0}
        begin = time.monotonic()
        reached = begin
        lost = 0
        while True:
            reason = ""
            result: dict[str, t.Any] = {}
            try:
                result = self._execute_module(module_args={**args, "state": state}, task_vars=task_vars)
                if lost_connection(result):
                    reason = str(result.get("msg") or result.get("module_stderr") or "connection lost").strip()
            except AnsibleConnectionFailure as exc:
                reason = str(exc)
            now = time.monotonic()
            if reason:
                lost += 1
                if now - reached >= grace:
                    return self._gone(node, reason, now - reached, state)
                display.display(f"{node}: does not answer ({now - begin:.0f} s): {reason.splitlines()[0][:160]}")
                let_go(self._connection)
                time.sleep(min(2.0, grace))
                continue
            reached = now
            if not result.get("pending"):
                result.pop("state", None)
                if lost:
                    result["connection_losses"] = lost
                return result
            state = dict(result["state"])
            if not args.get("watch") and should_show(shown, state, now):
                display.display(str(result["line"]))
                shown = {"stage": state["stage"], "at": now}

    @staticmethod
    def _gone(node: str, reason: str, seconds: float, state: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        stage = str(state.get("stage", "container"))
        found = f"the node did not answer for {seconds:.0f} s ({reason.strip()[:300]})"
        remedy = "see whether the node is up and not out of memory; run the same play again: it attaches to what runs"
        problem = {"id": "MEM-04", "node": node, "stage": stage, "found": found, "expected": "an answer over SSH", "remedy": remedy}
        msg = f"{node}: {stage}: found {found}; expected an answer over SSH. Remedy: {remedy}"
        return {"failed": True, "changed": False, "ready": False, "msg": msg, "problem": problem, "stages": list(state.get("stages", []))}
