# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module against the real server on loopback; head and worker are two caches on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _snapshot, _sync_server, _transfer
from ansible_collections.dgxspark.serving.plugins.modules import model_sync

COMMIT = "a" * 40
TOKEN = "0f" * 16
RNG = random.Random(3)
FILES = {
    "config.json": b"{}",
    "copy/config.json": b"{}",
    "m-1.safetensors": RNG.randbytes(2_000_000),
    "m-2.safetensors": RNG.randbytes(700_000),
}


def row_of(path: str, data: bytes) -> dict[str, t.Any]:
    if path.endswith(".safetensors"):
        return {"path": path, "size": len(data), "blob": hashlib.sha256(data).hexdigest(), "algo": "sha256"}
    return {
        "path": path,
        "size": len(data),
        "blob": hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
        "algo": "git-sha1",
    }


MANIFEST = [row_of(path, data) for path, data in FILES.items()]
UNIQUE = 2 + 2_000_000 + 700_000


class Bench:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.head, self.cache, self.capsys = root / "head", root / "worker" / ".cache" / "huggingface", capsys
        self.head.mkdir()
        for row in MANIFEST:
            (self.head / row["blob"]).write_bytes(FILES[row["path"]])
        self.folder = self.cache / "hub" / "models--org--m"
        self.snapshot = self.folder / "snapshots" / COMMIT
        self.server: dict[str, t.Any] | None = None

    @contextlib.contextmanager
    def serving(self) -> t.Iterator[_sync_server.Server]:
        blobs = {row["blob"]: {"path": str(self.head / row["blob"]), "size": row["size"]} for row in MANIFEST}
        config = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": ["127.0.0.1"], "blobs": blobs}
        server = _sync_server.serve(config)
        # everything sync_server returns is passed on as it is
        self.server = {
            "address": "127.0.0.1",
            "port": server.server_port,
            "token": TOKEN,
            "url": "u",
            "manifest_digest": "x",
            "bytes": 1,
            "source": "cache",
        }
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    def run(self, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {
            "repo_id": "org/m",
            "revision": COMMIT,
            "ref": "main",
            "cache_dir": str(self.cache),
            "manifest": MANIFEST,
            "node": "spark-2",
        }
        args.update({"processes": 2, "min_free_bytes": 0, "stall_timeout": 3, "_ansible_check_mode": check})
        if self.server:
            args["server"] = self.server
        with patch_module_args({**args, **over}), pytest.raises(SystemExit):
            model_sync.main()
        return json.loads(self.capsys.readouterr().out)

    def same(self) -> bool:
        return {path: (self.snapshot / path).read_bytes() for path in FILES} == FILES and (
            self.folder / "refs" / "main"
        ).read_text() == COMMIT


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(model_sync, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state" / "snapshots"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    return Bench(tmp_path, capsys)


def test_copy_then_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.serving() as server:
        first = bench.run()
        assert first["changed"] and not first.get("failed"), first.get("msg")
        assert first["bytes_transferred"] == UNIQUE == server.stats()["bytes_sent"]
    assert (first["files"], first["bytes"], first["missing"]) == (4, UNIQUE + 2, {"files": 3, "bytes": UNIQUE})
    assert first["method"] == "http" and first["rate"] > 0 and first["snapshot"]["verified"]
    assert first["snapshot"]["path"] == str(bench.snapshot) and bench.same()
    assert TOKEN not in json.dumps(first)
    assert sorted(os.listdir(bench.cache)) == ["hub"]  # no staging left
    assert first["diff"]["after"]["files"] == 4

    hashed: list[str] = []
    monkeypatch.setattr(_transfer, "hash_file", lambda path, *rest: hashed.append(path))
    bench.server = None
    second = bench.run()
    assert not second["changed"] and second["method"] == "none" and hashed == [] and second["actions"] == []
    assert second["manifest_digest"] == first["manifest_digest"] and second["snapshot"]["verified"]
    assert second["diff"]["before"] == second["diff"]["after"]


def test_check_mode(bench: Bench) -> None:
    result = bench.run(check=True)
    assert result["changed"] and "would copy 3 files (2.7 MB)" in result["actions"][0]
    assert not bench.cache.exists() and not os.path.exists(model_sync.RUN_DIR)
    assert bench.run(check=True, manifest=[], revision="")["changed"]
    with bench.serving():
        bench.run()
    assert not bench.run(check=True)["changed"]
    (bench.folder / "refs" / "main").write_text("b" * 40)
    assert bench.run(check=True)["changed"]


def test_a_lost_file_is_the_only_one_copied(bench: Bench) -> None:
    with bench.serving():
        bench.run()
        (bench.snapshot / "m-2.safetensors").resolve().unlink()
        result = bench.run()
    assert result["bytes_transferred"] == 700_000 and result["hashed"] == 0 and bench.same()


def test_a_changed_file_is_hashed_and_replaced(bench: Bench) -> None:
    with bench.serving():
        bench.run()
        blob = (bench.snapshot / "m-1.safetensors").resolve()
        data = bytearray(blob.read_bytes())
        data[0] ^= 1
        blob.write_bytes(data)
        result = bench.run()
    assert result["hashed"] == 1 and result["bytes_transferred"] == 2_000_000 and bench.same()


def test_full_verification(bench: Bench) -> None:
    with bench.serving():
        bench.run()
        result = bench.run(verify="full")
    assert not result["changed"] and result["hashed"] == 3 and result["bytes_transferred"] == 0


def test_what_a_worker_downloaded_itself_is_adopted(bench: Bench) -> None:
    (bench.folder / "blobs").mkdir(parents=True)
    for row in MANIFEST[2:]:
        (bench.folder / "blobs" / row["blob"]).write_bytes(FILES[row["path"]])
    with bench.serving():
        result = bench.run()
    assert result["hashed"] == 2 and result["bytes_transferred"] == 2 and bench.same()


def test_a_dangling_link_into_the_shared_store_is_replaced(bench: Bench) -> None:
    (bench.folder / "blobs").mkdir(parents=True)
    victim = bench.cache / "hub" / "blobs" / "aa" / "x"
    (bench.folder / "blobs" / MANIFEST[2]["blob"]).symlink_to(victim)
    with bench.serving():
        assert not bench.run().get("failed")
    assert bench.same() and not victim.exists()
    assert not (bench.folder / "blobs" / MANIFEST[2]["blob"]).is_symlink()


def test_leftovers_are_continued_or_removed(bench: Bench) -> None:
    staging = bench.cache / ".dgxspark-sync" / "models--org--m"
    staging.mkdir(parents=True)
    (staging / (MANIFEST[2]["blob"] + ".part")).write_bytes(FILES["m-1.safetensors"][:1_500_000])
    (staging / ("9" * 64 + ".part")).write_bytes(b"of an older version")
    (staging / "snapshot-x").mkdir()
    with bench.serving():
        result = bench.run()
    assert result["bytes_transferred"] == UNIQUE - 1_500_000 and bench.same() and not staging.exists()


def test_a_new_revision_moves_what_is_new(bench: Bench) -> None:
    new = {**FILES, "config.json": b"{1}"}
    rows = [row_of(path, data) for path, data in new.items()]
    with bench.serving() as server:
        bench.run()
        (bench.head / rows[0]["blob"]).write_bytes(b"{1}")
        server.config["blobs"][rows[0]["blob"]] = {"path": str(bench.head / rows[0]["blob"]), "size": 3}
        result = bench.run(manifest=rows, revision="b" * 40)
    assert result["bytes_transferred"] == 3 and result["hashed"] == 0
    assert (bench.folder / "refs" / "main").read_text() == "b" * 40 and (bench.snapshot / "config.json").read_bytes() == b"{}"


def test_old_snapshot_stays_visible_when_the_copy_fails(bench: Bench) -> None:
    with bench.serving():
        bench.run()
    rows = [*MANIFEST[:3], row_of("m-2.safetensors", b"new")]
    result = bench.run(manifest=rows, revision="b" * 40, stall_timeout=1)
    assert result["failed"] and bench.same()
    assert not (bench.folder / "snapshots" / ("b" * 40)).exists()


@pytest.mark.parametrize(
    ("over", "ident", "words"),
    [
        ({"revision": "main"}, "sync-input", "commit"),
        ({"manifest": [{**MANIFEST[0], "path": "../../../x"}]}, "sync-input", "not a path inside"),
        ({"manifest": [{"path": "x"}]}, "sync-input", "manifest"),
        ({"repo_id": "../x"}, "sync-input", "manifest"),
        ({"min_free_bytes": 10**18}, "disk-model", "free at"),
        ({"server": None}, "sync-no-server", "3 files (2.7 MB)"),
        ({"server": {"address": "127.0.0.1", "port": 1, "token": TOKEN}, "stall_timeout": 1}, "sync-stalled", "firewall"),
    ],
)
def test_failures_name_node_found_expected_remedy(bench: Bench, over: dict[str, t.Any], ident: str, words: str) -> None:
    with bench.serving():
        result = bench.run(**over)
    assert result["failed"] and result["problem"]["id"] == ident, result["msg"]
    assert words in result["msg"] and result["msg"].startswith("spark-2: model_sync: found ")
    assert not bench.snapshot.exists() and not result["changed"]


def test_wrong_token(bench: Bench) -> None:
    with bench.serving():
        result = bench.run(server={"address": "127.0.0.1", "port": bench.server["port"], "token": "1" * 32})
    assert result["problem"]["id"] == "sync-denied" and "1" * 32 not in json.dumps(result)


def test_a_file_that_changes_on_the_head(bench: Bench) -> None:
    with bench.serving():
        (bench.head / MANIFEST[2]["blob"]).write_bytes(b"other")
        result = bench.run()
    assert result["problem"]["id"] == "sync-source" and "m-1.safetensors" in result["msg"] and not bench.snapshot.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_all_belongs_to_the_login_user(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "12345")
    with bench.serving():
        assert not bench.run().get("failed")
    for path in [bench.cache, *bench.cache.rglob("*")]:
        assert path.lstat().st_uid == 12345, path
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044
