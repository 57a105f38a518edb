# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import serving_logs


@pytest.fixture
def run(monkeypatch):
    """run(answers, **arguments): result and printed lines; ``answers`` are those of the shell, one after the other."""
    monkeypatch.setattr(serving_logs.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(serving_logs, "hurry", lambda connection: None)
    clock = [0.0]
    monkeypatch.setattr(serving_logs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(serving_logs.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def run(answers, **arguments):
        lines, commands, waiting = [], [], iter(answers)
        monkeypatch.setattr(serving_logs.display, "display", lambda text: lines.extend(text.split("\n")))
        plugin = serving_logs.ActionModule.__new__(serving_logs.ActionModule)
        plugin._task = types.SimpleNamespace(args={"containers": ["spark-ray"], **arguments})
        plugin._connection = None

        def shell(command, sudoable):
            commands.append(command)
            answer = next(waiting)
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, dict) else {"rc": 0, "stdout": answer, "stderr": ""}

        plugin._low_level_execute_command = shell
        result = plugin.run(None, {"inventory_hostname": "spark-2"})
        assert not result.get("failed") and result["changed"] is False
        return result["lines"], lines, commands

    return run


def stamped(second, text):
    return f"2026-01-01T00:00:{second:02d}.000000000Z {text}\n"


def test_the_last_lines(run):
    number, lines, commands = run([stamped(1, "one") + stamped(2, "two")], lines=7)
    assert lines == ["spark-2 ray  | one", "spark-2 ray  | two"] and number == 2
    assert commands == ["timeout 20 docker logs --timestamps --tail 7 spark-ray"]


def test_both_streams_and_both_containers_in_the_order_of_time(run):
    first = {"rc": 0, "stdout": stamped(3, "c"), "stderr": stamped(1, "a")}
    lines = run([first, stamped(2, "b")], containers=["spark-vllm", "spark-ray"])[1]
    assert lines == ["spark-2 vllm | a", "spark-2 ray  | b", "spark-2 vllm | c"]


def test_follow_prints_nothing_twice_and_ends(run):
    older = "2026-01-01T00:00:00.900000000Z cut off by --tail\n"
    b = stamped(1, "b").replace("01.0", "01.5")
    answers = [stamped(1, "a"), older + stamped(1, "a") + b, b + stamped(2, "c")]
    number, lines, commands = run(answers, follow=True, seconds=3)
    assert [line[-1] for line in lines] == ["a", "b", "c"] and number == 3
    assert len(commands) == 3 and "--since 2026-01-01T00:00:01" in commands[1]


def test_no_container_is_said_once(run):
    gone = {"rc": 1, "stdout": "", "stderr": "Error response from daemon: No such container: spark-ray"}
    number, lines, dummy = run([gone, gone], follow=True, seconds=1.5)
    assert lines == ["spark-2      | (no container spark-ray here)"] and number == 0


def test_docker_that_refuses(run):
    lines = run([{"rc": 1, "stdout": "", "stderr": "permission denied"}])[1]
    assert "spark-2 ray  | (docker logs: permission denied)" in lines


def test_a_node_that_is_down(run):
    lines = run([AnsibleConnectionFailure("timed\nout")])[1]
    assert lines == ["spark-2      | (no SSH connection: timed out)"]


def test_colours_and_bars():
    entries = [("1", "spark-vllm", "\x1b[36m(EngineCore)\x1b[0m 1/2\r2/2\r"), ("2", "spark-ray", "a\x07b")]
    assert serving_logs.printable("n", entries) == ["n vllm | (EngineCore) 1/2", "n vllm | 2/2", "n ray  | a?b"]
