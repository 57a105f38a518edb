# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One head, 2, 4 and 8 workers that copy at the same time: light nodes of this machine (a network namespace with a Docker daemon each), the real modules."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
import spark

sys.path.insert(0, str(spark.ROOT / "lab"))
import bench_sync

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd")

TAG = "many/app:1"
MB = 1_000_000
LAYERS = [[f"opt/{index}", 4 * MB, f"many{index}"] for index in range(3)]
BYTES = 3 * 4 * MB

# The server of the head without its systemd unit: the module makes its configuration, the program serves it.
HEAD = """
import json, subprocess, sys
from ansible_collections.dgxspark.serving.plugins.module_utils import _sync_server
from ansible_collections.dgxspark.serving.plugins.modules import sync_server

class Module:
    check_mode = False
    params = {"node": "head", "name": "image", "what": "image", "image": sys.argv[2], "fingerprint": "", "transport": "auto", "timeout": 300, "port": 0,
              "address": sys.argv[3], "peers": sys.argv[4].split(","), "lifetime": 600, "idle": 0, "unique": False, "state": "present"}
    def run_command(self, argv):
        done = subprocess.run(argv, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

home = sys.argv[1]
result = sync_server.new_result(Module.params)
run = sync_server.SyncServer(Module(), result, run_dir=home + "/run", image_dir=home + "/images")
config = {**run._image(), "token": "0f" * 16, "state": home + "/server.state"}
print(json.dumps(result), file=open(home + "/result", "w"))
json.dump(config, open(home + "/config", "w"))
sys.exit(_sync_server.main(["", home + "/config"]))
"""
WORKER = """
import json, sys
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dgxspark.serving.plugins.modules import image_sync
image_sync.RUN_DIR, image_sync.STATE_DIR = sys.argv[1] + "/run", sys.argv[1] + "/state"
with patch_module_args(json.load(sys.stdin)):
    image_sync.main()
"""


def program(node: bench_sync.Node, *argv: str, stdin: str = "", check: bool = True, timeout: float = 300) -> str:
    """In the network of the node, with its Docker."""
    done = subprocess.run(
        ["nsenter", f"--net=/run/netns/{node.space}", *argv],
        env={**os.environ, "DOCKER_HOST": f"unix://{node.home}/docker.sock", "PYTHONPATH": str(spark.ROOT / "playbooks" / "collections")},
        input=stdin, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{node.name}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


def start(node: bench_sync.Node, *argv: str) -> subprocess.Popen[bytes]:
    with (node.home / "log").open("ab") as log:
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{node.space}", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "DOCKER_HOST": f"unix://{node.home}/docker.sock", "PYTHONPATH": str(spark.ROOT / "playbooks" / "collections")},
        )  # fmt: skip


def dockerd(node: bench_sync.Node) -> subprocess.Popen[bytes]:
    home = node.home
    (home / "daemon.json").write_text("{}")
    return start(
        node, "dockerd", "--host", f"unix://{home}/docker.sock", "--data-root", f"{home}/data", "--exec-root", f"{home}/exec", "--pidfile", f"{home}/pid",
        "--config-file", f"{home}/daemon.json", "--bridge", "none", "--containerd-namespace", f"many-{node.name}",
        "--containerd-plugins-namespace", f"many-plugins-{node.name}", "--iptables=false", "--ip6tables=false",
    )  # fmt: skip


def answers(node: bench_sync.Node) -> bool:
    return bool(program(node, "docker", "version", "--format", "{{.Server.Version}}", check=False).strip())


def until(ready: t.Callable[[], bool], what: str, log: Path) -> None:
    end = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < end, f"{what}: {log.read_text()[-3000:]}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def gang() -> t.Iterator[tuple[bench_sync.Nodes, dict[str, t.Any], dict[str, t.Any]]]:
    """(nodes, what the head tells of its image, what the workers need of its server)."""
    patch = pytest.MonkeyPatch()
    patch.setattr(bench_sync, "PREFIX", "manyimage")
    patch.setattr(bench_sync, "WORK", Path("/var/tmp/manyimage"))
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        nodes = stack.enter_context(bench_sync.Nodes(8))
        everyone = [nodes.head, *nodes.workers]
        for node in everyone:
            stack.callback(end, dockerd(node))
        for node in everyone:
            until(lambda node=node: answers(node), "dockerd did not start", node.home / "log")
        registry, tar = str(spark.ROOT / "lab" / "registry.py"), str(nodes.head.home / "app.tar")
        folder = str(nodes.head.home / "oci")
        program(nodes.head, "python3", registry, "make", folder, TAG, json.dumps({"layers": LAYERS, "attest": True}))
        program(nodes.head, "python3", registry, "tar", folder, TAG, tar)
        program(nodes.head, "docker", "load", "-q", "-i", tar)
        image = json.loads(
            program(
                nodes.head, sys.executable, "-c", WORKER, str(nodes.head.home), stdin=json.dumps({"reference": TAG, "source": "present"})
            )
        )
        peers = ",".join(node.address for node in nodes.workers)
        stack.callback(end, start(nodes.head, sys.executable, "-c", HEAD, str(nodes.head.home), TAG, nodes.head.address, peers))
        state = nodes.head.home / "server.state"
        until(state.exists, "the server did not start", nodes.head.home / "log")
        server = json.loads((nodes.head.home / "result").read_text())["server"]
        server.update(address=nodes.head.address, port=json.loads(state.read_text())["port"], token="0f" * 16)
        server["manifest_digest"] = json.loads((nodes.head.home / "config").read_text())["manifest_digest"]
        yield nodes, image["image"], server


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_workers_copy_at_the_same_time(gang: tuple[bench_sync.Nodes, dict[str, t.Any], dict[str, t.Any]], count: int) -> None:
    """Each has the image under its name, no temporary name is left, and the head sent each layer once to each of them: a star, not more."""
    nodes, image, server = gang
    workers = nodes.workers[:count]
    for node in workers:
        program(node, "docker", "image", "rm", "-f", TAG, check=False)
        shutil.rmtree(node.home / "state", ignore_errors=True)
        assert program(node, "docker", "images", "-q").split() == []
    sent = nodes.head.sent()

    def copy(node: bench_sync.Node) -> dict[str, t.Any]:
        args = {
            "node": node.name,
            "reference": TAG,
            "source": "peer",
            "fingerprint": image["fingerprint"],
            "size": image["size"],
            "server": server,
        }
        return json.loads(program(node, sys.executable, "-c", WORKER, str(node.home), stdin=json.dumps(args), check=False))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        results = list(pool.map(copy, workers))
    assert [result.get("msg") for result in results if result.get("failed")] == []
    assert {(result["method"], result["image"]["fingerprint"]) for result in results} == {("relay", image["fingerprint"])}
    for node in workers:
        names = program(node, "docker", "images", "--digests", "--format", "{{.Repository}}:{{.Tag}}").split()
        assert names == [TAG], node.name
    assert count * BYTES <= nodes.head.sent() - sent <= 1.1 * count * BYTES
    again = [copy(node) for node in workers]
    assert [result["changed"] for result in again] == [False] * count
