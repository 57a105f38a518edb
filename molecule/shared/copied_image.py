# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the scenarios image and image_faults stand on: a registry on the head, images made to measure, and looks at what is left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import time
import typing as t

import pytest
import spark

FOLDER = "/var/lib/sparklab-registry"


PORT = 5055


NAME = "acme/app"


MB = 1_000_000


LAYERS = [["opt/a", 30 * MB, "a"], ["opt/b", 30 * MB, "b"], ["opt/c", 40 * MB, "c1"]]


NEXT = [*LAYERS[:2], ["opt/c", 40 * MB, "c2"]]


STORES = {"containerd": {"features": {"containerd-snapshotter": True}}, "classic": {}}


# Ansible's own traffic to a worker of one run: its modules.
ANSIBLE = 8 * MB


def reference(version: int | str, host: str = "127.0.0.1") -> str:
    return f"{host}:{PORT}/{NAME}:{version}"


def make(version: int | str, layers: t.Sequence[t.Any] | None = None, **over: t.Any) -> dict[str, t.Any]:
    """An image in the head's registry: an index with attestations, as BuildKit pushes it."""
    text = json.dumps({"layers": LAYERS if layers is None else layers, "attest": True, **over})
    return json.loads(spark.on("spark-1", "python3", f"{FOLDER}/registry.py", "make", FOLDER, f"{NAME}:{version}", text))


def fault(**given: t.Any) -> None:
    spark.shell("spark-1", f"echo '{json.dumps(given)}' > {FOLDER}/fault" if given else f"rm -f {FOLDER}/fault")


def site(version: int | str = 1, *arguments: str, image: str = "", **over: t.Any) -> spark.Run:
    """Nobody asks these images for vLLM: they have none."""
    variables = {"spark_image": image or reference(version), "image_sync_inside": False, **over}
    return spark.site("--tags", "image", *arguments, **variables)


def inspected(node: str, image: str) -> dict[str, t.Any]:
    found = json.loads(spark.on(node, "docker", "image", "inspect", image, check=False) or "[]")
    return found[0] if found else {}


def layers_of(node: str, image: str) -> list[str]:
    return inspected(node, image).get("RootFS", {}).get("Layers", [])


def same_everywhere(version: int | str = 1) -> None:
    head, worker = (layers_of(node, reference(version)) for node in spark.NODES)
    assert len(head) == 3 and head == worker


def received(node: str = "spark-2") -> int:
    return int(spark.on(node, "cat", "/sys/class/net/enp1s0f1np1/statistics/rx_bytes"))


nothing_left = spark.nothing_of_a_copy


def forget(*nodes: str) -> None:
    """These nodes never saw an image of the tests."""
    for node in nodes or tuple(spark.NODES):
        spark.shell(
            node,
            "docker images --format '{{.Repository}}:{{.Tag}} {{.ID}}' | grep -v glm | grep -v sglang | awk '{print $2}' | sort -u | xargs -r docker rmi -f;"
            "docker image prune -f >/dev/null; rm -rf /var/lib/dgxspark-serving",
            check=False,
        )


def use_store(node: str, kind: str) -> None:
    daemon = json.loads(spark.on(node, "cat", "/etc/docker/daemon.json"))
    daemon.pop("features", None)
    text = json.dumps({**daemon, **STORES[kind]})
    spark.shell(node, f"cat > /etc/docker/daemon.json <<'END'\n{text}\nEND\nsystemctl reset-failed docker; systemctl restart docker")
    told = spark.on(node, "docker", "info", "--format", "{{json .DriverStatus}}")
    assert ("io.containerd.snapshotter" in told) == (kind == "containerd")


@contextlib.contextmanager
def slow(rate: str = "100mbit") -> t.Iterator[None]:
    """The head sends so slowly that there is a middle of the copy."""
    spark.shell("spark-1", f"tc qdisc replace dev enp1s0f1np1 root tbf rate {rate} burst 256k latency 400ms")
    try:
        yield
    finally:
        spark.shell("spark-1", "tc qdisc del dev enp1s0f1np1 root", check=False)


def until(ready: t.Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@contextlib.contextmanager
def in_background(version: int | str = 1, **over: t.Any) -> t.Iterator[concurrent.futures.Future[spark.Run]]:
    """A run whose copy is in the middle when the block begins."""
    before = received()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(site, version, **over)
        until(lambda: received() - before > 12 * MB or future.done(), "the copy did not begin")
        assert not future.done(), future.result().output
        yield future


@pytest.fixture(scope="module", autouse=True)
def registry() -> t.Iterator[None]:
    for node in spark.NODES:
        spark.shell(node, f"mkdir -p {FOLDER}")
    source = (spark.ROOT / "lab" / "registry.py").read_text(encoding="utf-8")
    subprocess.run(
        ["docker", "exec", "-i", f"{spark.NAME}-spark-1", "sh", "-c", f"cat > {FOLDER}/registry.py"],
        input=source, text=True, check=True, timeout=60,
    )  # fmt: skip
    serve = f"systemd-run --quiet --collect --unit=sparklab-registry python3 {FOLDER}/registry.py serve {FOLDER} {PORT} 0.0.0.0"
    spark.shell("spark-1", f"systemctl stop sparklab-registry 2>/dev/null; {serve}")
    make(1)
    make(2, NEXT)
    yield
    forget()
    spark.shell("spark-1", f"systemctl stop sparklab-registry; rm -rf {FOLDER}")


@pytest.fixture(autouse=True)
def whole() -> t.Iterator[None]:
    """Every test ends with a node that has nothing of a copy on it."""
    fault()
    yield
    fault()


@pytest.fixture(scope="module")
def usual() -> None:
    """The stores of a fresh lab."""
    for node, kind in zip(spark.NODES, ("containerd", "classic"), strict=True):
        use_store(node, kind)
    forget()


@contextlib.contextmanager
def small_disk(node: str, size: str) -> t.Iterator[None]:
    """Docker's data on a file system of this size; the old service is back afterwards."""
    spark.shell(node, f"systemctl stop docker docker.socket; mount -t tmpfs -o size={size} tmpfs /var/lib/docker; systemctl start docker")
    try:
        yield
    finally:
        spark.shell(
            node, "systemctl stop docker docker.socket; umount /var/lib/docker; systemctl reset-failed docker; systemctl start docker"
        )


def nothing_half(node: str = "spark-2") -> None:
    assert not layers_of(node, reference(1))


def finishes() -> None:
    """A rerun finishes, and nothing of the broken one is left."""
    run = site()
    assert run.rc == 0, run.output
    same_everywhere()
    nothing_left()


@pytest.fixture
def empty_worker(usual: None) -> None:
    """The head has the image, the worker not."""
    forget("spark-2")
    if not layers_of("spark-1", reference(1)):
        spark.on("spark-1", "docker", "pull", "-q", reference(1))


def failed(run: spark.Run, node: str, *words: str) -> None:
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message(node)
    for word in (f"{node}: ", "found ", "expected ", "Remedy: ", *words):
        assert word in message, f"{word!r} is not in: {message}"


def blob_of_head(number: int) -> str:
    made = json.loads(
        spark.on("spark-1", "python3", f"{FOLDER}/registry.py", "make", FOLDER, f"{NAME}:1", json.dumps({"layers": LAYERS, "attest": True}))
    )
    return made["layers"][number]["digest"][7:]
