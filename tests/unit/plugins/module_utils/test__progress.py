# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _progress


def state(done: int, total: int, seconds: float) -> dict[str, t.Any]:
    return {"node": "spark-2", "what": "image org/a:1", "done": done, "total": total, "seconds": seconds}


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (state(4_000_000_000, 12_000_000_000, 10), None, "4.0 GB of 12.0 GB, 400.0 MB/s, 20 s left, 10 s so far"),
        (
            state(4_000_000_000, 12_000_000_000, 10),
            state(3_000_000_000, 12_000_000_000, 5),
            "4.0 GB of 12.0 GB, 200.0 MB/s, 40 s left, 10 s so far",
        ),
        (state(0, 24_000_000_000, 125), None, "0 B of 24.0 GB, 0 B/s, 2 min 5 s so far"),
        (state(5_000_000, 0, 5), None, "5.0 MB, 1.0 MB/s, 5 s so far"),
        (state(6_000_000, 5_000_000, 2), None, "6.0 MB of 6.0 MB, 3.0 MB/s, 2 s so far"),
        (state(1_000_000, 5_000_000, 2), state(3_000_000, 5_000_000, 1), "1.0 MB of 5.0 MB, 0 B/s, 2 s so far"),
        (state(1_000, 5_000, 2), state(1_000, 5_000, 2), "1.0 kB of 5.0 kB, 0 B/s, 2 s so far"),
    ],
)
def test_line(now: dict[str, t.Any], before: dict[str, t.Any] | None, text: str) -> None:
    assert _progress.line(now, before) == f"spark-2: image org/a:1: {text}"


def test_the_file_is_readable_by_everyone_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "progress.json"
    with _progress.Progress(str(path), "spark-2", "image org/a:1", 10) as progress:
        assert progress.show(3) == 3
        found = json.loads(path.read_text())
        assert {key: found[key] for key in ("node", "what", "done", "total")} == {
            "node": "spark-2",
            "what": "image org/a:1",
            "done": 3,
            "total": 10,
        }
        assert path.stat().st_mode & 0o777 == 0o644
        progress.show(4)
        assert json.loads(path.read_text())["done"] == 3  # not for every block
    assert list(path.parent.iterdir()) == []


def test_no_place_for_the_file_ends_nothing() -> None:
    for path in ("", "/proc/nowhere/progress.json"):
        with _progress.Progress(path, "n", "w") as progress:
            assert progress.show(7) == 7
