# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The server program for real on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _sync_server

TOKEN = "0123456789abcdef0123456789abcdef"
DATA = bytes(range(256)) * 4096
NAME = hashlib.sha256(DATA).hexdigest()


@pytest.mark.parametrize(
    ("header", "size", "span"),
    [
        ("", 10, (0, 9)),
        ("bytes=0-", 10, (0, 9)),
        ("bytes=3-", 10, (3, 9)),
        ("bytes=3-5", 10, (3, 5)),
        ("bytes=3-99", 10, (3, 9)),
        ("bytes=-4", 10, (6, 9)),
        ("bytes=-99", 10, (0, 9)),
        ("bytes=10-", 10, None),
        ("bytes=-0", 10, None),
        ("bytes=5-3", 10, (0, 9)),
        ("bytes=1-2,4-5", 10, (0, 9)),
        ("items=1-2", 10, (0, 9)),
        ("bytes=-", 10, (0, 9)),
        ("", 0, (0, -1)),
        ("bytes=0-", 0, None),
    ],
)
def test_ranges(header: str, size: int, span: tuple[int, int] | None) -> None:
    assert _sync_server.parse_range(header, size) == span


@pytest.mark.parametrize(
    ("what", "path", "answer"),
    [
        ("model", f"/{TOKEN}/blobs/{NAME}", ("blob", NAME)),
        ("model", f"/{TOKEN}/stats", ("stats", "")),
        ("model", f"/{'0' * 32}/blobs/{NAME}", ("token", "")),
        ("model", f"/{TOKEN}/blobs/../../etc/passwd", ("token", "")),
        ("model", f"/{TOKEN}/blobs/%2e%2e", ("token", "")),
        ("model", "/", ("token", "")),
        ("model", "/v2/", ("token", "")),
        ("image", "/v2/", ("ping", "")),
        ("image", f"/v2/{TOKEN}/app/manifests/sha256:{NAME}", ("manifest", NAME)),
        ("image", f"/v2/{TOKEN}/app/blobs/sha256:{NAME}", ("blob", NAME)),
        ("image", f"/v2/{'0' * 32}/app/blobs/sha256:{NAME}", ("token", "")),
        ("image", f"/v2/{TOKEN}/app/manifests/latest", ("token", "")),
        ("image", f"/{TOKEN}/blobs/{NAME}", ("", "")),
    ],
)
def test_paths(what: str, path: str, answer: tuple[str, str]) -> None:
    assert _sync_server.blob_of(path, {"what": what, "token": TOKEN}) == answer


class Client:
    """A server in this process and a connection to it."""

    def __init__(self, server: _sync_server.Server) -> None:
        self.server = server
        self.conn = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        self.conn.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
        answer = self.conn.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


@contextlib.contextmanager
def serving(tmp_path: Path, **over: t.Any) -> t.Iterator[Client]:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    config: dict[str, t.Any] = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": ["127.0.0.1"], "manifests": {}}
    config["blobs"] = {NAME: {"path": str(path), "size": len(DATA)}, "b" * 64: {"path": str(tmp_path / "gone"), "size": 1}}
    server = _sync_server.serve({**config, **over})
    client = Client(server)
    try:
        yield client
    finally:
        client.conn.close()
        server.shutdown()
        server.server_close()


