# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _image_versions as versions


def v(fingerprint: str, ours: bool = True) -> dict[str, t.Any]:
    return {"fingerprint": fingerprint, "reference": "org/a:1", "id": f"sha256:{fingerprint}", "ours": ours}


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        ([], v("a"), [v("a")]),
        ([v("a"), v("b")], v("c"), [v("a"), v("b"), v("c")]),
        ([v("a"), v("b")], v("a", False), [v("b"), v("a")]),  # comes back, and stays ours
        ([v("a", False)], v("a", False), [v("a", False)]),
        ([v("a", False)], v("a"), [v("a")]),
    ],
)
def test_remember(before: list[t.Any], new: dict[str, t.Any], after: list[t.Any]) -> None:
    assert versions.remember(before, new) == after


@pytest.mark.parametrize(
    ("items", "keep", "names"),
    [
        ("a", 1, ""), ("ab", 1, ""), ("abc", 1, "a"), ("abcd", 1, "ab"), ("abcd", 0, "abc"), ("abcd", 9, ""), ("", 1, ""),
        ("Abc", 1, ""), ("aBcd", 1, "a"),
    ],
)  # fmt: skip
def test_surplus(items: str, keep: int, names: str) -> None:
    """Capitals were there before us."""
    assert [item["fingerprint"] for item in versions.surplus([v(name, name.islower()) for name in items], keep)] == list(names)


@pytest.mark.parametrize(
    ("tags", "digests", "names"),
    [
        (["org/a:1"], [], ["org/a:1"]),
        (["org/a:dgxspark-aaaa", "org/a:1", "mine:2"], [], ["org/a:dgxspark-aaaa", "org/a:1"]),
        (["mine:2"], [], []),
        ([], [], ["sha256:x"]),
        ([], ["org/a@sha256:1"], ["sha256:x"]),  # the tag was moved away
        ([], ["other/b@sha256:1"], []),
    ],
)
def test_names_to_remove(tags: list[str], digests: list[str], names: list[str]) -> None:
    image = {"Id": "sha256:x", "RepoTags": tags, "RepoDigests": digests}
    assert versions.names_to_remove(v("aaaa"), [image], lambda item: "aaaa") == names
    assert versions.names_to_remove(v("aaaa"), [image], lambda item: "bbbb") == []


@pytest.mark.parametrize("data", [None, [], {}, {"versions": None}, {"versions": [1, {}, {"fingerprint": "a", "reference": 3, "id": "x"}]}])
def test_a_broken_record_removes_nothing(data: t.Any) -> None:
    assert versions.readable(data) == []


def test_the_record_comes_back_as_it_was() -> None:
    assert versions.readable({"versions": [v("a", False), v("b")]}) == [v("a", False), v("b")]
