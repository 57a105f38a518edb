# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module against the lab's hub, with a stand-in for huggingface_hub."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
import threading
import time
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _download, _snapshot, _transfer
from ansible_collections.dgxspark.serving.plugins.modules import hf_snapshot

TOP = Path(__file__).resolve().parents[4]
STUB = TOP / "tests" / "unit" / "fixtures" / "snapshot"
SPEC = importlib.util.spec_from_file_location("lab_hub_for_snapshot", TOP / "lab" / "hub.py")
assert SPEC and SPEC.loader
hub = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = hub
SPEC.loader.exec_module(hub)

FILES = {
    "config.json": b"{}",
    "sub/t.json": b"[]",
    "m-00001-of-00002.safetensors": b"1" * 90000,
    "m-00002-of-00002.safetensors": b"2" * 90000,
}
TOTAL = sum(map(len, FILES.values()))


class Bench:
    """A hub with one model, an empty cache, and the module."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model = root / "hub" / "org" / "m"
        for path, data in FILES.items():
            target = self.model / "files" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self.server = hub.Server(str(root / "hub"), "127.0.0.1", 0)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.cache = root / "cache"
        self.folder = self.cache / "hub" / "models--org--m"
        self.log = root / "log"
        self.capsys = capsys

    def run(self, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {
            "repo_id": "org/m",
            "cache_dir": str(self.cache),
            "endpoint": self.endpoint,
            "python": sys.executable,
            "node": "spark-1",
        }
        args.update({"min_free_bytes": 0, "retries": 0, "processes": 2, "_ansible_check_mode": check, **over})
        with patch_module_args(args), pytest.raises(SystemExit):
            hf_snapshot.main()
        return json.loads(self.capsys.readouterr().out)

    def attempts(self) -> list[dict[str, t.Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> t.Iterator[Bench]:
    monkeypatch.setattr(hf_snapshot, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state" / "snapshots"))
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    made = Bench(tmp_path, capsys)
    yield made
    made.server.ending.set()
    made.server.shutdown()
    made.server.server_close()


def test_download_then_nothing(bench: Bench) -> None:
    first = bench.run()
    assert first["changed"] and first["missing"] == {"files": 4, "bytes": TOTAL} and not first.get("failed")
    snapshot = first["snapshot"]
    assert (snapshot["files"], snapshot["bytes"], snapshot["ref"], snapshot["verified"]) == (4, TOTAL, "main", True)
    assert {path: (Path(snapshot["path"]) / path).read_bytes() for path in FILES} == FILES
    assert (bench.folder / "refs" / "main").read_text() == snapshot["revision"]
    assert first["manifest_digest"] == _snapshot.manifest_digest(first["manifest"])
    assert first["diff"]["before"]["files"] is None and first["diff"]["after"]["files"] == 4

    bench.server.shutdown()  # a second run needs no hub, no image and no python
    second = bench.run(python="", image="")
    assert not second["changed"] and second["actions"] == []
    assert (second["snapshot"], second["manifest"], second["manifest_digest"]) == (snapshot, first["manifest"], first["manifest_digest"])
    assert len(bench.attempts()) == 1
    assert sorted(os.listdir(hf_snapshot.RUN_DIR)) == [name for name in os.listdir(hf_snapshot.RUN_DIR) if name.endswith(".lock")]


def test_check_mode_says_what_would_come_and_touches_nothing(bench: Bench) -> None:
    result = bench.run(check=True, python="", image="not/there")
    assert result["changed"] and result["missing"] == {"files": 4, "bytes": TOTAL}
    assert "would download 4 files" in result["actions"][0] and len(result["manifest"]) == 4
    assert not bench.cache.exists() and not os.path.exists(hf_snapshot.RUN_DIR)
    bench.run()
    assert not bench.run(check=True)["changed"]


def test_an_existing_cache_is_adopted(bench: Bench) -> None:
    bench.run()
    for name in os.listdir(_snapshot.STAMP_DIR):
        os.unlink(os.path.join(_snapshot.STAMP_DIR, name))
    result = bench.run(python="", image="")
    assert not result["changed"] and result["snapshot"]["verified"]
    assert any("verified 4 files" in action for action in result["actions"])
    assert len(bench.attempts()) == 1


def test_only_what_is_missing_or_wrong_is_fetched(bench: Bench) -> None:
    path = Path(bench.run()["snapshot"]["path"])
    blob = (path / "m-00001-of-00002.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[7] ^= 1
    blob.write_bytes(data)
    (path / "sub" / "t.json").resolve().unlink()
    result = bench.run()
    assert result["changed"] and result["missing"] == {"files": 2, "bytes": 90002}
    assert bench.attempts()[1]["patterns"] == ["m-00001-of-00002.safetensors", "sub/t.json"]
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


def test_full_verification_finds_what_the_stamp_cannot_see(bench: Bench) -> None:
    path = Path(bench.run()["snapshot"]["path"])
    blob = (path / "m-00001-of-00002.safetensors").resolve()
    info = blob.stat()
    with blob.open("r+b") as handle:
        handle.write(b"X")
    os.utime(blob, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not bench.run()["changed"]
    assert bench.run(verify="full")["missing"]["files"] == 1
    assert blob.read_bytes() == FILES["m-00001-of-00002.safetensors"]


def test_a_new_commit_takes_over_what_is_equal(bench: Bench) -> None:
    first = bench.run()["snapshot"]
    (bench.model / "files" / "config.json").write_bytes(b'{"new": 1}')
    second = bench.run(revision=hub.commit_of(hub.entries(str(bench.model / "files"))))
    assert second["missing"]["files"] == 1 and second["snapshot"]["revision"] != first["revision"]
    assert second["snapshot"]["ref"] == "" and (bench.folder / "refs" / "main").read_text() == first["revision"]
    assert {name: (Path(second["snapshot"]["path"]) / name).exists() for name in FILES} == dict.fromkeys(FILES, True)


def test_patterns_are_part_of_what_was_verified(bench: Bench) -> None:
    some = bench.run(ignore_patterns=["sub/"])
    assert some["snapshot"]["files"] == 3 and len(bench.attempts()[0]["patterns"]) == 3
    assert not bench.run(ignore_patterns=["sub/"])["changed"]
    every = bench.run()
    assert every["missing"]["files"] == 1 and every["snapshot"]["files"] == 4


@pytest.mark.parametrize(
    ("fault", "over", "ident", "words"),
    [
        ({"on": "api", "status": 401}, {}, "hub-401", "no token was given"),
        ({"on": "resolve", "status": 403, "code": "GatedRepo"}, {}, "hub-403", "no access"),
        ({"on": "resolve", "status": 401, "code": "GatedRepo"}, {}, "hub-401", "gated"),
        ({}, {"repo_id": "org/none"}, "hub-404", "no org/none"),
        ({}, {"revision": "v9"}, "hub-404", "no revision v9"),
        ({"on": "api", "status": 429, "retry_after": 900}, {}, "hub-429", "come back in 900 s"),
        ({"on": "api", "status": 503}, {}, "hub-unreachable", "503"),
        ({}, {"endpoint": "http://127.0.0.1:1"}, "hub-unreachable", "refused"),
        ({}, {"min_free_bytes": 10**18}, "disk-model", "free at"),
        ({}, {"allow_patterns": ["nothing"]}, "hub-manifest", "empty"),
        ({}, {"python": "", "image": ""}, "hub-no-library", "neither"),
        ({}, {"token_file": "/nonexistent"}, "hub-token", "No such file"),
        ({"on": "cdn", "flip_at": 5}, {}, "hub-hash", "twice with a wrong content"),
        ({"on": "cdn", "cut_after": 1000}, {}, "hub-download", "IncompleteRead"),
    ],
)
def test_failures_are_told_apart(bench: Bench, fault: dict[str, t.Any], over: dict[str, t.Any], ident: str, words: str) -> None:
    if fault:
        bench.server.faults.sent = [fault]
    result = bench.run(**over)
    assert result["failed"] and result["problem"]["id"] == ident, result["msg"]
    assert words in result["msg"] and result["msg"].startswith("spark-1: hf_snapshot: found ")
    assert result["problem"]["remedy"] and "Traceback" not in json.dumps(result)
    assert not result["snapshot"]["verified"]
    names = list(_snapshot.look(str(bench.folder), result["snapshot"]["revision"] or "0" * 40, result["manifest"], {}).unknown)
    assert all(
        _transfer.hash_file(_snapshot.file_of(str(bench.folder), result["snapshot"]["revision"], row), row["algo"]) == row["blob"]
        for row in names
    )


@pytest.mark.parametrize("fault", [{"on": "api", "status": 403}, {"on": "api", "status": 404}])
def test_nothing_is_created_when_the_hub_refuses(bench: Bench, fault: dict[str, t.Any]) -> None:
    bench.server.faults.sent = [fault]
    assert bench.run()["failed"]
    assert not bench.cache.exists() and bench.attempts() == []


def test_the_token_is_used_and_never_shown(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.model / "access.json").write_text(json.dumps({"private": True, "tokens": ["hf_secret"]}))
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    token.chmod(0o600)
    assert bench.run()["problem"]["id"] == "hub-401"
    result = bench.run(check=True, token_file=str(token))
    assert result["changed"] and "hf_secret" not in json.dumps(result)
    jobs: list[tuple[str, int]] = []

    def spy(argv: list[str], **kwargs: t.Any) -> _transfer.Watched:
        job = os.path.dirname(argv[1])
        for name in os.listdir(job):
            jobs.append((name, stat.S_IMODE(os.stat(os.path.join(job, name)).st_mode)))
        assert "hf_secret" not in " ".join(argv) + json.dumps(kwargs["env"])
        assert Path(job, "token").read_text() == "hf_secret" and kwargs["env"]["HF_TOKEN_PATH"] == os.path.join(job, "token")
        return _transfer.Watched(1, "", "boom", "", 0.0)

    monkeypatch.setattr(_transfer, "watch", spy)
    failed = bench.run(token_file=str(token))
    assert failed["failed"] and "hf_secret" not in json.dumps(failed)
    assert sorted(jobs) == [("_download.py", 0o600), ("job.json", 0o600), ("token", 0o600)]
    assert [name for name in os.listdir(hf_snapshot.RUN_DIR) if not name.endswith(".lock")] == []


def test_an_empty_token_file(bench: Bench, tmp_path: Path) -> None:
    """An empty string among the values to hide would garble the whole result."""
    token = tmp_path / "empty-token"
    token.write_text("\n")
    token.chmod(0o600)
    failed = bench.run(token_file=str(token))
    assert failed["failed"] and failed["problem"]["id"] == "hub-token"
    assert f"token file {token} is empty" in failed["msg"]


def test_a_stall_is_ended_and_tried_without_xet(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STALL_WITH_XET", "1")
    result = bench.run(stall_timeout=2, retries=1)
    assert result["changed"] and not result.get("failed"), result.get("msg")
    assert [item["xet"] for item in bench.attempts()] == [True, False]
    assert any("stood still for 2 s" in action for action in result["actions"])


def test_a_stall_without_end_is_MOD_02(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STALL_WITH_XET", "1")
    result = bench.run(stall_timeout=1)
    assert result["problem"]["id"] == "MOD-02" and "within 1 s" in result["msg"]


def test_a_download_that_takes_too_long_is_not_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STALL_WITH_XET", "1")
    result = bench.run(timeout=2, retries=3)
    assert result["problem"]["id"] == "download-timeout" and "spark_download_timeout" in result["problem"]["remedy"]
    assert "within 2 s" in result["msg"] and len(bench.attempts()) == 1 and "tried again" not in json.dumps(result)


def test_no_attempt_begins_after_the_time_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended the last one in time is reported."""
    monkeypatch.setenv("STUB_STALL_WITH_XET", "1")
    result = bench.run(timeout=2, stall_timeout=1, retries=3)
    assert result["problem"]["id"] == "MOD-02" and len(bench.attempts()) == 1


