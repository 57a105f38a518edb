# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module with a stand-in for docker; the relay and the head's server are real."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import platform
import sys
import tarfile
import threading
import time
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _sync_server
from ansible_collections.dgxspark.serving.plugins.modules import image_sync

TOKEN = "ab" * 16
DIGEST = "sha256:" + "d" * 64
ARCH = _image.docker_architecture(platform.machine())


def image(ident: str, layer: str = "1", arch: str = ARCH, tags: t.Sequence[str] = (), digests: t.Sequence[str] = ()) -> dict[str, t.Any]:
    config = {"Env": ["A=b"], "Cmd": ["x"]}
    return {"Id": f"sha256:{ident * 64}", "RepoTags": list(tags), "RepoDigests": list(digests), "Architecture": arch, "Os": "linux"} | {
        "Size": 5,
        "RootFS": {"Layers": [f"sha256:{layer * 64}"]},
        "Config": config,
    }


# A docker that keeps its images in a JSON file. `pull` makes the image of pull.json appear; for a loopback name it first
# fetches the manifest through the relay.
DOCKER = """#!{python} -IS
import json, os, sys
root, argv = "{root}", sys.argv[1:]
with open(root + "/docker.log", "a") as log: log.write(" ".join(argv) + "\\n")
path = root + "/images.json"
images = json.load(open(path))
def names(item): return [item["Id"], *item["RepoTags"], *item["RepoDigests"]]
def find(name): return [item for item in images if name in names(item)]
def save(): json.dump(images, open(path, "w"))
def fail(text): sys.stderr.write(text + "\\n"); sys.exit(1)
if os.path.exists(root + "/down"): fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
if argv[:2] == ["image", "inspect"]:
    found = [find(name)[0] for name in argv[2:] if find(name)]
    print(json.dumps(found))
    if len(found) < len(argv) - 2: fail("Error: No such image")
elif argv[:2] == ["image", "ls"]:
    print("\\n".join(item["Id"] for item in images))
elif argv[0] == "info":
    print(root + "|[]")
elif argv[:2] == ["manifest", "inspect"]:
    if os.path.exists(root + "/manifest.json"): print(open(root + "/manifest.json").read())
    else: fail("no such manifest")
elif argv[0] == "load":
    data = sys.stdin.buffer.read()
    if os.path.exists(root + "/load.err"): fail(open(root + "/load.err").read())
    if not data.startswith(b"tar"): fail("unexpected EOF")
    new = json.load(open(root + "/pull.json")); images.append(new)
    for name in new["RepoTags"]:
        for item in images[:-1]: item["RepoTags"] = [tag for tag in item["RepoTags"] if tag != name]
    save()
    print("\\n".join("Loaded image: " + name for name in new["RepoTags"]) or "Loaded image ID: " + new["Id"])
elif argv[0] == "tag":
    if os.path.exists(root + "/tag.err"): fail(open(root + "/tag.err").read())
    if not find(argv[1]): fail("No such image")
    for item in images: item["RepoTags"] = [tag for tag in item["RepoTags"] if tag != argv[2]]
    find(argv[1])[0]["RepoTags"].append(argv[2]); save()
elif argv[:2] == ["image", "rm"]:
    if os.path.exists(root + "/rm.err"): fail(open(root + "/rm.err").read())
    gone = []
    for item in images:
        named = set(item["RepoTags"] + item["RepoDigests"])
        item["RepoTags"] = [tag for tag in item["RepoTags"] if tag not in argv]
        item["RepoDigests"] = [tag for tag in item["RepoDigests"] if tag not in argv]
        if item["Id"] in argv or (named & set(argv) and not item["RepoTags"] + item["RepoDigests"]): gone.append(item["Id"])
    images = [item for item in images if item["Id"] not in gone]; save()
elif argv[0] == "pull":
    if os.path.exists(root + "/pull.once"):
        text = open(root + "/pull.once").read(); os.remove(root + "/pull.once"); fail(text)
    if os.path.exists(root + "/pull.err"): fail(open(root + "/pull.err").read())
    if os.path.exists(root + "/pull.kill"):
        print("b89a4dab3fc3: Downloading\\x1b[1B", flush=True); os.kill(os.getpid(), 9)
    if os.path.exists(root + "/pull.stall"):
        import time; time.sleep(600)
    while os.path.exists(root + "/pull.waits"): pass
    if argv[1].startswith("127.0.0.1:"):
        import urllib.error, urllib.request
        host, token, rest = argv[1].split("/")
        url = "http://%s/v2/%s/app/manifests/%s" % (host, token, rest.split("@")[1])
        try: urllib.request.urlopen(url, timeout=10).read()
        except urllib.error.HTTPError as exc:
            texts = {{403: "denied: requested access to the resource is denied", 404: "manifest unknown"}}
            fail("Error response from daemon: %s: %s" % (argv[1], texts[exc.code]))
        except OSError as exc: fail("Error response from daemon: Get http://%s/v2/: EOF" % host)
    new = json.load(open(root + "/pull.json"))
    new["RepoDigests" if "@" in argv[1] else "RepoTags"].append(argv[1])
    images[:] = [item for item in images if item["Id"] != new["Id"]] + [new]
    for item in images[:-1]: item["RepoTags"] = [tag for tag in item["RepoTags"] if tag != argv[1]]
    save()
"""


