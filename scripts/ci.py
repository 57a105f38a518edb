# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the stages of ``make test`` one after the other and sums up what they counted.

``scripts/ci`` runs all of ``STAGES``, ``scripts/ci lint docs`` only those, which may be of ``EXTRA``. A stage is a script of this directory whose last line
of output is ``N passed, M failed``. Every stage runs, also after a failure, and has a limit in time. The last line here is the sum.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
LOGS = SCRIPTS.parent / ".cache" / "ci"

# stage: (what it does, limit in seconds); the quick ones first
STAGES: dict[str, tuple[str, int]] = {
    "lint": ("ruff, mypy, yamllint, ansible-lint", 600),
    "unit": ("unit tests", 600),
    "sanity": ("ansible-test sanity", 1200),
    "artifact": ("build, install elsewhere, use by name", 300),
    "molecule": ("every scenario on the simulated Sparks", 3300),
}
# Only when they are named: what a release needs beside the others. Their tools are installed when they run first.
EXTRA: dict[str, tuple[str, int]] = {
    "importer": ("galaxy-importer on the built collection", 900),
    "environment": ("execution environment", 300),
    "docs": ("the site of the documentation", 600),
    "matrix": ("sanity and unit tests with every ansible-core", 5400),
}
# A sign of life after so many silent seconds.
SILENCE = 30
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed$")


class Outcome(t.NamedTuple):
    stage: str
    passed: int
    failed: int
    seconds: float
    note: str


def span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in t.cast("t.TextIO", process.stdout):
        lines.put(line)
    lines.put(None)


def end(process: subprocess.Popen[str]) -> None:
    """Ends the stage with everything it started (a process group of its own), politely first."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def follow(stage: str, limit: int, process: subprocess.Popen[str], log: t.TextIO) -> tuple[re.Match[str] | None, str]:
    """Shows and keeps the output; returns the last line with counts and, when it was ended, why."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=pump, args=(process, lines), daemon=True).start()
    start = heard = time.monotonic()
    counts = None
    while True:
        try:
            line = lines.get(timeout=2)
        except queue.Empty:
            now = time.monotonic()
            if now - start > limit:
                end(process)
                return counts, f"ended after its limit of {span(limit)}"
            # A daemon that the stage started may hold the pipe open for ever.
            if process.poll() is not None:
                return counts, ""
            if now - heard > SILENCE:
                print(f"... {stage}: running for {span(now - start)}", flush=True)
                heard = now
            continue
        if line is None:
            return counts, ""
        heard = time.monotonic()
        if heard - start > limit:
            end(process)
            return counts, f"ended after its limit of {span(limit)}"
        counts = COUNTS.match(line.strip()) or counts
        log.write(line)
        print(line, end="", flush=True)


def run(stage: str) -> Outcome:
    purpose, limit = {**STAGES, **EXTRA}[stage]
    print(f"\n=== {stage}: {purpose}", flush=True)
    start = time.monotonic()
    with open(LOGS / f"{stage}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(SCRIPTS / stage)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            counts, note = follow(stage, limit, process, log)
            # The output has ended (or the stage was): what is left is a matter of moments.
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            end(process)
            code, note = 1, "closed its output but did not end"
        except BaseException:
            end(process)
            raise
    passed, failed = (int(counts[1]), int(counts[2])) if counts else (0, 0)
    if not counts and not note:
        note = "did not say what it counted"
    if code != 0 and not note and not failed:
        note = f"exit code {code}"
    if note:
        failed = max(failed, 1)
    return Outcome(stage, passed, failed, time.monotonic() - start, note)


def table(outcomes: list[Outcome]) -> str:
    rows = [f"{'stage':<11} {'passed':>7} {'failed':>7} {'time':>13}"]
    rows += [f"{o.stage:<11} {o.passed:>7} {o.failed:>7} {span(o.seconds):>13}  {o.note}".rstrip() for o in outcomes]
    passed, failed = sum(o.passed for o in outcomes), sum(o.failed for o in outcomes)
    return "\n".join([*rows, f"{'all':<11} {passed:>7} {failed:>7} {span(sum(o.seconds for o in outcomes)):>13}"])


def main(arguments: list[str]) -> int:
    unknown = sorted(set(arguments) - set(STAGES) - set(EXTRA))
    if unknown:
        print(f"scripts/ci: no stage {', '.join(unknown)}; there are: {', '.join([*STAGES, *EXTRA])}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = [run(stage) for stage in [*STAGES, *EXTRA] if stage in (arguments or STAGES)]
    passed, failed = sum(o.passed for o in outcomes), sum(o.failed for o in outcomes)
    last = f"{passed} passed, {failed} failed"
    (LOGS / "result").write_text(last + "\n", encoding="utf-8")
    print(f"\n{table(outcomes)}\n\n{last}", flush=True)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *dummy: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
