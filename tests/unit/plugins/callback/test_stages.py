# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real runs of ansible-playbook on hosts that are this machine: what a person sees of them."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
HOSTS = "a ansible_connection=local\nb ansible_connection=local\n"
ONE = "a ansible_connection=local\n"

OK = """
- name: First
  hosts: all
  gather_facts: false
  tasks:
    - name: Look
      ansible.builtin.set_fact: {x: 1}
    - name: Ensure it is there
      ansible.builtin.set_fact: {x: 1}
      changed_when: true
    - name: Ensure each is there
      ansible.builtin.set_fact: {x: 1}
      changed_when: item == "two"
      loop: [one, two]
    - name: Not for this one
      ansible.builtin.set_fact: {x: 1}
      when: false
    - name: May fail
      ansible.builtin.fail: {msg: not so bad}
      ignore_errors: true
    - name: Ensure the last is there
      ansible.builtin.set_fact: {x: 1}
      changed_when: inventory_hostname == "b"
      notify: Tell
    - name: Say
      ansible.builtin.debug: {msg: "a: all is well"}
      run_once: true
    - name: Value
      ansible.builtin.debug: {var: x}
      run_once: true
  handlers:
    - name: Tell
      ansible.builtin.debug: {msg: [one, two]}
"""

RESCUED = """
- name: Try
  hosts: all
  gather_facts: false
  tasks:
    - name: Try it
      block:
        - name: Cannot work
          ansible.builtin.fail: {msg: this one is rescued}
      rescue:
        - name: Go on
          ansible.builtin.debug: {msg: went on}
"""

FAILS = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Ask each
      ansible.builtin.assert:
        that: item != "bad"
        quiet: true
      loop: [good, bad]
      when: inventory_hostname == "a"
    - name: Run the command
      ansible.builtin.raw: echo to stdout; echo to stderr >&2; exit 3
      when: inventory_hostname == "b"
    - name: Never comes
      ansible.builtin.set_fact: {x: 1}
      changed_when: true
"""

OURS = """
- name: Check
  hosts: all
  gather_facts: false
  tasks:
    - name: Choose the interface
      dgxspark.serving.nccl_interface_info:
        subnets: [203.0.113.0/24]
"""

ROLES = """
- name: Play
  hosts: all
  gather_facts: false
  tasks:
    - name: Ensure the first
      ansible.builtin.import_role: {name: one}
    - name: Ensure the second
      ansible.builtin.import_role: {name: two}
"""


def environment(**settings: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "DGXSPARK_", "NO_COLOR", "COVERAGE"))}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks" / "collections"),
        "ANSIBLE_STDOUT_CALLBACK": "dgxspark.serving.stages",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "ANSIBLE_RETRIES": "0",
        **settings,
    }


@pytest.fixture
def command(tmp_path):
    """command(playbook, hosts, arguments): the words of a run."""

    def command(playbook: str, hosts: str, *arguments: str) -> list[str]:
        (tmp_path / "play.yml").write_text(playbook)
        (tmp_path / "hosts.ini").write_text(hosts)
        return [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            str(tmp_path / "hosts.ini"),
            *arguments,
            str(tmp_path / "play.yml"),
        ]

    return command


@pytest.fixture
def run(command, tmp_path):
    """run(playbook, ...): exit code and output, both streams in one."""

    def run(playbook: str, *arguments: str, hosts: str = HOSTS, **settings: str) -> tuple[int, str]:
        done = subprocess.run(
            command(playbook, hosts, *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=120, check=False, cwd=tmp_path, env=environment(**settings),
        )  # fmt: skip
        print(done.stdout)
        assert "\x1b" not in done.stdout  # colour is for terminals
        return done.returncode, done.stdout

    return run


def before_recap(output: str) -> list[str]:
    """The lines of the run itself, with the seconds made equal."""
    return [re.sub(r"\d+(\.\d)? s$", "N s", text) for text in output.partition("\nPLAY RECAP")[0].splitlines()]


def test_what_changed_and_what_was_said(run):
    code, output = run(OK)
    assert code == 0
    ignored = [text for text in before_recap(output) if text.startswith("  ignored")]
    assert sorted(ignored) == ["  ignored  a: May fail: not so bad", "  ignored  b: May fail: not so bad"]
    assert [text for text in before_recap(output) if text not in ignored] == [
        "First",
        "  changed  Ensure it is there (a, b)",
        "  changed  Ensure each is there: two (a, b)",
        "  changed  Ensure the last is there (b)",
        "a: all is well",
        "a:",
        "    x: 1",
        "one",
        "two",
        "  5 changed, N s",
    ]
    assert re.search(r"^b +: ok=\d+ +changed=3 +unreachable=0 +failed=0 +skipped=1 +rescued=0 +ignored=1", output, re.M)
    assert "ERROR" not in output


LOOKS = """
- name: Look
  hosts: all
  gather_facts: false
  tasks:
    - name: Look
      ansible.builtin.set_fact: {x: 1}
    - name: Summary
      ansible.builtin.debug:
        msg: {endpoint: here, nodes: [a, b]}
