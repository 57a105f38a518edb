# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real Prometheus beside the lab: Debian's packages, unpacked and not installed (installing them would start services on this machine)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import typing as t
import urllib.parse
import urllib.request
from pathlib import Path

import spark

CACHE = spark.ROOT / ".cache" / "watching"
# What the lab's image lacks of ray[default], so that its Ray exports metrics.
RAY_DEFAULT = (
    "aiohttp_cors==0.8.1",
    "google-api-core==2.44.0",
    "google-auth==2.63.0",
    "opencensus==0.11.4",
    "opencensus-context==0.1.3",
    "opentelemetry-exporter-prometheus==0.66b2",
    "proto-plus==1.29.0",
    "pyasn1==0.6.5",
    "pyasn1-modules==0.4.2",
    "six==1.17.0",
)


def unpacked(package: str, program: str) -> Path:
    """A program of a Debian package; downloaded once."""
    found = CACHE / package / program
    if not found.exists():
        fresh = CACHE / f"{package}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        download = ["apt-get", "-qq", "download", package]
        if subprocess.run(
            download, cwd=fresh, check=False, timeout=300, stdin=subprocess.DEVNULL
        ).returncode:  # lists that are old, or none
            root = [] if os.geteuid() == 0 else ["sudo", "-n"]
            subprocess.run([*root, "apt-get", "-qq", "update"], check=True, timeout=300, stdin=subprocess.DEVNULL)
            subprocess.run(download, cwd=fresh, check=True, timeout=300, stdin=subprocess.DEVNULL)
        (archive,) = fresh.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(fresh)], check=True, timeout=120)
        archive.unlink()
        shutil.rmtree(CACHE / package, ignore_errors=True)
        fresh.rename(CACHE / package)
    return found


def ray_packages() -> Path:
    """Packages that make a Ray of the lab's image export its metrics."""
    found = CACHE / "ray-default"
    if not found.exists():
        fresh = CACHE / "ray-default.new"
        shutil.rmtree(fresh, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(fresh)]
        pip += ["--python-version", "3.11", "--only-binary=:all:", *RAY_DEFAULT]
        subprocess.run(pip, check=True, timeout=300, stdin=subprocess.DEVNULL)
        fresh.rename(found)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A running server on loopback."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **query: str) -> t.Any:
        with self.opener.open(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
            return json.loads(answer.read())["data"]

    def value(self, query: str) -> list[dict[str, t.Any]]:
        """The series of an instant query."""
        return self.get("/api/v1/query", query=query)["result"]

    def wait(self, query: str, seconds: float = 40) -> list[dict[str, t.Any]]:
        """The series of a query, as soon as there is one; [] after that many seconds."""
        end = time.monotonic() + seconds
        while True:
            found = self.value(query)
            if found or time.monotonic() > end:
                return found
            time.sleep(0.5)


@contextlib.contextmanager
def prometheus(config: Path, data: Path) -> t.Iterator[Prometheus]:
    """Prometheus with this configuration for the time of the block."""
    program = unpacked("prometheus", "usr/bin/prometheus")
    port = free_port()
    argv = [str(program), f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port}"]
    with open(data.parent / "prometheus.log", "w+", encoding="utf-8") as log:
        run = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            server = Prometheus(port)
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError), server.opener.open(f"{server.url}/-/ready", timeout=2):
                    break
                if run.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise AssertionError(f"Prometheus does not start: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield server
        finally:
            run.terminate()
            try:
                run.wait(20)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()


def copy_in(node: str, source: Path, target: str) -> None:
    subprocess.run(["docker", "cp", "-q", str(source), f"{spark.NAME}-{node}:{target}"], check=True, timeout=120, stdin=subprocess.DEVNULL)


NODE_UNIT, NODE_PORT = "sparklab-node-exporter", 9100
RAY_NAME, RAY_PORT, RAY_METRICS = "sparklab-ray-default", 6399, 6395
RAY_PLACE = "/var/tmp/sparklab-ray-default"
ACTOR = """
import ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
@ray.remote(num_gpus=1)
class Rank:
    def here(self): return 1
rank = Rank.options(name="rank", lifetime="detached", namespace="lab").remote()
print(ray.get(rank.here.remote()))
"""


@contextlib.contextmanager
def node_exporters() -> t.Iterator[None]:
    """Debian's node exporter on every node, as a person would install it."""
    program = unpacked("prometheus-node-exporter", "usr/bin/prometheus-node-exporter")
    try:
        for node in spark.NODES:
            copy_in(node, program, "/usr/local/bin/sparklab-node-exporter")
            spark.on(node, "systemd-run", "--quiet", "--collect", f"--unit={NODE_UNIT}", "/usr/local/bin/sparklab-node-exporter")
        yield
    finally:
        for node in spark.NODES:
            spark.shell(node, f"systemctl stop {NODE_UNIT}; rm -f /usr/local/bin/sparklab-node-exporter", check=False)


@contextlib.contextmanager
def ray_with_metrics() -> t.Iterator[None]:
    """A Ray that exports metrics, beside that of the gang, whose image has the small Ray that cannot: the same image and Ray on the same nodes, with
    what ray[default] adds, on other ports, and one actor that holds a GPU.
    """
    packages = ray_packages()
    image = spark.settings()["spark_image"]
    head = spark.NODES[spark.HEAD]
    try:
        for node, address in spark.NODES.items():
            copy_in(node, packages, RAY_PLACE)
            argv = [
                "docker",
                "run",
                "-d",
                "--rm",
                "--name",
                RAY_NAME,
                "--network=host",
                "-v",
                f"{RAY_PLACE}:/extra:ro",
                "-e",
                "PYTHONPATH=/extra",
            ]
            argv += [
                "-e",
                f"RAY_NODE_IP_ADDRESS={address}",
                "--entrypoint=ray",
                image,
                "start",
                "--block",
                f"--node-ip-address={address}",
                "--num-gpus=1",
            ]
            argv += ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", f"--metrics-export-port={RAY_METRICS}"]
            argv += ["--min-worker-port=21500", "--max-worker-port=21600"]
            argv += (
                ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if node == spark.HEAD else [f"--address={head}:{RAY_PORT}"]
            )
            spark.on(node, *argv)
            if node == spark.HEAD:
                spark.shell(
                    node,
                    f"for n in $(seq 60); do ss -Htln | grep -q ':{RAY_PORT} ' && exit 0; sleep 0.5; done; docker logs {RAY_NAME}; exit 1",
                )
        for node in spark.NODES:
            listens = f"ss -Htln | grep -q ':{RAY_METRICS} '"
            spark.shell(node, f"for n in $(seq 80); do {listens} && exit 0; sleep 0.5; done; docker logs {RAY_NAME} >&2; exit 1")
        assert spark.on(spark.HEAD, "docker", "exec", RAY_NAME, "python3", "-c", ACTOR).strip().endswith("1")
        yield
    finally:
        for node in spark.NODES:
            spark.shell(node, f"docker rm -f {RAY_NAME}; rm -rf {RAY_PLACE}", check=False)
