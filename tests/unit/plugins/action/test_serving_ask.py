# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import threading
import time
import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import serving_ask

EVENTS = (
    b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}\n\ndata: [DONE]\n\n'
)


def look(code, data=b""):
    return f"{code}\n{base64.b64encode(data).decode()}"


@pytest.fixture
def run(monkeypatch):
    """run(looks): result and printed text; ``looks`` are the answers to look_command."""
    monkeypatch.setattr(serving_ask.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(serving_ask.time, "sleep", lambda seconds: None)

    def run(looks, check=False, **arguments):
        printed, waiting = [], iter(looks)
        run.bodies, run.commands = [], []
        monkeypatch.setattr(serving_ask.display, "display", lambda text, newline=True: printed.append(text))
        plugin = serving_ask.ActionModule.__new__(serving_ask.ActionModule)
        plugin._task = types.SimpleNamespace(args={"prompt": "secret question", "model": "m", **arguments}, check_mode=check)
        plugin._make_tmp_path = lambda: "/tmp/f"
        plugin._remove_tmp_path = lambda folder: run.commands.append(f"rm {folder}")
        plugin._transfer_data = lambda path, body: run.bodies.append(json.loads(body))

        def shell(command, sudoable):
            assert sudoable is False
            run.commands.append(command)
            answer = "" if "setsid" in command else next(waiting)
            if isinstance(answer, Exception):
                raise answer
            return {"rc": 0, "stdout": answer, "stderr": ""}

        plugin._low_level_execute_command = shell
        return plugin.run(None, {"inventory_hostname": "spark-1"}), "".join(printed)

    return run


def test_an_answer_as_it_comes(run):
    result, printed = run([look("- -"), look("- -", EVENTS[:60]), look("200 0", EVENTS[60:])])
    assert (result["answer"], result["tokens"], result["changed"]) == ("Hello", 2, False)
    assert printed.startswith("Hello") and "2 tokens in " in printed
    assert not any("secret question" in command for command in run.commands)
    assert "tail -c +61 out" in run.commands[3] and run.commands[-1] == "rm /tmp/f"


def test_a_model_without_a_chat_template_is_asked_plainly(run):
    refusal = json.dumps({"error": {"message": "default chat template is no longer allowed"}}).encode()
    plain = b'data: {"choices": [{"text": "Hi"}]}\n'
    result = run([look("400 0", refusal), look("200 0", plain)])[0]
    assert result["answer"] == "Hi" and "prompt" in run.bodies[1]


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([look("000 7")], "connection refused at http://127.0.0.1:30000"),
        ([look("200 28", EVENTS[:60])], "no answer in time"),
        ([look("000 99")], "curl ended with 99"),
        ([look("404 0", b'{"error": {"message": "no model m"}}')], "HTTP 404 of http://127.0.0.1:30000/v1/chat/completions: no model m"),
        ([look("200 0", b'data: {"error": {"message": "dead"}}\n')], "dead"),
        ([AnsibleConnectionFailure("timed\nout")], "no SSH connection (timed out)"),
    ],
)
def test_failures(run, looks, found):
    result = run(looks)[0]
    assert result["failed"] and found in result["msg"] and result["problem"]["node"] == "spark-1"
    assert run.commands[-1] == "rm /tmp/f"


def test_check_mode_asks_nothing(run):
    result = run([], check=True)[0]
    assert result["changed"] is False and run.commands == []


@pytest.fixture
def server():
    """A server that streams EVENTS."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(EVENTS)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def sh(command):
    return subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.mark.skipif(subprocess.run(["sh", "-c", "command -v curl setsid base64"], check=False).returncode != 0, reason="no curl here")
def test_the_shell_lines_do_what_they_say(server, tmp_path):
    (tmp_path / "ask").write_text('{"a": "it\'s"}', encoding="utf-8")
    sh(serving_ask.start_command(str(tmp_path), f"http://127.0.0.1:{server.server_port}/v1", 10))
    code, data, until = None, b"", time.monotonic() + 15
    while code is None and time.monotonic() < until:
        code, status, more = serving_ask.parse_look(sh(serving_ask.look_command(str(tmp_path), len(data))))
        data += more
    assert (code, status, data, server.body) == (0, 200, EVENTS, b'{"a": "it\'s"}')
