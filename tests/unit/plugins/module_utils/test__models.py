# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _models, _snapshot
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

A, B, C = "a" * 40, "b" * 40, "c" * 40
REPO = "org/model"


def fill(cache, repo, snapshots, refs=None):
    """A model as huggingface_hub lays it out: ``snapshots`` is {commit: {file: (blob, size)}}."""
    folder = cache / "hub" / _snapshot.repo_folder(repo)
    for commit, files in snapshots.items():
        place = folder / "snapshots" / commit
        place.mkdir(parents=True)
        for name, (blob, size) in files.items():
            content = folder / "blobs" / blob
            content.parent.mkdir(exist_ok=True)
            content.write_bytes(b"x" * size)
            (place / name).symlink_to(os.path.relpath(content, place))
    for ref, commit in (refs or {}).items():
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return folder


@pytest.fixture
def cache(tmp_path):
    """org/model with two revisions that share one file, org/other with a missing shard, and a download that was never finished."""
    root = tmp_path / "hf"
    shared = {"model.safetensors": ("1" * 64, 1000)}
    fill(root, REPO, {A: {**shared, "old.json": ("2" * 40, 10)}, B: {**shared, "new.json": ("3" * 40, 20)}}, {"main": B})
    other = fill(root, "org/other", {C: {"w-00001-of-00002.safetensors": ("4" * 64, 500)}}, {"main": C})
    (other / "blobs" / ("5" * 64 + ".incomplete")).write_bytes(b"y" * 70)
    (root / "hub" / "datasets--org--data").mkdir()
    (root / "hub" / "models--org--empty").mkdir()
    return str(root)


@pytest.fixture
def stamps(tmp_path):
    return str(tmp_path / "stamps")


def test_scan(cache, stamps):
    folder = _snapshot.repo_dir(cache, REPO)
    rows, _dangling = _snapshot.list_snapshot(os.path.join(folder, "snapshots", B))
    _snapshot.write_stamp(folder, B, rows, stamps)
    empty, model, other = _models.scan(cache, stamps)
    assert (empty["repo_id"], empty["revisions"]) == ("org/empty", [])
    assert (model["repo_id"], model["bytes"], model["partial"]) == (REPO, 1000 + 10 + 20 + 40, 0)  # refs/main has 40 bytes
    assert [(r["revision"], r["refs"], r["complete"], r["verified"], r["bytes"]) for r in model["revisions"]] == [
        (A, [], True, False, 1010),
        (B, ["main"], True, True, 1020),
    ]
    assert (other["partial"], other["revisions"][0]["complete"]) == (70, False)
    assert "w-00002-of-00002.safetensors" in other["revisions"][0]["reason"]
    assert _models.scan(os.path.join(cache, "nowhere")) == []


def test_what_is_served():
    labels = {"dgxspark.serving": "1", "dgxspark.serving.model": REPO, "dgxspark.serving.revision": B}
    server = gang.container("spark-vllm", labels=labels)
    nodes = [
        gang.node(containers=[server]),
        gang.node(containers=[gang.container("spark-ray", labels={**labels, "dgxspark.serving.revision": ""})]),
    ]
    assert _models.served(nodes) == [f"{REPO}@{B}"]
    assert _models.served([gang.node(containers=[{**server, "running": False}])]) == []


SERVED = [f"{REPO}@{B}"]

