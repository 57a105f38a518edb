# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.dgxspark.serving.plugins.module_utils import _wait


class Fake:
    def __init__(self):
        self.time = 100.0
        self.slept = []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


def test_clock_yields_at_once_and_at_the_end():
    fake = Fake()
    seen = list(_wait.clock(2.5, 1, fake.now, fake.sleep))
    assert seen == [0.0, 1.0, 2.0, 2.5]
    assert fake.slept == [1, 1, 0.5]


def test_clock_without_time_looks_once_and_never_sleeps():
    fake = Fake()
    assert list(_wait.clock(0, 1, fake.now, fake.sleep)) == [0.0]
    assert fake.slept == []


def test_clock_counts_the_time_of_the_caller():
    fake = Fake()
    seen = []
    for elapsed in _wait.clock(10, 1, fake.now, fake.sleep):
        seen.append(elapsed)
        fake.time += 6
    assert seen == [0.0, 7.0, 13.0 + 1.0]


def test_bounded_puts_a_limit_before_every_command():
    calls = []

    def run_command(argv, **kwargs):
        calls.append((argv, kwargs))
        return 0, "out", ""

    run = _wait.bounded(run_command)
    assert run(["docker", "ps"], timeout=7) == (0, "out", "")
    run(["docker", "exec"], data="text")
    assert calls[0][0] == ["timeout", "-k", "5", "7.0", "docker", "ps"]
    assert "data" not in calls[0][1] and calls[1][1]["data"] == "text"
    assert _wait.timed_out(124) and _wait.timed_out(137) and not _wait.timed_out(1)
