# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting with a bound: a clock that asks at once, and bounded commands.

PRIVATE to the collection.
"""

from __future__ import annotations

import time
import typing as t

Run = t.Callable[..., "tuple[int, str, str]"]


def clock(
    total: float,
    interval: float,
    now: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
) -> t.Iterator[float]:
    """Yield the elapsed seconds: at once, then every ``interval`` seconds, the last time when ``total`` seconds are over.

    The time that the caller spends between two steps counts. With ``total`` 0 it yields exactly once.
    """
    start = now()
    elapsed = 0.0
    yield elapsed
    while elapsed < total:
        sleep(max(0.0, min(interval, total - elapsed)))
        elapsed = now() - start
        yield elapsed


def bounded(run_command: t.Callable[..., tuple[int, str, str]]) -> Run:
    """``run(argv, timeout=30, data=None)`` over AnsibleModule.run_command; no command outlives its timeout (seconds).

    The code is 124 (137 when it had to be killed) when the time was over, 127 when the command does not exist.
    """

    def run(argv: t.Sequence[str], timeout: float = 30, data: str | None = None) -> tuple[int, str, str]:
        bound = ["timeout", "-k", "5", f"{max(0.1, float(timeout)):.1f}", *argv]
        rc, out, err = run_command(bound, data=data, binary_data=False) if data is not None else run_command(bound)
        return rc, out, err

    return run


def timed_out(rc: int) -> bool:
    """Whether a code of ``bounded`` means that the time was over."""
    return rc in (124, 137)
