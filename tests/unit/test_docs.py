# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages that scripts/docs.py makes. (`make docs` builds the site of them.)"""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(docs: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("source")
    docs.write(target)
    return target


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("[a](lab.md)", "docs/day-two.md", "[a](lab.md)"),
        ("[a](../lab.md#x)", "docs/site/tutorial.md", "[a](lab.md#x)"),
        ("[a](../failure-modes.md)", "docs/site/tutorial.md", "[a](troubleshooting.md)"),
        ("[a](../../roles/preflight/README.md)", "docs/site/index.md", "[a](collections/preflight_role.rst)"),
        ("[a](../roles/boot/README.md)", "docs/day-two.md", "[a](collections/boot_role.rst)"),
        ("[a](../README.md)", "docs/day-two.md", "[a](index.md)"),
        ("[a](../LICENSE)", "docs/day-two.md", "a"),
        ("[a](../fabric.md)", "docs/benchmarks/sync.md", "[a](../fabric.md)"),
        ("[a](https://example.org/x)", "docs/day-two.md", "[a](https://example.org/x)"),
        ("[a](#here)", "docs/day-two.md", "[a](#here)"),
    ],
)
def test_links_are_turned_to_the_site(docs: types.ModuleType, text: str, place: str, expected: str) -> None:
    assert docs.turned(text, place) == expected


def test_every_page_is_in_the_menu(source: Path) -> None:
    index = (source / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(source).with_suffix("").as_posix() for path in source.rglob("*.md")} - {"index"}
    listed = re.findall(r"^(?:.* <)?([\w/-]+)>?$", index.partition("```{toctree}")[2], re.MULTILINE)
    assert pages <= set(listed)
    assert "tutorial" in pages and "failure-modes" not in pages


def test_a_page_that_nobody_listed_comes_last(docs: types.ModuleType) -> None:
    text = docs.menu(["index", "tutorial", "brand-new"])
    assert text.index("tutorial") < text.index(":caption: More") < text.index("brand-new")
    assert ":caption: More" not in docs.menu(["index", "tutorial"])


def test_troubleshooting_has_every_id_of_the_catalogue(source: Path) -> None:
    catalogue = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
    ids = re.findall(r"^\| ([A-Za-z][\w-]*) \|", catalogue, re.MULTILINE)
    ids = [name for name in ids if name != "Id"]
    page = (source / "troubleshooting.md").read_text(encoding="utf-8")
    assert len(ids) > 100
    assert re.findall(r"^### ([\w-]+): ", page, re.MULTILINE) == ids
    assert re.findall(r"^## .*$", page, re.MULTILINE) == re.findall(r"^## .*$", catalogue, re.MULTILINE)


def test_an_entry(docs: types.ModuleType) -> None:
    text = docs.troubleshooting(
        "## Net\n\n| Id | a | b | c | d |\n|---|---|---|---|---|\n| NET-12 | MTU | B | refused: compared | `t.py::x`, `y.py` |\n"
    )
    assert "(net-12)=\n### NET-12: MTU\n\n**Refused**: compared\n\n*common*\n" in text
    assert "2 tests" in text and "<code>t.py::x</code>" in text


def test_playbooks_have_their_words_and_commands(source: Path) -> None:
    page = (source / "playbooks.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "playbooks").glob("*.yml") if not path.name.endswith(".meta.yml")]
    sections = dict(re.findall(r"^## (\S+)\n\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(names)
    assert [name for name, text in sections.items() if f"$ ansible-playbook playbooks/{name}" not in text] == []
    assert [name for name, text in sections.items() if "- play *" not in text and name != "restart.yml"] == []


def test_a_page_of_antsibull_gets_a_short_title_and_no_second_contents(docs: types.ModuleType) -> None:
    title = "dgxspark.serving.node_info module -- Collects facts"
    text = f"{title}\n{'+' * len(title)}\n\n.. note::\n    This module is part of the `dgxspark.serving collection <x>`_\n\n    To install it\n\n.. x\n\n"
    text += ".. contents::\n   :local:\n   :depth: 1\n\n.. note::\n    Mind this\n"
    found = docs.tidied(text)
    assert found.startswith("node_info (module)\n++++++++++++++++++\n\nCollects facts.\n")
    assert "contents::" not in found and "To install it" not in found and "Mind this" in found


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('<p id="x"><a href="#x">a</a> <a href="b.html">b</a> <a href="https://example.org">c</a>', []),
        ('<a href="gone.html">a</a>', ["a.html: gone.html"]),
        ('<a href="#gone">a</a>', ["a.html: no #gone"]),
        ('<a href="b.html#gone">a</a>', ["a.html: no b.html#gone"]),
        ('<script src="https://example.org/x.js"></script>', ["a.html: loads https://example.org/x.js"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["a.html: loads //example.org/x.css"]),
        ('<img src="gone.png">', ["a.html: gone.png"]),
    ],
)
def test_the_built_site_is_looked_through(docs: types.ModuleType, tmp_path: Path, page: str, expected: list[str]) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text("<p>")
    assert docs.problems_of(tmp_path) == expected
