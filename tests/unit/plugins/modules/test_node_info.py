# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import http.server
import json
import os
import pathlib
import pwd
import socketserver
import threading

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import node_info as module

FIXTURES = pathlib.Path(module.__file__).resolve().parents[2] / "tests" / "unit" / "fixtures" / "node"


def load(name):
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


@pytest.fixture
def daemon(tmp_path):
    """A Docker daemon on a Unix socket that plays recorded answers."""
    container = load("container_published.json")
    answers = {
        "/info": load("info_containerd.json"),
        "/version": {"ApiVersion": "1.45"},
        "/containers/json?all=1": [{"Id": container["Id"]}],
        f"/containers/{container['Id']}/json": container,
        "/images/lmsysorg/sglang:spark/json": {
            "Id": "sha256:1",
            "RootFS": {"Layers": ["sha256:2"]},
            "Architecture": "arm64",
            "Os": "linux",
        },
    }
    connections = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            connections.append(1)

        def do_GET(self):
            found = self.path in answers
            body = json.dumps(answers.get(self.path, {"message": "no such thing"})).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self):
            return "test"

        def log_message(self, *args):
            pass

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    path = str(tmp_path / "docker.sock")
    server = Server(path, Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield path, connections
    server.shutdown()
    server.server_close()


@pytest.fixture
def run_module(capsys):
    def run(**params):
        with patch_module_args(params), pytest.raises(SystemExit) as caught:
            module.main()
        assert caught.value.code == 0
        result = json.loads(capsys.readouterr().out)
        assert result["changed"] is False
        return result["node"]

    return run


@pytest.mark.parametrize("check_mode", [False, True])
def test_one_connection_gives_everything_of_docker(daemon, run_module, check_mode):
    path, connections = daemon
    node = run_module(docker_socket=path, image="lmsysorg/sglang:spark", node="spark-1", _ansible_check_mode=check_mode)
    assert node["name"] == "spark-1"
    assert node["docker"]["reachable"] and node["docker"]["store"] == "containerd"
    assert node["image"]["present"] and node["image"]["architecture"] == "arm64"
    assert [item["name"] for item in node["containers"]] == ["web"]
    assert len(connections) == 1


def test_keys(daemon, run_module):
    node = run_module(docker_socket=daemon[0])
    documented = {
        "name", "hostname", "machine", "kernel", "os", "dgx", "python", "python_requests", "user", "effective_user", "time", "memory", "limits", "gpu",
        "docker", "image", "containers", "disks", "listeners", "listeners_error", "rdma_devices", "infiniband_dev", "unit_states", "snapshot", "boot",
        "oom_daemons", "remove_ipc", "autostart",
    }  # fmt: skip
    assert set(node) == documented
    assert node["memory"]["total"] > 0 and node["time"] > 1e9
    assert (node["image"], node["snapshot"], node["disks"], node["unit_states"]) == (None, None, {}, {})


def test_no_daemon_is_a_fact(run_module, tmp_path):
    node = run_module(docker_socket=str(tmp_path / "none.sock"), image="a/b:1")
    assert node["docker"]["reachable"] is False and node["docker"]["error"]
    assert node["docker"]["gpu_capable"] is False and node["image"]["present"] is False


def test_something_else_on_the_socket_is_a_fact(run_module, tmp_path):
    path = str(tmp_path / "other.sock")

    class Rude(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"go away\r\n\r\n")

    with socketserver.UnixStreamServer(path, Rude) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        node = run_module(docker_socket=path)
        server.shutdown()
    assert "no HTTP answer to GET /info" in node["docker"]["error"]


def test_login_user_is_the_caller_of_sudo(monkeypatch):
    other = next(entry for entry in pwd.getpwall() if entry.pw_uid not in (0, os.getuid()))
    monkeypatch.setenv("SUDO_UID", str(other.pw_uid))
    user = module.login_user()
    assert (user["name"], user["uid"], user["home"]) == (other.pw_name, other.pw_uid, other.pw_dir)
    monkeypatch.delenv("SUDO_UID")
    assert module.login_user()["uid"] == os.getuid()
    monkeypatch.setenv("SUDO_UID", "3999999999")
    assert module.login_user()["name"] == "3999999999"


def test_snapshot_of_a_model(run_module, daemon, tmp_path):
    hub = tmp_path / "hub" / "models--a--b"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    model = {"cache_dir": str(tmp_path), "repo_id": "a/b"}
    assert run_module(docker_socket=daemon[0], model=model)["snapshot"]["repo_id"] == "a/b"
    assert run_module(docker_socket=daemon[0], model=dict(model, cache_dir=str(tmp_path / "none")))["snapshot"] is None


def test_disk_of_a_path_to_come(run_module, daemon, tmp_path):
    wanted = str(tmp_path / "not" / "yet")
    found = run_module(docker_socket=daemon[0], paths=[wanted])["disks"][wanted]
    assert found["checked"] == str(tmp_path) and 0 < found["free"] <= found["total"] and os.path.ismount(found["mount"])


@pytest.mark.parametrize(("version", "expected"), [('__version__ = "2.31.0"\n', "2.31.0"), ("nothing", "unknown"), (None, None)])
def test_requests_version(monkeypatch, tmp_path, version, expected):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    if version is not None:
        (tmp_path / "__version__.py").write_text(version, encoding="utf-8")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if version is None else Spec)
    assert module.requests_version() == expected
