# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Looks at one node with bounds, or puts the rows of all nodes together: _status decides, this asks and shows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import types
import typing as t

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _service, _status

display = Display()

COLLECTION = "dgxspark.serving"
CONNECT = 4  # seconds
COLOURS = {"ok": C.COLOR_OK, "busy": C.COLOR_CHANGED, "bad": C.COLOR_ERROR}


class Late(BaseException):
    """The time for one node is over. Not an Exception: nothing on the way may take it for a failure of its own."""


@contextlib.contextmanager
def limited(seconds: float) -> t.Iterator[None]:
    """Raise Late in the block after ``seconds``."""

    def ring(number: int, frame: types.FrameType | None) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def quick_ssh(arguments: str, control_dir: str, number: int) -> str:
    """``ssh_args`` with a short time-out and a control socket of this run alone, before what is configured (ssh takes the first)."""
    socket = os.path.join(os.path.expanduser(control_dir), f"status{number}")
    ours = f"-o ConnectTimeout={CONNECT} -o ServerAliveInterval=2 -o ServerAliveCountMax=2"
    return f"{ours} -o ControlMaster=auto -o ControlPersist=5s -o ControlPath={socket} {arguments}".rstrip()


def hurry(connection: t.Any) -> None:
    """No retries and short time-outs, where the connection is ssh."""
    try:
        folder = str(connection.get_option("control_path_dir"))
        os.makedirs(os.path.expanduser(folder), mode=0o700, exist_ok=True)
        connection.set_option("ssh_args", quick_ssh(str(connection.get_option("ssh_args") or ""), folder, os.getpid()))
        connection.set_option("reconnection_retries", 0)
    except (AnsibleError, KeyError, OSError) as exc:  # another connection plugin
        display.vvv(f"the connection keeps its own time-outs: {exc}")


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        variables = task_vars or {}
        arguments = self._task.args
        settings = arguments["settings"]
        rows = arguments.get("rows")
        if rows is None:
            result["row"] = self._look(settings, variables, float(arguments.get("limit", 12)))
            return result
        head = next((row["node"] for row in rows if row["role"] == "head"), "")
        head = head or next(iter(variables.get("groups", {}).get("ray_head", [])), "")  # a run that is limited to other nodes
        place = str(variables.get("hostvars", {}).get(head, {}).get("ansible_host", head))
        status = _status.document(sorted(rows, key=lambda row: row["role"] != "head"), {**settings, "endpoint_host": place})
        self._show(status, str(arguments.get("output", "table")), str(arguments.get("file") or ""))
        result["status"] = status
        return result

    def _look(self, settings: dict[str, t.Any], variables: dict[str, t.Any], limit: float) -> dict[str, t.Any]:
        """The row of this node; never raises for what the node does or does not."""
        name = str(variables.get("inventory_hostname", ""))
        head = name in variables.get("groups", {}).get("ray_head", [])
        address = str(settings["fabric_address"])
        found: dict[str, t.Any] = {}
        error = ""
        hurry(self._connection)
        try:
            with limited(limit):
                self._ask(found, name, head, settings, variables)
        except Late:
            error = f"no answer within {limit:g} s"
        except AnsibleConnectionFailure as exc:
            error = f"no SSH connection: {' '.join(str(exc.message).split())[:300]}"
        if "node" not in found:
            return _status.unreachable_row(name, head, address, error or found["error"])
        row = _status.node_row(name, head, address, settings, **found)
        return {**row, "error": f"looked at only in part: {error}"} if error else row

    def _ask(self, found: dict[str, t.Any], name: str, head: bool, settings: dict[str, t.Any], variables: dict[str, t.Any]) -> None:
        """Fill ``found`` with the arguments of node_row, one by one: what is there when the time is over counts."""
        service = str(settings.get("service") or "")
        record = _service.record(service)
        facts = self._module(
            "node_info",
            variables,
            node=name,
            image=settings["image"],
            units=settings["stop"]["units"],
            service=service,
            paths=[record, record.replace(".json", ".last.json")],
        )
        if "node" not in facts:
            found["error"] = f"no facts: {' '.join(str(facts.get('msg', 'unknown')).split())[:300]}"
            return
        found["node"] = facts["node"]
        self._fabric(found, name, settings, variables)
        if head and self._task.args.get("server", True) and facts["node"]["docker"]["reachable"]:
            answer = self._module(
                "serving_info",
                variables,
                node=name,
                container=_service.own(_service.VLLM, service),
                ray_container=_service.own(_service.RAY, service),
                url=settings.get("api_local_url") or f"http://127.0.0.1:{settings['api_port']}",
                ray_address=f"{settings['fabric_address'] or (found['fabric'] or {}).get('address', '')}:{settings['ray_port']}",
            )
            found["server"] = answer.get("server")

    def _fabric(self, found: dict[str, t.Any], name: str, settings: dict[str, t.Any], variables: dict[str, t.Any]) -> None:
        """First of what is asked after the node itself: a gang whose addresses nobody named is asked under the one that is found."""
        fabric = self._module(
            "nccl_interface_info",
            variables,
            node=name,
            subnets=[settings["fabric_subnet"]] if settings["fabric_subnet"] else [],
            address=settings["fabric_address"],
            interface=settings["fabric_interface"],
            hcas=settings["fabric_hcas"],
            require_rdma=settings["require_rdma"],
        )
        found["fabric"] = fabric.get("fabric")
        if not found["fabric"]:
            found["fabric_error"] = str((fabric.get("problem") or {}).get("found") or fabric.get("msg") or "unknown").split(": ", 1)[0]

    def _module(self, name: str, variables: dict[str, t.Any], **arguments: t.Any) -> dict[str, t.Any]:
        return self._execute_module(module_name=f"{COLLECTION}.{name}", module_args=arguments, task_vars=variables)

    @staticmethod
    def _show(status: dict[str, t.Any], output: str, path: str) -> None:
        text = json.dumps(status, indent=1, sort_keys=True)
        if path:
            with open(os.path.expanduser(path), "w", encoding="utf-8") as handle:
                handle.write(text + "\n")
        if output == "json":
            display.display(text)
        elif output == "table":
            first, dummy, rest = _status.table(status).partition("\n")
            display.display(f"\n{first}", color=COLOURS[_status.STATES[status["state"]]])
            display.display(rest)
