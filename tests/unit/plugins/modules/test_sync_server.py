# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module with stand-ins for systemd-run and systemctl that run the real server program as a process."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import sys
import tarfile
import time
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _snapshot
from ansible_collections.dgxspark.serving.plugins.modules import sync_server

COMMIT = "c" * 40
DATA = b"weights" * 1000

SYSTEMD_RUN = """#!/bin/sh
echo "$*" >> {root}/systemd.log
[ -e {root}/broken ] && {{ echo 'Failed to start transient service unit' >&2; exit 1; }}
for a in "$@"; do case $a in --unit=*) unit=${{a#--unit=}};; esac; done
while [ "$1" != {python} ]; do shift; done
setsid "$@" >/dev/null 2>&1 & echo $! > {root}/$unit.pid
"""
SYSTEMCTL = """#!/bin/sh
for a in "$@"; do unit=${{a%.service}}; done
case $1 in
is-active) kill -0 "$(cat {root}/$unit.pid)" 2>/dev/null;;
stop) pid=$(cat {root}/$unit.pid) 2>/dev/null; kill "$pid" 2>/dev/null; i=0
  while kill -0 "$pid" 2>/dev/null && [ $i -lt 100 ]; do sleep .05; i=$((i+1)); done; rm -f {root}/$unit.pid;;
esac
"""


