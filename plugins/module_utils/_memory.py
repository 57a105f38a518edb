# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a node's memory is enough for a server that asks for nearly all of it.

PRIVATE to the collection. Pure functions.
"""

from __future__ import annotations

import re
import typing as t

NAMES = {"total": "MemTotal", "free": "MemFree", "available": "MemAvailable"}


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / (1 << 30):.1f} GiB"


def parse(meminfo: str) -> dict[str, int]:
    """total, free and available bytes of /proc/meminfo; 0 for a line that is not there."""
    kib = {found.group(1): int(found.group(2)) for found in re.finditer(r"^(\w+):\s+(\d+)", meminfo, re.MULTILINE)}
    return {key: kib.get(name, 0) * 1024 for key, name in NAMES.items()}


def room(memory: t.Mapping[str, int], need: int) -> str:
    """``enough``, ``cache`` (it is, when the page cache is dropped) or ``short``. Many builds of vLLM count the page cache of a GB10 as
    used. Figures that are not known are ``enough``."""
    available, free = int(memory.get("available") or 0), int(memory.get("free") or 0)
    if not available:
        return "enough"
    if available < need:
        return "short"
    return "cache" if free < need else "enough"


def top_users(statuses: t.Iterable[str], count: int) -> list[str]:
    """``python3 (pid 812) 30.1 GiB`` for the processes that hold the most memory, from texts of /proc/<pid>/status. Memory on the GPU of a GB10
    does not show there."""
    found = []
    for text in statuses:
        values = {key: value.strip() for key, _sep, value in (line.partition(":") for line in text.splitlines())}
        size = re.match(r"(\d+) kB", values.get("VmRSS", ""))
        if size:
            found.append(
                (int(size.group(1)) * 1024, f"{values.get('Name', '?')} (pid {values.get('Pid', '?')}) {gib(int(size.group(1)) * 1024)}")
            )
    return [text for _size, text in sorted(found, reverse=True)[:count]]
