# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.plugin_utils._connection import let_go_of_kept, one_try


def unreachable(node: str, text: str, place: str, head: str) -> Problem:
    """A node that does not answer, as one error with a remedy (Ansible's own UNREACHABLE has none). ``head``: "" for the head itself."""
    reason = " ".join(str(text).split()) or "no answer"
    if head:
        return Problem(
            "NET-13",
            node=node,
            stage="preflight",
            found=f"no SSH connection to {place} ({reason})",
            expected=f"an answer over the fabric, through {head}",
            remedy=f"check the node's power, the cable and spark_fabric_address, also that {head} has its own (ip addr); on {head}: ping {place}, "
            "then ssh there by hand once",
        )
    return Problem(
        "node-unreachable",
        node=node,
        stage="preflight",
        found=f"no SSH connection to {place} ({reason})",
        expected="an answer",
        remedy="check power, address (ansible_host) and user (ansible_user), then ssh there by hand once",
    )


class ActionModule(ActionBase):
    """Runs the module; a node that cannot be reached becomes a failure, so that the whole gang stops with its cause."""

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        # The first contact: what does not answer now is told at once, not after several rounds of ssh's patience.
        one_try(self._connection)
        try:
            return self._ask(task_vars)
        except AnsibleConnectionFailure as exc:
            node = variables.get("inventory_hostname", "")
            heads = variables.get("groups", {}).get("ray_head", [])
            place = str(self._play_context.remote_addr or node)
            if node not in heads and "spark_fabric_address" in variables:
                place = str(variables["spark_fabric_address"])
            problem = unreachable(node, exc.message, place, heads[0] if heads and node not in heads else "")
            return {"failed": True, "changed": False, "msg": problem.msg, "problem": problem.as_dict()}

    def _ask(self, task_vars: dict[str, t.Any] | None) -> dict[str, t.Any]:
        try:
            answer: dict[str, t.Any] = self._execute_module(task_vars=task_vars)
        except AnsibleConnectionFailure as exc:
            if not let_go_of_kept(self._connection, str(exc.message)):
                raise
            answer = self._execute_module(task_vars=task_vars)
        return answer
