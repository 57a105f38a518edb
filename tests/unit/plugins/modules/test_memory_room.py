# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import memory_room as module

GIB = 1 << 30


class Machine:
    """A /proc of files. ``then`` is what meminfo says after so many more looks (or after the page cache was dropped)."""

    def __init__(self, path):
        self.path = path
        self.warnings = []
        (path / "sys" / "vm").mkdir(parents=True)
        (path / "sys" / "vm" / "drop_caches").write_text("0\n")
        (path / "812").mkdir()
        (path / "812" / "status").write_text("Name:\tollama\nPid:\t812\nVmRSS:\t41943040 kB\n")

    def memory(self, free, available, total=121):
        text = f"MemTotal:       {total << 20} kB\nMemFree:        {free << 20} kB\nMemAvailable:   {available << 20} kB\n"
        (self.path / "meminfo").write_text(text)

    @property
    def dropped(self):
        return (self.path / "sys" / "vm" / "drop_caches").read_text() == "3\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "sync", lambda: None)
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    machine = Machine(tmp_path)
    monkeypatch.setattr(module.AnsibleModule, "warn", lambda self, text: machine.warnings.append(text))
    return machine


@pytest.fixture
def run_module(machine, capsys):
    def run(**params):
        given = {"node": "spark-2", "need": 97 * GIB, "wait": 0, "proc_path": str(machine.path), **params}
        with patch_module_args(given), pytest.raises(SystemExit) as caught:
            module.main()
        result = json.loads(capsys.readouterr().out)
        assert bool(result.get("failed")) == bool(caught.value.code)
        return result

    return run


def test_enough_is_left_alone(machine, run_module):
    machine.memory(100, 112)
    result = run_module()
    assert result["changed"] is False and result["actions"] == [] and not machine.dropped
    assert result["memory"]["before"] == {"total": 121 * GIB, "free": 100 * GIB, "available": 112 * GIB}


def test_the_page_cache_is_dropped_when_it_is_what_is_missing(machine, run_module, monkeypatch):
    machine.memory(18, 112)
    drop = module.Proc.drop
    monkeypatch.setattr(module.Proc, "drop", lambda self: (drop(self), machine.memory(110, 112))[0])
    result = run_module(_ansible_diff=True)
    assert result["changed"] and machine.dropped
    assert result["actions"] == ["dropped the page cache: 18.0 GiB are free and the server asks for 97.0 GiB"]
    assert result["memory"]["after"]["free"] == 110 * GIB
    assert result["diff"]["before"] == "free 18.0 GiB, available 112.0 GiB\n" and "free 110.0 GiB" in result["diff"]["after"]
    again = run_module()
    assert again["changed"] is False


def test_check_mode_tells_it(machine, run_module):
    machine.memory(18, 112)
    result = run_module(_ansible_check_mode=True, _ansible_diff=True)
    assert result["changed"] and not machine.dropped and result["diff"]["after"] == "no page cache\n"
    assert result["actions"] == ["would drop the page cache: 18.0 GiB are free and the server asks for 97.0 GiB"]


@pytest.mark.parametrize(("level", "failed"), [("ignore", False), ("error", True)])
def test_a_page_cache_that_must_not_be_dropped(machine, run_module, level, failed):
    machine.memory(18, 112)
    result = run_module(cache=level)
    assert bool(result.get("failed")) is failed and not machine.dropped and result["changed"] is False
    if failed:
        assert (
            result["problem"]["id"] == "MEM-01"
            and "drop_caches" in result["msg"]
            and result["msg"].startswith("spark-2: memory: found 18.0 GiB")
        )


def test_a_page_cache_that_cannot_be_dropped_is_a_warning(machine, run_module, monkeypatch):
    def refuse(self):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(module.Proc, "drop", refuse)
    machine.memory(18, 112)
    result = run_module()
    assert result["changed"] is False and "Read-only file system" in machine.warnings[0]


def test_memory_that_is_missing_is_refused_with_who_holds_it(machine, run_module):
    machine.memory(55, 60)
    result = run_module()
    assert result["failed"] and not machine.dropped
    assert (result["problem"]["id"], result["problem"]["node"]) == ("memory-short", "spark-2")
    for words in ("60.0 GiB of memory available of 121.0 GiB", "asks for 97.0 GiB", "ollama (pid 812) 40.0 GiB", "rule memory_available"):
        assert words in result["msg"]


def test_what_leaked_is_told(machine, run_module):
    machine.memory(55, 60)
    assert "leaked" not in run_module()["problem"]["found"]
    with (machine.path / "meminfo").open("a") as handle:
        handle.write(f"Cached: {5 << 20} kB\nAnonPages: {20 << 20} kB\nSlab: {1 << 20} kB\n")
    assert "; 40.0 GiB are on the GPU or were leaked there" in run_module()["problem"]["found"]


@pytest.mark.parametrize(("level", "warned"), [("warn", True), ("ignore", False)])
def test_missing_memory_that_the_inventory_accepts(machine, run_module, level, warned):
    machine.memory(55, 60)
    result = run_module(short=level)
    assert not result.get("failed") and bool(machine.warnings) is warned


def test_memory_that_comes_back_is_waited_for(machine, run_module, monkeypatch):
    machine.memory(55, 60)
    looks = []

    def sleep(_seconds):
        looks.append(1)
        if len(looks) == 3:
            machine.memory(110, 112)

    monkeypatch.setattr(module.time, "sleep", sleep)
    result = run_module(wait=60)
    assert not result.get("failed") and len(looks) == 3 and result["memory"]["before"]["available"] == 112 * GIB


def test_check_mode_does_not_judge_what_still_runs(machine, run_module, monkeypatch):
    def sleep(_seconds):
        raise AssertionError("check mode waits")

    monkeypatch.setattr(module.time, "sleep", sleep)
    machine.memory(20, 30)
    result = run_module(_ansible_check_mode=True, wait=60)
    assert not result.get("failed") and result["changed"] is False and machine.warnings == []


def test_check_mode_tells_a_page_cache_that_would_be_refused(machine, run_module):
    machine.memory(18, 112)
    result = run_module(_ansible_check_mode=True, cache="error")
    assert not result.get("failed") and result["changed"] is False and "the page cache is in the way" in machine.warnings[0]
