# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures on the lab, both sides in one run and in turn:

1. a run of site.yml on a serving pair (nothing to do) against ``ansible -m ping`` on the same hosts;
2. from the launch of ``vllm serve`` to the first answer: ``site.yml --tags vllm`` against ``docker run`` typed by hand;
3. for how long nothing answers when another version of the server takes over, and when the old service is replaced, against that load by hand.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = str(ROOT / "inventory" / "lab")
RUNS = int(os.environ.get("RUNS") or 5)
LAUNCHES = int(os.environ.get("LAUNCHES") or min(RUNS, 3))
PORT = os.environ.get("SPARKLAB_API_PORT") or "30000"
SITE = ["ansible-playbook", str(ROOT / "playbooks" / "site.yml"), "-i", INVENTORY]
# What is read here is the output of Ansible's own callback.
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_STDOUT_CALLBACK": "default"}
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def command(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(f"bench: '{' '.join(argv)}' ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
    return done.stdout


def timed(*argv: str) -> tuple[float, str]:
    start = time.monotonic()
    out = command(*argv)
    return time.monotonic() - start, out


def on_head(*argv: str) -> str:
    return command(str(ROOT / "lab" / "on"), "spark-1", *argv)


def answers(limit: float = 60) -> bool:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4}).encode()
    try:
        HTTP.open(
            urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}), timeout=limit
        ).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


def by_hand() -> float:
    """``docker run`` of spark-vllm with exactly the definition that the playbook uses, then asking until it answers."""
    found = json.loads(on_head("docker", "inspect", "spark-vllm"))[0]
    config, host = found["Config"], found["HostConfig"]
    on_head("docker", "rm", "-f", "spark-vllm")
    argv = ["docker", "run", "-d", "--name", "spark-vllm", "--network", "host", "--ipc", "host", "--pid", host["PidMode"], "--gpus", "all"]
    argv += ["--cap-add", "IPC_LOCK", "--entrypoint", config["Entrypoint"][0]]
    for value in config["Env"]:
        argv += ["-e", value]
    for value in host["Binds"]:
        argv += ["-v", value]
    for key, value in config["Labels"].items():
        argv += ["--label", f"{key}={value}"]
    start = time.monotonic()
    on_head(*argv, config["Image"], *config["Cmd"])
    while not answers():
        if time.monotonic() - start > 600:
            sys.exit("bench: the server typed by hand gave no answer within 600 s")
        time.sleep(0.2)
    return time.monotonic() - start


def by_playbook() -> float:
    """From the task that starts the container to the end of the wait, as the user sees them."""
    on_head("docker", "rm", "-f", "spark-vllm")
    start = end = 0.0
    with subprocess.Popen(
        [*SITE, "--tags", "vllm"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=ENVIRONMENT,
    ) as process:  # fmt: skip
        tail: list[str] = []
        waiting = False
        for line in process.stdout or ():
            tail = [*tail[-40:], line]
            if "Ensure the server container runs" in line:
                start = time.monotonic()
            waiting = waiting or "Wait until the server gives real answers" in line
            if waiting and not end and re.match(r"ok: \[spark-1\]", line):
                end = time.monotonic()
        if process.wait() or not start or not end:
            sys.exit("bench: site.yml --tags vllm failed:\n" + "".join(tail))
    return end - start


def longest_silence(*argv: str) -> float:
    """Run a command and ask the server all the time; the longest time between two answers."""
    answered: list[float] = []
    over = threading.Event()

    def ask() -> None:
        limit = 3.0
        while not over.is_set():
            begun = time.monotonic()
            if answers(limit):
                answered.append(time.monotonic())
            # A question that was under way when the server was stopped may hang, and must not hide the first answer of the new one. Once nothing
            # listens, it is the new one that is asked: its first answer may take as long as that of a server that was typed by hand.
            elif time.monotonic() - begun < 1:
                limit = 60
            over.wait(0.25 if limit < 60 else 0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        command(*argv)
    finally:
        over.set()
        thread.join()
    return max((after - before for before, after in itertools.pairwise(answered)), default=0.0)


def downtime_of_an_upgrade() -> float:
    """The server is replaced by one with another context length, which is another container; Ray stays."""
    return longest_silence(*SITE, "-e", json.dumps({"spark_max_model_len": 768}))


def downtime_of_the_old_service() -> float:
    """As the playbook's summary says it: the old service listens on the node's loopback only."""
    command("ansible-playbook", str(ROOT / "molecule" / "shared" / "old_service.yml"), "-i", INVENTORY)
    found = re.search(r"downtime: ([\d.]+) s", command(*SITE))
    if not found:
        sys.exit("bench: the summary of site.yml says no downtime")
    return float(found[1])


def row(name: str, values: list[float]) -> str:
    return f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {len(values)} |"


def main() -> int:
    global MODEL  # pylint: disable=global-statement
    say("bringing the pair to its serving state")
    command(*SITE)
    with HTTP.open(f"http://127.0.0.1:{PORT}/v1/models", timeout=30) as reply:
        MODEL = json.load(reply)["data"][0]["id"]
    ping, second = [], []
    for number in range(RUNS):
        say(f"ping and second run, {number + 1} of {RUNS}")
        ping.append(timed("ansible", "-i", INVENTORY, "sparks", "-m", "ping")[0])
        seconds, out = timed(*SITE)
        if re.search(r"changed=[1-9]", out):
            sys.exit(f"bench: the second run changed something:\n{out[-2000:]}")
        second.append(seconds)
    hand, play, upgrade, old = [], [], [], []
    for number in range(LAUNCHES):
        say(f"launch by the playbook and by hand, downtime of an upgrade, {number + 1} of {LAUNCHES}")
        play.append(by_playbook())
        hand.append(by_hand())
        upgrade.append(downtime_of_an_upgrade())
    for number in range(LAUNCHES):
        say(f"downtime of an old service, {number + 1} of {LAUNCHES}")
        old.append(downtime_of_the_old_service())
    ratio_upgrade = statistics.median(upgrade) / statistics.median(hand)
    ratio_old = statistics.median(old) / statistics.median(hand)
    command(*SITE)
    ratio_second = statistics.median(second) / statistics.median(ping)
    ratio_launch = statistics.median(play) / statistics.median(hand)
    print("| what | median s | range | runs |\n|---|---|---|---|")
    print(row("ansible -m ping, two hosts", ping))
    print(row("site.yml with nothing to do", second))
    print(row("vllm serve to answer, docker run by hand", hand))
    print(row("vllm serve to answer, site.yml --tags vllm", play))
    print(row("downtime, another version of the server", upgrade))
    print(row("downtime, the old service replaced", old))
    print(
        f"\ndowntime of an upgrade / by hand = {ratio_upgrade:.2f} (goal: at most 1.1)\ndowntime of the old service / by hand = {ratio_old:.2f}"
    )
    print(f"second run / ping = {ratio_second:.2f} (goal: at most 5)\nplaybook / by hand = {ratio_launch:.2f} (goal: at most 1.1)")
    result = {
        "ping": ping,
        "second_run": second,
        "launch_by_hand": hand,
        "launch_by_playbook": play,
        "downtime_upgrade": upgrade,
        "downtime_old_service": old,
        "downtime_upgrade_ratio": ratio_upgrade,
        "downtime_old_service_ratio": ratio_old,
        "second_run_ratio": ratio_second,
        "launch_ratio": ratio_launch,
    }
    target = ROOT / ".cache" / "bench.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


MODEL = ""

if __name__ == "__main__":
    sys.exit(main())
