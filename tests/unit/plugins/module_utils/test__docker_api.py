# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import http.server
import json
import socketserver
import threading

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils._docker_api import DockerApi


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list = []

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, self.headers.get("Content-Type"), json.loads(body) if body else None))
        text = b"plain" if self.path == "/text" else json.dumps({"Id": "x"}).encode()
        self.send_response(201 if self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(text)))
        if self.path == "/close":
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def address_string(self):
        return ""

    def log_message(self, *args):
        pass


@pytest.fixture
def api(tmp_path):
    path = str(tmp_path / "docker.sock")
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield DockerApi(path)
        server.shutdown()


def test_questions_and_a_container_from_its_definition(api):
    Handler.seen.clear()
    assert api.get("/close") == (200, {"Id": "x"})
    assert api.get("/text") == (200, "plain")
    assert api.call("POST", "/containers/create?name=old", {"Image": "x:1"}) == (201, {"Id": "x"})
    assert Handler.seen[-1] == ("POST", "/containers/create?name=old", "application/json", {"Image": "x:1"})
    assert [entry[2] for entry in Handler.seen[:2]] == [None, None]


def test_no_daemon(tmp_path):
    with pytest.raises(OSError):
        DockerApi(str(tmp_path / "none.sock")).get("/version")
