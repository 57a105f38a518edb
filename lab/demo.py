# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Second half of lab/demo: runs site.yml on the lab, times its stages, asks the model a question."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
API = f"http://127.0.0.1:{os.environ.get('SPARKLAB_API_PORT') or 30000}"
QUESTION = "What is served here?"


class Stages:
    """Durations of the roles, told apart by the lines that ansible-playbook prints."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._current, self._since = "start", time.monotonic()

    def line(self, text: str) -> None:
        found = re.match(r"(?:TASK|RUNNING HANDLER) \[dgxspark\.serving\.(\w+) :", text)
        if found and found[1] != self._current:
            self.close()
            self._current = found[1]

    def close(self) -> None:
        now = time.monotonic()
        self.seconds[self._current] = self.seconds.get(self._current, 0.0) + now - self._since
        self._since = now

    def table(self) -> str:
        rows = [f"  {name:<16}{seconds:>7.1f} s" for name, seconds in self.seconds.items()]
        return "\n".join([*rows, f"  {'all':<16}{sum(self.seconds.values()):>7.1f} s"])


def play(stages: Stages) -> int:
    command = ["ansible-playbook", str(ROOT / "playbooks" / "site.yml"), "-i", str(ROOT / "inventory" / "lab")]
    print("+", " ".join(command), flush=True)
    colour = {"ANSIBLE_FORCE_COLOR": "1"} if sys.stdout.isatty() and "NO_COLOR" not in os.environ else {}
    environment = {**os.environ, **colour, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        for text in process.stdout or ():
            sys.stdout.write(text)
            sys.stdout.flush()
            stages.line(re.sub(r"\x1b\[[0-9;]*m", "", text))
        return process.wait()


def ask() -> str:
    """One chat completion through the port that the lab publishes on this machine."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{API}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(f"{API}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        reply = json.load(answer)
    text = "".join(c if c.isprintable() else " " for c in reply["choices"][0]["message"]["content"])
    return f"{text.strip()!r} ({reply['usage']['completion_tokens']} tokens from {model})"


def main() -> int:
    stages = Stages()
    status = play(stages)
    stages.close()
    if status:
        return status
    answer = ask()
    print(f"\nEndpoint:  {API}/v1 (OpenAI API; on the lab's head: port 30000)")
    print(f"Question:  {QUESTION}")
    print(f"Answer:    {answer}")
    print("           The lab's model is random: its words mean nothing, but both nodes computed every token.")
    print(f"\nStages:\n{stages.table()}\n")
    print("The lab stays up: 'make lab-status' shows it, 'make lab-down' removes it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
