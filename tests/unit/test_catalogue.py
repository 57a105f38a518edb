# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/failure-modes.md is complete and true: ids once, every reported id is a row, every test that is named exists."""

from __future__ import annotations

import ast
import collections
import re
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "docs" / "failure-modes.md"

NOT_YET = "not yet"
HANDLED = ("avoided", "refused", "repaired", "explained", NOT_YET)


class Row(t.NamedTuple):
    id: str
    title: str
    tier: str
    handled: str
    shown_by: str


def rows_in(text: str) -> list[list[str]]:
    """Cells of every table row that is neither a heading nor a rule; an escaped bar belongs to its cell."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells[0] != "Id" and not re.fullmatch(r"[-: ]+", cells[0]):
                rows.append(cells)
    return rows


def catalogue() -> list[Row]:
    return [Row(*cells) for cells in rows_in(CATALOGUE.read_text(encoding="utf-8"))]


# Calls whose first text is an id: the exception, the helpers that make one, and the table of known log lines.
MAKERS = ("Problem", "_problem", "problem", "Row")
SHAPE = re.compile(r"[A-Z]{1,3}-\d{1,2}|[a-z][a-z0-9]*(-[a-z0-9]+)*")
NUMBERED = re.compile(r"[A-Z]{3}-\d{2}")
# Texts that look like ids of ours and are none.
OTHER = {"docker-init", "docker-proxy", "docker-pull", "node-manager-port", "vllm-distributed", "vllm-ray"}


def reported_ids(source: str) -> list[str]:
    """Ids that a Python source can report.

    That is ``Problem("<id>", ...)``, positional or by name (``a if b else c`` counts both), ``problem="<id>"`` in any call, and every text of the
    shape ``NET-12``.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NUMBERED.fullmatch(node.value):
            found.add(node.value)
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "problem"]
            found.update(value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str))
        if not isinstance(node, ast.Call) or (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) not in MAKERS:
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg == "id"]
        for value in named + node.args:
            parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            # Where the id comes out of a table, the first text of the call is a sentence.
            found.update(text for text in texts if SHAPE.fullmatch(text))
            if texts:
                break
    return sorted(found)


def spelled_like_ids(source: str, known: set[str]) -> list[str]:
    """Texts in a Python source that begin like an id of ours (``hub-``, ``fabric-``), where the id comes out of a table or a variable."""
    areas = {name.partition("-")[0] for name in known if re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", name)}
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(
        text for text in texts if re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", text) and text.partition("-")[0] in areas and text not in OTHER
    )


def references(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def exists(reference: str) -> bool:
    """Whether ``path`` or ``path::Class::test`` is there."""
    name, *inner = reference.split("::")
    path = ROOT / name
    if not path.exists():
        return False
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return all(re.search(rf"\b{re.escape(part.partition('[')[0])}\b", text) for part in inner)


def test_every_row_has_five_cells() -> None:
    assert [cells for cells in rows_in(CATALOGUE.read_text(encoding="utf-8")) if len(cells) != 5 or not all(cells)] == []


def test_ids_are_unique() -> None:
    counts = collections.Counter(row.id for row in catalogue())
    assert counts
    assert [name for name, count in counts.items() if count > 1] == []


def test_ids_have_one_shape() -> None:
    assert [row.id for row in catalogue() if not SHAPE.fullmatch(row.id)] == []


def test_tiers() -> None:
    assert [row.id for row in catalogue() if row.tier not in ("A", "B", "C")] == []


def test_handled_begins_with_a_known_word() -> None:
    assert [row.id for row in catalogue() if not row.handled.startswith(HANDLED)] == []


def test_reported_ids_are_in_the_catalogue() -> None:
    known = {row.id for row in catalogue()}
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "plugins").rglob("*.py"))
        for source in [path.read_text(encoding="utf-8")]
        for name in reported_ids(source) + spelled_like_ids(source, known)
        if name not in known
    }
    assert sorted(missing) == []


def test_tests_that_are_named_exist() -> None:
    missing = [f"{row.id}: {name}" for row in catalogue() for name in references(row.shown_by) if not exists(name)]
    assert missing == []


def test_what_is_handled_is_shown_or_says_not_yet() -> None:
    unshown = [row.id for row in catalogue() if row.shown_by != NOT_YET and not references(row.shown_by)]
    assert unshown == []


def test_what_is_not_handled_is_not_shown() -> None:
    assert [row.id for row in catalogue() if row.handled == NOT_YET and row.shown_by != NOT_YET] == []


def test_reported_ids() -> None:
    source = (
        'raise Problem("NET-12", found="")\nraise p.Problem(id="a-b", found="c")\nProblem("X-1" if c else "X-2")\nProblem(name)\n'
        'Other("no")\n_problem(request, "d-e", "found")\nTABLE = ["RAY-20", "a RAY-21 in a sentence"]\n'
        '_problem(known[0], "Docker does not answer")\ncheck(1, problem="disk-full")\n'
    )
    assert reported_ids(source) == ["NET-12", "RAY-20", "X-1", "X-2", "a-b", "d-e", "disk-full"]


def test_spelled_like_ids() -> None:
    source = 'TABLE = ["hub-999", "docker-proxy", "other-thing", "hub", "a hub-1 in a sentence"]\n'
    assert spelled_like_ids(source, {"hub-401", "docker-down", "NET-12", "input"}) == ["hub-999"]


def test_rows_in() -> None:
    assert rows_in("| Id | x |\n|---|---|\n| A | b \\| c |\ntext\n") == [["A", "b | c"]]


def test_exists() -> None:
    assert exists("tests/unit/test_catalogue.py::test_exists")
    assert not exists("tests/unit/test_catalogue.py::test_" + "nothing")
    assert not exists("tests/unit/none.py")