class Bench:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.capsys = root, capsys
        (root / "bin").mkdir()
        (root / "bin" / "docker").write_text(DOCKER.format(python=sys.executable, root=root))
        (root / "bin" / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(image_sync, "RUN_DIR", str(root / "run"))
        monkeypatch.setattr(image_sync, "STATE_DIR", str(root / "state"))
        self.images()
        self.pulls(image("9"))
        self.server: dict[str, t.Any] | None = None

    def images(self, *images: dict[str, t.Any]) -> None:
        (self.root / "images.json").write_text(json.dumps(images))

    def now(self) -> list[dict[str, t.Any]]:
        return json.loads((self.root / "images.json").read_text())

    def pulls(self, new: dict[str, t.Any]) -> None:
        (self.root / "pull.json").write_text(json.dumps(new))

    def log(self) -> list[str]:
        path = self.root / "docker.log"
        return path.read_text().splitlines() if path.exists() else []

    @contextlib.contextmanager
    def serving(self, **over: t.Any) -> t.Iterator[_sync_server.Server]:
        (self.root / "manifest").write_bytes(b"{}")
        blobs = {"d" * 64: {"path": str(self.root / "manifest"), "size": 2}}
        config = {
            "what": "image",
            "bind": "127.0.0.1",
            "port": 0,
            "token": TOKEN,
            "peers": ["127.0.0.1"],
            "blobs": blobs,
            "manifests": {DIGEST: "m"},
        }
        server = _sync_server.serve({**config, **over})
        self.server = {
            "address": "127.0.0.1",
            "port": server.server_port,
            "token": TOKEN,
            "manifest_digest": DIGEST,
            "url": "u",
            "bytes": 1,
            "source": "s",
            "archive": "archive" in over,
        }
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    def run(self, source: str, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {"reference": "org/a:1", "node": "spark-2", "timeout": 60, "_ansible_check_mode": check}
        if source:
            args["source"] = source
        if self.server and source == "peer":
            args["server"] = self.server
        with patch_module_args({**args, **over}), pytest.raises(SystemExit):
            image_sync.main()
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, capsys, monkeypatch)


def test_present(bench: Bench) -> None:
    assert bench.run("present")["problem"]["id"] == "image-missing"
    bench.images(image("1", tags=["org/a:1"]))
    result = bench.run("present")
    assert not result["changed"] and result["image"]["present"] and result["reference"] == "org/a:1" and result["method"] == "none"
    assert bench.run("present", fingerprint="0" * 64)["problem"]["id"] == "DOC-03"


def test_registry_pulls_what_is_missing(bench: Bench) -> None:
    check = bench.run("registry", check=True)
    assert check["changed"] and not any(line.startswith("pull") for line in bench.log())
    first = bench.run("registry")
    assert first["changed"] and first["method"] == "registry" and first["image"]["fingerprint"] == _image.image_fingerprint(image("9"))
    assert first["diff"]["before"]["id"] == "" and first["diff"]["after"]["id"] == image("9")["Id"]
    second = bench.run("registry")
    assert not second["changed"] and [line for line in bench.log() if line.startswith("pull")] == ["pull org/a:1"]
    again = bench.run("registry", pull="always")
    assert not again["changed"]
    bench.pulls(image("8", layer="2"))
    assert bench.run("registry", pull="always")["changed"]


def test_digest_reference_gets_a_local_name(bench: Bench) -> None:
    reference = "org/a@" + DIGEST
    first = bench.run("registry", reference=reference)
    assert first["changed"] and first["reference"] == "org/a:dgxspark-" + "d" * 16
    assert first["reference"] in bench.now()[0]["RepoTags"]
    assert not bench.run("registry", reference=reference)["changed"]


@pytest.mark.parametrize(
    ("dummy", "text", "ident"), json.loads((Path(__file__).resolve().parents[2] / "fixtures/image/pull_errors.json").read_text())
)
def test_registry_errors_are_told_apart(bench: Bench, dummy: str, text: str, ident: str) -> None:
    (bench.root / "pull.err").write_text(text)
    result = bench.run("registry")
    assert result["failed"] and result["problem"]["id"] == ident
    assert result["msg"].startswith("spark-2: image_sync: found org/a:1: ") and result["problem"]["remedy"]


def test_a_pull_that_stands_still_is_ended(bench: Bench) -> None:
    (bench.root / "pull.stall").touch()
    result = bench.run("registry", stall_timeout=1)
    assert result["problem"]["id"] == "image-stalled" and "no progress for 1 s" in result["msg"]


@pytest.mark.parametrize("source", ["registry", "present"])
def test_wrong_platform(bench: Bench, source: str) -> None:
    bench.images(image("1", arch="s390x", tags=["org/a:1"]))
    result = bench.run(source)
    assert result["problem"]["id"] == "DOC-11" and "linux/s390x" in result["msg"] and f"linux/{ARCH}" in result["msg"]


def test_daemon_down_and_bad_reference(bench: Bench) -> None:
    assert bench.run("present", reference="Bad Name")["problem"]["id"] == "image-unknown"
    (bench.root / "down").touch()
    assert bench.run("present")["problem"]["id"] == "docker-down"


WANTED = _image.image_fingerprint(image("9"))


def test_peer_pulls_through_the_relay(bench: Bench) -> None:
    with bench.serving():
        check = bench.run("peer", check=True, fingerprint=WANTED)
        assert (
            check["changed"]
            and check["diff"]["after"]["fingerprint"] == WANTED
            and not any(line.startswith("pull") for line in bench.log())
        )
        first = bench.run("peer", fingerprint=WANTED)
        assert first["changed"] and not first.get("failed"), first.get("msg")
    assert first["method"] == "relay" and first["bytes_transferred"] > 0 and first["image"]["fingerprint"] == WANTED
    assert TOKEN not in json.dumps(first)
    assert bench.now() == [image("9", tags=["org/a:1"])]  # no temporary name is left
    pull = next(line for line in bench.log() if line.startswith("pull"))
    assert pull.startswith("pull 127.0.0.1:") and pull.endswith(f"/{TOKEN}/app@{DIGEST}")
    bench.server = None
    second = bench.run("peer", fingerprint=WANTED)
    assert not second["changed"] and second["method"] == "none" and second["image"] == first["image"]


def test_peer_other_id_same_content_is_equal(bench: Bench) -> None:
    bench.images(image("7", tags=["org/a:1"]))
    assert not bench.run("peer", fingerprint=WANTED)["changed"]


def test_peer_only_tags_what_is_there_under_another_name(bench: Bench) -> None:
    bench.images(image("7", tags=["other:2"]), image("6", layer="6", tags=["org/a:1"]))
    assert bench.run("peer", check=True, fingerprint=WANTED)["changed"]
    result = bench.run("peer", fingerprint=WANTED)
    assert result["changed"] and result["method"] == "tag" and result["image"]["fingerprint"] == WANTED
    assert not bench.run("peer", fingerprint=WANTED)["changed"]


def test_a_name_that_cannot_be_set(bench: Bench) -> None:
    bench.images(image("1", tags=["other:1"]))
    (bench.root / "tag.err").write_text("Error response from daemon: no space left on device")
    failed = bench.run("peer", fingerprint=_image.image_fingerprint(image("1")))
    assert failed["problem"]["id"] == "image-tag" and "docker tag org/a:1: " in failed["msg"] and "no space left" in failed["msg"]
    assert tags(bench) == {"other:1"}


def test_peer_moves_a_tag_that_names_something_else(bench: Bench) -> None:
    bench.images(image("6", layer="6", tags=["org/a:1", "keep:1"]))
    with bench.serving():
        result = bench.run("peer", fingerprint=WANTED)
    assert result["changed"] and result["image"]["fingerprint"] == WANTED
    kept = "org/a:dgxspark-" + _image.image_fingerprint(image("6", layer="6"))[:16]
    assert {tuple(item["RepoTags"]) for item in bench.now()} == {("keep:1", kept), ("org/a:1",)}


def test_peer_removes_names_of_broken_runs(bench: Bench) -> None:
    old = f"127.0.0.1:40001/{'cd' * 16}/app@sha256:{'e' * 64}"
    bench.images(image("5", layer="5", tags=["127.0.0.1:5000/mine:1"], digests=[old]))
    with bench.serving():
        bench.run("peer", fingerprint=WANTED)
    names = [name for item in bench.now() for name in item["RepoTags"] + item["RepoDigests"]]
    assert old not in names and "127.0.0.1:5000/mine:1" in names


def test_peer_with_other_content_is_refused_and_removed(bench: Bench) -> None:
    with bench.serving():
        result = bench.run("peer", fingerprint="0" * 64)
    assert result["problem"]["id"] == "DOC-03" and bench.now() == []


@pytest.mark.parametrize(
    ("serve", "over", "ident"),
    [
        ({"token": "cd" * 16}, {}, "sync-denied"),
        ({"manifests": {}}, {}, "sync-source"),
        ({}, {"server": {"address": "127.0.0.1", "port": 1, "token": TOKEN, "manifest_digest": DIGEST}}, "sync-stalled"),
        ({}, {"server": None}, "sync-no-server"),
        ({}, {"fingerprint": ""}, "sync-input"),
        ({}, {"size": 10**18}, "disk-image"),
    ],
)
def test_peer_failures_are_told_apart(bench: Bench, serve: dict[str, t.Any], over: dict[str, t.Any], ident: str) -> None:
    with bench.serving(**serve):
        result = bench.run("peer", **{"fingerprint": WANTED, **over})
    assert result["failed"] and result["problem"]["id"] == ident, result["msg"]
    assert TOKEN not in json.dumps(result) and result["problem"]["node"] == "spark-2"
    assert ident != "sync-stalled" or ("no connection to 127.0.0.1:1: " in result["msg"] and "firewall" in result["msg"])
    assert bench.now() == [] and not result["changed"]


@pytest.mark.parametrize(
    ("text", "ident", "pulls"),
    [
        ("failed to read expected number of bytes: unexpected EOF", "", 2),
        ("filesystem layer verification failed for digest sha256:1", "", 2),
        ('failed commit on ref "layer-sha256:1": unexpected commit digest sha256:2', "", 2),
        ("toomanyrequests: slow down", "registry-429", 1),
    ],
)
def test_a_pull_that_broke_in_the_middle_goes_on(bench: Bench, text: str, ident: str, pulls: int) -> None:
    (bench.root / "pull.once").write_text(text)
    result = bench.run("registry")
    assert result.get("problem", {}).get("id", "") == ident
    assert sum(line.startswith("pull ") for line in bench.log()) == pulls


def test_a_pull_that_is_killed(bench: Bench) -> None:
    (bench.root / "pull.kill").touch()
    result = bench.run("registry")
    assert result["problem"]["id"] == "image-pull" and "killed by signal 9 (b89a4dab3fc3: Downloading)" in result["msg"]
    assert "reused" in result["problem"]["remedy"]


def test_what_stays_damaged_is_told(bench: Bench) -> None:
    (bench.root / "pull.err").write_text("filesystem layer verification failed for digest sha256:1")
    assert bench.run("registry")["problem"]["id"] == "image-damaged"
    with bench.serving() as server:
        result = bench.run("peer", fingerprint=WANTED)
    assert result["problem"]["id"] == "image-damaged" and "damaged on the head's disk" in result["problem"]["remedy"]
    assert bench.now() == [] and server.stats()["bytes_sent"] == 0


def manifest_of(arch: str, size: int) -> str:
    return json.dumps({"manifests": [{"digest": DIGEST, "platform": {"architecture": arch, "os": "linux"}}], "layers": None})


def test_the_registry_is_asked_before_the_pull(bench: Bench) -> None:
    """Platform and space; a registry that does not tell is no failure."""
    layers = {"layers": [{"digest": DIGEST, "size": 10**18}]}
    for document, ident in ((manifest_of("s390x", 1), "DOC-11"), (json.dumps(layers), "disk-image")):
        (bench.root / "manifest.json").write_text(document)
        for check in (True, False):
            result = bench.run("registry", check=check)
            assert result["problem"]["id"] == ident, result["msg"]
            assert not result["changed"]
    assert "at least 3500" in result["msg"]  # packed and 2.5 times unpacked, in TB
    (bench.root / "manifest.json").write_text(json.dumps({"layers": [{"digest": DIGEST, "size": 100}]}))
    asked = bench.run("registry", check=True)
    assert asked["missing_bytes"] == 100
    known = bench.root / "image" / "overlay2" / "distribution" / "diffid-by-digest" / "sha256"
    known.mkdir(parents=True)
    (known / DIGEST[7:]).write_text(image("6", layer="6")["RootFS"]["Layers"][0])
    bench.images(image("6", layer="6", tags=["base:1"]))
    assert bench.run("registry", check=True)["missing_bytes"] == 0  # the layer is here
    (known / DIGEST[7:]).unlink()
    assert asked["incoming"] == {"layers": [{"diff_id": DIGEST, "bytes": 100}], "unpacked": 250}
    assert not any(line.startswith("pull ") for line in bench.log())


# --- from a file ---


def archive(bench: Bench, *names: str, arch: str = ARCH, layer: str = "1", count: int = 1) -> str:
    config = {
        "architecture": arch,
        "os": "linux",
        "config": {"Env": ["A=b"], "Cmd": ["x"]},
        "rootfs": {"diff_ids": [f"sha256:{layer * 64}"]},
    }
    listing = [{"Config": "c.json", "RepoTags": list(names), "Layers": ["l"]}] * count
    path = bench.root / "image.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in (("tar", b"x"), ("c.json", json.dumps(config).encode()), ("manifest.json", json.dumps(listing).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def loads(bench: Bench) -> int:
    return sum(line == "load" for line in bench.log())


def test_file_is_loaded_once(bench: Bench) -> None:
    path = archive(bench, "other:name")
    assert bench.run("file", path=path, check=True)["changed"] and loads(bench) == 0
    first = bench.run("file", path=path)
    assert (first["changed"], first["method"], first["image"]["fingerprint"]) == (True, "file", WANTED), first.get("msg")
    assert bench.now() == [image("9", tags=["org/a:1"])]
    second = bench.run("file", path=path)
    assert (second["changed"], second["method"], loads(bench)) == (False, "none", 1)
    bench.pulls(image("8", layer="8"))
    assert bench.run("file", path=archive(bench, layer="8"))["changed"]
    assert loads(bench) == 2


def test_file_that_is_here_under_another_name_is_only_tagged(bench: Bench) -> None:
    bench.images(image("7", tags=["other:2"]))
    result = bench.run("file", path=archive(bench))
    assert (result["method"], loads(bench)) == ("tag", 0)
    assert bench.now()[0]["RepoTags"] == ["other:2", "org/a:1"]


@pytest.mark.parametrize("local", ["org/a:1", "taken:1"])
def test_the_names_in_a_file_change_nothing_here(bench: Bench, local: str) -> None:
    """Docker would give them to the new image; one that stood for something else gets that back, a new one goes again."""
    bench.images(image("6", layer="6", tags=["taken:1"]))
    bench.pulls(image("9", tags=["taken:1", "new:1"]))
    result = bench.run("file", path=archive(bench, "taken:1", "new:1"), reference=local)
    assert result["method"] == "file", result.get("msg")
    names = {item["Id"][7]: item["RepoTags"] for item in bench.now()}
    kept = "taken:dgxspark-" + _image.image_fingerprint(image("6", layer="6"))[:16]
    assert names == ({"6": ["taken:1"], "9": ["org/a:1"]} if local == "org/a:1" else {"6": [kept], "9": ["taken:1"]})


@pytest.mark.parametrize(
    ("over", "ident", "words"),
    [
        ({"arch": "s390x"}, "DOC-11", "linux/s390x"),
        ({"count": 2}, "image-file", "holds 2 images"),
        ({"path": "/nowhere/a.tar"}, "image-file", "No such file"),
        ({"layer": "5"}, "DOC-03", "docker load brought"),
        ({"error": "write /x: no space left on device"}, "disk-image", "no space left"),
        ({"error": "invalid tar header"}, "image-load", "invalid tar header"),
    ],
)
def test_file_failures(bench: Bench, over: dict[str, t.Any], ident: str, words: str) -> None:
    path = over.pop("path", "")
    if "error" in over:
        (bench.root / "load.err").write_text(over.pop("error"))
    result = bench.run("file", path=path or archive(bench, **over))
    assert result["problem"]["id"] == ident and words in result["msg"], result["msg"]
    assert bench.now() == []
    if ident == "DOC-11":
        assert loads(bench) == 0


# --- before the copy, and the other way ---


def test_peer_of_another_platform_is_refused_before_the_copy(bench: Bench) -> None:
    with bench.serving() as server:
        result = bench.run("peer", fingerprint=WANTED, architecture="s390x")
    assert result["problem"]["id"] == "DOC-11"
    assert server.stats()["bytes_sent"] == 0 and not any(line.startswith("pull ") for line in bench.log())


def test_peer_needs_space_only_for_what_is_missing(bench: Bench) -> None:
    """Layers that any image here has do not count; the numbers are in the message."""
    bench.images(image("6", layer="6", tags=["base:1"]))
    big, here = {"diff_id": f"sha256:{'1' * 64}", "bytes": 10**18}, {"diff_id": f"sha256:{'6' * 64}", "bytes": 10**18}
    result = bench.run("peer", check=True, fingerprint=WANTED, layers=[big, here], size=4 * 10**18)
    assert result["problem"]["id"] == "disk-image" and "1000000.0 TB still to come" not in result["msg"]
    assert f"at least {3 * 10**6}" in result["msg"]  # one of two layers, packed and unpacked: 1 + 2 of 10^18
    fits = bench.run("peer", check=True, fingerprint=WANTED, layers=[here, {**big, "bytes": 1000}], size=10**18)
    assert not fits.get("failed") and fits["missing_bytes"] == 1000


def test_progress_is_written_and_gone_at_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    (bench.root / "pull.waits").touch()  # until it was told

    def tell(_progress: t.Any, what: str, done: int = 0, total: int = 0) -> None:
        told.append((what, done, total))
        (bench.root / "pull.waits").unlink(missing_ok=True)

    monkeypatch.setattr(image_sync._transfer.Progress, "__call__", tell)
    layers = [{"diff_id": f"sha256:{'1' * 64}", "bytes": 1000}]
    with bench.serving():
        bench.server = {**(bench.server or {}), "layers": layers}
        bench.run("peer", fingerprint=WANTED, size=1000, progress="x")
    assert told and {item[0] for item in told} == {"pulls org/a:1"} and {item[2] for item in told} == {1000}
    assert [path.name for path in (bench.root / "run").iterdir()] == ["image.lock"]


def test_peer_takes_what_another_run_brought_while_it_waited(bench: Bench) -> None:
    (bench.root / "run").mkdir()
    lock = open(bench.root / "run" / "image.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)

    def other() -> None:
        while not bench.log():
            time.sleep(0.01)
        time.sleep(1.0)  # whoever does not wait has begun to pull
        bench.images(image("9", tags=["org/a:1"]))
        lock.close()

    thread = threading.Thread(target=other)
    with bench.serving():
        thread.start()
        result = bench.run("peer", fingerprint=WANTED)
        thread.join()
    assert not result.get("failed") and result["image"]["fingerprint"] == WANTED
    assert (result["changed"], result["method"]) == (False, "none")
    assert not any(line.startswith("pull ") for line in bench.log())


def printing(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); sys.exit({code})"]


def test_peer_gets_the_whole_image_when_asked(bench: Bench) -> None:
    with bench.serving(archive=printing("tar" * 1000)):
        result = bench.run("peer", fingerprint=WANTED, transport="archive")
    assert (result["method"], result["bytes_transferred"], result["changed"]) == ("archive", 3000, True), result.get("msg")
    assert bench.now() == [image("9", tags=["org/a:1"])]
    assert TOKEN not in json.dumps(result)


@pytest.mark.parametrize("digest", ["", DIGEST])
def test_peer_gets_the_whole_image_when_layers_are_impossible(bench: Bench, digest: str) -> None:
    """The head can offer no layers, or Docker here does not reach its own loopback. The result says so."""
    (bench.root / "pull.err").write_text(
        "Error response from daemon: Get https://127.0.0.1:1/v2/: http: server gave HTTP response to HTTPS client"
    )
    with bench.serving(archive=printing("tar")):
        bench.server = {**(bench.server or {}), "manifest_digest": digest}
        result = bench.run("peer", fingerprint=WANTED)
        assert result["method"] == "archive", result.get("msg")
        assert not digest or any("cannot reach its own loopback" in text for text in result["actions"])
        bench.images()
        assert bench.run("peer", fingerprint=WANTED, transport="relay")["problem"]["id"] in ("sync-stalled", "sync-source")


def test_peer_that_was_refused_is_not_sent_the_whole_image(bench: Bench) -> None:
    with bench.serving(archive=printing("tar"), manifests={}):
        assert bench.run("peer", fingerprint=WANTED)["problem"]["id"] == "sync-source"
    assert loads(bench) == 0


@pytest.mark.parametrize(
    ("command", "loaded", "ident"),
    [
        (printing("tar", 1), "", "sync-source"),
        (printing("tar"), "no space left on device", "disk-image"),
        (printing("garbage"), "", "image-load"),
    ],
)
def test_peer_archive_failures(bench: Bench, command: list[str], loaded: str, ident: str) -> None:
    """A stream that docker save did not finish is never taken for a whole one."""
    if loaded:
        (bench.root / "load.err").write_text(loaded)
    with bench.serving(archive=command):
        result = bench.run("peer", fingerprint=WANTED, transport="archive")
    assert result["problem"]["id"] == ident and bench.now() == [], result["msg"]
    assert TOKEN not in json.dumps(result)


def test_peer_archive_with_other_content_is_removed(bench: Bench) -> None:
    bench.pulls(image("8", layer="8"))
    with bench.serving(archive=printing("tar")):
        assert bench.run("peer", fingerprint=WANTED, transport="archive")["problem"]["id"] == "DOC-03"
    assert bench.now() == []


# --- versions ---


def tags(bench: Bench) -> set[str]:
    return {tag for item in bench.now() for tag in item["RepoTags"]}


def test_one_replaced_version_is_kept(bench: Bench) -> None:
    """A, B and C under one moved tag: B stays under a name of ours, A goes; images and names of others stay."""
    bench.images(image("f", layer="f", tags=["theirs:1"]))
    kept = {}
    for number in "123":
        bench.pulls(image(number, layer=number))
        result = bench.run("registry", pull="always")
        kept[number] = "org/a:dgxspark-" + result["image"]["fingerprint"][:16]
    assert tags(bench) == {"theirs:1", "org/a:1", kept["2"]}
    assert result["pruned"] == [kept["1"]] and any(text.startswith("removed ") for text in result["actions"])
    assert not bench.run("registry")["changed"]


def test_an_image_that_was_there_before_us_is_never_removed(bench: Bench) -> None:
    bench.images(image("1", layer="1", tags=["org/a:1"]))
    for number in "2345":
        bench.pulls(image(number, layer=number))
        assert not bench.run("registry", pull="always", keep=0).get("failed")
    assert {item["Id"][7] for item in bench.now()} == {"1", "5"}


def test_a_version_in_use_is_left_for_the_next_run(bench: Bench) -> None:
    for number in "12":
        bench.pulls(image(number, layer=number))
        bench.run("registry", pull="always")
    (bench.root / "rm.err").write_text("conflict: unable to remove: container abc is using its referenced image")
    bench.pulls(image("3", layer="3"))
    result = bench.run("registry", pull="always")
    assert not result.get("failed") and result["pruned"] == [] and any("is using" in text for text in result["actions"])
    (bench.root / "rm.err").unlink()
    assert bench.run("registry")["pruned"]


def test_absent_removes_the_image_and_what_was_kept_of_it(bench: Bench) -> None:
    """As teardown.yml asks: the present version, the one before it, and one under another reference that we brought; nothing of others."""
    bench.images(image("e", layer="e", tags=["theirs:1", "org/a:theirs"]))
    bench.pulls(image("4", layer="4"))
    bench.run("registry", reference="org/b:1")
    for number in "12":
        bench.pulls(image(number, layer=number))
        kept = "org/a:dgxspark-" + bench.run("registry", pull="always", keep=9)["image"]["fingerprint"][:16]
    before = tags(bench)
    assert {"org/a:1", "org/b:1"} < before and kept not in before and len(before) == 5
    told = bench.run("", check=True, state="absent")
    assert told["changed"] and tags(bench) == before and all(text.startswith("would ") for text in told["actions"])
    result = bench.run("", state="absent")
    assert result["changed"] and set(result["pruned"]) == set(told["pruned"]) == before - {"theirs:1", "org/a:theirs"}
    assert result["diff"]["before"]["id"] == image("2")["Id"] and result["diff"]["after"]["id"] == "" and not result["image"]["present"]
    assert [item["Id"] for item in bench.now()] == [image("e")["Id"]] and tags(bench) == {"theirs:1", "org/a:theirs"}
    assert not (bench.root / "state" / "images.json").exists()
    again = bench.run("", state="absent")
    assert not again["changed"] and again["actions"] == []


def recorded(bench: Bench) -> list[tuple[str, str]]:
    path = bench.root / "state" / "images.json"
    return [(item["service"], item["reference"]) for item in json.loads(path.read_text())["versions"]] if path.exists() else []


def two_services(bench: Bench, second: str) -> None:
    """The one without a name has org/a:1, small has ``second``."""
    for name, service, number in (("org/a:1", "", "1"), (second, "small", "1" if second == "org/a:1" else "2")):
        bench.pulls(image(number, layer=number))
        assert not bench.run("registry", reference=name, service=service).get("failed")


def test_an_upgrade_of_one_service_leaves_the_image_of_another(bench: Bench) -> None:
    """The other one is stopped, so that no container holds its image."""
    two_services(bench, "org/b:1")
    bench.pulls(image("3", layer="3"))
    result = bench.run("registry", reference="org/b:1", service="small", pull="always", keep=0)
    assert [name.rpartition("-")[0] for name in result["pruned"]] == ["org/b:dgxspark"] and tags(bench) == {"org/a:1", "org/b:1"}
    assert recorded(bench) == [("", "org/a:1"), ("small", "org/b:1")]


def test_absent_of_one_service_leaves_another_and_its_place_in_the_list(bench: Bench) -> None:
    two_services(bench, "org/b:1")
    told = bench.run("", check=True, state="absent", reference="org/b:1", service="small")
    result = bench.run("", state="absent", reference="org/b:1", service="small")
    assert result["pruned"] == told["pruned"] == ["org/b:1"] and result["left"] == [] and result["others"] == told["others"] == [""]
    assert tags(bench) == {"org/a:1"} and recorded(bench) == [("", "org/a:1")]
    assert not bench.run("", state="absent", reference="org/b:1", service="small")["changed"]
    assert bench.run("", state="absent")["others"] == [] and bench.now() == [] and recorded(bench) == []


def test_absent_of_an_image_that_two_services_have(bench: Bench) -> None:
    two_services(bench, "org/a:1")
    result = bench.run("", state="absent", service="small")
    assert not result.get("failed") and result["pruned"] == [] and result["left"] == ["org/a:1"] and result["image"]["present"]
    assert any("another service has it" in text for text in result["actions"]) and recorded(bench) == [("", "org/a:1")]
    assert bench.run("", state="absent")["pruned"] == ["org/a:1"] and bench.now() == []


def test_absent_of_an_image_that_a_container_of_another_service_uses(bench: Bench) -> None:
    """A list of before has no services: the container is what tells."""
    bench.images(image("1", tags=["org/a:1"]))
    used = [{"service": "", "image": "org/a:1", "image_id": image("1")["Id"]}]
    result = bench.run("", state="absent", service="small", beside=used)
    assert not result.get("failed") and not result["changed"] and result["left"] == ["org/a:1"] and tags(bench) == {"org/a:1"}


def test_forgotten_takes_one_service_out_of_the_list(bench: Bench) -> None:
    two_services(bench, "org/b:1")
    asked = len(bench.log())
    assert bench.run("", check=True, state="forgotten", service="small")["changed"] and len(recorded(bench)) == 2
    result = bench.run("", state="forgotten", service="small")
    assert result["changed"] and result["others"] == [""] and recorded(bench) == [("", "org/a:1")]
    assert not bench.run("", state="forgotten", service="small")["changed"]
    assert bench.run("", state="forgotten")["changed"] and not (bench.root / "state" / "images.json").exists()
    assert not bench.run("", state="forgotten")["changed"] and len(bench.log()) == asked and len(bench.now()) == 2
    (bench.root / "state" / "images.json").write_text("{")
    assert bench.run("", state="forgotten")["changed"] and not (bench.root / "state" / "images.json").exists()


def test_absent_without_the_list_of_versions(bench: Bench) -> None:
    """An earlier teardown removed it: the name of a version tells that it is ours, when it fits the content. A digest has a local name, too."""
    fingerprint = _image.image_fingerprint(image("1"))
    digest = f"org/a@{DIGEST}"
    bench.images(
        image("1", tags=[f"org/a:dgxspark-{fingerprint[:16]}"]),
        image("2", layer="2", tags=["org/a:dgxspark-0123456789abcdef"]),
        image("3", layer="3", tags=["org/a:dgxspark-dddddddddddddddd"], digests=[digest]),
    )
    assert bench.run("", state="absent", reference=digest)["changed"]
    assert tags(bench) == {"org/a:dgxspark-0123456789abcdef"} and len(bench.now()) == 1


def test_absent_and_a_container_uses_it(bench: Bench) -> None:
    bench.images(image("1", tags=["org/a:1"]))
    (bench.root / "rm.err").write_text("conflict: unable to remove: container abc is using its referenced image")
    result = bench.run("", state="absent")
    assert result["problem"]["id"] == "image-remove" and "container abc is using" in result["msg"] and "spark-2: " in result["msg"]
    assert not result["changed"] and tags(bench) == {"org/a:1"}


def test_peer_in_check_mode_before_the_head_has_the_image(bench: Bench) -> None:
    result = bench.run("peer", check=True)
    assert result["changed"] and not result.get("failed")


def test_temporary_names() -> None:
    names = [
        f"127.0.0.1:4/{'a' * 32}/app@{DIGEST}",
        f"127.0.0.1:4/{'a' * 32}/app:x",
        "127.0.0.1:5000/app:1",
        f"10.0.0.1:4/{'a' * 32}/app:x",
    ]
    assert image_sync.temporary_names([{"RepoTags": names[1:], "RepoDigests": names[:1]}]) == sorted(names[:2])
