# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.plugin_utils import _stages


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (75, "75 s"), (125, "2 min 05 s"), (3600, "1 h 00 min"), (7384, "2 h 03 min")],
)
def test_span(seconds, expected):
    assert _stages.span(seconds) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dgxspark.serving.verify : Summary", "Summary"),
        ("other.role : Summary", "other.role : Summary"),
        ("Compare a : b", "Compare a : b"),
        ("Summary", "Summary"),
    ],
)
def test_task_name(name, expected):
    assert _stages.task_name(name) == expected


def test_a_line_of_several_lines_is_aligned():
    assert _stages.line("found", "one\ntwo") == "  found    one\n           two"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"problem": {"found": "no cable"}, "msg": "spark-1: found no cable; expected one"}, "found no cable"),
        ({"msg": "non-zero return code", "stderr": "first\nlast"}, "non-zero return code last"),
        ({"msg": "", "stdout": "only"}, "only"),
        ({"msg": "Module failed", "stderr": "noise"}, "Module failed"),
        ({"censored": "the output has been hidden"}, "the output has been hidden"),
        ({}, "no message"),
        ({"msg": "a\n  b"}, "a b"),
        ({"msg": "x" * 300}, "x" * 197 + "..."),
    ],
)
def test_reason(result, expected):
    assert _stages.reason(result) == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"msg": "ready"}, "a: ready"),
        ({"msg": "a: ready"}, "a: ready"),
        ({"msg": "ab: ready"}, "a: ab: ready"),
        ({"msg": "one\ntwo\n"}, "one\ntwo"),
        ({"msg": ["one", 2]}, "one\n2"),
        ({"msg": {"k": 1}}, None),
        ({"msg": [{"k": 1}]}, None),
        ({"x": 1}, None),
    ],
)
def test_message(result, expected):
    assert _stages.message("a", result) == expected


def test_a_problem_is_told_whole():
    problem = Problem("NET-12", node="a", stage="preflight", found="f" * 500, expected="e", remedy="r", rails=[1]).as_dict()
    assert _stages.has_problem({"problem": problem})
    assert _stages.problem_lines(problem) == [
        "  found    " + "f" * 500, "  expected e", "  remedy   r", "  see      NET-12 in docs/failure-modes.md", "  details  rails: with -v",
    ]  # fmt: skip
    result = {"failed": True, "msg": "m", "problem": problem, "logs": ["l"], "empty": [], "_ansible_x": 1, "changed": False}
    assert _stages.beside_problem(result) == {"logs": ["l"]}
    assert not _stages.has_problem({"problem": "text"})


@pytest.mark.parametrize(
    ("changed", "failed", "check", "expected"),
    [
        (0, False, False, "nothing changed, 3.0 s"),
        (2, False, False, "2 changed, 3.0 s"),
        (2, False, True, "2 would change, 3.0 s"),
        (0, False, True, "nothing would change, 3.0 s"),
        (2, True, False, "failed after 3.0 s"),
    ],
)
def test_closing(changed, failed, check, expected):
    assert _stages.closing(3, changed, failed, check) == expected
