# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _report_charts, _report_png
from ansible_collections.dgxspark.serving.tests.unit.plugins.plugin_utils import test__report_charts as charts


def found() -> list[_report_charts.Chart]:
    return _report_charts.charts(charts.run(), charts.run(1.1))


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert _report_png.draw(found(), "title", str(path)) == ""
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert _report_png.draw(found(), "title", str(tmp_path / "a.png")) == _report_png.MISSING
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_fails_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(_report_png, "_draw", broken)
    assert _report_png.draw(found(), "title", str(tmp_path / "a.png")) == "no PNG: RuntimeError: no font"


def test_nothing_measured(tmp_path: Path) -> None:
    assert _report_png.draw([], "title", str(tmp_path / "a.png")) == "no PNG: nothing was measured"
