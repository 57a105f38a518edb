# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures the copying of models and images. ``make bench-sync``; as root, on one Linux machine with nothing else running.

``RUNS=5`` (medians), ``SIZE=4G`` (bytes of the model), ``CASES="model-empty model-8"`` (default: all), ``SHAPED=512M`` and ``RATE=200mbit``
(bytes and links of the case with eight workers).

The cases are in ``lab/bench_sync_*.py`` (``from bench_sync import case, …``), one file for each subject. A case is a function with
``@case(name, title)``. It takes a Report, adds samples for each side (all sides of a case in one run and in
turn) and
the goals that it has. Results: a table on the terminal, ``docs/benchmarks/sync.md`` and ``docs/benchmarks/sync.json``, both merged by case.

The nodes of the model cases are network namespaces joined by veth and one bridge: the module and the server run there as they do on a real
node, with a directory of this machine's disk for each. Eight of them cost nothing. Sources lie in the page cache, ``sync`` is part of every
copy.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
PREFIX = "benchsync"


def size_of(text: str) -> int:
    """``4G`` -> 4000000000 (decimal, as the goals are)."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    return int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].upper() in units else int(text)


RUNS = int(os.environ.get("RUNS") or 5)
SIZE = size_of(os.environ.get("SIZE") or "4G")
SHAPED = size_of(os.environ.get("SHAPED") or "512M")
RATE = os.environ.get("RATE") or "200mbit"
WORK = Path(os.environ.get("BENCH_DIR") or "/var/tmp/sparklab-bench-sync")


def say(text: str) -> None:
    print(f"bench-sync: {text}", file=sys.stderr, flush=True)


# --- the frame: cases, samples, goals, results ---


class Sample(t.NamedTuple):
    """One measured copy. CPU seconds are those of our processes (system calls included, interrupts not)."""

    seconds: float
    cpu_head: float = 0.0
    cpu_worker: float = 0.0
    wire_bytes: int = 0


class Report:
    """What one case has measured."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.sides: dict[str, list[Sample]] = {}
        self.goals: list[dict[str, t.Any]] = []
        self.notes: list[str] = []

    def rounds(self, runs: int = 0) -> t.Iterator[int]:
        """0, 1, … as often as RUNS says."""
        for number in range(runs or RUNS):
            say(f"{self.name}: round {number + 1} of {runs or RUNS}")
            yield number

    def add(self, side: str, sample: Sample) -> None:
        """One sample of one side."""
        say(f"  {side}: {sample.seconds:.2f} s, CPU {sample.cpu_head:.2f} + {sample.cpu_worker:.2f} s, {sample.wire_bytes / 1e6:.1f} MB")
        self.sides.setdefault(side, []).append(sample)

    def seconds(self, side: str) -> float:
        """Median duration of a side."""
        return statistics.median(sample.seconds for sample in self.sides[side])

    def wire(self, side: str) -> float:
        """Median of the bytes that left the head."""
        return statistics.median(sample.wire_bytes for sample in self.sides[side])

    def goal(self, text: str, value: float, limit: float) -> None:
        """A figure and the most that it may be."""
        self.goals.append({"text": text, "value": round(value, 3), "limit": limit, "reached": value <= limit})

    def note(self, text: str) -> None:
        """Something that a reader of the figures has to know (the physical limit, for example)."""
        self.notes.append(text)

    def as_dict(self) -> dict[str, t.Any]:
        """For the JSON file."""
        sides = {
            side: {
                "median_seconds": round(statistics.median(sample.seconds for sample in samples), 3),
                "cpu_head": round(statistics.median(sample.cpu_head for sample in samples), 3),
                "cpu_worker": round(statistics.median(sample.cpu_worker for sample in samples), 3),
                "wire_bytes": int(statistics.median(sample.wire_bytes for sample in samples)),
                "seconds": [round(sample.seconds, 3) for sample in samples],
            }
            for side, samples in self.sides.items()
        }
        return {"title": self.title, "sides": sides, "goals": self.goals, "notes": self.notes}


CASES: dict[str, tuple[str, t.Callable[[Report], None]]] = {}


def case(name: str, title: str) -> t.Callable[[t.Callable[[Report], None]], t.Callable[[Report], None]]:
    """Registers a case."""

    def register(function: t.Callable[[Report], None]) -> t.Callable[[Report], None]:
        CASES[name] = (title, function)
        return function

    return register


