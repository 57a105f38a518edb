# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _image_versions as versions


def v(fingerprint: str, ours: bool = True, service: str = "", reference: str = "org/a:1") -> dict[str, t.Any]:
    return {"fingerprint": fingerprint, "reference": reference, "id": f"sha256:{fingerprint}", "ours": ours, "service": service}


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        ([], v("a"), [v("a")]),
        ([v("a"), v("b")], v("c"), [v("a"), v("b"), v("c")]),
        ([v("a"), v("b")], v("a", False), [v("b"), v("a")]),  # comes back, and stays ours
        ([v("a", False)], v("a", False), [v("a", False)]),
        ([v("a", False)], v("a"), [v("a")]),
        ([v("a"), v("b")], v("a", False, "small"), [v("a"), v("b"), v("a", True, "small")]),  # brought for another service, and still ours
        ([v("a", service="small"), v("b")], v("a", False, "small"), [v("b"), v("a", True, "small")]),
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
    old = {key: value for key, value in v("a").items() if key != "service"}
    assert versions.readable({"versions": [old, v("b", service="small")]}) == [v("a"), v("b", service="small")]


def test_a_service_has_its_own_surplus() -> None:
    """The image of a service that is stopped is not an old one of the other."""
    items = [v("a"), v("b", service="small"), v("c", service="small")]
    assert versions.surplus(items, 0, "small") == [v("b", service="small")]
    assert versions.surplus(items, 0) == versions.surplus(items, 1, "small") == []


def image(content: str, *tags: str, digests: t.Sequence[str] = ()) -> dict[str, t.Any]:
    return {"Id": f"sha256:{content}", "RepoTags": list(tags), "RepoDigests": list(digests)}


def content(item: t.Mapping[str, t.Any]) -> str:
    return str(item["Id"]).removeprefix("sha256:")


@pytest.mark.parametrize(
    ("tags", "other", "names"),
    [
        (["org/a:1"], v("x", service="small"), []),  # the same name
        (["org/a:1", "org/b:1"], v("x", service="small", reference="org/b:1"), ["org/a:1"]),
        (["org/a:1"], v("x", service="small", reference="org/b:1"), []),  # the last name of what the other has
        (["org/a:dgxspark-x", "org/a:1"], v("x", service="small"), []),
        ([], v("x", service="small"), []),
        (["org/a:1"], v("y", service="small"), ["org/a:1"]),
    ],
)
def test_what_another_service_has_stays(tags: list[str], other: dict[str, t.Any], names: list[str]) -> None:
    images = [image("x", *tags), image("y", "other/y:1")]
    assert versions.names_to_remove(v("x"), images, content, [other]) == names
    assert versions.names_to_forget([v("x")], ["org/a:1"], images, content, [other]) == names


def test_a_digest_of_what_another_service_has_stays() -> None:
    images = [image("x", "org/a:dgxspark-d", "org/b:1", digests=["org/a@sha256:d"])]
    wanted = ["org/a:dgxspark-d", "org/a@sha256:d"]
    assert set(versions.names_to_forget([], wanted, images, content)) == set(wanted)
    assert versions.names_to_forget([], wanted, images, content, [v("x", service="small", reference="org/b:1")]) == wanted[:1]


def test_what_containers_use() -> None:
    used = [{"service": "small", "image": "org/a:1", "image_id": "sha256:x"}, {"service": "small", "image": "gone", "image_id": "sha256:z"}]
    assert versions.run_by(used, [image("x")], content) == [v("x", False, "small")]
