# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module with a stand-in for docker; the relay and the head's server are real."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
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
    print(root)
elif argv[0] == "tag":
    if not find(argv[1]): fail("No such image")
    for item in images: item["RepoTags"] = [tag for tag in item["RepoTags"] if tag != argv[2]]
    find(argv[1])[0]["RepoTags"].append(argv[2]); save()
elif argv[:2] == ["image", "rm"]:
    for item in images:
        item["RepoTags"] = [tag for tag in item["RepoTags"] if tag not in argv]
        item["RepoDigests"] = [tag for tag in item["RepoDigests"] if tag not in argv]
    images = [item for item in images if item["RepoTags"] or item["RepoDigests"]]; save()
elif argv[0] == "pull":
    if os.path.exists(root + "/pull.err"): fail(open(root + "/pull.err").read())
    if os.path.exists(root + "/pull.stall"):
        import time; time.sleep(600)
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
        }
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    def run(self, source: str, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {"reference": "org/a:1", "source": source, "node": "spark-2", "timeout": 60, "_ansible_check_mode": check}
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


def test_peer_moves_a_tag_that_names_something_else(bench: Bench) -> None:
    bench.images(image("6", layer="6", tags=["org/a:1", "keep:1"]))
    with bench.serving():
        result = bench.run("peer", fingerprint=WANTED)
    assert result["changed"] and result["image"]["fingerprint"] == WANTED
    assert {tuple(item["RepoTags"]) for item in bench.now()} == {("keep:1",), ("org/a:1",)}


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
    assert bench.now() == [] and not result["changed"]


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
