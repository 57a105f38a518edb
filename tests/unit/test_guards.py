# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of scripts/guards.py fits the sources: what it would break is there, once, and the tests that must notice exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("guards_of_the_copies", ROOT / "scripts" / "guards.py")
guards = importlib.util.module_from_spec(SPEC)  # type: ignore[arg-type]
sys.modules["guards_of_the_copies"] = guards
SPEC.loader.exec_module(guards)  # type: ignore[union-attr]


@pytest.mark.parametrize("guard", guards.GUARDS, ids=lambda guard: guard.fault)
def test_a_guard_is_still_there(guard: guards.Guard) -> None:
    for cut in guard.cuts:
        text = (ROOT / cut.path).read_text(encoding="utf-8")
        assert text.count(cut.old) == 1, f"{cut.path}: {cut.old!r} is there {text.count(cut.old)} times"
        compile(text.replace(cut.old, cut.new, 1), cut.path, "exec")
    for test in guard.tests:
        path, dummy, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8") if name else (ROOT / path).exists(), test


def test_faults_are_named_once() -> None:
    faults = [guard.fault for guard in guards.GUARDS]
    assert sorted(set(faults)) == sorted(faults)
