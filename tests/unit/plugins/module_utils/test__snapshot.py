# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""State of a snapshot, stamps, publication; on real directories laid out as huggingface_hub does."""

from __future__ import annotations

import hashlib
import os
import pwd
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
REPO = "org/model"
OWNER = _snapshot.Owner(os.getuid(), os.getgid())
FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"two" * 1000,
    "sub/tokenizer.json": b"[]",
}


def row_of(path: str, data: bytes) -> dict[str, t.Any]:
    if path.endswith(".safetensors"):
        return {"path": path, "size": len(data), "blob": hashlib.sha256(data).hexdigest(), "algo": "sha256"}
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return {"path": path, "size": len(data), "blob": blob, "algo": "git-sha1"}


ROWS = [row_of(path, data) for path, data in FILES.items()]


class Cache:
    """A cache as ``hf download`` leaves it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cache"
        self.stamps = str(root / "state" / "snapshots")
        self.folder = self.root / "hub" / "models--org--model"
        self.snapshot = self.folder / "snapshots" / COMMIT

    def fill(self) -> Cache:
        (self.folder / "blobs").mkdir(parents=True)
        for row in ROWS:
            (self.folder / "blobs" / row["blob"]).write_bytes(FILES[row["path"]])
            link = self.snapshot / row["path"]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(self.folder / "blobs" / row["blob"], link.parent))
        (self.folder / "refs").mkdir()
        (self.folder / "refs" / "main").write_text(COMMIT)
        return self

    def stamp(self) -> None:
        _snapshot.write_stamp(str(self.folder), COMMIT, ROWS, self.stamps)

    def state(self, revision: str = "main") -> dict[str, t.Any]:
        state = _snapshot.local_state(str(self.root), REPO, revision, stamp_dir=self.stamps)
        assert state is not None
        return state


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path).fill()


def test_complete_but_never_verified(cache: Cache) -> None:
    state = cache.state()
    assert (state["complete"], state["verified"], state["reason"]) == (True, False, "")
    assert (state["revision"], state["files"], state["bytes"]) == (COMMIT, 4, sum(map(len, FILES.values())))
    assert state["path"] == str(cache.snapshot)
    assert state["manifest_digest"] == _snapshot.manifest_digest(ROWS)


def test_verified_by_stamp_for_branch_and_commit(cache: Cache) -> None:
    cache.stamp()
    assert cache.state()["verified"] and cache.state(COMMIT)["verified"]
    assert cache.state()["manifest_digest"] == _snapshot.manifest_digest(ROWS)
    assert os.stat(cache.stamps).st_mode & 0o777 == 0o700
    assert os.stat(os.path.dirname(cache.stamps)).st_mode & 0o777 == 0o700


def test_nothing_is_opened_when_the_stamp_fits(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.stamp()
    opened: list[str] = []
    real = open

    def spy(path: t.Any, *args: t.Any, **kwargs: t.Any) -> t.Any:
        opened.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", spy)
    assert cache.state()["verified"]
    monkeypatch.undo()
    assert len(opened) == 2 and not any("blobs" in path or "snapshots/" + COMMIT in path for path in opened)


def touch(path: Path) -> None:
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))


def rewrite(path: Path) -> None:
    """Same size and time, other inode."""
    info, data = path.stat(), path.read_bytes()
    new = path.with_name("new")
    new.write_bytes(data)
    os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.replace(new, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (touch, "changed since"),
        (rewrite, "changed since"),
        (lambda path: path.write_bytes(b"x"), "changed since"),
        (lambda path: path.unlink(), "links without a file, first model-00001"),
    ],
)
def test_a_changed_file_is_noticed(cache: Cache, change: t.Callable[[Path], t.Any], reason: str) -> None:
    cache.stamp()
    change(cache.folder / "blobs" / ROWS[1]["blob"])
    state = cache.state()
    assert not state["verified"] and not state["complete"]
    assert reason in state["reason"]


def test_a_missing_shard_is_named(cache: Cache) -> None:
    (cache.snapshot / "model-00002-of-00002.safetensors").unlink()
    state = cache.state()
    assert not state["complete"] and "model-00002-of-00002.safetensors" in state["reason"]


def test_what_is_not_there(tmp_path: Path) -> None:
    empty = Cache(tmp_path)
    assert _snapshot.local_state(str(empty.root), REPO, "main") is None
    assert _snapshot.local_state("", REPO, "main") is None
    empty.root.mkdir()
    assert empty.state()["reason"] == "the model is not in the cache"
    full = empty.fill()
    assert "revision 'nope'" in full.state("nope")["reason"]
    assert full.state("../../../../etc/passwd")["revision"] is None
    assert "no snapshot" in full.state(OTHER)["reason"]
    (full.folder / "refs" / "main").write_text("garbage")
    assert full.state()["revision"] is None


def test_a_damaged_stamp_counts_as_none(cache: Cache) -> None:
    cache.stamp()
    path = Path(_snapshot.stamp_path(str(cache.folder), COMMIT, cache.stamps))
    for content in ("", "{", "[]", '{"version": 2, "files": []}', '{"version": 1}'):
        path.write_text(content)
        state = cache.state()
        assert state["complete"] and not state["verified"]


def test_two_caches_have_two_stamps(tmp_path: Path) -> None:
    one, two = (str(tmp_path / name / "hub" / "models--org--model") for name in ("a", "b"))
    assert _snapshot.stamp_path(one, COMMIT, "/s") != _snapshot.stamp_path(two, COMMIT, "/s")


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (["model-00001-of-00003.safetensors"], ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]),
        (["m-00001-of-00001.gguf", "config.json"], []),
        (["a-00001-of-00002.bin", "a-00002-of-00002.bin", "d/a-00002-of-00002.bin"], ["d/a-00001-of-00002.bin"]),
        (["model.safetensors"], []),
    ],
)
def test_missing_shards(paths: list[str], missing: list[str]) -> None:
    assert _snapshot.missing_shards(paths) == missing


def test_login_user_and_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd(("spark", "x", 1000, 1001, "", "/home/spark", "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    login = _snapshot.login_user({"SUDO_UID": "1000"}, lambda uid: entry)
    assert login == ("spark", 1000, 1001, "/home/spark")
    assert _snapshot.resolve_cache_dir("~/.cache/huggingface", login) == "/home/spark/.cache/huggingface"
    assert _snapshot.resolve_cache_dir("/srv//models/", login) == "/srv/models"
    assert _snapshot.resolve_cache_dir("", login) == ""


def test_sudo_uid_counts_only_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    asked: list[int] = []

    def lookup(uid: int) -> t.Any:
        asked.append(uid)
        raise KeyError

    assert _snapshot.login_user({"SUDO_UID": "1000", "HOME": "/h"}, lookup).home == "/h"
    assert asked == [1234]


def test_manifest_digest_does_not_depend_on_order_or_extra_keys() -> None:
    rows = [{**row, "mtime_ns": 1} for row in reversed(ROWS)]
    assert _snapshot.manifest_digest(rows) == _snapshot.manifest_digest(ROWS)
    assert _snapshot.manifest_digest(ROWS[1:]) != _snapshot.manifest_digest(ROWS)


# --- comparing ---


def test_look_sorts_rows(cache: Cache) -> None:
    found = _snapshot.look(str(cache.folder), COMMIT, ROWS, {})
    assert (len(found.good), len(found.unknown), len(found.missing)) == (0, 4, 0)
    cache.stamp()
    (cache.folder / "blobs" / ROWS[1]["blob"]).write_bytes(b"short")
    (cache.folder / "blobs" / ROWS[2]["blob"]).write_bytes(b"TWO" * 1000)
    found = _snapshot.look(str(cache.folder), COMMIT, ROWS, _snapshot.trusted_files(str(cache.folder), cache.stamps))
    assert [row["path"] for row in found.missing] == [ROWS[1]["path"]]
    assert [row["path"] for row in found.unknown] == [ROWS[2]["path"]]
    assert len(found.good) == 2


def test_a_new_revision_trusts_what_an_old_one_proved(cache: Cache) -> None:
    cache.stamp()
    found = _snapshot.look(str(cache.folder), OTHER, ROWS, _snapshot.trusted_files(str(cache.folder), cache.stamps))
    assert len(found.good) == 4
    assert _snapshot.trusted_files(str(cache.folder) + "x", cache.stamps) == {}


def test_discard_removes_link_and_content_also_in_the_shared_store(cache: Cache) -> None:
    shared = cache.root / "hub" / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob = cache.folder / "blobs" / ROWS[1]["blob"]
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert cache.state()["complete"]
    _snapshot.discard(str(cache.folder), COMMIT, ROWS[1])
    assert not shared.exists() and not os.path.lexists(blob) and not os.path.lexists(cache.snapshot / ROWS[1]["path"])


def test_discard_never_leaves_the_cache(cache: Cache, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_bytes(FILES[ROWS[1]["path"]])
    blob = cache.folder / "blobs" / ROWS[1]["blob"]
    blob.unlink()
    blob.symlink_to(outside)
    _snapshot.discard(str(cache.folder), COMMIT, ROWS[1])
    assert outside.exists() and not os.path.lexists(blob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../x"}, "not a path inside"),
        ({"path": "/etc/passwd"}, "not a path inside"),
        ({"path": "a//b"}, "not a path inside"),
        ({"path": ""}, "not a path inside"),
        ({"blob": "../../x", "algo": ""}, "not a known name"),
        ({"blob": "a" * 40}, "not a sha256 name"),
        ({"size": -1}, "no size"),
        ({"path": "config.json"}, "twice"),
    ],
)
def test_a_bad_manifest_is_refused(change: dict[str, t.Any], message: str) -> None:
    rows = [*ROWS[:1], {**ROWS[1], **change}]
    assert message in str(_snapshot.check_manifest(rows))
    assert _snapshot.check_manifest(ROWS) is None
    assert _snapshot.check_manifest([]) == "it is empty"


# --- publication ---


def blobs_only(cache: Cache) -> None:
    for path in sorted(cache.snapshot.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cache.snapshot.rmdir()


def test_publish_new_snapshot(cache: Cache, tmp_path: Path) -> None:
    blobs_only(cache)
    linked = _snapshot.publish(str(cache.folder), COMMIT, ROWS, str(tmp_path / "staging"), OWNER)
    assert sorted(linked) == sorted(FILES)
    assert {path: (cache.snapshot / path).read_bytes() for path in FILES} == FILES
    assert all(not os.path.isabs(os.readlink(cache.snapshot / path)) for path in FILES)
    assert os.listdir(cache.snapshot.parent) == [COMMIT]
    assert _snapshot.publish(str(cache.folder), COMMIT, ROWS, str(tmp_path / "staging"), OWNER) == []


def test_publish_repairs_an_existing_snapshot(cache: Cache, tmp_path: Path) -> None:
    (cache.snapshot / "config.json").unlink()
    (cache.snapshot / ROWS[1]["path"]).unlink()
    (cache.snapshot / ROWS[1]["path"]).symlink_to("../../blobs/" + ROWS[2]["blob"])
    linked = _snapshot.publish(str(cache.folder), COMMIT, ROWS, str(tmp_path / "staging"), OWNER)
    assert sorted(linked) == ["config.json", ROWS[1]["path"]]
    assert (cache.snapshot / ROWS[1]["path"]).read_bytes() == FILES[ROWS[1]["path"]]


def test_refs(cache: Cache) -> None:
    folder = str(cache.folder)
    assert not _snapshot.write_ref(folder, "main", COMMIT, OWNER)
    assert _snapshot.write_ref(folder, "main", OTHER, OWNER) and _snapshot.read_ref(folder, "main") == OTHER
    assert _snapshot.write_ref(folder, "refs/pr/1", COMMIT, OWNER) and _snapshot.read_ref(folder, "refs/pr/1") == COMMIT
    assert not _snapshot.write_ref(folder, COMMIT, COMMIT, OWNER)
    assert not _snapshot.write_ref(folder, "", COMMIT, OWNER)
    assert not _snapshot.write_ref(folder, "../../../x", COMMIT, OWNER)
    assert sorted(os.listdir(cache.folder / "refs")) == ["main", "refs"]


def test_repair_access_makes_it_readable_for_all(cache: Cache) -> None:
    blob = cache.folder / "blobs" / ROWS[1]["blob"]
    blob.chmod(0o600)
    (cache.folder / "blobs").chmod(0o700)
    changed = _snapshot.repair_access(str(cache.root), REPO, OWNER)
    assert sorted(changed) == sorted([str(blob), str(cache.folder / "blobs")])
    assert blob.stat().st_mode & 0o777 == 0o644 and (cache.folder / "blobs").stat().st_mode & 0o777 == 0o755
    assert _snapshot.repair_access(str(cache.root), REPO, OWNER) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_repair_access_gives_foreign_files_to_the_login_user(cache: Cache) -> None:
    owner = _snapshot.Owner(12345, 12345)
    _snapshot.repair_access(str(cache.root), REPO, owner)
    for path in [cache.folder, *cache.folder.rglob("*")]:
        assert path.lstat().st_uid == 12345, path
    assert cache.root.stat().st_uid == 0


def test_staging_is_outside_hub_on_the_same_file_system(cache: Cache) -> None:
    assert _snapshot.staging_dir(str(cache.root), REPO) == str(cache.root / ".dgxspark-sync" / "models--org--model")


def test_staging_is_inside_hub_when_hub_is_another_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    class Other:
        st_dev = -1

    monkeypatch.setattr(os, "stat", lambda path, **kw: Other() if str(path).endswith("/hub") else real(path, **kw))
    assert "/hub/.dgxspark-sync/" in _snapshot.staging_dir(str(cache.root), REPO)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"model-00001-of-00002.safetensors": 5, "model-00002-of-00002.safetensors": 6, "config.json": 100, "tokenizer.json": 100}, 11),
        ({"model.safetensors": 5, "original/model.safetensors": 50, "metal/model.bin": 50}, 5),
        ({"model.safetensors": 5, "consolidated.safetensors": 5, "pytorch_model.bin": 5}, 5),
        ({"consolidated.safetensors": 7}, 7),
        ({"pytorch_model-00001-of-00001.bin": 8, "training_args.bin": 1}, 8),
        ({"config.json": 100}, 0),
    ],
)
def test_weights_are_counted_once(sizes, expected):
    assert _snapshot.weight_bytes({"path": path, "size": size} for path, size in sizes.items()) == expected


def test_a_snapshot_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is built there is nothing under its final name."""
    cache = Cache(tmp_path).fill()
    top = cache.folder / "snapshots" / OTHER
    seen: list[bool] = []
    original = _snapshot._link

    def spy(*args: t.Any) -> None:
        seen.append(top.exists())
        original(*args)

    monkeypatch.setattr(_snapshot, "_link", spy)
    (tmp_path / "staging").mkdir()
    _snapshot.publish(str(cache.folder), OTHER, ROWS, str(tmp_path / "staging"), OWNER)
    assert seen == [False] * len(ROWS) and {row["path"]: (top / row["path"]).read_bytes() for row in ROWS} == FILES


