# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import fcntl
import hashlib
import json
import os

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import model_cache

A, B = "a" * 40, "b" * 40


@pytest.fixture
def node(tmp_path, monkeypatch, capsys):
    """run(check, **options): the module's answer on a cache with org/model in two revisions and org/other in one."""
    monkeypatch.setattr(model_cache, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(model_cache, "STAMP_DIR", str(tmp_path / "stamps"))
    monkeypatch.setattr(model_cache, "WAIT", 0)
    for repo, commit in (("org/model", A), ("org/model", B), ("org/other", A)):
        folder = tmp_path / "hf" / "hub" / ("models--" + repo.replace("/", "--"))
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "blobs").mkdir(exist_ok=True)
        (folder / "blobs" / commit).write_bytes(b"x" * 100)
        (folder / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/{commit}")

    def run(check=False, **options):
        arguments = {"node": "spark-1", "cache_dir": str(tmp_path / "hf"), "_ansible_check_mode": check, **options}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            model_cache.main()
        return json.loads(capsys.readouterr().out)

    run.root = tmp_path
    return run


def test_the_list(node):
    result = node()
    assert not result["changed"] and result["node"] == "spark-1" and result["cache_dir"].endswith("/hf")
    assert [(m["repo_id"], len(m["revisions"])) for m in result["models"]] == [("org/model", 2), ("org/other", 1)]
    assert (result["removed"], result["freed"], result["actions"]) == ([], 0, [])


def test_check_change_and_nothing_more_to_do(node):
    prune = {"prune": [f"org/model@{A[:8]}", "org/other"], "served": [f"org/model@{B}"]}
    before = node()["models"]
    for _again in range(2):
        checked = node(check=True, **prune)
        assert checked["changed"] and checked["freed"] == 200 and checked["models"] == before
        assert checked["actions"] == [f"would remove org/model@{A}", "would remove org/other"]
    done = node(**prune)
    assert done["changed"] and done["removed"] == [f"org/model@{A}", "org/other"] and done["freed"] == 200
    assert [(m["repo_id"], [r["revision"] for r in m["revisions"]]) for m in done["models"]] == [("org/model", [B])]
    assert done["diff"] == checked["diff"]
    assert done["diff"].pop("before_header") == done["diff"].pop("after_header") == f"spark-1: {node.root}/hf"
    assert done["diff"] == {"before": f"org/model@{A}\norg/model@{B}\norg/other@{A}\n", "after": f"org/model@{B}\n"}
    for check in (False, True):
        again = node(check=check, **prune)
        assert not again["changed"] and again["freed"] == 0 and "diff" not in again


def test_the_parts_of_a_copy_go_with_the_model_and_without_it(node):
    """Without it: the model's folder was removed before."""
    for repo in ("org/other", "org/gone"):
        parts = node.root / "hf" / ".dgxspark-sync" / ("models--" + repo.replace("/", "--"))
        parts.mkdir(parents=True)
        (parts / "1.part").write_bytes(b"p" * 1000)
        done = [node(check=check, prune=[repo]) for check in (True, False)]
        assert [(result["removed"], result["freed"], result["absent"]) for result in done] == [
            ([repo], 1100 if repo == "org/other" else 1000, [])
        ] * 2
        assert not parts.exists() and not node(prune=[repo])["changed"]


def test_what_is_served_stays_and_nothing_else_goes_either(node):
    result = node(prune=["org/other", "org/model"], served=[f"org/model@{B}"])
    assert result["failed"] and (result["problem"]["id"], result["problem"]["node"]) == ("model-served", "spark-1")
    assert not result["changed"] and len(node()["models"]) == 2


def test_unused(node):
    assert node(prune=["unused"], served=[f"org/model@{B}"], keep=["org/other@main"])["removed"] == [f"org/model@{A}"]


def test_another_run_works_on_the_model(node):
    folder = str(node.root / "hf" / "hub" / "models--org--other")
    lock = node.root / "run" / f"hf-{hashlib.sha256(folder.encode()).hexdigest()[:12]}.lock"
    lock.parent.mkdir()
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        result = node(prune=["org/other"])
    assert result["failed"] and result["problem"]["id"] == "busy" and os.path.isdir(folder)
    assert node(prune=["org/other"])["changed"]


def test_a_cache_that_cannot_be_changed(node, monkeypatch):
    def refuse(paths):
        raise PermissionError(13, "Permission denied", paths[0])

    monkeypatch.setattr(model_cache._models, "remove", refuse)
    result = node(prune=["org/other"])
    assert result["failed"] and result["problem"]["id"] == "cache-access" and "Permission denied" in result["msg"]


def test_no_cache_at_all(node):
    result = node(cache_dir=str(node.root / "nowhere"), prune=["unused"])
    assert not result["changed"] and result["models"] == []


def test_documented_are_the_options():
    documented = yaml.safe_load(model_cache.DOCUMENTATION)["options"]
    assert set(documented) | {"node"} == set(model_cache.argument_spec())
