# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that serving_benchmark runs inside the server's container. It reaches the image's own python3 as text on stdin.

PRIVATE to the collection. Standard library only, Python 3.9 or newer: it runs in whatever Python the image has. It starts ``vllm bench serve``, ends it
when its time is over, tells how far it is and what it wrote, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing as t
import urllib.request

MARK = "@dgxspark-benchmark "
PACKAGES = ("vllm", "ray", "torch", "transformers", "flashinfer-python", "triton")
NCCL = re.compile(r"nvidia-nccl-cu\d+$")
BAR = re.compile(rb"(\d+)/(\d+) \[")  # of tqdm
TAIL = 6000  # bytes of what it said
WARM_TOKENS = 8


def say(kind: str, **data: t.Any) -> None:
    """One line for the module."""
    sys.stdout.write(MARK + json.dumps({"kind": kind, **data}) + "\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Versions of what decides about speed, without importing any of it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for entry in importlib.metadata.distributions():
        name = str(entry.metadata["Name"] or "").lower()
        if NCCL.match(name):
            found["nccl"] = entry.version
    return found


def last_bar(text: bytes) -> tuple[int, int] | None:
    """(done, total) of the last progress bar in the text."""
    found = BAR.findall(text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def tail(path: str) -> bytes:
    """The end of a file."""
    with open(path, "rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(0, handle.tell() - TAIL))
        return handle.read()


def warm(request: dict[str, t.Any], limit: float) -> None:
    """One request of the same length that is not counted: the first of a length may compile a kernel. What is wrong shows in the run itself."""
    body = {
        "model": request["model"],
        "prompt": [10 + number % 80 for number in range(request["input"])],
        "max_tokens": min(WARM_TOKENS, request["output"]),
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    if os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    ask = urllib.request.Request(request["url"] + "/v1/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, ValueError), opener.open(ask, timeout=limit) as answer:
        answer.read()


def end(child: subprocess.Popen[bytes]) -> None:
    """End the tool and what it started."""
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def measure(job: dict[str, t.Any], command: t.Sequence[str] = ("vllm", "bench", "serve"), pause: float = 0.5) -> None:
    """One point: run the tool, say how far it is, then what it found."""
    began = time.monotonic()
    folder = tempfile.mkdtemp(prefix="dgxspark-benchmark-")
    child = None
    try:
        if os.environ.get("VLLM_API_KEY"):
            os.environ.setdefault("OPENAI_API_KEY", os.environ["VLLM_API_KEY"])
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        warm(job["warm"], job["limit"])
        out, err, result = (os.path.join(folder, name) for name in ("out", "err", "result.json"))
        argv = [*command, *job["argv"], "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            try:
                child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file, start_new_session=True)
            except OSError as exc:
                say("end", rc=127, late=False, result=None, seconds=0.0, tail=f"{command[0]}: {exc.strerror}")
                return
            told = None
            while child.poll() is None and time.monotonic() - began < job["limit"]:
                time.sleep(pause)
                seen = last_bar(tail(err))
                if seen and seen != told and seen[1] == job["total"]:
                    told = seen
                    say("progress", done=seen[0], total=seen[1])
            late = child.poll() is None
            if late:
                end(child)
        found = None
        if os.path.exists(result) and not late:
            with open(result, encoding="utf-8") as handle:
                found = json.load(handle)
        said = (tail(out) + b"\n" + tail(err)).decode("utf-8", "replace")
        say("end", rc=child.returncode, late=late, result=found, seconds=round(time.monotonic() - began, 1), tail=said)
    finally:
        if child is not None and child.poll() is None:
            end(child)
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: t.Sequence[str]) -> None:
    """Entry point: one JSON object as the argument."""
    job = json.loads(argv[0])
    if job["step"] == "look":
        say("look", versions=versions(), tool=bool(shutil.which("vllm")))
    else:
        measure(job)


if __name__ == "__main__":
    main(sys.argv[1:])
