# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Carries out the sweep point by point on the head, and writes what was measured on the controller."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shlex
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark, _status
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.plugin_utils import _progress, _report, _report_charts, _report_png

display = Display()

MODULE = "dgxspark.serving.serving_benchmark"


def now() -> datetime.datetime:
    """This moment, in UTC."""
    return datetime.datetime.now(tz=datetime.timezone.utc)


def write(path: str, text: str) -> None:
    """A whole file or none."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as handle:
        handle.write(text)
    os.replace(f"{path}.tmp", path)


def read_runs(folder: str) -> list[dict[str, t.Any]]:
    """Every run in a directory; other JSON files are left out."""
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if not name.endswith(".json"):
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as handle:
                document = json.load(handle)
        except (OSError, ValueError):
            continue
        if _benchmark.is_run(document):
            found.append(document)
    return found


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        self.variables = task_vars or {}
        arguments = self._task.args
        if arguments.get("step", "all") != "all":
            return {**result, **self._execute_module(module_name=MODULE, module_args=dict(arguments), task_vars=task_vars)}
        self.node = str(arguments.get("node") or self.variables.get("inventory_hostname", ""))
        self.settings = arguments["settings"]
        self.found: dict[str, t.Any] = {}
        try:
            self._all(arguments)
        except Problem as problem:
            problem.node = problem.node or self.node
            self.found.update(failed=True, msg=problem.msg, problem=problem.as_dict())
        except AnsibleConnectionFailure as exc:
            lost = Problem(
                "benchmark-failed",
                node=self.node,
                stage=_benchmark.STAGE,
                found=f"no SSH connection ({' '.join(str(exc.message).split())[:200]})",
                expected="the head to answer for the whole sweep",
                remedy="see status.yml",
            )
            self.found.update(failed=True, msg=lost.msg, problem=lost.as_dict())
        result.update(self.found)
        return result

    def _all(self, arguments: dict[str, t.Any]) -> None:
        """Look, refuse or measure, write. What there is to return is in ``found`` also when it raises."""
        settings, rows = self.settings, sorted(arguments["rows"], key=lambda row: row["role"] != "head")
        status = _status.document(rows, {**settings, "endpoint_host": self.node})
        longest = status["max_model_len"]
        lengths = _benchmark.lengths(settings["benchmark_lengths"], longest)
        wanted: list[dict[str, t.Any]] = [*_benchmark.points(settings["benchmark_concurrency"], lengths, settings["benchmark_requests"])]
        problem = _benchmark.not_serving(status) or _benchmark.too_long(wanted, longest)
        if problem:
            raise problem
        started = now()
        stamp = started.isoformat(timespec="seconds")
        folder = os.path.abspath(os.path.expanduser(settings["benchmark_dir"]))
        earlier = _benchmark.previous(read_runs(folder), status["model"], settings["benchmark_compare"], stamp)
        look = self._module(step="look")["server"]
        if look["error"]:
            raise Problem(
                "benchmark-tool",
                stage=_benchmark.STAGE,
                found=f"the server's container runs no python3: {look['error']}",
                expected="vLLM's own load tool in the serving image",
                remedy="serve from an image that has it",
            )
        run = {
            "schema": _benchmark.SCHEMA,
            "id": _benchmark.run_id(stamp, status["model"], settings["benchmark_name"]),
            "name": settings["benchmark_name"],
            "date": stamp,
            "complete": False,
            "notes": self._notes(status),
            "config": _benchmark.configuration(status, settings, look, rows, arguments.get("facts") or []),
            "points": wanted,
        }
        server = {"url": settings["api_local_url"], "model": status["served_model_name"], "command": look["command"]}
        for number, point in enumerate(wanted):
            point["argv"] = _benchmark.arguments(point, server, int(started.timestamp()) + number)
        if self._task.check_mode:
            would = [shlex.join(["vllm", "bench", "serve", *point["argv"]]) for point in wanted]
            against = f"compared with {earlier['id']}" if earlier else "compared with no other run"
            display.display("\n".join([f"\n{self.node}: would run in container spark-vllm, {against}, and write to {folder}:", *would]))
            self.found.update(would=would, msg=f"would measure {len(wanted)} points and write to {folder}")
            return
        self._prepare(folder)
        self._sweep(run, folder, earlier)

    @staticmethod
    def _notes(status: t.Mapping[str, t.Any]) -> list[str]:
        """What makes the figures doubtful."""
        busy = status["load"] or {}
        notes = [f"Not all is well while this was measured: {text}" for text in status["problems"]]
        if busy.get("running") or busy.get("waiting"):
            notes.append(f"Other requests were there when it began: {busy['running']} running, {busy['waiting']} waiting.")
        return notes

    def _prepare(self, folder: str) -> None:
        """The directory is there and can be written to, before an hour is spent on measuring."""
        probe = os.path.join(folder, f".{secrets.token_hex(4)}")
        try:
            os.makedirs(folder, exist_ok=True)
            write(probe, "")
            os.unlink(probe)
        except OSError as exc:
            raise Problem(
                "benchmark-files",
                stage=_benchmark.STAGE,
                found=f"spark_benchmark_dir {folder}: {exc.strerror}",
                expected="a directory on the controller that can be written to",
                remedy="name another one",
            )

    def _sweep(self, run: dict[str, t.Any], folder: str, earlier: t.Mapping[str, t.Any] | None) -> None:
        """Measure every point; what is measured is written at once. Raises the first Problem at the end."""
        path = os.path.join(folder, run["id"])
        limit = float(self.settings["benchmark_timeout"])
        first: Problem | None = None
        done = 0
        try:
            for number, point in enumerate(run["points"], start=1):
                what = (
                    f"point {number} of {len(run['points'])}, {point['input']}+{point['output']} tokens, {point['concurrency']} at a time"
                )
                end = self._point(point, what, limit)
                problem = _benchmark.failure(end["end"], point, limit, end.get("said", ""))
                point.update(result=_benchmark.kept((end["end"] or {}).get("result")), seconds=(end["end"] or {}).get("seconds"))
                if problem:
                    point["problem"] = problem.found
                    first = first or problem
                    display.warning(f"{self.node}: {problem.found}")
                done = number
                write(f"{path}.json", json.dumps(run, indent=1) + "\n")
                if problem and (problem.id == "benchmark-tool" or not end["healthy"]):
                    break
        finally:
            run["complete"] = done == len(run["points"]) and first is None
            if _benchmark.measured(run):
                self._write(run, path, earlier)
        if first:
            kept = f" (what was measured is in {path}.html)" if _benchmark.measured(run) else ""
            raise Problem(
                first.id, node=self.node, stage=first.stage, found=first.found + kept, expected=first.expected, remedy=first.remedy
            )

    def _point(self, point: dict[str, t.Any], what: str, limit: float) -> dict[str, t.Any]:
        """Run one point on the head and show how far it is."""
        display.display(f"{self.node}: {what}: {point['requests']} requests")
        name = secrets.token_hex(8)
        warm = {"url": self.settings["api_local_url"], "model": _benchmark.flag(point["argv"], "--model")}
        job = {
            "argv": point["argv"],
            "limit": limit,
            "total": point["requests"],
            "what": what,
            "warm": {**warm, "input": point["input"], "output": point["output"]},
        }
        interval = _progress.TERMINAL_SECONDS if _progress.INTERACTIVE else _progress.PIPE_SECONDS
        with _progress.Watcher(self._connection, self.node, name, display.display, interval):
            return self._module(step="measure", job=job, progress=name)

    def _module(self, **more: t.Any) -> dict[str, t.Any]:
        """One execution of the module on the head. Raises Problem when it fails."""
        given = {"node": self.node, "url": self.settings["api_local_url"], **more}
        if self._task.args.get("container"):
            given["container"] = self._task.args["container"]
        answer = self._execute_module(module_name=MODULE, module_args=given, task_vars=self.variables)
        if answer.get("failed") or answer.get("unreachable"):
            raise Problem(
                "benchmark-failed",
                stage=_benchmark.STAGE,
                found=" ".join(str(answer.get("msg", "an answer without words")).split())[:300],
                expected="an answer of the module",
                remedy="see the message",
            )
        return answer

    def _write(self, run: dict[str, t.Any], path: str, earlier: t.Mapping[str, t.Any] | None) -> None:
        """The document, the report and the plot; tells where they are."""
        write(f"{path}.json", json.dumps(run, indent=1) + "\n")
        write(f"{path}.html", _report.page(run, earlier))
        title = f"{run['id']}{' against ' + earlier['id'] if earlier else ''}"
        lacking = _report_png.draw(_report_charts.charts(run, earlier), title, f"{path}.png")
        lines = _status.columns(_benchmark.table(run, earlier))
        against = f"CHANGE: against {earlier['id']}" if earlier else "no earlier run of this model to compare with"
        files = [f"{path}.json", f"{path}.html", *([] if lacking else [f"{path}.png"])]
        display.display("\n".join(["", *lines, "", against, *files, *([lacking] if lacking else [])]))
        self.found.update(changed=True, run=run, file=f"{path}.json", report=f"{path}.html", plot="" if lacking else f"{path}.png")
