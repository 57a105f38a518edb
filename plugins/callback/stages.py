# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: stages
type: stdout
short_description: Short output by stages, errors last and complete
version_added: 0.1.0
author:
  - dgxspark.serving contributors (!UNKNOWN)
description:
  - Shows of a play what a person wants to see while it runs, which is the stage, what changed, warnings, the progress of long tasks, and the messages of
    C(ansible.builtin.debug) tasks. A stage is a role that the play imports, or the play where it imports none.
  - A failed task is told in one line when it happens. When the play has ended, after the recap, every failure comes once more with all that is known of it.
  - The recap is left out where one stage ran and nothing changed and nothing failed.
  - With C(-v) and more everything is shown as P(ansible.builtin.default#callback) does, and the errors come once more at the end.
  - Colours are used on a terminal only, and never when the environment variable C(NO_COLOR) is set.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
options:
  long_task:
    description:
      - After so many seconds of a task one line says which one it is and for which nodes it waits. V(0) for never. Answers and logs are not interrupted by it.
    type: float
    default: 10
    env:
      - name: DGXSPARK_STAGES_LONG_TASK
    ini:
      - section: callback_dgxspark_stages
        key: long_task
requirements:
  - set as stdout in configuration
seealso:
  - plugin: ansible.builtin.default
    plugin_type: callback
"""

EXAMPLES = r"""
# ansible.cfg:
#
#   [defaults]
#   stdout_callback = dgxspark.serving.stages
#
# or for one run:
#
#   ANSIBLE_STDOUT_CALLBACK=dgxspark.serving.stages ansible-playbook dgxspark.serving.site.yml -i inventory/sparks
"""

import atexit
import copy
import os
import sys
import threading
import time
import typing as t

from ansible import constants as C
from ansible import context
from ansible.playbook.role_include import IncludeRole
from ansible.playbook.task_include import TaskInclude
from ansible.plugins.callback.default import CallbackModule as Default

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _stages

DEBUG = ("debug", "ansible.builtin.debug", "ansible.legacy.debug")
# They show something all the time, and the first one in the middle of a line.
TALKING = ("dgxspark.serving.serving_ask", "dgxspark.serving.serving_logs")
LOOK = 1.0  # seconds between two looks of the thread


class Failure(t.NamedTuple):
    """A failure as it came, for the end."""

    result: t.Any  # what the callback was given
    whole: t.Any  # what the display takes the exception from
    unreachable: bool


def without_secrets(result: t.Any) -> None:
    """Take the exception out of a result with ``no_log``: its message is what was to be hidden, and the default callback shows it."""
    if "censored" in result.result:
        result.result.pop("exception", None)


def role_of(task: t.Any) -> str:
    """The name of the outermost task that brought a role in (``import_role: ... name: Start the Ray cluster``), or of the role, or nothing."""
    found, parent = "", getattr(task, "_parent", None)
    while parent is not None:
        if isinstance(parent, IncludeRole):
            found = str(parent.name or parent.get_name())
        parent = getattr(parent, "_parent", None)
    role = getattr(task, "_role", None)
    return found or (str(role.get_name()) if role else "")


class CallbackModule(Default):
    """The default callback with most of it left out."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "dgxspark.serving.stages"

    def __init__(self) -> None:
        super().__init__()
        self._failures: list[Failure] = []
        self._stage: tuple[str, str] | None = None
        self._stage_name = ""
        self._begun = 0.0
        self._stage_changed = 0
        self._stage_failed = False
        self._stages = 0
        self._all_changed = 0
        self._all_begun = time.monotonic()
        # what changed in a task, until the task is over: one line for all nodes
        self._changed: dict[str, tuple[str, list[str]]] = {}
        self._looped: set[tuple[str, str]] = set()
        self._waiting: set[str] = set()
        self._task_begun = 0.0
        self._task_label = ""
        self._told_long = True
        self._over = threading.Event()
        self._pid = os.getpid()

    # --- helpers

    @property
    def _all(self) -> bool:
        return self._display.verbosity > 0

    @property
    def _check(self) -> bool:
        return bool(context.CLIARGS.get("check"))

    def _say(self, text: str, color: str | None = None, stderr: bool = False) -> None:
        self._display.display(text, color=color, stderr=stderr)

    def _flush_changed(self) -> None:
        for name, hosts in self._changed.values():
            self._say(_stages.line("changes" if self._check else "changed", _stages.where(name, hosts)), C.COLOR_CHANGED)
        self._changed = {}

    def _close_stage(self) -> None:
        self._flush_changed()
        if self._stage_name and not self._all:
            text = _stages.closing(time.monotonic() - self._begun, self._stage_changed, self._stage_failed, self._check)
            colour = C.COLOR_ERROR if self._stage_failed else C.COLOR_CHANGED if self._stage_changed else C.COLOR_OK
            self._say(f"{_stages.INDENT}{text}", colour)
            self._stages += 1
            self._all_changed += self._stage_changed
        self._stage_name = ""

    def _enter(self, task: t.Any) -> None:
        """The header of the task's stage, when it is another one than that of the task before."""
        play = self._play.get_name().strip() if self._play else ""
        stage = (str(getattr(self._play, "_uuid", "")), role_of(task))
        if stage == self._stage:
            return
        self._close_stage()
        self._stage = stage
        self._stage_name = stage[1] or play or "Play"
        self._begun = time.monotonic()
        self._stage_changed = 0
        self._stage_failed = False
        self._say(self._stage_name, C.COLOR_HIGHLIGHT)

    def _name(self, task: t.Any) -> str:
        name = self._last_task_name if self._last_task_name is not None else task.get_name()
        return _stages.task_name(str(name))

    def _mark_changed(self, result: t.Any, name: str) -> None:
        hosts = self._changed.setdefault(result.task._uuid, (name, []))[1]
        hosts.append(self.host_label(result))
        self._stage_changed += 1

    def _fail(self, result: t.Any, name: str, ignored: bool, unreachable: bool = False) -> None:
        """One line now; all of it at the end."""
        self._flush_changed()
        self._handle_warnings(result.result)
        word = "ignored" if ignored else "DOWN" if unreachable else "FAILED"
        colour = C.COLOR_SKIP if ignored else C.COLOR_UNREACHABLE if unreachable else C.COLOR_ERROR
        text = f"{self.host_label(result)}: {name}: {_stages.reason(result.result)}"
        self._say(_stages.line(word, text), colour, stderr=not ignored and self.get_option("display_failed_stderr"))
        if not ignored:
            self._stage_failed = True
            self._keep(result, unreachable)

    def _keep(self, result: t.Any, unreachable: bool = False) -> None:
        self._failures.append(Failure(result, getattr(self, "_current_task_result", None), unreachable))

    # --- what takes long

    def _watch(self) -> None:
        """In a thread: output through a pipe comes at once, and a task that takes long says that it runs."""
        patience = float(self.get_option("long_task"))
        while not self._over.wait(LOOK):
            if patience and not self._told_long and time.monotonic() - self._task_begun > patience:
                self._told_long = True
                waiting = sorted(self._waiting)
                if waiting:
                    self._say(_stages.line("...", _stages.where(self._task_label, waiting)), C.COLOR_SKIP)
            try:
                sys.stdout.flush()
            except (OSError, ValueError):  # the reader is gone; Ansible itself finds out
                return

    def _done(self, result: t.Any) -> None:
        self._waiting.discard(result.host.get_name())

    # --- events

    def v2_playbook_on_start(self, playbook: t.Any) -> None:
        """Begin to watch."""
        atexit.register(self._at_exit)
        if self._all:
            super().v2_playbook_on_start(playbook)
            return
        if self._check:
            self._say("Check mode: nothing is changed; lines with 'changes' say what a run would change.", C.COLOR_HIGHLIGHT)
        threading.Thread(target=self._watch, daemon=True).start()

    def v2_playbook_on_play_start(self, play: t.Any) -> None:
        """A new stage; its header comes with its first task."""
        if self._all:
            super().v2_playbook_on_play_start(play)
            return
        self._close_stage()
        self._stage = None
        self._play = play

    def _task_start(self, task: t.Any, prefix: str | None = None) -> None:
        if self._all:
            super()._task_start(task, prefix)
            return
        self._flush_changed()
        free = self._play is not None and self._play.strategy.rpartition(".")[2] in ("free", "host_pinned")
        self._last_task_name = None if free else task.get_name().strip()
        self._last_task_banner = task._uuid
        self._enter(task)
        self._waiting = set()
        self._task_label, self._task_begun, self._told_long = self._name(task), time.monotonic(), task.action in TALKING

    def v2_runner_on_start(self, host: t.Any, task: t.Any) -> None:
        """Known for the line about a task that takes long."""
        if self._all:
            super().v2_runner_on_start(host, task)
            return
        self._waiting.add(host.get_name())

    def v2_runner_on_ok(self, result: t.Any) -> None:
        """Only what changed, or says something."""
        if self._all:
            super().v2_runner_on_ok(result)
            return
        self._done(result)
        if isinstance(result.task, TaskInclude):
            return
        self._handle_warnings_and_exception(result)
        if result.task.loop and "results" in result.result:
            return  # its items were shown one by one
        self._ok(result, self._name(result.task))

    def _ok(self, result: t.Any, name: str) -> None:
        if result.result.get("changed", False):
            self._mark_changed(result, name)
        if result.task.action not in DEBUG:
            return
        self._flush_changed()
        text = _stages.message(result.host.get_name(), result.result)
        if text is None:
            self._clean_results(result.result, result.task.action)
            found = result.result.get("msg")
            text = f"{result.host.get_name()}:{self._dump_results(found if isinstance(found, dict) else result.result)}"
        self._say(text)

    def v2_runner_item_on_ok(self, result: t.Any) -> None:
        """As for a task, with the item in its name."""
        if self._all:
            super().v2_runner_item_on_ok(result)
            return
        if isinstance(result.task, TaskInclude):
            return
        self._handle_warnings_and_exception(result)
        if result.result.get("changed", False):
            label = f"{self._name(result.task)}: {_stages.brief(str(self._get_item_label(result.result)))}"
            key = f"{result.task._uuid} {label}"
            self._changed.setdefault(key, (label, []))[1].append(self.host_label(result))
            self._stage_changed += 1
            return
        self._ok(result, self._name(result.task))

    def v2_runner_on_skipped(self, result: t.Any) -> None:
        """Nothing, warnings excepted."""
        if self._all:
            super().v2_runner_on_skipped(result)
            return
        self._done(result)
        self._handle_warnings_and_exception(result)

    def v2_runner_item_on_skipped(self, result: t.Any) -> None:
        """Nothing, warnings excepted."""
        if self._all:
            super().v2_runner_item_on_skipped(result)
            return
        self._handle_warnings_and_exception(result)

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        """One line, and kept for the end."""
        without_secrets(result)
        looped = (result.task._uuid, result.host.get_name()) in self._looped
        if self._all:
            if ignore_errors:
                self._forget(result)
            elif not looped:
                self._keep_copy(result)
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self._done(result)
        if looped and result.task.loop and "results" in result.result:
            self._handle_warnings(result.result)
            if ignore_errors:
                self._forget(result)
                self._say(_stages.line("ignored", f"{self.host_label(result)}: {self._name(result.task)}"), C.COLOR_SKIP)
            else:
                self._stage_failed = True
            return
        self._fail(result, self._name(result.task), ignore_errors)

    def v2_runner_item_on_failed(self, result: t.Any) -> None:
        """One line, and kept for the end."""
        without_secrets(result)
        self._looped.add((result.task._uuid, result.host.get_name()))
        if self._all:
            self._keep_copy(result)
            super().v2_runner_item_on_failed(result)
            return
        name = f"{self._name(result.task)}: {_stages.brief(str(self._get_item_label(result.result)))}"
        self._fail(result, name, result.task.ignore_errors is True)

    def v2_runner_retry(self, result: t.Any) -> None:
        """One line."""
        if self._all:
            super().v2_runner_retry(result)
            return
        left = result.result["retries"] - result.result["attempts"]
        self._say(_stages.line("retry", f"{self.host_label(result)}: {self._name(result.task)}, {left} left"), C.COLOR_DEBUG)

    def v2_runner_on_unreachable(self, result: t.Any) -> None:
        """One line, and kept for the end."""
        ignored = result.task.ignore_unreachable is True
        if self._all:
            if not ignored:
                self._keep_copy(result, unreachable=True)
            super().v2_runner_on_unreachable(result)
            return
        self._done(result)
        self._fail(result, self._name(result.task), ignored, unreachable=True)

    def _forget(self, result: t.Any) -> None:
        """The task of a loop is over, and its failures are ignored."""
        known = (result.task._uuid, result.host.get_name())
        self._failures = [f for f in self._failures if (f.result.task._uuid, f.result.host.get_name()) != known]

    def _keep_copy(self, result: t.Any, unreachable: bool = False) -> None:
        """Keep a result that the default callback is about to take apart."""
        kept = copy.copy(result)
        kept.__dict__["result"] = dict(result.result)
        self._keep(kept, unreachable)

    def v2_on_file_diff(self, result: t.Any) -> None:
        """The name of the task and the node before its diff."""
        if self._all:
            super().v2_on_file_diff(result)
            return
        parts = result.result["results"] if result.task.loop and "results" in result.result else [result.result]
        diffs = [self._get_diff(part["diff"]) for part in parts if part.get("diff") and part.get("changed", False)]
        for text in filter(None, diffs):
            self._say(_stages.line("diff", f"{self.host_label(result)}: {self._name(result.task)}"), C.COLOR_HIGHLIGHT)
            self._say(text.rstrip("\n"))

    def v2_playbook_on_include(self, included_file: t.Any) -> None:
        """Nothing."""
        if self._all:
            super().v2_playbook_on_include(included_file)

    def v2_playbook_on_no_hosts_remaining(self) -> None:
        """Nothing: the end says why."""
        if self._all:
            super().v2_playbook_on_no_hosts_remaining()

    def v2_playbook_on_stats(self, stats: t.Any) -> None:
        """The recap of the default callback, then the errors."""
        self._over.set()
        self._close_stage()
        self._stage = None
        counts = [stats.summarize(host) for host in stats.processed]
        failed = any(count["failures"] or count["unreachable"] for count in counts)
        if self._stages > 1:
            seconds = time.monotonic() - self._all_begun
            self._say(f"All stages: {_stages.closing(seconds, self._all_changed, failed, self._check)}")
        # One play that only looked has said what it has to say; a play of several stages has its recap, which others read, too.
        if self._all or failed or self._stages != 1 or self._all_changed or stats.custom:
            super().v2_playbook_on_stats(stats)
        if not failed:  # all that failed was rescued
            self._failures = []
        self._errors()

    def _at_exit(self) -> None:
        """A run that was interrupted has no recap, but it has its errors."""
        if os.getpid() == self._pid:
            self._over.set()
            self._errors()

    def _errors(self) -> None:
        failures, self._failures = self._failures, []
        if not failures:
            return
        self._display.banner("ERRORS" if len(failures) > 1 else "ERROR")
        for failure in failures:
            self._error(failure)

    def _error(self, failure: Failure) -> None:
        """All that is known of one failure."""
        result = failure.result
        stderr = self.get_option("display_failed_stderr")
        if _stages.has_problem(result.result):
            found = result.result
            self._say(f"\n{self.host_label(result)}: {result.task.get_name().strip()}", C.COLOR_ERROR, stderr=stderr)
            self._say("\n".join(_stages.problem_lines(found["problem"])), C.COLOR_ERROR, stderr=stderr)
            more = _stages.beside_problem(found)
            if more:
                self._say(self._dump_results(more).lstrip("\n"), stderr=stderr)
            self._print_task_path(result.task)
            return
        self._last_task_banner = None  # the name of the task again
        self._last_task_name = None
        current, self._current_task_result = getattr(self, "_current_task_result", None), failure.whole
        try:
            if failure.unreachable:
                super().v2_runner_on_unreachable(result)
            elif "_ansible_item_label" in result.result or "ansible_loop_var" in result.result:
                super().v2_runner_item_on_failed(result)
            else:
                super().v2_runner_on_failed(result)
        finally:
            self._current_task_result = current
