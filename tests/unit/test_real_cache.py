# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Caches that the real huggingface_hub writes on the head, in both of its layouts: adopted without a download, copied to a worker, and
accepted there by the library itself (offline look-up, and what ``hf cache verify`` does). The hub is the lab's, on loopback.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _snapshot, _sync_server
from ansible_collections.dgxspark.serving.plugins.modules import hf_snapshot, model_sync

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("lab_hub_real", ROOT / "lab" / "hub.py")
hub = importlib.util.module_from_spec(SPEC)  # type: ignore[arg-type]
SPEC.loader.exec_module(hub)  # type: ignore[union-attr]

TOKEN = "ab" * 16
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b"{}",
    "sub/tokenizer.json": b"[]",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"1" * 900_000,
    "model-00002-of-00002.safetensors": b"2" * 70_000,
}

# The Xet protocol is not spoken by the lab's hub: its one call is replaced by a plain request, all else is the library.
PROGRAM = """
import json, sys, urllib.request
import huggingface_hub
from huggingface_hub import file_download

def xet_get(*, incomplete_path, xet_file_data, **rest):
    with urllib.request.urlopen(xet_file_data.refresh_route) as answer:
        incomplete_path.write_bytes(answer.read())

file_download.xet_get = xet_get
what, repo = sys.argv[1:]
if what == "download":
    # One by one: two threads that make the shared store at the same time may leave the blob of one of them outside.
    print(json.dumps(huggingface_hub.snapshot_download(repo, max_workers=1)))
elif what == "offline":
    print(json.dumps(huggingface_hub.snapshot_download(repo, local_files_only=True)))
else:
    found = huggingface_hub.HfApi().verify_repo_checksums(repo)
    print(json.dumps([found.checked_count, found.mismatches, sorted(found.missing_paths or []), sorted(found.extra_paths or [])]))
"""


@pytest.fixture
def server(tmp_path: Path) -> t.Iterator[t.Any]:
    for name, access in (("plain", {}), ("xet", {"xet": True})):
        for path, data in FILES.items():
            target = tmp_path / "hub" / "org" / name / "files" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        (tmp_path / "hub" / "org" / name / "access.json").write_text(json.dumps(access))
    server = hub.Server(str(tmp_path / "hub"), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.ending.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def endpoint(server: t.Any) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def library(cache: Path, endpoint: str, what: str, repo: str, **env: str) -> t.Any:
    """The real library in a process of its own."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, repo],
        env={
            **base,
            "HF_HOME": str(cache),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def module(what: t.Any, capsys: pytest.CaptureFixture[str], **args: t.Any) -> dict[str, t.Any]:
    with patch_module_args({"min_free_bytes": 0, "processes": 2, **args}), pytest.raises(SystemExit):
        what.main()
    result: dict[str, t.Any] = json.loads(capsys.readouterr().out)
    assert not result.get("failed"), result["msg"]
    return result


@pytest.mark.parametrize("repo", ["org/plain", "org/xet"])
def test_a_cache_of_the_real_library_arrives(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, repo: str
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    head, worker = tmp_path / "head", tmp_path / "worker"
    path = Path(library(head, endpoint, "download", repo))
    shared = head / "hub" / "blobs"
    assert shared.is_dir() is (repo == "org/xet")  # else the second layout is not what is tested
    assert (path / "model-00001-of-00002.safetensors").resolve().is_relative_to(shared) is (repo == "org/xet")

    # head: adopted as it is
    for name in ("head", "worker"):
        monkeypatch.setattr(hf_snapshot if name == "head" else model_sync, "RUN_DIR", str(tmp_path / f"run-{name}"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state-head"))
    found = module(hf_snapshot, capsys, repo_id=repo, cache_dir=str(head), endpoint=endpoint)
    assert found["missing"]["files"] == 0 and found["snapshot"]["path"] == str(path) and found["snapshot"]["files"] == len(FILES)

    # worker: copied
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state-worker"))
    blobs = {row["blob"]: {"path": os.path.realpath(path / row["path"]), "size": row["size"]} for row in found["manifest"]}
    server = _sync_server.serve({"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": ["127.0.0.1"], "blobs": blobs})
    try:
        copied = module(
            model_sync,
            capsys,
            repo_id=repo,
            revision=found["snapshot"]["revision"],
            ref="main",
            cache_dir=str(worker),
            manifest=found["manifest"],
            server={"address": "127.0.0.1", "port": server.server_port, "token": TOKEN},
        )
    finally:
        server.shutdown()
        server.server_close()
    assert copied["bytes_transferred"] == sum(map(len, FILES.values()))

    # the library accepts it: without a hub, and file by file against the hub's list
    dead = "http://127.0.0.1:1"
    offline = Path(library(worker, dead, "offline", repo, HF_HUB_OFFLINE="1"))
    assert str(offline) == copied["snapshot"]["path"]
    assert {name: (offline / name).read_bytes() for name in FILES} == FILES
    assert library(worker, endpoint, "verify", repo) == [len(FILES), [], [], []]
    for blob in (worker / "hub" / f"models--org--{repo[4:]}" / "blobs").iterdir():
        data = blob.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        assert blob.name in (hashlib.sha256(data).hexdigest(), git)


def test_download_with_the_real_library(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(hf_snapshot, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state"))
    found = module(hf_snapshot, capsys, repo_id="org/plain", cache_dir=str(tmp_path / "c"), endpoint=endpoint, python=sys.executable)
    assert found["changed"] and found["snapshot"]["verified"] and found["huggingface_hub"] != "0.stub"
    assert {name: (Path(found["snapshot"]["path"]) / name).read_bytes() for name in FILES} == FILES
    assert library(tmp_path / "c", endpoint, "verify", "org/plain") == [len(FILES), [], [], []]


def test_a_token_that_is_revoked_in_the_middle(
    tmp_path: Path, server: t.Any, endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub refuses after some files: said as what it is, and the next run takes over what arrived."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(hf_snapshot, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state"))
    over = {"repo_id": "org/plain", "cache_dir": str(tmp_path / "c"), "endpoint": endpoint, "python": sys.executable, "node": "spark-1"}
    server.faults.sent = [{"on": "resolve", "file": "model-00002*", "status": 401, "code": "GatedRepo"}]
    with patch_module_args({"min_free_bytes": 0, "retries": 0, "workers": 1, **over}), pytest.raises(SystemExit):
        hf_snapshot.main()
    failed = json.loads(capsys.readouterr().out)
    assert failed["problem"]["id"] == "hub-401" and failed["msg"].startswith("spark-1: hf_snapshot: found 401"), failed["msg"]
    server.faults.sent = []
    again = module(hf_snapshot, capsys, **over)
    assert again["snapshot"]["verified"] and again["missing"]["files"] < len(FILES)
