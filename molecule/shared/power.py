# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes that lose power, and what their units for the boot say."""

from __future__ import annotations

import subprocess
import time
import typing as t

import spark

UNIT = "dgxspark-serving"


def power(verb: str, *nodes: str) -> None:
    """``restart``, ``stop`` or ``start`` of nodes, all at the same time and without a word to what runs on them."""
    arguments = ["-t", "0"] if verb != "start" else []
    subprocess.run(
        ["docker", verb, *arguments, *(f"{spark.NAME}-{node}" for node in nodes)], check=True, timeout=120, stdin=subprocess.DEVNULL
    )


def status(node: str) -> str:
    """The line that ``systemctl status`` shows."""
    return spark.on(node, "systemctl", "show", "-P", "StatusText", UNIT, check=False).strip()


def until(look: t.Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not look():
        if time.monotonic() > end:
            told = {node: spark.on(node, "journalctl", "-b", "-u", UNIT, "--no-pager", "-o", "cat", check=False) for node in spark.NODES}
            raise AssertionError(f"not within {seconds:.0f} s; the units said {told}")
        time.sleep(1)


def made() -> dict[str, list[str]]:
    """The ids of our containers: after a boot they are started, not made anew."""
    return {node: sorted(c["Id"] for c in spark.inspect(node, *spark.OURS)) for node in spark.NODES}


def serves() -> bool:
    return status(spark.HEAD) == "serves" and status(spark.WORKER) == "is part of the gang"
