# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Asks a node whose network was changed over new connections, until it works or the time is nearly over: the module decides, this keeps trying."""

from __future__ import annotations

import os
import time
import typing as t

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.action.serving_status import Late, limited, quick_ssh
from ansible_collections.dgxspark.serving.plugins.action.vllm_ready import lost_connection
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_setup import STAGE, rail_peers
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.plugin_utils._connection import let_go

display = Display()

MODULE = "dgxspark.serving.fabric_setup"
CHECK = "dgxspark.serving.fabric_check"
MARGIN = 4  # seconds before the node's timer at which we stop trying
ATTEMPT = 20  # seconds for everything that is asked in one attempt
AFTER_TIMER = 60  # seconds for netplan and the ports after the node's timer


class Lost(Exception):
    """The node did not answer."""


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        self.variables = task_vars or {}
        self.args = dict(self._task.args)
        self.node = str(self.args.get("node") or self.variables.get("inventory_hostname", ""))
        self.place = str(self._play_context.remote_addr or self.node)
        self.ssh_args: str | None = None
        self.attempts = 0
        step = self.args.get("step", "change")
        try:
            if self._task.check_mode or step == "change":
                return self._module(MODULE, **self.args)
            self._forget()
            if step == "prove":
                return self._prove(float(self.args.get("timeout", 120)))
            if step == "revert":
                return self._revert(float(self.args.get("timeout", 120)))
            self._new_connection()
            return self._module(MODULE, **self.args)
        except Lost as exc:
            return self._failed(self._lost(str(exc)))

    # -- one attempt

    def _forget(self) -> None:
        """Close the connection that is kept for the next task: it may be one from before the change."""
        let_go(self._connection)

    def _new_connection(self) -> None:
        """The next module comes over a connection that did not exist before; short time-outs, no retries."""
        self.attempts += 1
        try:
            if self.ssh_args is None:
                self.ssh_args = str(self._connection.get_option("ssh_args") or "")
            folder = str(self._connection.get_option("control_path_dir"))
            os.makedirs(os.path.expanduser(folder), mode=0o700, exist_ok=True)
            self._connection.set_option("ssh_args", quick_ssh(self.ssh_args, folder, os.getpid() * 1000 + self.attempts))
            self._connection.set_option("reconnection_retries", 0)
        except (AnsibleError, KeyError, OSError) as exc:  # another connection plugin
            display.vvv(f"the connection keeps its own time-outs: {exc}")

    def _module(self, name: str, **arguments: t.Any) -> dict[str, t.Any]:
        """A module's result. Raises Lost when the node does not answer."""
        try:
            result = self._execute_module(module_name=name, module_args=arguments, task_vars=self.variables)
        except AnsibleConnectionFailure as exc:
            raise Lost(" ".join(str(exc.message).split())[:300]) from exc
        if lost_connection(result):
            raise Lost(" ".join(str(result.get("msg") or result.get("module_stderr") or "connection lost").split())[:300])
        return result

    def _ask(self, step: str) -> dict[str, t.Any]:
        """The module over a new connection, bounded."""
        self._new_connection()
        try:
            with limited(ATTEMPT):
                return self._module(MODULE, node=self.node, step=step, change_id=str(self.args.get("change_id", "")))
        except Late:
            raise Lost(f"no answer within {ATTEMPT} s") from None

    # -- until it works

    def _prove(self, timeout: float) -> dict[str, t.Any]:
        end = time.monotonic() + timeout - MARGIN
        while True:
            try:
                result = self._ask("prove")
                if "setup" not in result:
                    return result
                setup = result["setup"]
                end = min(end, time.monotonic() + setup["left"] - MARGIN)
                problem = self._judge(setup)
                if not problem:
                    return result
                if setup["phase"] not in ("pending", "applied"):
                    return self._failed(problem)
            except Lost as exc:
                problem = self._lost(str(exc))
            if time.monotonic() >= end:
                return self._failed(problem)
            time.sleep(1)

    def _judge(self, setup: t.Mapping[str, t.Any]) -> Problem | None:
        """What is wrong with the node now, its path to every peer over each rail included. Raises Lost."""
        if not setup["ready"]:
            gone = setup["phase"] not in ("pending", "applied")
            return Problem(
                "fabric-reverted" if gone else "fabric-not-live",
                node=self.node,
                stage=STAGE,
                found=setup["why"] or f"a change that is {setup['phase']}",
                expected="the addresses and the MTU of the file on its ports",
                remedy="look at 'journalctl -u dgxspark-fabric-apply' and 'networkctl' or 'nmcli device' on the node",
            )
        gang = [member for member in self.args.get("gang") or [] if member["node"] != self.node]
        for number, (port, peers) in enumerate(rail_peers(setup["ports"], gang)):
            try:
                with limited(ATTEMPT):
                    result = self._module(
                        CHECK,
                        node=self.node,
                        interface=port["name"],
                        address=port["address"],
                        mtu=port["mtu"],
                        peers=peers,
                        timeout=8,
                        skip=["tcp"] if number else [],
                    )
            except Late:
                raise Lost(f"no answer within {ATTEMPT} s") from None
            found = result.get("problem")
            if found:
                known = {key: found[key] for key in ("found", "expected", "remedy")}
                return Problem(found["id"], node=self.node, stage=STAGE, **known)
            if result.get("failed"):
                raise AnsibleError(str(result.get("msg")))
        return None

    def _revert(self, timeout: float) -> dict[str, t.Any]:
        """Wait until the node has its configuration from before; never fails, the cause is told elsewhere."""
        end = time.monotonic() + timeout + AFTER_TIMER
        step, why = "revert", ""
        while True:
            try:
                result = self._ask(step)
                step = "prove"  # it was told; from now on only look
                setup = result.get("setup", {})
                settled = ("reverted", "none") if self.args.get("change_id") else ("reverted", "none", "confirmed")
                if setup.get("phase") in settled:
                    return {"changed": True, "setup": setup, "text": f"{self.node} has its configuration from before again"}
                why = str(setup.get("why") or result.get("msg") or setup.get("phase"))
            except Lost as exc:
                why = str(exc)
            if time.monotonic() >= end:
                text = f"{self.node} has not been seen with its configuration from before ({why}); its console shows 'ip -br addr'"
                return {"changed": True, "setup": {}, "text": text}
            time.sleep(1)

    # -- messages

    def _lost(self, reason: str) -> Problem:
        return Problem(
            "fabric-lost",
            node=self.node,
            stage=STAGE,
            found=f"no new SSH connection to {self.place} ({reason})",
            expected="an answer of the node",
            remedy="check the cable and the addresses of both ends; a change that nobody confirms is taken back by the node itself",
        )

    @staticmethod
    def _failed(problem: Problem) -> dict[str, t.Any]:
        return {"failed": True, "changed": False, "msg": problem.msg, "problem": problem.as_dict()}