class Bench:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.capsys = root, capsys
        self.cache = root / "cache"
        self.bin = root / "bin"
        self.bin.mkdir()
        self.tool("systemd-run", SYSTEMD_RUN.format(root=root, python=sys.executable))
        self.tool("systemctl", SYSTEMCTL.format(root=root))
        self.tool("journalctl", "#!/bin/sh\necho 'last words'\n")
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def fill(self) -> None:
        folder = self.cache / "hub" / "models--org--m"
        top = folder / "snapshots" / COMMIT
        top.mkdir(parents=True)
        (folder / "blobs").mkdir()
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
        blob = hashlib.sha256(DATA).hexdigest()
        (folder / "blobs" / blob).write_bytes(DATA)
        (top / "m.safetensors").symlink_to(f"../../blobs/{blob}")
        self.blob = blob
        _snapshot.write_stamp(str(folder), COMMIT, [{"path": "m.safetensors", "size": len(DATA), "blob": blob, "algo": "sha256"}])

    def run(self, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {
            "name": "t",
            "what": "model",
            "repo_id": "org/m",
            "cache_dir": str(self.cache),
            "address": "127.0.0.1",
            "node": "spark-1",
        }
        args.update({"peers": ["127.0.0.1"], "lifetime": 60, "_ansible_check_mode": check, **over})
        with patch_module_args(args), pytest.raises(SystemExit):
            sync_server.main()
        return json.loads(self.capsys.readouterr().out)

    def get(self, server: dict[str, t.Any], path: str) -> tuple[int, bytes]:
        conn = http.client.HTTPConnection(server["address"], server["port"], timeout=10)
        conn.request("GET", path)
        answer = conn.getresponse()
        status, body = answer.status, answer.read()
        conn.close()
        return status, body

    def kill(self) -> None:
        for path in self.root.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> t.Iterator[Bench]:
    monkeypatch.setattr(sync_server, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(sync_server, "IMAGE_DIR", str(tmp_path / "state" / "images"))
    monkeypatch.setattr(_snapshot, "STAMP_DIR", str(tmp_path / "state" / "snapshots"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    made = Bench(tmp_path, capsys, monkeypatch)
    yield made
    made.kill()


def test_start_keep_stop(bench: Bench) -> None:
    bench.fill()
    first = bench.run()
    assert first["changed"] and not first.get("failed"), first.get("msg")
    server = first["server"]
    assert server["url"] == f"http://127.0.0.1:{server['port']}" and len(server["token"]) == 32
    assert (server["bytes"], server["source"], first["unit"]) == (len(DATA), "cache", "dgxspark-sync-t")
    assert bench.get(server, f"/{server['token']}/blobs/{bench.blob}") == (200, DATA)
    run = bench.root / "run"
    assert (run / "sync-t").stat().st_mode & 0o777 == 0o700
    assert (run / "sync-t" / "config.json").stat().st_mode & 0o777 == 0o600
    assert server["token"] not in (bench.root / "systemd.log").read_text()

    assert bench.run(check=True)["server"]["port"] == server["port"]
    again = bench.run()
    assert not again["changed"] and again["server"] == server
    other = bench.run(peers=["127.0.0.1", "127.0.0.2"])
    assert other["changed"] and other["server"]["token"] != server["token"]

    assert bench.run(state="absent", check=True)["changed"]
    gone = bench.run(state="absent")
    assert gone["changed"] and gone["bytes_sent"] == 0 and not (run / "sync-t").exists()
    assert not bench.run(state="absent")["changed"]
    with pytest.raises(OSError, match="refused"):
        bench.get(other["server"], "/")


def test_a_unit_that_does_not_stop(bench: Bench) -> None:
    bench.fill()
    bench.run()
    stuck = '#!/bin/sh\n[ "$1" = stop ] && { echo "Job for dgxspark-sync-t.service timed out" >&2; exit 1; }\n[ "$1" = is-active ]\n'
    (bench.bin / "systemctl").write_text(stuck)
    failed = bench.run(state="absent")
    assert failed["problem"]["id"] == "sync-stop" and "timed out" in failed["msg"] and "systemctl kill dgxspark-sync-t" in failed["msg"]
    assert failed["msg"].startswith("spark-1: ") and (bench.root / "run" / "sync-t").exists()  # the next run tries again


def test_absent_reports_what_was_sent(bench: Bench) -> None:
    bench.fill()
    server = bench.run()["server"]
    bench.get(server, f"/{server['token']}/blobs/{bench.blob}")
    assert bench.run(state="absent")["bytes_sent"] == len(DATA)


def test_two_runs_have_servers_of_their_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one play does not end the server of another at the same time."""
    bench.fill()
    first, second = bench.run(unique=True), bench.run(unique=True)
    assert first["name"] != second["name"] and first["server"]["token"] != second["server"]["token"]
    assert first["unit"] == f"dgxspark-sync-{first['name']}" and first["name"].startswith("t-")
    for made in (first, second):
        assert bench.get(made["server"], f"/{made['server']['token']}/blobs/{bench.blob}") == (200, DATA)
    bench.run(name=first["name"], state="absent")
    assert bench.get(second["server"], f"/{second['server']['token']}/blobs/{bench.blob}") == (200, DATA)
    with pytest.raises(ConnectionRefusedError):
        bench.get(first["server"], "/")
    # what nobody asks any more was left by a killed play
    monkeypatch.setattr(sync_server, "ABANDONED_SECONDS", 0.0)
    third = bench.run(unique=True)
    assert f"removed {second['unit']}.service, which an ended run had left" in third["actions"]
    assert os.listdir(sync_server.RUN_DIR) == [f"sync-{third['name']}"]


def test_without_the_right_to_write(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill()
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(sync_server, "RUN_DIR", str(tmp_path / "file" / "run"))
    result = bench.run()
    assert result["problem"]["id"] == "sync-access" and "become" in result["problem"]["remedy"]


def test_a_worker_passes_on_what_arrives(bench: Bench) -> None:
    """Started before anything is there: no stamp is wanted; parts are served from where model_sync puts them."""
    blob = hashlib.sha256(DATA).hexdigest()
    rows = [{"path": "m.safetensors", "size": len(DATA), "blob": blob, "algo": "sha256"}]
    started = bench.run(manifest=rows, revision=COMMIT)
    assert started["server"]["source"] == "arriving" and started["server"]["bytes"] == len(DATA)
    part = bench.cache / ".dgxspark-sync" / "models--org--m" / f"{blob}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA)
    assert bench.get(started["server"], f"/{started['server']['token']}/blobs/{blob}") == (200, DATA)
    wrong = bench.run(manifest=[{**rows[0], "path": "../x"}], revision=COMMIT)
    assert wrong["problem"]["id"] == "sync-input"


def test_absent_cleans_up_after_a_dead_server(bench: Bench) -> None:
    bench.fill()
    bench.run()
    bench.kill()
    time.sleep(0.1)
    assert bench.run(state="absent")["changed"]
    assert not (bench.root / "run" / "sync-t").exists()


def test_check_mode_starts_nothing(bench: Bench) -> None:
    early = bench.run(check=True)
    assert early["changed"] and not early.get("failed") and early["server"]["port"] == 0
    bench.fill()
    result = bench.run(check=True)
    assert result["changed"] and result["actions"] == ["would start dgxspark-sync-t"] and result["server"]["token"] == ""
    assert not (bench.root / "run").exists() and not (bench.root / "systemd.log").exists()


@pytest.mark.parametrize(
    ("prepare", "over", "ident", "words"),
    [
        (lambda bench: None, {}, "sync-source", "never verified"),
        (
            lambda bench: (bench.fill(), (bench.cache / "hub/models--org--m/blobs" / bench.blob).write_bytes(b"x")),
            {},
            "sync-source",
            "changed since",
        ),
        (Bench.fill, {"peers": ["nonsense"]}, "sync-input", "nonsense"),
        (Bench.fill, {"address": "192.0.2.1"}, "sync-start", "192.0.2.1"),
        (lambda bench: (bench.fill(), (bench.root / "broken").touch()), {}, "sync-start", "Failed to start transient"),
    ],
)
def test_failures(bench: Bench, prepare: t.Callable[[Bench], t.Any], over: dict[str, t.Any], ident: str, words: str) -> None:
    prepare(bench)
    result = bench.run(**over)
    assert result["failed"] and result["problem"]["id"] == ident, result["msg"]
    assert words in result["msg"] and result["msg"].startswith("spark-1: sync_server: found ")
    assert not (bench.root / "run" / "sync-t").exists()


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "x;y"])
def test_a_name_that_is_no_unit_name(bench: Bench, name: str) -> None:
    assert bench.run(name=name)["failed"]


def test_unit_is_hardened_and_bounded() -> None:
    argv = sync_server.unit_argv("u", 100, "/usr/bin/python3", "/r/server.py", "/r/config.json", "/r")
    assert argv[0] == "systemd-run" and argv[-4:] == ["/usr/bin/python3", "-I", "/r/server.py", "/r/config.json"]
    for part in (
        "--collect",
        "RuntimeMaxSec=130",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=CAP_DAC_READ_SEARCH",
        "Restart=no",
    ):
        assert any(part in item for item in argv)


# --- image ---

INSPECT = {
    "Id": "sha256:" + "1" * 64,
    "Architecture": "arm64",
    "Os": "linux",
    "Size": 1000,
    "RootFS": {"Layers": ["sha256:" + "2" * 64]},
    "Config": {},
}


def docker(
    bench: Bench, members: dict[str, bytes], *, driver: str = '[["Backing Filesystem","extfs"]]', save_rc: int = 0, save_err: str = ""
) -> None:
    with tarfile.open(bench.root / "save.tar", "w") as tar:
        for name, data in members.items():
            path = bench.root / "member"
            path.write_bytes(data)
            tar.add(path, name)
    (bench.root / "inspect.json").write_text(json.dumps([INSPECT]))
    bench.tool(
        "docker",
        f"""#!/bin/sh
echo "$*" >> {bench.root}/docker.log
case "$1 $2" in
"image inspect") [ "$3" = none ] && {{ echo 'Error: No such image: none' >&2; exit 1; }}; cat {bench.root}/inspect.json;;
info*) echo '{driver}|/var/lib/docker';;
save*) cat {bench.root}/save.tar; echo '{save_err}' >&2; exit {save_rc};;
esac
""",
    )


LISTING = json.dumps([{"Config": "c.json", "RepoTags": None, "Layers": ["l/layer.tar"]}]).encode()
GOOD = {"l/layer.tar": b"layer" * 500, "c.json": b"{}", "manifest.json": LISTING}


def saves(bench: Bench) -> int:
    return (bench.root / "docker.log").read_text().count("save ")


def test_classic_store_is_staged_once(bench: Bench) -> None:
    docker(bench, GOOD)
    first = bench.run(what="image", image="a:1")
    assert not first.get("failed"), first.get("msg")
    server = first["server"]
    assert server["source"] == "staged" and server["manifest_digest"].startswith("sha256:")
    body = bench.get(server, f"/v2/{server['token']}/app/manifests/{server['manifest_digest']}")[1]
    layer = json.loads(body)["layers"][0]
    assert bench.get(server, f"/v2/{server['token']}/app/blobs/{layer['digest']}") == (200, b"layer" * 500)
    bench.run(what="image", image="a:1", state="absent")
    second = bench.run(what="image", image="a:1")
    assert second["server"]["manifest_digest"] == server["manifest_digest"] and saves(bench) == 1
    assert os.listdir(bench.root / "state" / "images") == [_image.image_fingerprint(INSPECT)]


def test_older_stagings_are_removed(bench: Bench) -> None:
    docker(bench, GOOD)
    (bench.root / "state" / "images" / "old").mkdir(parents=True)
    (bench.root / "state" / "images" / "x.partial").mkdir(parents=True)
    bench.run(what="image", image="a:1")
    assert os.listdir(bench.root / "state" / "images") == [_image.image_fingerprint(INSPECT)]


def test_a_staging_goes_with_the_server_when_asked(bench: Bench) -> None:
    docker(bench, GOOD)
    bench.run(what="image", image="a:1")
    folder = bench.root / "state" / "images"
    bench.run(what="image", image="a:1", state="absent")
    assert folder.exists()
    assert bench.run(what="image", image="a:1", state="absent", staging="absent", check=True)["changed"] and folder.exists()
    assert bench.run(what="image", image="a:1", state="absent", staging="absent")["changed"] and not folder.exists()
    assert not bench.run(what="image", image="a:1", state="absent", staging="absent")["changed"]


@pytest.mark.parametrize("over", [{"transport": "archive"}, {}])
def test_the_archive_is_docker_save_itself(bench: Bench, over: dict[str, t.Any]) -> None:
    """When it is asked for, or when the disk has no room to stage; nothing is staged then."""
    full = {} if over else {"save_rc": 1, "save_err": "write /x: no space left on device"}
    docker(bench, GOOD, **full)
    result = bench.run(what="image", image="a:1", **over)
    assert not result.get("failed"), result["msg"]
    server = result["server"]
    assert (server["source"], server["archive"], server["manifest_digest"]) == ("archive", True, "")
    folder = bench.root / "state" / "images"
    assert not folder.exists() or os.listdir(folder) == []
    if over:
        assert bench.get(server, f"/{server['token']}/archive") == (200, (bench.root / "save.tar").read_bytes())
        assert bench.get(server, f"/{'0' * 32}/archive")[0] == 403
        assert (bench.root / "docker.log").read_text().splitlines()[-1] == f"save {INSPECT['Id']}"  # by Id: no name is set on the worker


def test_image_check_mode_stages_nothing(bench: Bench) -> None:
    docker(bench, GOOD)
    assert bench.run(check=True, what="image", image="a:1")["changed"]
    assert saves(bench) == 0 and not (bench.root / "state" / "images").exists()
    early = bench.run(check=True, what="image", image="none")
    assert early["changed"] and not early.get("failed")


@pytest.mark.parametrize(
    ("members", "kwargs", "over", "ident", "words"),
    [
        (GOOD, {}, {"image": "none"}, "image-missing", "none is not on this node"),
        (GOOD, {}, {"fingerprint": "f" * 64}, "image-changed", "fingerprint"),
        (GOOD, {"save_rc": 1, "save_err": "write /x: no space left on device"}, {"transport": "relay"}, "disk-image", "no space left"),
        (GOOD, {"save_rc": 1, "save_err": "unexpected EOF"}, {}, "image-save", "unexpected EOF"),
        ({"c.json": b"{}"}, {}, {}, "image-save", "no complete image"),
    ],
)
def test_image_failures(
    bench: Bench, members: dict[str, bytes], kwargs: dict[str, t.Any], over: dict[str, t.Any], ident: str, words: str
) -> None:
    docker(bench, members, **kwargs)
    result = bench.run(**{"what": "image", "image": "a:1", **over})
    assert result["failed"] and result["problem"]["id"] == ident, result["msg"]
    assert words in result["msg"]
    images = bench.root / "state" / "images"
    assert not images.exists() or os.listdir(images) == []


def test_containerd_store_whose_blobs_are_gone_is_staged(bench: Bench) -> None:
    docker(bench, GOOD, driver='[["driver-type","io.containerd.snapshotter.v1"]]')
    result = bench.run(what="image", image="a:1")
    assert result["server"]["source"] == "staged" and "not served in place" in result["actions"][0]


def test_containerd_store_is_served_in_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(bench, {}, driver='[["driver-type","io.containerd.snapshotter.v1"]]')
    content = bench.root / "content"
    content.mkdir()
    view = {"manifest_digest": "sha256:" + "3" * 64, "manifests": {}, "blobs": {}, "bytes": 77, "layers": []}
    monkeypatch.setattr(_image, "content_roots", lambda root, toml: [str(bench.root / "nope"), str(content)])
    monkeypatch.setattr(_image, "view_of_content", lambda directory, inspect: dict(view) if directory == str(content) else None)
    server = bench.run(what="image", image="a:1")["server"]
    assert (server["source"], server["bytes"], server["manifest_digest"]) == ("containerd", 77, "sha256:" + "3" * 64)
    assert saves(bench) == 0