# --- other patterns, plain models, what the head does not have ---


def test_other_patterns_make_a_snapshot_unverified(tmp_path: Path) -> None:
    """A changed spark_model_exclude is noticed; a worker, which knows no patterns, is not concerned."""
    cache = Cache(tmp_path).fill()
    one = {"allow": [], "ignore": ["*.bin"]}
    for patterns, asked, verified in ((one, one, True), (one, {"allow": [], "ignore": []}, False), (None, one, True), (one, None, True)):
        _snapshot.write_stamp(str(cache.folder), COMMIT, ROWS, cache.stamps, patterns=patterns)
        state = _snapshot.local_state(str(cache.root), REPO, COMMIT, stamp_dir=cache.stamps, patterns=asked)
        assert state and state["verified"] is verified and state["complete"] is verified, (patterns, asked)
        assert ("other patterns" in state["reason"]) is not verified


@pytest.mark.parametrize(
    ("repo", "place", "path"),
    [
        ("/data/m", ("/data/m", "plain"), "/data/m"),
        ("/data/m/", ("/data/m", "plain"), "/data/m"),
        ("~/m", ("/home/x/m", "plain"), "/home/x/m"),
        ("/data/m/q4.gguf", ("/data/m", "plain-q4.gguf"), "/data/m/q4.gguf"),
        ("/data/Q.GGUF", ("/data", "plain-Q.GGUF"), "/data/Q.GGUF"),
    ],
)
def test_place_of_a_plain_model(repo: str, place: tuple[str, str], path: str) -> None:
    assert _snapshot.is_plain(repo) and not _snapshot.is_plain("org/m")
    assert _snapshot.plain_place(repo, _snapshot.Login("x", 1, 1, "/home/x")) == place
    assert _snapshot.model_path(*place) == path