# name: (prune, served, keep, what goes)
TARGETS = {
    "nothing": ([], [], [], []),
    "a model": (["org/other"], SERVED, [], [("org/other", [])]),
    "a revision by its first digits": ([f"{REPO}@{A[:7]}"], SERVED, [], [(REPO, [A])]),
    "two revisions": ([f"{REPO}@{A}", f"{REPO}@{B}"], [], [], [(REPO, [A, B])]),
    "what is not there": (["org/nothing", f"org/other@{A}"], [], [], []),
    "unused, one is served": (["unused"], SERVED, [], [("org/empty", []), (REPO, [A]), ("org/other", [])]),
    "unused, one is the inventory's by its branch": (["unused"], [], ["org/other@main"], [("org/empty", []), (REPO, [])]),
    "unused, one is the inventory's by its commit": (["unused"], SERVED, [f"org/other@{C}"], [("org/empty", []), (REPO, [A])]),
    "unused, the inventory's is not complete yet": (["unused"], SERVED, ["org/empty@main"], [(REPO, [A]), ("org/other", [])]),
    "unused, the inventory's branch is not known": (["unused"], SERVED, ["org/other@dev"], [("org/empty", []), (REPO, [A])]),
    "unused, a server of unknown revision": (["unused"], [f"{REPO}@"], [], [("org/empty", []), ("org/other", [])]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets(cache, case):
    prune, running, keep, expected = TARGETS[case]
    assert _models.targets(_models.scan(cache), prune, running, keep) == expected


@pytest.mark.parametrize(
    ("prune", "running", "ident"),
    [
        ([REPO], SERVED, "model-served"),
        ([f"{REPO}@{B[:9]}"], SERVED, "model-served"),
        ([f"{REPO}@{A}"], [f"{REPO}@"], "model-served"),
        (["../../etc"], [], "input"),
        (["org/model@main"], [], "input"),
        ([f"{REPO}@abc"], [], "input"),
    ],
)
def test_what_must_stay(cache, prune, running, ident):
    with pytest.raises(Problem) as caught:
        _models.targets(_models.scan(cache), prune, running, [])
    assert caught.value.id == ident and caught.value.stage == "models"


def test_absent(cache):
    models = _models.scan(cache)
    there = ["unused", "org/empty", REPO, f"{REPO}@{A[:7]}", f"{REPO}@{A}"]
    assert _models.absent(models, [*there, "org/mod", f"{REPO}@{C}", "unusd"]) == ["org/mod", f"{REPO}@{C}", "unusd"]


def test_a_revision_takes_only_what_no_other_uses(cache, stamps):
    paths = _models.doomed(cache, REPO, [A], stamps)
    folder = _snapshot.repo_dir(cache, REPO)
    assert paths == [os.path.join(folder, "snapshots", A), os.path.join(folder, "blobs", "2" * 40)]
    assert _models.size_of(paths) == 10
    _models.remove(paths)
    left = next(model for model in _models.scan(cache) if model["repo_id"] == REPO)
    assert [(r["revision"], r["complete"]) for r in left["revisions"]] == [(B, True)]


def test_a_revision_takes_its_branch_and_its_stamp(cache, stamps):
    folder = _snapshot.repo_dir(cache, REPO)
    rows, _dangling = _snapshot.list_snapshot(os.path.join(folder, "snapshots", B))
    _snapshot.write_stamp(folder, B, rows, stamps)
    paths = _models.doomed(cache, REPO, [B], stamps)
    assert paths[:2] == [_snapshot.stamp_path(folder, B, stamps), os.path.join(folder, "refs", "main")]
    assert os.path.join(folder, "blobs", "1" * 64) not in paths


def test_content_outside_of_the_model_is_never_touched(cache, tmp_path):
    elsewhere = tmp_path / "shared-blob"
    elsewhere.write_bytes(b"z" * 9)
    (tmp_path / "hf" / "hub" / "models--org--model" / "snapshots" / A / "linked").symlink_to(elsewhere)
    assert str(elsewhere) not in _models.doomed(cache, REPO, [A])


def test_a_whole_model(cache, stamps):
    locks = os.path.join(cache, "hub", ".locks", "models--org--other")
    staged = _snapshot.staging_dir(cache, "org/other")
    for place in (locks, staged):
        os.makedirs(place)
    with open(os.path.join(staged, "part"), "wb") as handle:
        handle.write(b"p" * 30)
    folder = _snapshot.repo_dir(cache, "org/other")
    paths = _models.doomed(cache, "org/other", [], stamps)
    assert paths == [os.path.join(folder, "refs"), os.path.join(folder, "snapshots"), folder, staged, locks]
    assert _models.size_of(paths) == 500 + 70 + 40 + 30
    _models.remove(paths)
    assert [model["repo_id"] for model in _models.scan(cache)] == ["org/empty", REPO] and not os.path.exists(staged)


def test_parts_of_a_copy_without_a_model(cache, stamps):
    """As a model that was removed by hand leaves them: they are seen, and can be named."""
    for repo in ("org/copied", REPO):
        os.makedirs(_snapshot.staging_dir(cache, repo))
        with open(os.path.join(_snapshot.staging_dir(cache, repo), "1.part"), "wb") as handle:
            handle.write(b"p" * (300 << 20 >> 4))
    os.makedirs(os.path.join(cache, ".dgxspark-sync", "other"))
    os.makedirs(_snapshot.staging_dir(cache, "org/linked"))
    os.symlink("models--org--model", os.path.join(cache, "hub", "models--org--linked"))
    models = _models.scan(cache, stamps)
    assert [model["repo_id"] for model in models] == ["org/copied", "org/empty", REPO, "org/other"]
    assert (models[0]["bytes"], models[0]["partial"], models[0]["revisions"]) == (0, 300 << 20 >> 4, [])
    assert "incomplete: no snapshot (+ 18.8 MiB in parts)" in _models.table([{"node": "spark-1", "models": models}], [], [])
    assert _models.targets(models, ["org/copied"], [], []) == [("org/copied", [])]
    assert ("org/copied", []) not in _models.targets(models, ["unused"], [], ["org/copied@main"])
    paths = _models.doomed(cache, "org/copied", [], stamps)
    assert paths == [_snapshot.staging_dir(cache, "org/copied")] and _models.size_of(paths) == 300 << 20 >> 4
    _models.remove(paths)
    assert [model["repo_id"] for model in _models.scan(cache)] == ["org/empty", REPO, "org/other"]


def test_table(cache):
    rows = [{"node": "spark-1", "models": _models.scan(cache)}, {"node": "spark-2", "models": []}]
    lines = _models.table(rows, SERVED, ["org/other@main"]).splitlines()
    assert lines[0].split() == ["NODE", "MODEL", "REVISION", "SIZE", "STATE", "USE"]
    assert [line.split()[1] for line in lines[1:]] == ["org/empty", REPO, REPO, "org/other", "(none)"]
    assert lines[2].split()[2:] == ["aaaaaaaaaaaa", "0.0", "MiB", "complete"]
    assert lines[3].split()[2:] == ["bbbbbbbbbbbb", "(main)", "0.0", "MiB", "complete", "served"]
    assert "incomplete: 1 shards are missing" in lines[4] and "(+ 0.0 MiB in parts)" in lines[4] and lines[4].endswith("inventory")


@pytest.mark.parametrize(("folder", "repo"), [("models--org--name", "org/name"), ("models--gpt2", "gpt2")])
def test_repo_of(folder, repo):
    assert _models.repo_of(folder) == repo