def test_a_large_directory_hides_no_growth_of_another(tmp_path: Path) -> None:
    """The cache of Xet may hold more files than are looked at."""
    blobs, xet = tmp_path / "blobs", tmp_path / "xet"
    for folder in (blobs, xet / "a", xet / "b"):
        folder.mkdir(parents=True)
    for number in range(30):
        (xet / "ab"[number % 2] / str(number)).write_bytes(b"")
    for paths in ([blobs, xet], [xet, blobs]):
        before = hf_snapshot.tree_bytes(map(str, paths), limit=10)
        with (blobs / "new").open("ab") as handle:
            handle.write(b"x" * 100_000)
        assert hf_snapshot.tree_bytes(map(str, paths), limit=10) >= before + 90_000


def test_offline_trusts_the_disk_and_verifies_it(bench: Bench) -> None:
    none = bench.run(offline=True)
    assert none["problem"]["id"] == "model-incomplete"
    path = Path(bench.run()["snapshot"]["path"])
    bench.server.shutdown()
    for name in os.listdir(_snapshot.STAMP_DIR):
        os.unlink(os.path.join(_snapshot.STAMP_DIR, name))
    good = bench.run(offline=True)
    assert not good["changed"] and good["snapshot"]["verified"] and good["snapshot"]["files"] == 4
    blob = (path / "m-00002-of-00002.safetensors").resolve()
    blob.write_bytes(b"3" * 90000)
    assert bench.run(offline=True)["problem"]["id"] == "model-damaged"
    blob.unlink()
    missing = bench.run(offline=True)
    assert missing["problem"]["id"] == "model-incomplete" and "m-00002-of-00002.safetensors" in missing["msg"]


