# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/host-gate.md lists every rule of the host gate as it is, and every problem of a rule is in the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.dgxspark.serving.plugins.module_utils import _gate

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| ((?:[^|\\]|\\.)+) \| (\S+) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, ...]]:
    return {name: rest for name, *rest in ROW.findall((ROOT / "docs" / "host-gate.md").read_text(encoding="utf-8"))}


def test_the_page_lists_every_rule_with_its_severity_and_problem() -> None:
    found = {name: (cells[0], cells[-1]) for name, cells in rows().items()}
    assert found == {rule.name: (rule.severity, rule.problem) for rule in _gate.RULES}


def test_the_page_says_what_and_how_to_mend_it() -> None:
    """``scripts/host_gate`` writes it anew."""
    for rule in _gate.RULES:
        cells = rows()[rule.name]
        assert re.sub(r"\W+", "", cells[1]) == re.sub(r"\W+", "", rule.what), rule.name
        assert re.sub(r"\W+", "", cells[3].replace("&lt;", "")) == re.sub(r"\W+", "", rule.remedy), rule.name


def test_problems_of_rules_are_in_the_catalogue() -> None:
    text = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
    assert [rule.name for rule in _gate.RULES if f"\n| {rule.problem} |" not in text] == []


def test_each_rule_has_one_name_and_one_way_to_look() -> None:
    assert len(set(_gate.NAMES)) == len(_gate.RULES)
    assert all((rule.node is None) != (rule.gang is None) for rule in _gate.RULES)
    assert all(rule.severity in (_gate.ERROR, _gate.WARN) and rule.found and rule.expected and rule.remedy for rule in _gate.RULES)
