# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The head asks Ray; meanwhile every other node watches its own container, and the end of one ends the wait of all."""

from __future__ import annotations

import os
import time
import typing as t

from ansible import constants as C
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.action.vllm_ready import HEAD_GRACE, Board, Interrupted, unless

display = Display()


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        args = dict(self._task.args)
        args["node"] = args.get("node") or str(variables.get("inventory_hostname", ""))
        if self._task.check_mode:
            return self._execute_module(module_args=args, task_vars=variables)
        board = Board(os.path.join(str(C.DEFAULT_LOCAL_TMP), f"ray_cluster_ready-{self._task._uuid}"))
        if boolean(args.get("watch", False), strict=False):
            return self._watch(board, args, variables)
        board.tell("begun", {})
        try:
            with unless(board.lost_rank):
                return self._execute_module(module_args=args, task_vars=variables)
        except Interrupted:
            lost = board.lost_rank() or {}
            return {"failed": True, "changed": False, "ready": False, **{key: lost.get(key) for key in ("msg", "problem")}}
        finally:
            board.tell("done", {})

    def _watch(self, board: Board, args: dict[str, t.Any], variables: dict[str, t.Any]) -> dict[str, t.Any]:
        """Watch this node's container until the head's wait is over; tell it when the container ended."""
        end = time.monotonic() + HEAD_GRACE
        while board.read("begun") is None:
            if time.monotonic() > end:
                display.warning(
                    f"{args['node']}: its Ray is not watched: the head's part of the task does not run at the same time (forks)"
                )
                return {"changed": False, "ready": False}
            time.sleep(0.2)
        try:
            with unless(lambda: board.read("done") is not None):
                result = self._execute_module(module_args=args, task_vars=variables)
        except Interrupted:
            return {"changed": False, "ready": False}
        if result.get("failed"):
            board.tell(f"lost-{args['node']}", {"at": time.time(), "msg": result.get("msg"), "problem": result.get("problem")})
        return result
