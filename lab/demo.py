# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Second half of lab/demo: runs site.yml on the lab, asks the model a question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
API = f"http://127.0.0.1:{os.environ.get('SPARKLAB_API_PORT') or 30000}"
QUESTION = "What is served here?"


def play() -> int:
    command = ["ansible-playbook", str(ROOT / "playbooks" / "site.yml"), "-i", str(ROOT / "inventory" / "lab")]
    print("+", " ".join(command), flush=True)
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


def ask() -> tuple[str, str]:
    """The model, and one chat completion of it through the port that the lab publishes on this machine."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{API}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(f"{API}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        reply = json.load(answer)
    text = "".join(c if c.isprintable() else " " for c in reply["choices"][0]["message"]["content"])
    return model, f"{text.strip()!r} ({reply['usage']['completion_tokens']} tokens from {model})"


def main() -> int:
    status = play()
    if status:
        return status
    model, answer = ask()
    print(f"\nEndpoint:  {API}/v1 (OpenAI API; on the lab's head: port 30000)")
    print(f"Question:  {QUESTION}")
    print(f"Answer:    {answer}")
    print("           The lab's model is random: its words mean nothing, but both nodes computed every token.")
    print(f"\nAsk it:    curl {API}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"           -d '{json.dumps({'model': model, 'messages': [{'role': 'user', 'content': 'hello'}]})}'")
    print("Go on:     . .venv/bin/activate; ansible-playbook playbooks/status.yml -i inventory/lab   (make help has them all)")
    print("\nThe lab stays up: 'make lab-status' shows it, 'make lab-down' removes it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