def test_whole_range_and_head(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        path = f"/{TOKEN}/blobs/{NAME}"
        status, headers, body = client.ask("GET", path)
        assert (status, body, headers["Content-Length"]) == (200, DATA, str(len(DATA)))
        status, headers, body = client.ask("GET", path, Range="bytes=1000-")
        assert (status, body) == (206, DATA[1000:])
        assert headers["Content-Range"] == f"bytes 1000-{len(DATA) - 1}/{len(DATA)}"
        status, headers, body = client.ask("HEAD", path)
        assert (status, body, headers["Content-Length"]) == (200, b"", str(len(DATA)))
        assert client.ask("GET", path, Range=f"bytes={len(DATA)}-")[0] == 416
        status, dummy, body = client.ask("GET", f"/{TOKEN}/stats")
        told = json.loads(body)
        assert told.pop("quiet") < 60
        assert told == {"bytes_sent": 2 * len(DATA) - 1000, "peers": {"127.0.0.1": 2 * len(DATA) - 1000}}


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(tmp_path: Path, method: str) -> None:
    with serving(tmp_path) as client:
        assert client.ask(method, f"/{TOKEN}/blobs/{NAME}")[0] == 501
        assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize(
    ("over", "path", "status", "reason"),
    [
        ({}, f"/{'0' * 32}/blobs/{NAME}", 403, "token"),
        ({"peers": ["127.0.0.9"], "bind": "127.0.0.2"}, f"/{TOKEN}/blobs/{NAME}", 403, "peer"),
        ({}, f"/{TOKEN}/blobs/{'a' * 64}", 404, "blob"),
        ({}, f"/{TOKEN}/blobs/{'b' * 64}", 404, "blob"),
        ({}, f"/{TOKEN}/blobs/../../../../etc/passwd", 403, "token"),
        ({"blobs": {NAME: {"path": __file__, "size": 1}}}, f"/{TOKEN}/blobs/{NAME}", 409, "changed"),
    ],
)
def test_refusals_say_why(tmp_path: Path, over: dict[str, t.Any], path: str, status: int, reason: str) -> None:
    with serving(tmp_path, **over) as client:
        client.conn = http.client.HTTPConnection(
            over.get("bind", "127.0.0.1"), client.server.server_port, timeout=10, source_address=("127.0.0.1", 0)
        )
        got, headers, body = client.ask("GET", path)
        assert (got, headers["X-Reason"]) == (status, reason)
        assert DATA[:100] not in body


def test_the_head_itself_may_ask(tmp_path: Path) -> None:
    with serving(tmp_path, peers=["127.0.0.9"]) as client:
        assert client.ask("GET", f"/{TOKEN}/stats")[0] == 200


def test_registry_view(tmp_path: Path) -> None:
    media = "application/vnd.oci.image.manifest.v1+json"
    with serving(tmp_path, what="image", manifests={f"sha256:{NAME}": media}) as client:
        assert client.ask("GET", "/v2/")[0] == 200
        status, headers, body = client.ask("HEAD", f"/v2/{TOKEN}/app/manifests/sha256:{NAME}")
        assert (status, headers["Content-Type"], headers["Docker-Content-Digest"]) == (200, media, f"sha256:{NAME}")
        assert client.ask("GET", f"/v2/{TOKEN}/app/blobs/sha256:{NAME}")[2] == DATA
        status, dummy, body = client.ask("GET", f"/v2/{TOKEN}/app/manifests/sha256:{'b' * 64}")
        assert status == 404 and json.loads(body)["errors"][0]["code"] == "MANIFEST_UNKNOWN"


def test_an_archive_is_whole_or_has_no_end(tmp_path: Path) -> None:
    """What a command prints, in chunks; without the last chunk when the command failed, so that nobody takes a part for the whole."""
    path = f"/{TOKEN}/archive"
    printing = [sys.executable, "-c", "import sys; sys.stdout.write('x' * 3000000); sys.stdout.flush(); sys.exit(int(sys.argv[1]))"]
    with serving(tmp_path, what="image", archive=[*printing, "0"]) as client:
        assert client.ask("GET", path)[::2] == (200, b"x" * 3000000)
    with serving(tmp_path, what="image", archive=[*printing, "1"]) as client, pytest.raises(http.client.IncompleteRead):
        client.ask("GET", path)
    with serving(tmp_path, what="image", archive=[*printing, "0"]) as client:
        assert client.ask("GET", f"/{'0' * 32}/archive")[0] == 403
    with serving(tmp_path, what="image") as client:
        assert client.ask("GET", path)[0] == 404


def test_nonsense_gets_a_status_line(tmp_path: Path) -> None:
    with serving(tmp_path) as client, socket.create_connection(("127.0.0.1", client.server.server_port), timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")


def test_the_program(tmp_path: Path) -> None:
    """Started as systemd does, from a copy of its source, with -I: state file, answers, end by TERM, no token in its argv."""
    (tmp_path / "file").write_bytes(DATA)
    program, config, state = tmp_path / "server.py", tmp_path / "config.json", tmp_path / "state.json"
    program.write_text(Path(_sync_server.__file__).read_text())
    data = {
        "what": "model",
        "bind": "127.0.0.1",
        "port": 0,
        "token": TOKEN,
        "peers": [],
        "lifetime": 60,
        "state": str(state),
        "manifest_digest": "x",
    }
    config.write_text(json.dumps({**data, "blobs": {NAME: {"path": str(tmp_path / "file"), "size": len(DATA)}}}))
    with subprocess.Popen([sys.executable, "-I", str(program), str(config)]) as process:
        try:
            wait_for(state)
            told = json.loads(state.read_text())
            assert told["pid"] == process.pid and state.stat().st_mode & 0o777 == 0o600
            conn = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=10)
            conn.request("GET", f"/{TOKEN}/blobs/{NAME}")
            assert conn.getresponse().read() == DATA
            conn.close()
            assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()
        finally:
            process.terminate()
        assert process.wait(10) == 0


def test_the_program_ends_by_itself(tmp_path: Path) -> None:
    config, state = tmp_path / "config.json", tmp_path / "state.json"
    data = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": [], "lifetime": 0.2, "state": str(state), "blobs": {}}
    config.write_text(json.dumps(data))
    assert subprocess.run([sys.executable, _sync_server.__file__, str(config)], timeout=30, check=False).returncode == 0


@pytest.mark.parametrize("held", [False, True])
def test_the_program_ends_when_nobody_asks(tmp_path: Path, held: bool) -> None:
    """A killed play leaves no server for long; one that is in use stays."""
    config, state = tmp_path / "config.json", tmp_path / "state.json"
    data = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": [], "lifetime": 60, "idle": 0.2, "blobs": {}}
    config.write_text(json.dumps({**data, "state": str(state)}))
    with subprocess.Popen([sys.executable, _sync_server.__file__, str(config)]) as process, contextlib.ExitStack() as stack:
        wait_for(state)
        if held:
            stack.enter_context(socket.create_connection(("127.0.0.1", json.loads(state.read_text())["port"]), timeout=10))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.5)
            process.kill()
        else:
            assert process.wait(20) == 0


def test_a_foreign_address_is_told_in_the_state(tmp_path: Path) -> None:
    config, state = tmp_path / "config.json", tmp_path / "state.json"
    config.write_text(
        json.dumps({"what": "model", "bind": "192.0.2.1", "port": 0, "token": TOKEN, "peers": [], "state": str(state), "blobs": {}})
    )
    assert subprocess.run([sys.executable, _sync_server.__file__, str(config)], timeout=30, check=False).returncode == 1
    assert "192.0.2.1" in json.loads(state.read_text())["error"]


def wait_for(path: Path, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
