# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module against the real server on loopback; head and worker are two caches on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
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


@pytest.mark.parametrize(("same_size", "ident"), [(False, "sync-source"), (True, "copy-hash")])
def test_a_file_that_changes_on_the_head(bench: Bench, same_size: bool, ident: str) -> None:
    blob = MANIFEST[2]["blob"]
    right = (bench.head / blob).read_bytes()
    with bench.serving():
        (bench.head / blob).write_bytes(right[:-1] + b"!" if same_size else b"other")
        result = bench.run()
        assert result["problem"]["id"] == ident and "m-1.safetensors" in result["msg"] and result["msg"].startswith("spark-2: ")
        assert not bench.snapshot.exists() and not (bench.folder / "blobs" / blob).exists()
        (bench.head / blob).write_bytes(right)
        again = bench.run()
    assert not again.get("failed") and bench.same()


@pytest.mark.parametrize("first", ["runs on", "is killed"])
def test_two_plays_at_once(bench: Bench, tmp_path: Path, first: str) -> None:
    """The second waits for the first, whatever became of its controller, then has nothing to copy, or only the rest."""
    part = bench.cache / ".dgxspark-sync" / "models--org--m" / (MANIFEST[2]["blob"] + ".part")
    with bench.serving() as server:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            original = _transfer.Puller._write

            def slowly(fd: int, view: memoryview, offset: int) -> None:
                original(fd, view, offset)
                time.sleep(0.1)

            _transfer.Puller._write = staticmethod(slowly)  # type: ignore[method-assign]
            with contextlib.suppress(BaseException):
                bench.run()
            os._exit(0)
        deadline = time.monotonic() + 20
        while not (part.exists() and part.stat().st_size > 300_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if first == "is killed":
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert not bench.snapshot.exists()  # nothing under a final name
            for blob in (bench.folder / "blobs").iterdir():
                assert blob.name in {row["blob"] for row in MANIFEST}
        result = bench.run()
        if first == "runs on":
            os.waitpid(pid, 0)
            assert result["bytes_transferred"] == 0 and not result["changed"] and server.stats()["bytes_sent"] == UNIQUE
        else:
            assert 0 < result["bytes_transferred"] < UNIQUE
    assert not result.get("failed") and bench.same() and sorted(os.listdir(bench.cache)) == ["hub"]


def test_a_run_that_waits_too_long_names_the_lock(bench: Bench) -> None:
    lock = os.path.join(model_sync.RUN_DIR, f"model-{hashlib.sha256(str(bench.folder).encode()).hexdigest()[:12]}.lock")
    with bench.serving(), _transfer.exclusive(lock, 0, node="n", stage="s", what="m"):
        result = bench.run(timeout=1)
    assert result["problem"]["id"] == "busy" and result["msg"].startswith("spark-2: model_sync: found another run")


def test_a_cache_that_cannot_be_written(bench: Bench) -> None:
    bench.cache.parent.parent.mkdir(parents=True)
    bench.cache.parent.write_text("a file where the directory should be")
    with bench.serving():
        result = bench.run()
    assert result["problem"]["id"] == "cache-access" and str(bench.cache.parent) in result["msg"] and result["msg"].startswith("spark-2: ")


# --- chain, rsync, prune ---


def test_chain(bench: Bench, tmp_path: Path) -> None:
    """What the worker in front has is taken from it, the head is asked for the rest only."""
    front = tmp_path / "front"
    front.mkdir()
    big = MANIFEST[2]
    (front / big["blob"]).write_bytes(FILES[big["path"]])
    blobs = {row["blob"]: {"path": str(front / row["blob"]), "size": row["size"], "part": str(front / "none")} for row in [big]}
    config = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": "7" * 32, "peers": ["127.0.0.1"], "blobs": blobs}
    peer = _sync_server.serve(config)
    try:
        with bench.serving() as head:
            result = bench.run(peers=[{"address": "127.0.0.1", "port": peer.server_port, "token": "7" * 32, "unit": "u", "path": "p"}])
            assert (peer.stats()["bytes_sent"], head.stats()["bytes_sent"]) == (2_000_000, 700_002)
    finally:
        peer.shutdown()
        peer.server_close()
    assert result["bytes_transferred"] == UNIQUE and bench.same() and "7" * 32 not in json.dumps(result)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
@pytest.mark.parametrize("transport", ["auto", "rsync", "http"])
def test_rsync_is_the_second_way(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """With the port closed: rsync over SSH (here a script in its place), named in the result; asked for http it is an error."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do case $1 in -o|-c|-l) shift 2;; -*) shift;; *) break;; esac; done\nshift\nexec "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for row in MANIFEST:
        target = tmp_path / "snapshot" / row["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(FILES[row["path"]])
    warned: list[str] = []
    monkeypatch.setattr(model_sync.AnsibleModule, "warn", lambda self, text, *rest, **more: warned.append(text))
    server = {"address": "127.0.0.1", "port": 1, "token": TOKEN, "path": str(tmp_path / "snapshot")}
    result = bench.run(server=server, transport=transport, stall_timeout=1)
    if transport == "http":
        assert result["problem"]["id"] == "sync-stalled" and not bench.snapshot.exists()
        return
    assert not result.get("failed"), result["msg"]
    assert result["method"] == "rsync" and result["bytes_transferred"] > UNIQUE and bench.same()
    assert ["was not reached" in text for text in warned] == ([True] if transport == "auto" else [])
    assert sorted(os.listdir(bench.cache)) == ["hub"]


def test_when_neither_way_works_the_first_is_explained(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    server = {"address": "127.0.0.1", "port": 1, "token": TOKEN, "path": "/x"}
    result = bench.run(server=server, stall_timeout=1)
    assert result["problem"]["id"] == "sync-stalled" and "no command rsync" in result["problem"]["remedy"]


def test_prune_removes_what_the_head_does_not_have(bench: Bench) -> None:
    old, kept = "d" * 40, "e" * 40
    with bench.serving():
        bench.run()
        stray = bench.folder / "blobs" / ("5" * 64)
        stray.write_bytes(b"old weights")
        for commit in (old, kept):
            (bench.folder / "snapshots" / commit).mkdir()
        (bench.folder / "snapshots" / old / "x").symlink_to(f"../../blobs/{stray.name}")
        shared = bench.folder / "blobs" / ("6" * 64)
        shared.write_bytes(b"of the kept revision")
        (bench.folder / "snapshots" / kept / "x").symlink_to(f"../../blobs/{shared.name}")
        (bench.folder / "refs" / "old").write_text(old)
        (bench.snapshot / "extra.bin").write_bytes(b"x")
        (bench.folder / "refs" / "main").unlink()
        left = bench.run()
        assert stray.exists() and left["pruned"] == [] and bench.same()  # left alone unless asked for
        result = bench.run(prune=True, keep=[COMMIT, kept])
    assert result["changed"] and result["bytes_transferred"] == 0 and bench.same()
    assert result["pruned"] == sorted([f"blobs/{stray.name}", "refs/old", f"snapshots/{COMMIT}/extra.bin", f"snapshots/{old}"])
    assert shared.exists() and not stray.exists()
    again = bench.run(prune=True, keep=[COMMIT, kept])
    assert not again["changed"] and again["pruned"] == []


# --- a path as a model ---


@pytest.mark.parametrize("name", ["model", "model.gguf"])
@pytest.mark.parametrize("there", [False, True])
def test_a_plain_model(bench: Bench, tmp_path: Path, name: str, there: bool) -> None:
    """A directory or a GGUF file is copied to the same path; other files beside it stay."""
    data = (
        {"model.gguf": RNG.randbytes(900_000)} if name.endswith(".gguf") else {**FILES, "sub/again.safetensors": FILES["m-1.safetensors"]}
    )
    rows = [{"path": path, "size": len(text), "blob": hashlib.sha256(text).hexdigest(), "algo": "sha256"} for path, text in data.items()]
    blobs = {}
    for row in rows:
        (bench.head / row["blob"]).write_bytes(data[row["path"]])
        blobs[row["blob"]] = {"path": str(bench.head / row["blob"]), "size": row["size"]}
    place = tmp_path / "data" / name
    folder = place.parent if name.endswith(".gguf") else place
    if there:
        folder.mkdir(parents=True)
        (folder / "mine.txt").write_text("mine")
    over = {"repo_id": str(place), "manifest": rows, "revision": _snapshot.plain_revision(rows), "ref": ""}
    with bench.serving() as server:
        server.config["blobs"] = blobs
        would = bench.run(check=True, **over)
        assert would["changed"] and folder.exists() is there
        first = bench.run(**over)
        assert first["bytes_transferred"] == sum(blob["size"] for blob in blobs.values()) and first["snapshot"]["path"] == str(place)
        assert {path: (folder / path).read_bytes() for path in data} == data
        assert sorted(os.listdir(tmp_path / "data")) == (["mine.txt"] if there and folder != place else []) + [name]
        assert (folder / "mine.txt").exists() is there
        second = bench.run(**over)
        assert not second["changed"] and second["hashed"] == 0
        victim = folder / rows[-1]["path"]
        victim.write_bytes(b"y" * rows[-1]["size"])
        third = bench.run(**over)
    assert third["changed"] and third["hashed"] == 1 and {path: (folder / path).read_bytes() for path in data} == data


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_all_belongs_to_the_login_user(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "12345")
    with bench.serving():
        assert not bench.run().get("failed")
    for path in [bench.cache, *bench.cache.rglob("*")]:
        assert path.lstat().st_uid == 12345, path
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044


def test_an_interrupted_copy_of_a_plain_model_goes_on(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had arrived whole is used; a file that is damaged meanwhile is fetched again."""
    rows = [{"path": path, "size": len(text), "blob": hashlib.sha256(text).hexdigest(), "algo": "sha256"} for path, text in FILES.items()]
    blobs = {}
    for row in rows:
        (bench.head / row["blob"]).write_bytes(FILES[row["path"]])
        blobs[row["blob"]] = {"path": str(bench.head / row["blob"]), "size": row["size"]}
    place = tmp_path / "data" / "m"
    over = {"repo_id": str(place), "manifest": rows, "revision": _snapshot.plain_revision(rows), "ref": ""}

    def power_cut(*args: t.Any) -> None:
        raise KeyboardInterrupt

    with bench.serving() as server:
        server.config["blobs"] = blobs
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_snapshot, "publish_plain", power_cut)
            bench.run(**over)
        largest = max(rows, key=lambda row: row["size"])
        (arrived,) = [path for path in tmp_path.rglob(largest["blob"]) if bench.head not in path.parents]
        arrived.write_bytes(b"x" * largest["size"])
        result = bench.run(**over)
    assert result["bytes_transferred"] == largest["size"]
    assert {row["path"]: (place / row["path"]).read_bytes() for row in rows} == FILES