"""


def test_a_play_that_only_looked_has_no_recap(run):
    code, output = run(LOOKS, hosts=ONE)
    assert code == 0
    assert before_recap(output) == ["Look", "a:", "    endpoint: here", "    nodes:", "    - a", "    - b", "  nothing changed, N s"]
    assert "RECAP" not in output
    assert "RECAP" in run(LOOKS, "-v", hosts=ONE)[1]


def test_check_mode_and_diff(run, tmp_path):
    (tmp_path / "it").write_text("old\n")
    play = f"""
- name: Files
  hosts: all
  gather_facts: false
  tasks:
    - name: Ensure the file says so
      ansible.builtin.copy: {{content: "new\\n", dest: {tmp_path}/it, mode: "0600"}}
"""
    code, output = run(play, "--check", "--diff", hosts=ONE)
    assert code == 0
    lines = before_recap(output)
    assert lines[0].startswith("Check mode")
    assert lines[2] == "  diff     a: Ensure the file says so"
    assert [text for text in lines if text in ("-old", "+new")] == ["-old", "+new"]
    assert lines[-2:] == ["  changes  Ensure the file says so (a)", "  1 would change, N s"]
    assert (tmp_path / "it").read_text() == "old\n"


def test_what_was_rescued_is_no_error_at_the_end(run):
    code, output = run(RESCUED, hosts=ONE)
    assert code == 0
    assert before_recap(output) == ["Try", "  FAILED   a: Cannot work: this one is rescued", "a: went on", "  failed after N s"]
    assert "ERROR" not in output


def test_errors_come_last_and_complete(run):
    code, output = run(FAILS)
    assert code == 2
    during, dummy, after = output.partition("PLAY RECAP")
    assert "  FAILED   a: Ask each: bad: Assertion failed" in during
    assert "  FAILED   b: Run the command: non-zero return code to stderr" in during
    assert "to stdout" not in during
    assert "Never comes" not in output
    dummy, dummy, errors = after.partition("\nERRORS")
    assert "TASK [Ask each]" in errors
    assert "failed: [a] (item=bad) =>" in errors
    assert "fatal: [b]: FAILED! =>" in errors
    assert re.search(r"stdout: \|?-?\s*to stdout", errors)
    assert re.search(r"^    rc: 3", errors, re.M)
    assert "play.yml:12" in errors  # where the task is


def test_no_answer_is_an_error(run):
    play = "- name: Serve\n  hosts: all\n  gather_facts: false\n  tasks:\n    - name: Look\n      ansible.builtin.raw: 'true'\n"
    code, output = run(play, hosts="gone ansible_host=127.0.0.1 ansible_port=1\n")
    assert code == 4
    during, dummy, errors = output.partition("\nERROR ")
    assert re.search(r"^  DOWN     gone: Look: .*Connection refused", during, re.M)
    assert "fatal: [gone]: UNREACHABLE! =>" in errors


def test_our_own_problem_is_told_as_found_expected_remedy(run):
    code, output = run(OURS, hosts=ONE)
    assert code == 2
    during, dummy, errors = output.partition("\nERROR ")
    assert re.search(r"^  FAILED   a: Choose the interface: found .*203\.0\.113\.0/24", during, re.M)
    for text in (
        "found    no usable interface",
        "expected exactly one port",
        "remedy   set spark_fabric_subnet",
        "see      fabric-missing in docs/",
        "details  ",
    ):
        assert re.search(f"^  {text}", errors, re.M)
    assert "play.yml:6" in errors


def test_verbose_shows_all(run):
    code, output = run(FAILS, "-v")
    assert code == 2
    during, dummy, errors = output.partition("\nERRORS")
    assert "PLAY [Serve] ***" in during
    assert "TASK [Run the command] ***" in during
    assert "fatal: [b]: FAILED! =>" in during
    assert "skipping: [b]" in during
    assert "failed: [a] (item=bad)" in errors
    assert "fatal: [b]: FAILED! =>" in errors
    assert "to stdout" in errors


@pytest.mark.parametrize("level", [(), ("-v",)])
def test_ignored_items_are_no_errors_at_the_end(run, level):
    play = """