def machine() -> str:
    """One line about this machine."""
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")).split()[1]
    return f"{os.cpu_count()} cores {model}, {int(memory) >> 20} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def write(reports: t.Sequence[Report]) -> None:
    """Merge into sync.json, then sync.md from all of it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "sync.json"
    data: dict[str, t.Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    for report in reports:
        about = {"date": datetime.date.today().isoformat(), "machine": machine(), "runs": RUNS, "size": SIZE}
        data["cases"][report.name] = {**about, **report.as_dict()}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "sync.md").write_text(table(data["cases"]), encoding="utf-8")
    print(table(data["cases"]))


def table(cases: dict[str, t.Any]) -> str:
    """All results as Markdown."""
    lines = ["# Copying: measured", "", "Written by `make bench-sync`; how and what is measured is said in `../benchmarks.md`.", ""]
    for name, found in sorted(cases.items()):
        lines += [f"## {name}: {found['title']}", "", f"{found['date']}, {found['runs']} runs, {found['machine']}", ""]
        lines += ["| side | median s | range | CPU s head | CPU s worker | MB from the head |", "|---|---|---|---|---|---|"]
        for side, row in found["sides"].items():
            span = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
            cells = [side, f"{row['median_seconds']:.2f}", span, f"{row['cpu_head']:.2f}", f"{row['cpu_worker']:.2f}"]
            lines.append("| " + " | ".join([*cells, f"{row['wire_bytes'] / 1e6:.1f}"]) + " |")
        lines += ["", "| goal | measured | at most | |", "|---|---|---|---|"]
        for goal in found["goals"]:
            word = "reached" if goal["reached"] else "**not reached**"
            lines.append(f"| {goal['text']} | {goal['value']:g} | {goal['limit']:g} | {word} |")
        lines += ["", *(f"- {note}" for note in found["notes"]), *([""] if found["notes"] else [])]
    return "\n".join(lines).rstrip() + "\n"


# --- light nodes: network namespaces ---


def run(*argv: str, **over: t.Any) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **over)
    if done.returncode:
        sys.exit(f"bench-sync: '{' '.join(argv)}' ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")


class Node:
    """One namespace with one address and one directory."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.space = f"{PREFIX}-{name}"
        self.address = f"192.168.231.{index}"
        self.home = WORK / name

    def argv(self, *argv: str) -> list[str]:
        """A command inside the node."""
        return ["ip", "netns", "exec", self.space, *argv]

    def start(self, *argv: str, **over: t.Any) -> subprocess.Popen[str]:
        """A command of the node, not waited for."""
        return subprocess.Popen(self.argv(*argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **over)

    def sent(self) -> int:
        """Bytes that left this node."""
        return int(run(*self.argv("cat", "/sys/class/net/fabric/statistics/tx_bytes")))


class Nodes:
    """A head and some workers on one bridge; ``rate`` shapes every node's sending and receiving."""

    def __init__(self, workers: int, rate: str = "") -> None:
        self.head = Node("head", 1)
        self.workers = [Node(f"worker{index}", 10 + index) for index in range(1, workers + 1)]
        self.rate = rate

    def __enter__(self) -> Nodes:
        self._remove()
        hub = f"{PREFIX}-hub"
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "mtu", "9000", "up")
        for node in [self.head, *self.workers]:
            shutil.rmtree(node.home, ignore_errors=True)
            node.home.mkdir(parents=True)
            port = f"p-{node.name}"
            run("ip", "netns", "add", node.space)
            run("ip", "-n", hub, "link", "add", port, "mtu", "9000", "type", "veth", "peer", "name", "fabric", "netns", node.space)
            run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", node.space, "link", "set", "lo", "up")
            run("ip", "-n", node.space, "link", "set", "fabric", "mtu", "9000", "up")
            run("ip", "-n", node.space, "addr", "add", f"{node.address}/24", "dev", "fabric")
            if self.rate:
                shape = ["root", "tbf", "rate", self.rate, "burst", "256k", "latency", "100ms"]
                run("tc", "-n", node.space, "qdisc", "add", "dev", "fabric", *shape)
                run("tc", "-n", hub, "qdisc", "add", "dev", port, *shape)
        return self

    def __exit__(self, *exc_info: t.Any) -> None:
        self._remove()
        shutil.rmtree(WORK, ignore_errors=True)

    @staticmethod
    def _remove() -> None:
        for line in run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            if name.startswith(f"{PREFIX}-"):
                run("ip", "netns", "del", name)


@contextlib.contextmanager
def daemon(node: Node, *argv: str, ready: t.Callable[[], bool]) -> t.Iterator[int]:
    """A program of a node for as long as the block lasts; its process id."""
    process = node.start(*argv)
    try:
        deadline = time.monotonic() + 20
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"bench-sync: {argv[0]} did not start: {(process.stdout or sys.stdin).read()[-1000:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(15)


def measured(node: Node, head: Node, pid: int, *argv: str, check: bool = True) -> tuple[Sample, str]:
    """Run a command of a node and count; ``pid`` is the program on the head that serves it (0: none)."""
    sent, cpu = head.sent(), cpu_of(pid) if pid else 0.0
    begin = time.monotonic()
    process = node.start(*argv)
    out = (process.stdout or sys.stdin).read()
    dummy, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if check and process.returncode:
        sys.exit(f"bench-sync: '{' '.join(argv)[:200]}' ended with {process.returncode}:\n{out[-3000:]}")
    used = cpu_of(pid) - cpu if pid else 0.0
    return Sample(seconds, used, usage.ru_utime + usage.ru_stime, head.sent() - sent), out


def settle() -> None:
    """Nothing of the copy before is still on its way to the disk."""
    os.sync()


# --- main ---


def main() -> int:
    if os.geteuid() != 0:
        sys.exit("bench-sync: needs root (network namespaces)")
    sys.modules["bench_sync"] = sys.modules[__name__]
    for path in sorted(Path(__file__).parent.glob("bench_sync_*.py")):
        importlib.import_module(path.stem)
    wanted = (os.environ.get("CASES") or " ".join(CASES)).split()
    reports = []
    for name in wanted:
        title, function = CASES[name]
        report = Report(name, title)
        function(report)
        reports.append(report)
    write(reports)
    return 0 if all(goal["reached"] for report in reports for goal in report.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
