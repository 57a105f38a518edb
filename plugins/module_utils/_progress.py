# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a long copy is: a module writes it to a small file of its node, an action plugin reads it and shows a line.

PRIVATE to the collection. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._transfer import human

EVERY = 0.5
TERMINAL_SECONDS = 5.0
PIPE_SECONDS = 30.0


class Progress:
    """Writes {node, what, done, total, seconds}, at most twice a second; without a path it only counts. The file is gone at the end."""

    def __init__(self, path: str, node: str, what: str, total: int = 0) -> None:
        self.path = path
        self.node = node
        self.what = what
        self.total = total
        self._begin = time.monotonic()
        self._at = 0.0

    def show(self, done: int) -> int:
        """``done`` bytes of ``total`` (0: unknown) are here. Never fails: a full /run must not end a copy."""
        now = time.monotonic()
        if self.path and now - self._at >= EVERY:
            self._at = now
            state = {"node": self.node, "what": self.what, "done": done, "total": self.total, "seconds": round(now - self._begin, 1)}
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(self.path), mode=0o711, exist_ok=True)
                with open(f"{self.path}.new", "w", encoding="utf-8") as handle:
                    json.dump(state, handle)
                os.chmod(f"{self.path}.new", 0o644)
                os.replace(f"{self.path}.new", self.path)
        return done

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: t.Any) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def duration(seconds: float) -> str:
    """``125`` -> ``2 min 5 s``."""
    whole = int(seconds + 0.5)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def line(state: t.Mapping[str, t.Any], before: t.Mapping[str, t.Any] | None = None) -> str:
    """One line: node, what, done and total, rate since ``before`` (else since the begin), time left."""
    past = before or {"done": 0, "seconds": 0.0}
    seconds = state["seconds"] - past["seconds"]
    rate = (state["done"] - past["done"]) / seconds if seconds > 0 else 0.0
    text = f"{state['node']}: {state['what']}: {human(state['done'])}"
    if state["total"]:
        text += f" of {human(max(state['total'], state['done']))}"
    text += f", {human(max(0.0, rate))}/s"
    left = state["total"] - state["done"]
    if state["total"] and left > 0 and rate > 0:
        text += f", {duration(left / rate)} left"
    return text + f", {duration(state['seconds'])} so far"