def test_files_of_a_plain_model(tmp_path: Path) -> None:
    for name in (
        "a.json",
        "sub/b.json",
        ".cache/x",
        ".git/y",
        ".dgxspark-sync/z",
        "q-00001-of-00002.gguf",
        "q-00002-of-00002.gguf",
        "r.gguf",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "lost").symlink_to("nowhere")

    def names(key: str) -> tuple[list[str], list[str]]:
        rows, dangling = _snapshot.list_plain(str(tmp_path), key)
        return [row["path"] for row in rows], dangling

    assert names("plain") == (["a.json", "q-00001-of-00002.gguf", "q-00002-of-00002.gguf", "r.gguf", "sub/b.json"], ["lost"])
    assert names("plain-q-00001-of-00002.gguf") == (["q-00001-of-00002.gguf", "q-00002-of-00002.gguf"], [])
    assert names("plain-r.gguf") == (["r.gguf"], [])


@pytest.mark.parametrize(
    ("name", "weights"), [("", 30), ("q-00001-of-00002.gguf", 300), ("q-00002-of-00002.gguf", 300), ("r.gguf", 1000), ("none.gguf", 0)]
)
@pytest.mark.parametrize("stamped", [False, True])
def test_weights_of_a_plain_model(tmp_path: Path, name: str, weights: int, stamped: bool) -> None:
    """As vLLM loads them, by what the file is: of a directory the tensors, of a GGUF model all files of its series."""
    sizes = {"config.json": 1, "m-00001-of-00001.safetensors": 30, "consolidated.safetensors": 40, "original/a.safetensors": 50}
    sizes |= {"q-00001-of-00002.gguf": 100, "q-00002-of-00002.gguf": 200, "r.gguf": 1000}
    folder = tmp_path / "model"
    for path, size in sizes.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x" * size)
    repo, stamps = str(folder / name), str(tmp_path / "stamps")
    if stamped and weights:
        place = _snapshot.plain_place(repo)
        _snapshot.write_stamp(*place, _snapshot.list_plain(*place)[0], stamps)
    state = _snapshot.local_state("", repo, "main", stamp_dir=stamps)
    assert state and (state["complete"], state["weights"]) == (bool(weights), weights)
    assert state["verified"] is (stamped and bool(weights))


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name, reason in {
        "model.safetensors": "it is a file; only a directory or a GGUF file is a model",
        "model.safetensors/": "it is a file; only a directory or a GGUF file is a model",
        "model.safetensors/below": "there is no ",
        "loop.gguf": "there is no ",
        "folder.gguf": "there is no GGUF file of that name",
    }.items():
        state = _snapshot.local_state("", f"{tmp_path}/{name}", "main", stamp_dir=str(tmp_path / "stamps"))
        assert state and not state["complete"] and reason in state["reason"], (name, state)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory"), PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("name", ["", "r.gguf"])
def test_a_directory_that_vanishes_during_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, name: str) -> None:
    """A directory that cannot be seen makes a model incomplete; a GGUF file does not care for what lies beside it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "r.gguf").write_bytes(b"x")
    original = os.scandir

    def scandir(path: t.Any) -> t.Any:
        if "sub" in str(path):
            raise type(error)(error.errno, error.strerror, path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    state = _snapshot.local_state("", str(tmp_path / name), "main", stamp_dir=str(tmp_path / "stamps"))
    assert state and state["complete"] is bool(name)
    assert name or state["reason"] == f"{tmp_path}/sub/: {error.strerror}"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}', ["two.safetensors"]),
        ('{"weight_map": {"a": "one.safetensors"}}', []),
        ("not json", ["model.safetensors.index.json"]),
        ('{"other": 1}', ["model.safetensors.index.json"]),
    ],
)
def test_the_index_names_what_is_missing(tmp_path: Path, text: str, missing: list[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert _snapshot.missing_of_index(str(tmp_path), ["one.safetensors", "model.safetensors.index.json"]) == missing