def test_plain_folders_are_adopted(bench: Bench, tmp_path: Path) -> None:
    """As `hf download --local-dir` leaves them: what is right is taken, what is wrong or lacking is downloaded."""
    folder = tmp_path / "local"
    (folder / "sub").mkdir(parents=True)
    (folder / "m-00001-of-00002.safetensors").write_bytes(FILES["m-00001-of-00002.safetensors"])
    (folder / "m-00002-of-00002.safetensors").write_bytes(b"3" * 90000)
    (folder / "sub" / "t.json").write_bytes(FILES["sub/t.json"])
    result = bench.run(adopt=[str(folder)])
    assert sorted(bench.attempts()[0]["patterns"]) == ["config.json", "m-00002-of-00002.safetensors"]
    assert result["missing"] == {"files": 2, "bytes": 90002} and result["snapshot"]["verified"]
    assert {path: (Path(result["snapshot"]["path"]) / path).read_bytes() for path in FILES} == FILES
    assert (folder / "m-00002-of-00002.safetensors").read_bytes() == b"3" * 90000


def local_dir(root: Path, mode: int = 0o644) -> Path:
    """The whole model as `hf download --local-dir` leaves it."""
    folder = root / "local"
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        (folder / path).chmod(mode)
    return folder


def facts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Owner, mode, size and time of every file."""
    infos = {path: (folder / path).stat() for path in FILES}
    return {path: (info.st_uid, info.st_gid, info.st_mode, info.st_size, info.st_mtime_ns) for path, info in infos.items()}


def test_what_is_linked_needs_no_space(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before the download asks for as much room as the run itself: for what no folder has."""
    folder = local_dir(tmp_path)
    monkeypatch.setattr(_transfer, "free_bytes", lambda path: 10)
    check = bench.run(check=True, adopt=[str(folder)])
    assert check["changed"] and check["missing"] == {"files": 0, "bytes": 0}, check.get("msg")
    assert check["actions"] == [f"would adopt 4 files from {folder}"] and not bench.cache.exists()
    (folder / "sub" / "t.json").unlink()
    (folder / "m-00002-of-00002.safetensors").write_bytes(b"2" * 89999)
    short = bench.run(check=True, adopt=[str(folder)])
    assert short["problem"]["id"] == "disk-model" and "(2 files)" in short["msg"]
    monkeypatch.setattr(_transfer, "free_bytes", lambda path: 110_000)
    check = bench.run(check=True, adopt=[str(folder)])
    assert check["missing"] == {"files": 2, "bytes": 90002} and "would download 2 files" in check["actions"][1]
    run = bench.run(adopt=[str(folder)])
    assert run["missing"] == check["missing"] and run["snapshot"]["verified"], run.get("msg")


