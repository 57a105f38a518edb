# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Starts curl in the background on the head and prints what it has received, several times a second."""

from __future__ import annotations

import base64
import shlex
import time
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.dgxspark.serving.plugins.module_utils import _ask
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

display = Display()

PAUSE = 0.2  # seconds between two looks at what came
CURL = {
    6: "no such host",
    7: "connection refused",
    28: "no answer in time",
    52: "an empty answer",
    56: "the connection broke",
    127: "no curl",
}


def start_command(folder: str, url: str, timeout: int) -> str:
    """A shell line that starts the question and returns at once. Files in ``folder``: ask (body), out, err, code (HTTP, then curl's)."""
    curl = f"curl -sS -N --noproxy '*' --connect-timeout 5 --max-time {timeout} -H 'Content-Type: application/json'"
    curl += f" --data-binary @ask -o out -w '%{{http_code}} ' {shlex.quote(url)}"
    inner = f'c=$({curl} 2>err); r=$?; printf "%s %s" "${{c:-0}}" "$r" >code.new; mv code.new code'
    return f"cd {shlex.quote(folder)} && : >out && {{ setsid nohup sh -c {shlex.quote(inner)} >/dev/null 2>&1 </dev/null & }}"


def look_command(folder: str, offset: int) -> str:
    """A shell line that prints the end of the question ("- -" while it runs) and, in the next line, new bytes as base64."""
    return f"cd {shlex.quote(folder)} && {{ cat code 2>/dev/null || printf '%s' '- -'; }}; echo; tail -c +{offset + 1} out | base64 -w0"


def parse_look(text: str) -> tuple[int | None, int, bytes]:
    """(code of curl or None while it runs, HTTP status, new bytes)."""
    first, dummy, rest = text.strip().partition("\n")
    words = first.split()
    data = base64.b64decode(rest.strip() or b"")
    if len(words) < 2 or not words[-1].isdigit():
        return None, 0, data
    return int(words[-1]), int(words[0]) if words[0].isdigit() else 0, data


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result["changed"] = False
        self.node = str((task_vars or {}).get("inventory_hostname", ""))
        if self._task.check_mode:
            result.update(answer="", reasoning="", tokens=0, elapsed=0.0, msg="would ask")
            return result
        try:
            stream, seconds = self._converse(self._task.args)
        except Problem as problem:
            result.update(failed=True, msg=problem.msg, problem=problem.as_dict())
            return result
        except AnsibleConnectionFailure as exc:
            lost = self._problem(f"no SSH connection ({' '.join(str(exc.message).split())[:200]})", "see status.yml")
            result.update(failed=True, msg=lost.msg, problem=lost.as_dict())
            return result
        display.display(f"\n\n{_ask.summary(stream, seconds)}")
        result.update(answer=stream.text, reasoning=stream.reasoning, tokens=stream.tokens, elapsed=round(seconds, 2))
        return result

    def _problem(self, found: str, remedy: str) -> Problem:
        return Problem("ask", node=self.node, stage="ask", found=found, expected="an answer of the server", remedy=remedy)

    def _converse(self, arguments: dict[str, t.Any]) -> tuple[_ask.Stream, float]:
        """Ask as a chat, and plainly where the model has no chat template. Raises Problem."""
        for path in (_ask.CHAT, _ask.PLAIN):
            stream, code, status, seconds = self._ask(arguments, path)
            if code == 0 and status == 200 and not stream.error:
                return stream, seconds
            if path == _ask.CHAT and status == 400 and "chat template" in stream.message:
                continue
            break
        url = str(arguments.get("url", "http://127.0.0.1:30000"))
        if status and (status != 200 or stream.error):
            raise self._problem(f"HTTP {status} of {url}{path}: {stream.message}", "see status.yml and logs.yml")
        raise self._problem(f"{CURL.get(code, f'curl ended with {code}')} at {url}", "see status.yml; site.yml starts the server")

    def _ask(self, arguments: dict[str, t.Any], path: str) -> tuple[_ask.Stream, int, int, float]:
        timeout = int(arguments.get("timeout", 300))
        body = _ask.request(path, str(arguments["model"]), str(arguments["prompt"]), int(arguments.get("max_tokens", 512)))
        folder = self._make_tmp_path()
        stream, offset, code, status = _ask.Stream(), 0, None, 0
        try:
            self._transfer_data(f"{folder}/ask", body)
            started = time.monotonic()
            self._shell(start_command(folder, str(arguments.get("url", "http://127.0.0.1:30000")) + path, timeout))
            while code is None and time.monotonic() - started < timeout + 30:
                code, status, data = parse_look(self._shell(look_command(folder, offset)))
                offset += len(data)
                text = stream.feed(data)
                if text:
                    display.display(text, newline=False)
                if code is None:
                    time.sleep(PAUSE)
            return stream, 28 if code is None else code, status, time.monotonic() - started
        finally:
            self._remove_tmp_path(folder)

    def _shell(self, command: str) -> str:
        answer = self._low_level_execute_command(command, sudoable=False)
        if answer.get("rc"):
            raise self._problem(
                f"a shell that ended with {answer['rc']}: {str(answer.get('stderr', '')).strip()[-200:]}", "see the message"
            )
        return str(answer.get("stdout", ""))
