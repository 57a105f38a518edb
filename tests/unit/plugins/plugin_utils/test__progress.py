# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import time
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _progress


def sample(done: int, at: float, what: str = "copies", total: int = 1000_000_000) -> dict[str, t.Any]:
    return {"what": what, "done": done, "total": total, "at": at}


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (sample(0, 5, "waits for another run", 0), None, "spark-2: waits for another run"),
        (sample(250_000_000, 5), None, "spark-2: copies 250.0 MB of 1.0 GB (25 %)"),
        (sample(250_000_000, 5), sample(50_000_000, 3), "spark-2: copies 250.0 MB of 1.0 GB (25 %), 100.0 MB/s, 8 s left"),
        (sample(250_000_000, 5), sample(250_000_000, 3), "spark-2: copies 250.0 MB of 1.0 GB (25 %), 0 B/s"),
        (
            {**sample(3, 5, "point 1 of 2", 16), "unit": "requests"},
            sample(1, 4, "point 1 of 2", 16),
            "spark-2: point 1 of 2: 3 of 16 requests",
        ),
        # another activity, or the same one anew: no rate out of what does not belong together
        (sample(250_000_000, 5), sample(900_000_000, 3, "verifies"), "spark-2: copies 250.0 MB of 1.0 GB (25 %)"),
    ],
)
def test_line(now: dict[str, t.Any], before: dict[str, t.Any] | None, text: str) -> None:
    assert _progress.line("spark-2", now, before) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (104, "1 min 44 s"), (7384, "2 h 3 min")])
def test_duration(seconds: float, text: str) -> None:
    assert _progress.duration(seconds) == text


class Connection:
    """Answers what the script says, one after the other, the last for ever."""

    def __init__(self, *script: t.Any) -> None:
        self.script = list(script)
        self.commands: list[str] = []

    def exec_command(self, command: str, in_data: t.Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        self.commands.append(command)
        item = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(item, Exception):
            raise item
        return (1, b"", b"") if item is None else (0, json.dumps(item).encode(), b"")


def watch(connection: Connection, until: int) -> list[str]:
    shown: list[str] = []
    with _progress.Watcher(connection, "spark-2", "0a0a", shown.append, 0.01):
        deadline = time.monotonic() + 10
        while len(connection.commands) < until and time.monotonic() < deadline:
            time.sleep(0.005)
    return shown


def test_lines_come_while_something_changes() -> None:
    connection = Connection(None, sample(100_000_000, 1), sample(100_000_000, 1), sample(200_000_000, 2), None)
    connection.commands = commands = []  # the watcher uses a copy of the connection: lists are shared, attributes are not
    assert watch(connection, 6) == [
        "spark-2: copies 100.0 MB of 1.0 GB (10 %)",
        "spark-2: copies 200.0 MB of 1.0 GB (20 %), 100.0 MB/s, 8 s left",
    ]
    assert set(commands) == {"cat /run/dgxspark-serving/progress-0a0a"}


def test_nothing_that_goes_wrong_there_matters() -> None:
    connection = Connection(OSError("lost"), {"no": "sample"}, sample(1, 1), None)
    assert watch(connection, 4) == ["spark-2: copies 1 B of 1.0 GB (0 %)"]
