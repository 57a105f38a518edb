# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plans and shows on the controller, asks the module on the nodes; a node that does not answer is a line of the table."""

from __future__ import annotations

import typing as t

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_test

display = Display()

MEMORY = 8 << 30  # free bytes that all_gather wants: it must not push a serving node over the edge


def head_address(looks: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """Fabric address of the first node; "" when it has none."""
    links = looks[0].get("links") or [] if looks else []
    return next((link["addresses"][0].partition("/")[0] for link in links if link["rail"] == 1), "")


def gather_skip(looks: t.Sequence[t.Mapping[str, t.Any]], image: str) -> str:
    """Why all_gather cannot be run; "" when it can. All ranks or none: one alone would wait for the others."""
    if len(looks) < 2:
        return "one node only"
    for text, lacking in (
        ("no answer of", lambda look: look.get("error")),
        ("no fabric address on", lambda look: not any(link["rail"] == 1 for link in look["links"])),
        ("no GPU on", lambda look: not look.get("gpus")),
        (f"the image {image}, which site.yml brings, is not on", lambda look: not look.get("image")),
        ("less than 8 GiB of memory free on", lambda look: look.get("memory", 0) < MEMORY),
    ):
        nodes = [look["node"] for look in looks if lacking(look)]
        if nodes:
            return f"{text} {', '.join(nodes)}"
    return ""


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        args = self._task.args
        step = args["step"]
        if step == "plan":
            looks = args["looks"]
            plan, rows = _fabric_test.pairs(looks)
            skip = gather_skip(looks, str(args.get("image", "")))
            return {**result, "changed": False, "plan": plan, "rows": rows, "gather_skip": skip, "head": head_address(looks)}
        if step == "report":
            return {**result, **self._report(args)}
        try:
            return self._execute_module(module_args=dict(args), task_vars=task_vars)
        except AnsibleConnectionFailure as exc:
            return self._silent(step, args, str((task_vars or {}).get("inventory_hostname", "")), " ".join(str(exc.message).split())[:200])

    @staticmethod
    def _silent(step: str, args: t.Mapping[str, t.Any], node: str, reason: str) -> dict[str, t.Any]:
        """The result for a node that does not answer."""
        node = str(args.get("node") or node)
        pair = args.get("pair") or {}
        found: dict[str, t.Any] = {"changed": False}
        if step == "look":
            found["look"] = {"node": node, "error": f"no SSH connection: {reason}"}
        elif step == "measure":
            over = f"rail {pair['rail']} {pair['interface']}"
            found["rows"] = [
                _fabric_test.row("ping", pair["source"], pair["target"], over, _fabric_test.FAILED, f"no SSH connection: {reason}")
            ]
        elif step == "all_gather":
            found["answer"] = {"node": node, "error": f"no SSH connection: {reason}"}
        return found

    @staticmethod
    def _report(args: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        looks, rows = args["looks"], list(args.get("rows") or [])
        answers = args.get("answers") or []
        active = [sum(link["rdma_state"] == "ACTIVE" and link["rail"] > 0 for link in look.get("links") or []) for look in looks]
        rails = max(1, min(active, default=1))
        if answers:
            rows.append(_fabric_test.gather_row(answers, rails))
        else:
            why = str(args.get("gather_skip") or "not asked for")
            rows.append(_fabric_test.row("all_gather", "all", "all", "-", _fabric_test.NOT_RUN, why))
        problem = _fabric_test.verdict(rows)
        display.display(f"\n{_fabric_test.table(looks, rows)}\n", color=C.COLOR_ERROR if problem else None)
        found: dict[str, t.Any] = {"changed": False, "rows": rows}
        if problem:
            found.update(failed=True, msg=problem.msg, problem=problem.as_dict())
        return found
