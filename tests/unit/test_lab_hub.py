# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hub answers as the real one does, also when it is told to misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import json
import sys
import threading
import typing as t
from pathlib import Path

import pytest

HUB = Path(__file__).resolve().parents[2] / "lab" / "hub.py"
SPEC = importlib.util.spec_from_file_location("lab_hub", HUB)
assert SPEC and SPEC.loader
hub = importlib.util.module_from_spec(SPEC)
sys.modules["lab_hub"] = hub
SPEC.loader.exec_module(hub)

SHARD = b"weights" * 20000
FILES = {"config.json": b"{}\n", "sub/a.json": b"[]", "model.safetensors": SHARD}


class Client:
    def __init__(self, server: t.Any) -> None:
        self.server = server

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        conn = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=10)
        with contextlib.closing(conn):
            conn.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
            answer = conn.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def faults(self, *faults: dict[str, t.Any]) -> None:
        assert self.ask("PUT", "/control", json.dumps(faults))[0] == 200


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for path, data in FILES.items():
        target = tmp_path / "org" / "m" / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return tmp_path / "org" / "m"


@pytest.fixture
def client(model: Path) -> t.Iterator[Client]:
    server = hub.Server(str(model.parents[1]), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield Client(server)
    server.ending.set()
    server.shutdown()
    server.server_close()


def info(client: Client, query: str = "?blobs=true") -> dict[str, t.Any]:
    status, dummy, body = client.ask("GET", f"/api/models/org/m{query}")
    assert status == 200
    return json.loads(body)


def test_model_info_names_every_file(client: Client) -> None:
    data = info(client)
    rows = {item["rfilename"]: item for item in data["siblings"]}
    assert set(rows) == set(FILES) and len(data["sha"]) == 40
    assert rows["model.safetensors"]["lfs"] == {"sha256": hashlib.sha256(SHARD).hexdigest(), "size": len(SHARD), "pointerSize": 130}
    assert (
        rows["config.json"]["blobId"] == hashlib.sha1(b"blob 3\0{}\n", usedforsecurity=False).hexdigest()
        and "lfs" not in rows["config.json"]
    )
    assert "size" not in info(client, "")["siblings"][0]


def test_the_commit_is_the_content(client: Client, model: Path) -> None:
    first = info(client)["sha"]
    assert json.loads(client.ask("GET", f"/api/models/org/m/revision/{first}")[2])["sha"] == first
    (model / "files" / "config.json").write_bytes(b"{ }")
    assert info(client)["sha"] != first
    assert client.ask("GET", f"/api/models/org/m/revision/{first}")[1]["X-Error-Code"] == "RevisionNotFound"
    (model / "revisions" / "v1").mkdir(parents=True)
    (model / "revisions" / "v1" / "config.json").write_bytes(b"old")
    assert len(json.loads(client.ask("GET", "/api/models/org/m/revision/v1")[2])["siblings"]) == 1


def test_resolve_small_and_large_files(client: Client) -> None:
    sha = info(client)["sha"]
    status, headers, body = client.ask("GET", "/org/m/resolve/main/config.json")
    assert (status, body, headers["X-Repo-Commit"]) == (200, FILES["config.json"], sha)
    assert headers["ETag"].strip('"') == hashlib.sha1(b"blob 3\0{}\n", usedforsecurity=False).hexdigest()
    status, headers, dummy = client.ask("HEAD", f"/org/m/resolve/{sha}/model.safetensors")
    assert (status, headers["X-Linked-Size"]) == (302, str(len(SHARD)))
    assert headers["X-Linked-Etag"].strip('"') == hashlib.sha256(SHARD).hexdigest()
    path = "/" + headers["Location"].split("/", 3)[3]
    assert client.ask("GET", path)[2] == SHARD
    status, headers, body = client.ask("GET", path, Range="bytes=1000-1999")
    assert (status, body, headers["Content-Range"]) == (206, SHARD[1000:2000], f"bytes 1000-1999/{len(SHARD)}")
    assert client.ask("GET", path, Range=f"bytes={len(SHARD)}-")[0] == 416


def test_tree(client: Client) -> None:
    rows = {row["path"]: row for row in json.loads(client.ask("GET", "/api/models/org/m/tree/main?recursive=true")[2])}
    assert rows["model.safetensors"]["lfs"]["oid"] == hashlib.sha256(SHARD).hexdigest()
    assert rows["sub/a.json"]["size"] == 2


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/org/none", "RepoNotFound"),
        ("/api/models/org/m/revision/none", "RevisionNotFound"),
        ("/org/m/resolve/main/none.json", "EntryNotFound"),
        ("/org/m/resolve/main/../../access.json", "EntryNotFound"),
        ("/org/../resolve/main/x", "RepoNotFound"),
        ("/api/models/../m", "RepoNotFound"),
    ],
)
def test_404_says_what(client: Client, path: str, code: str) -> None:
    status, headers, dummy = client.ask("GET", path)
    assert (status, headers["X-Error-Code"]) == (404, code)