- name: Look
  hosts: all
  gather_facts: false
  tasks:
    - name: May be missing
      ansible.builtin.fail: {msg: "{{ item }}"}
      loop: [first, second]
      ignore_errors: "{{ true }}"
    - name: Must be there
      ansible.builtin.fail: {msg: it is not}
"""
    code, output = run(play, *level, hosts=ONE)
    assert code == 2
    errors = output.partition("\nERROR ")[2]
    assert "it is not" in errors
    assert "TASK [May be missing]" not in errors and "(item=first)" not in errors


def test_stages_are_the_imported_roles(run, tmp_path):
    for name in ("one", "two"):
        (tmp_path / "roles" / name / "tasks").mkdir(parents=True)
        (tmp_path / "roles" / name / "tasks" / "main.yml").write_text(
            f"- name: Part of {name}\n  ansible.builtin.set_fact: {{x: 1}}\n  changed_when: true\n"
        )
    code, output = run(ROLES, hosts=ONE)
    assert code == 0
    assert before_recap(output) == [
        "Ensure the first", "  changed  one : Part of one (a)", "  1 changed, N s",
        "Ensure the second", "  changed  two : Part of two (a)", "  1 changed, N s",
        "All stages: 2 changed, N s",
    ]  # fmt: skip


def test_a_task_that_takes_long_says_so_once(run):
    play = "- name: Long\n  hosts: all\n  gather_facts: false\n  tasks:\n    - name: Wait\n      ansible.builtin.pause: {seconds: 4}\n"
    code, output = run(play, hosts=ONE, DGXSPARK_STAGES_LONG_TASK="0.5")
    assert code == 0
    assert output.count("  ...      Wait (a)") == 1
    code, output = run(play.replace("4", "2"), hosts=ONE, DGXSPARK_STAGES_LONG_TASK="0")
    assert "..." not in output.partition("PLAY RECAP")[0].replace("...)", "")


def test_a_task_that_talks_itself_is_not_interrupted(run):
    play = "- name: Talk\n  hosts: all\n  gather_facts: false\n  tasks:\n    - name: Follow\n"
    play += "      dgxspark.serving.serving_logs: {containers: [no-such-container], follow: true, seconds: 4}\n"
    code, output = run(play, hosts=ONE, DGXSPARK_STAGES_LONG_TASK="0.5")
    assert code == 0 and "Talk" in output
    assert "...  " not in output


@pytest.mark.parametrize("level", [(), ("-v",)])
def test_secrets_stay_hidden(run, level):
    play = """
- name: Secret
  hosts: all
  gather_facts: false
  tasks:
    - name: Use each
      ansible.builtin.fail: {msg: "{{ item }}"}
      loop: [hunter1]
      no_log: true
      when: inventory_hostname == "a"
    - name: Use it
      ansible.builtin.fail: {msg: hunter2}
      no_log: true
"""
    code, output = run(play, *level)
    assert code == 2
    assert (
        re.findall(r"hunter\d", re.sub(r"^\d+ .*$", "", output, flags=re.MULTILINE)) == []
    )  # the lines of the playbook itself may be shown
    assert output.count("no_log") >= 2
    assert "ERRORS" in output


def on_a_terminal(words: list[str], folder: Path, **settings: str) -> str:
    """The output of a command whose standard output is a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, cwd=folder, env=environment(TERM="xterm", **settings)
    )
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        text += piece
    os.close(master)
    assert process.wait(timeout=60) == 2
    return text.decode()


def test_colour_is_for_terminals_and_can_be_switched_off(command, tmp_path):
    words = command(FAILS, HOSTS)
    assert re.search(r"\x1b\[[0-9;]*m  FAILED", on_a_terminal(words, tmp_path))
    plain = on_a_terminal(words, tmp_path, NO_COLOR="1")
    assert "  FAILED   b" in plain
    assert "\x1b[" not in plain


def test_errors_are_told_when_the_run_is_interrupted(command, tmp_path):
    play = RESCUED.replace("ansible.builtin.debug: {msg: went on}", "ansible.builtin.pause: {seconds: 60}")
    with open(tmp_path / "out", "w+") as output:
        process = subprocess.Popen(
            command(play, ONE), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment(),
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while "FAILED" not in (tmp_path / "out").read_text() and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)
    text = (tmp_path / "out").read_text()
    print(text)
    assert "fatal: [a]: FAILED! =>" in text.partition("\nERROR ")[2]