@pytest.mark.parametrize(("mode", "linked"), [(0o644, True), (0o664, True), (0o755, True), (0o600, False), (0o640, False), (0o444, False)])
def test_adopted_files_stay_as_they_are(bench: Bench, tmp_path: Path, mode: int, linked: bool) -> None:
    """A link is the user's own file, and the cache gives owner and mode to what it has."""
    folder = local_dir(tmp_path, mode)
    before = facts(folder)
    result = bench.run(adopt=[str(folder)], python="")
    assert result["snapshot"]["verified"] and facts(folder) == before, result.get("msg")
    for path in FILES:
        blob = (Path(result["snapshot"]["path"]) / path).stat()
        assert (blob.st_ino == (folder / path).stat().st_ino) is linked and blob.st_mode & 0o644 == 0o644
    assert result["actions"][0] == f"adopted 4 files from {folder}" + ("" if linked else " (4 of them as copies)")
    assert not [name for name in os.listdir(bench.folder / "blobs") if "adopt" in name]


@pytest.mark.skipif(os.geteuid() != 0, reason="files of two users")
def test_adopted_files_stay_their_owners(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_dir(tmp_path)
    os.chown(folder / "config.json", 12345, 12345)
    monkeypatch.setenv("SUDO_UID", "54321")
    os.chown(folder / "sub" / "t.json", 54321, 12345)
    before = facts(folder)
    result = bench.run(adopt=[str(folder)], python="")
    assert result["snapshot"]["verified"] and facts(folder) == before, result.get("msg")
    assert result["actions"][0] == f"adopted 4 files from {folder} (3 of them as copies)"
    assert {(Path(result["snapshot"]["path"]) / path).stat().st_uid for path in FILES} == {54321}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("reason", ["mode", "disk"])
def test_copies_of_adopted_files_need_space(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool, reason: str
) -> None:
    folder = local_dir(tmp_path, 0o600 if reason == "mode" else 0o644)
    if reason == "disk":
        original = os.stat
        local = os.path.realpath(folder)

        def elsewhere(path: t.Any, *args: t.Any, **options: t.Any) -> os.stat_result:
            info = original(path, *args, **options)
            values = list(info)
            values[2] += str(path).startswith(local)
            return os.stat_result(values, {name: getattr(info, name) for name in dir(info) if name.startswith("st_") and name != "st_dev"})

        monkeypatch.setattr(os, "stat", elsewhere)
    monkeypatch.setattr(_transfer, "free_bytes", lambda path: TOTAL)
    failed = bench.run(check=check, adopt=[str(folder)], python="")
    assert failed["problem"]["id"] == "disk-model" and "0 files to download, 4 to copy from spark_model_adopt" in failed["msg"]
    monkeypatch.setattr(_transfer, "free_bytes", lambda path: 2 * TOTAL)
    good = bench.run(check=check, adopt=[str(folder)], python="")
    assert good["actions"][0].endswith("(4 of them as copies)") and good["missing"]["files"] == 0, good.get("msg")


def test_a_file_system_that_links_nothing(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the device says nothing about it: two mounts of one file system."""

    def refuse(*args: t.Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    result = bench.run(adopt=[str(local_dir(tmp_path))], python="")
    assert result["snapshot"]["verified"] and "4 of them as copies" in result["actions"][0], result.get("msg")


def test_offline_the_index_counts(bench: Bench) -> None:
    """A weight file that only the index knows is missing, unless it is left out on purpose."""
    (bench.model / "files" / "w.safetensors.index.json").write_text('{"weight_map": {"a": "lost.safetensors"}}')
    bench.run()
    for name in os.listdir(_snapshot.STAMP_DIR):
        os.unlink(os.path.join(_snapshot.STAMP_DIR, name))
    failed = bench.run(offline=True)
    assert failed["problem"]["id"] == "model-incomplete" and "lost.safetensors" in failed["msg"]
    assert bench.run(offline=True, ignore_patterns=["lost*"])["snapshot"]["verified"]


# --- a path as a model ---


def plain(root: Path) -> Path:
    folder = root / "plain"
    index = {"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}
    for path, data in {
        **FILES,
        "m.safetensors.index.json": json.dumps(index).encode(),
        ".cache/x": b"x",
        "../quant.gguf": b"g" * 500,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def test_a_directory_is_a_model(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain(tmp_path)
    over = {"repo_id": str(folder), "endpoint": "http://127.0.0.1:1", "python": ""}
    assert bench.run(check=True, **over)["actions"] == [f"would hash 5 files of {folder}"]
    first = bench.run(**over)
    assert not first["changed"] and first["snapshot"]["verified"] and first["snapshot"]["path"] == str(folder)
    assert sorted(row["path"] for row in first["manifest"]) == sorted([*FILES, "m.safetensors.index.json"])
    assert first["snapshot"]["revision"] == first["manifest_digest"][:40]
    state = _snapshot.local_state("", str(folder), "main")
    assert state and state["verified"] and state["revision"] == first["snapshot"]["revision"]

    hashed: list[str] = []
    original = _transfer.hash_file
    monkeypatch.setattr(_transfer, "hash_file", lambda path, *rest: hashed.append(path) or original(path, *rest))
    assert bench.run(**over)["manifest"] == first["manifest"] and bench.run(**over)["timings"]["verify"] == 0.0
    # a new file is part of the model, and another content another revision
    (folder / "extra.json").write_text("{}")
    assert not (_snapshot.local_state("", str(folder), "main") or {})["verified"]
    third = bench.run(**over)
    assert third["snapshot"]["files"] == 6 and third["snapshot"]["revision"] != first["snapshot"]["revision"]
    (folder / "m.safetensors.index.json").write_text('{"weight_map": {"a": "only-in-the-index.safetensors"}}')
    unlisted = bench.run(**over)
    assert unlisted["problem"]["id"] == "model-incomplete" and "only-in-the-index.safetensors" in unlisted["msg"]
    (folder / "m-00002-of-00002.safetensors").unlink()
    gone = bench.run(**over)
    assert gone["problem"]["id"] == "model-incomplete" and "m-00002-of-00002.safetensors" in gone["msg"]


def test_other_patterns_of_a_directory(bench: Bench, tmp_path: Path) -> None:
    """What is left out is no part of it, a second run has nothing to do, and other patterns make it unverified."""
    folder = plain(tmp_path)
    over = {"repo_id": str(folder), "endpoint": "http://127.0.0.1:1", "python": ""}
    some = bench.run(ignore_patterns=["sub/"], **over)
    assert some["snapshot"]["files"] == 4
    left_out = {"allow": [], "ignore": ["sub/"]}
    for patterns, verified in ((left_out, True), (None, True), ({"allow": [], "ignore": []}, False)):
        state = _snapshot.local_state("", str(folder), "main", patterns=patterns) or {}
        assert state["verified"] is verified and state["files"] == (4 if verified else 5), patterns
    assert bench.run(**over)["snapshot"]["files"] == 5
    assert not (_snapshot.local_state("", str(folder), "main", patterns=left_out) or {})["verified"]


def test_a_gguf_file_is_a_model(bench: Bench, tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"o")
    result = bench.run(repo_id=str(tmp_path / "quant.gguf"), endpoint="http://127.0.0.1:1", python="")
    assert [row["path"] for row in result["manifest"]] == ["quant.gguf"] and result["snapshot"]["path"] == str(tmp_path / "quant.gguf")
    none = bench.run(repo_id=str(tmp_path / "none.gguf"), endpoint="http://127.0.0.1:1", python="")
    assert none["problem"]["id"] == "model-incomplete" and str(tmp_path / "none.gguf") in none["msg"]


@pytest.mark.parametrize("check", [True, False])
def test_a_file_that_is_no_model(bench: Bench, tmp_path: Path, check: bool) -> None:
    path = plain(tmp_path) / "m-00001-of-00002.safetensors"
    result = bench.run(check=check, repo_id=str(path), endpoint="http://127.0.0.1:1", python="")
    assert result["problem"]["id"] == "model-incomplete"
    assert f"{path}: it is a file; only a directory or a GGUF file is a model" in result["msg"]


def test_content_that_changed_under_its_old_time(bench: Bench, tmp_path: Path) -> None:
    folder = plain(tmp_path)
    over = {"repo_id": str(folder), "endpoint": "http://127.0.0.1:1", "python": ""}
    bench.run(**over)
    victim = folder / "m-00001-of-00002.safetensors"
    info = victim.stat()
    with victim.open("r+b") as handle:
        handle.write(b"X")
    os.utime(victim, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not bench.run(**over).get("failed")
    full = bench.run(verify="full", **over)
    assert full["problem"]["id"] == "model-damaged" and victim.name in full["msg"]


def test_progress_of_a_download(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(_transfer.Progress, "__call__", lambda self, what, done=0, total=0: told.append((what, total)))
    monkeypatch.setenv("STUB_STALL_WITH_XET", "1")
    bench.run(progress="0a", stall_timeout=1, retries=1)
    assert ("downloads", TOTAL) in told and os.listdir(hf_snapshot.RUN_DIR) == [
        name for name in os.listdir(hf_snapshot.RUN_DIR) if name.endswith(".lock")
    ]


def test_leftovers_of_a_stopped_attempt_are_removed_and_those_of_others_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = bench.folder / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "theirs.01234567.incomplete").write_bytes(b"x")

    def leave(argv: list[str], **kwargs: t.Any) -> _transfer.Watched:
        (blobs / "ours.89abcdef.incomplete").write_bytes(b"x")
        return _transfer.Watched(-9, "", "", "stall", 1.0)

    monkeypatch.setattr(_transfer, "watch", leave)
    assert bench.run()["failed"]
    assert os.listdir(blobs) == ["theirs.01234567.incomplete"]


def test_parts_that_a_reboot_left_are_removed_and_those_that_are_written_kept(bench: Bench) -> None:
    """One of another job is open at this moment, one was closed just now (before it gets its name), one can be continued."""
    blobs = bench.folder / "blobs"
    blobs.mkdir(parents=True)
    old = time.time() - 2 * 86400
    for name in ("dead.01234567.incomplete", "open.01234567.incomplete", "plain.incomplete"):
        (blobs / name).write_bytes(b"x" * 5000)
        os.utime(blobs / name, (old, old))
    (blobs / "fresh.01234567.incomplete").write_bytes(b"x")
    with (blobs / "open.01234567.incomplete").open("rb"):
        check = bench.run(check=True)
        assert "would remove 1 parts" in " ".join(check["actions"]) and (blobs / "dead.01234567.incomplete").exists()
        result = bench.run()
    assert result["changed"] and result["snapshot"]["verified"] and "removed 1 parts" in " ".join(result["actions"])
    assert sorted(name for name in os.listdir(blobs) if name.endswith(".incomplete")) == [
        "fresh.01234567.incomplete", "open.01234567.incomplete", "plain.incomplete",
    ]  # fmt: skip
    assert not bench.run()["changed"]


def test_dead_parts_count_as_free_space_in_check_mode(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the look before the download refuses what the download itself would make room for."""
    blobs = bench.folder / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "dead.01234567.incomplete").write_bytes(b"x" * 300_000)
    os.utime(blobs / "dead.01234567.incomplete", (1, 1))
    monkeypatch.setattr(_transfer, "free_bytes", lambda path: 100_000)
    assert not bench.run(check=True).get("failed")
    (blobs / "dead.01234567.incomplete").unlink()
    assert bench.run(check=True)["problem"]["id"] == "disk-model"


# --- container ---


def test_container_definition() -> None:
    login = _snapshot.Login("spark", 1000, 1001, "/home/spark")
    place = {"name": "n", "key": "k", "job": "/run/x/job", "hub": "/data/hub", "xet": "/c/xet"}
    argv = hf_snapshot.container_argv({"endpoint": "https://hub", "image": "org/img:1"}, place, login, False)
    text = " ".join(argv)
    assert argv[:3] == ["docker", "run", "--detach"] and argv[-3:] == ["org/img:1", "/job/_download.py", "/job/job.json"]
    for part in (
        "--network host",
        "--user 1000:1001",
        "--entrypoint python3",
        "--volume /data/hub:/hf/hub",
        "--volume /run/x/job:/job",
        "--env HF_HUB_DISABLE_XET=1",
        "--env HF_ENDPOINT=https://hub",
        "--env HF_TOKEN_PATH=/job/token",
        "--env HF_TOKEN= ",
        "--restart no",
        "--label dgxspark.serving=1",
        "NVIDIA_VISIBLE_DEVICES=void",
    ):
        assert part in text
    assert "--privileged" not in text and "--gpus" not in text


def test_proxies_reach_the_download_and_their_password_nobody(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the job's file, which the login user alone can read: an argument is in every list of processes, the environment in docker inspect."""
    for name in hf_snapshot.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:pass%21word@proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert hf_snapshot.proxy_logins(os.environ) == {"user:pass%21word", "user:pass!word"}
    assert hf_snapshot.proxy_logins({"http_proxy": "u:p@proxy:1", "HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "a,b"}) == {"u:p"}

    # what the program says about the proxy gets into no result
    script = """case $1 in
run) cat RUN/hf-*/job.json > ROOT/job; stat -c %a $(dirname RUN/hf-*/job.json) RUN/hf-*/job.json > ROOT/modes;;
container) exit 1;;
logs) echo "ProxyError http://user:pass%21word@proxy:3128 user:pass!word";;
esac"""
    log = fake_docker(tmp_path, monkeypatch, script.replace("ROOT", str(tmp_path)).replace("RUN", hf_snapshot.RUN_DIR))
    result = bench.run(python="", image="x:1")
    assert result["problem"]["id"] == "hub-download" and "ProxyError" in result["msg"]
    assert "word" not in json.dumps(result).replace("words", "") and "word" not in log.read_text()
    job = json.loads((tmp_path / "job").read_text())
    assert job["environment"] == {"HTTPS_PROXY": "http://user:pass%21word@proxy:3128", "no_proxy": "127.0.0.1"}
    assert (tmp_path / "modes").read_text().split() == ["700", "600"]

    # and the program takes them
    (tmp_path / "job").write_text(json.dumps({**job, "environment": {"HTTP_PROXY": "http://other:1"}}))
    monkeypatch.setenv("HTTP_PROXY", "")  # so that it is as before afterwards
    monkeypatch.setattr(_download, "download", lambda job: {"ok": True, "version": os.environ["HTTP_PROXY"]})
    assert _download.main(["", str(tmp_path / "job")]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["version"] == "http://other:1"


@pytest.mark.parametrize(
    ("err", "ident"),
    [
        ("Unable to find image 'x:1' locally", "image-missing"),
        ('exec: "python3": executable file not found in $PATH', "hub-no-library"),
        ("something else", "download-container"),
    ],
)
def test_container_that_does_not_start(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, err: str, ident: str) -> None:
    log = fake_docker(tmp_path, monkeypatch, f"case $1 in run) echo '{err.replace(chr(39), '')}' >&2; exit 125;; container) exit 1;; esac")
    result = bench.run(python="", image="x:1")
    assert result["problem"]["id"] == ident
    assert "rm --force" in log.read_text()


def test_container_is_watched_and_removed(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker that runs the program on this machine: the job directory is the one that would be mounted."""
    script = f"""
case $1 in
container) exit 1;;
run) for a in "$@"; do
    case $a in */hf-*:/job) echo "${{a%:/job}}" > {tmp_path}/job;; *:/hf/hub) echo "${{a%:/hf/hub}}" > {tmp_path}/hubdir;; esac
  done;;
wait) job=$(cat {tmp_path}/job)
  export HF_HUB_CACHE=$(cat {tmp_path}/hubdir) HF_ENDPOINT={bench.endpoint} HF_HUB_DISABLE_XET=0
  {sys.executable} $job/_download.py $job/job.json;;
esac
"""
    log = fake_docker(tmp_path, monkeypatch, script)
    result = bench.run(python="", image="x:1")
    assert result["changed"] and not result.get("failed"), result.get("msg")
    assert result["huggingface_hub"] == "0.stub"
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("rm --force dgxspark-hf-") and sum(line.startswith("run ") for line in lines) == 1


@pytest.mark.parametrize(
    ("answer", "joined", "removed"),
    [
        ("true|key|{job}", True, False),
        ("true|other|{job}", False, True),
        ("false|key|{job}", False, True),
        ("true|key|/gone", False, True),
    ],
)
def test_a_container_of_an_interrupted_run(tmp_path: Path, answer: str, joined: bool, removed: bool) -> None:
    job = tmp_path / "hf-1"
    job.mkdir()
    calls: list[str] = []

    class Module:
        params = {"timeout": 1, "cache_dir": str(tmp_path), "repo_id": "org/m", "processes": 1, "progress": ""}

        def run_command(self, argv: list[str]) -> tuple[int, str, str]:
            calls.append(" ".join(argv[5:]))
            return 0, answer.format(job=job) + "\n", ""

    parent = hf_snapshot.HfSnapshot(t.cast(t.Any, Module()), {"actions": []}, run_dir=str(tmp_path))
    got = hf_snapshot.Downloader(parent, "c" * 40)._running("name", "key")
    assert got == (str(job) if joined else "")
    assert ("rm --force name" in calls) is removed
    assert job.exists() is (joined or "{job}" not in answer)


def fake_docker(root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A docker command on the PATH that records its arguments."""
    directory = root / "bin"
    directory.mkdir(exist_ok=True)
    (directory / "docker").write_text(f'#!/bin/sh\necho "$*" >> {root}/docker.log\n{script}\n')
    (directory / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return root / "docker.log"


def test_program_source_can_be_read() -> None:
    assert "def download(" in _download.__loader__.get_source(_download.__name__)  # type: ignore[name-defined,union-attr]