def test_access(client: Client, model: Path) -> None:
    (model / "access.json").write_text(json.dumps({"gated": True, "tokens": ["good"], "denied": ["known"]}))
    assert client.ask("GET", "/api/models/org/m")[0] == 200
    cases = [("", 401), ("bad", 401), ("known", 403), ("good", 200)]
    for token, status in cases:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        got, answer, dummy = client.ask("HEAD", "/org/m/resolve/main/config.json", **headers)
        assert got == status
        assert status == 200 or answer["X-Error-Code"] == "GatedRepo"
    (model / "access.json").write_text(json.dumps({"private": True, "tokens": ["good"]}))
    assert client.ask("GET", "/api/models/org/m")[1]["X-Error-Code"] == "RepoNotFound"
    assert client.ask("GET", "/api/models/org/m", Authorization="Bearer good")[0] == 200


def test_status_fault_strikes_as_often_as_told(client: Client) -> None:
    client.faults({"repo": "org/*", "on": "api", "status": 429, "retry_after": 3, "times": 2})
    answers = [client.ask("GET", "/api/models/org/m") for dummy in range(3)]
    assert [answer[0] for answer in answers] == [429, 429, 200]
    assert answers[0][1]["Retry-After"] == "3"
    assert client.ask("GET", "/org/m/resolve/main/config.json")[0] == 200
    client.faults({"status": 500})
    assert client.ask("GET", "/org/m/resolve/main/config.json")[0] == 500
    assert client.ask("DELETE", "/control")[0] == 200
    assert client.ask("GET", "/api/models/org/m")[0] == 200


def test_cut_stall_and_flip(client: Client) -> None:
    path = "/cdn/org/m/main/model.safetensors"
    client.faults({"on": "cdn", "cut_after": 100_000})
    with pytest.raises(http.client.IncompleteRead) as cut:
        client.ask("GET", path)
    assert cut.value.partial == SHARD[:100_000]
    client.faults({"on": "cdn", "stall_after": 50_000, "seconds": 0.3})
    with pytest.raises(http.client.IncompleteRead) as stall:
        client.ask("GET", path)
    assert stall.value.partial == SHARD[:50_000]
    client.faults({"on": "cdn", "flip_at": 70_000})
    body = client.ask("GET", path)[2]
    assert [index for index, byte in enumerate(body) if byte != SHARD[index]] == [70_000]


def test_faults_from_a_file(model: Path, tmp_path: Path) -> None:
    faults = hub.Faults(str(tmp_path / "faults.json"))
    assert faults.find("api", "org/m", "") == {}
    (tmp_path / "faults.json").write_text('[{"repo": "org/x", "status": 401}, {"file": "*.safetensors", "status": 403}]')
    assert faults.find("api", "org/x", "config.json")["status"] == 401
    assert faults.find("cdn", "org/m", "a.safetensors")["status"] == 403
    assert faults.find("api", "org/m", "") == {}


def test_whoami(client: Client) -> None:
    assert client.ask("GET", "/api/whoami-v2")[0] == 401
    assert client.ask("GET", "/api/whoami-v2", Authorization="Bearer x")[0] == 200
    assert client.ask("PUT", "/api/whoami-v2", "x")[0] == 405
