# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image on every node: in all four pairs of image stores, only what is missing crosses, and nothing is left behind. Then the faults, on real
daemons and a real network."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
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


# --- what the tests stand on ------------------------------------------------------------------------------------------------


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


def nothing_left() -> None:
    """No server, relay, unit, temporary name or staged file on any node."""
    for node in spark.NODES:
        assert spark.shell(node, "systemctl list-units --all --plain --no-legend 'dgxspark*'") == ""
        left = spark.shell(node, "find /run/dgxspark-serving /var/lib/dgxspark-serving/images -not -type d 2>/dev/null || true").split()
        assert [path for path in left if not path.endswith(".lock")] == []
        names = spark.on(node, "docker", "images", "--digests", "--format", "{{.Repository}}")
        assert "/app\n" not in names.replace(f"127.0.0.1:{PORT}/{NAME}\n", "")
        assert "docker pull" not in spark.shell(node, "ps -eo args | grep -v grep || true")


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


# --- four pairs of stores ---------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=[("containerd", "classic"), ("containerd", "containerd"), ("classic", "containerd"), ("classic", "classic")]
)
def stores(request: pytest.FixtureRequest) -> tuple[str, str]:
    for node, kind in zip(spark.NODES, request.param, strict=True):
        use_store(node, kind)
    forget()
    return request.param


def test_the_image_arrives(stores: tuple[str, str]) -> None:
    before = received()
    run = site()
    assert run.rc == 0, stores
    same_everywhere()
    nothing_left()
    assert 100 * MB <= received() - before <= 100 * MB + ANSIBLE


def test_the_second_run_moves_nothing(stores: tuple[str, str]) -> None:
    before = received()
    run = site()
    assert (run.rc, run.changed) == (0, 0), stores
    assert received() - before <= ANSIBLE
    assert "Copy the image over the fabric" not in run.output and "Ensure the worker has" not in run.output


def test_a_changed_layer_alone_moves(stores: tuple[str, str]) -> None:
    before = received()
    assert site(2).rc == 0, stores
    same_everywhere(2)
    nothing_left()
    assert 40 * MB <= received() - before <= 1.1 * 40 * MB + ANSIBLE


def test_of_the_replaced_versions_one_is_kept(stores: tuple[str, str]) -> None:
    """The third version of the moved tag: the second is kept under a name of ours, the first goes; what somebody else named stays."""
    make("latest", LAYERS)
    assert site("latest").rc == 0, stores
    for node in spark.NODES:
        spark.on(node, "docker", "tag", reference("latest"), "mine:keep")
    names = {}
    for seed in ("c3", "c4"):
        made = make("latest", [*LAYERS[:2], ["opt/c", MB, seed]])
        spark.on("spark-1", "docker", "pull", "-q", reference("latest"))
        assert made["manifest"]
        assert site("latest").rc == 0
        names = {node: spark.on(node, "docker", "images", "--format", "{{.Repository}}:{{.Tag}}").split() for node in spark.NODES}
    worker = [name for name in names["spark-2"] if ":dgxspark-" in name]
    assert len(worker) == 1
    assert "mine:keep" in names["spark-2"] and "mine:keep" in names["spark-1"]
    nothing_left()


def test_the_whole_image_when_asked(stores: tuple[str, str]) -> None:
    forget("spark-2")
    run = site(1, "-v", spark_image_transport="archive")
    assert run.rc == 0, stores
    assert "method: archive" in run.output
    same_everywhere()
    nothing_left()


# --- from a file ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual() -> None:
    """The stores of a fresh lab."""
    for node, kind in zip(spark.NODES, ("containerd", "classic"), strict=True):
        use_store(node, kind)
    forget()


def test_an_image_from_a_file(usual: None) -> None:
    """Whatever name is in it; a second run finds it loaded, another version in the file replaces it."""
    path = f"{FOLDER}/app.tar"
    wanted = {"image": "acme/from-file:prod", "spark_image_file": path}
    for version, layers in ((1, LAYERS), (2, NEXT)):
        spark.on("spark-1", "python3", f"{FOLDER}/registry.py", "tar", FOLDER, f"{NAME}:{version}", path)
        run = site(**wanted)
        assert run.rc == 0
        found = [layers_of(node, "acme/from-file:prod") for node in spark.NODES]
        assert found[0] == found[1] and len(found[0]) == len(layers)
        again = site(**wanted)
        assert (again.rc, again.changed) == (0, 0)
        nothing_left()
    assert "file" in spark.refused_text(site(image="acme/from-file:prod", spark_image_file="/nowhere/app.tar"))
    spark.shell("spark-1", f"rm {path}")


# --- refused before anything is copied --------------------------------------------------------------------------------------


def test_another_platform_is_refused_before_the_pull(usual: None) -> None:
    make("odd", [["opt/a", MB, "odd"]], architecture="s390x")
    run = site("odd")
    spark.refused(run, "spark-1", "linux/s390x" if "linux/s390x" in run.text else "no manifest for linux/")
    assert not layers_of("spark-1", reference("odd"))


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


def test_a_full_disk_of_a_worker_is_refused_before_the_download(usual: None) -> None:
    forget()
    with small_disk("spark-2", "150m"):
        run = site()
    assert run.rc != 0
    message = run.message("spark-2")
    for words in ("spark-2: image_sync: found ", " free at ", "expected at least ", "Remedy: "):
        assert words in message
    assert not layers_of("spark-1", reference(1))  # nothing was downloaded


# --- faults on the way ------------------------------------------------------------------------------------------------------


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


def test_the_pull_of_the_worker_is_killed(empty_worker: None) -> None:
    with slow(), in_background() as future:
        spark.shell("spark-2", "pkill -KILL -x -f 'docker pull 127.0.0.1:.*'")
        run = future.result()
    failed(run, "spark-2", "killed by signal 9")
    nothing_half()
    finishes()


def test_the_server_of_the_head_is_killed(empty_worker: None) -> None:
    with slow(), in_background() as future:
        spark.shell("spark-1", "systemctl kill -s KILL 'dgxspark-sync-image*'")
        run = future.result()
    failed(run, "spark-2", "no connection to")
    nothing_half()
    finishes()


def test_a_link_that_is_cut_for_some_seconds(empty_worker: None) -> None:
    with slow(), in_background() as future:
        spark.shell("spark-2", "ip link set enp1s0f1np1 down; sleep 15; ip link set enp1s0f1np1 up")
        run = future.result()
    assert run.rc == 0, run.output
    same_everywhere()
    nothing_left()


def test_the_disk_of_the_worker_gets_full(empty_worker: None) -> None:
    with small_disk("spark-2", "280m"):
        with slow(), in_background() as future:
            spark.shell("spark-2", "dd if=/dev/zero of=/var/lib/docker/ballast bs=1M 2>/dev/null", check=False)
            run = future.result()
        failed(run, "spark-2", "disk of Docker's data is full")
        nothing_half()
        spark.shell("spark-2", "rm /var/lib/docker/ballast")
        finishes()


def test_the_worker_loses_its_docker(empty_worker: None) -> None:
    """Docker is back after a moment: the pull is tried again. Else the message says what Docker said."""
    with slow(), in_background() as future:
        spark.shell("spark-2", "systemctl kill -s KILL docker; sleep 1; systemctl reset-failed docker; systemctl start docker")
        run = future.result()
    if run.rc:
        failed(run, "spark-2")
    finishes()


def blob_of_head(number: int) -> str:
    made = json.loads(
        spark.on("spark-1", "python3", f"{FOLDER}/registry.py", "make", FOLDER, f"{NAME}:1", json.dumps({"layers": LAYERS, "attest": True}))
    )
    return made["layers"][number]["digest"][7:]


def test_a_damaged_layer_on_the_disk_of_the_head(empty_worker: None) -> None:
    path = f"/var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/{blob_of_head(2)}"
    flip = (
        f"python3 - <<'END'\nf = open('{path}', 'r+b'); f.seek(20000000); b = f.read(1); f.seek(20000000); f.write(bytes([b[0] ^ 1]))\nEND"
    )
    spark.shell("spark-1", flip)
    try:
        run = site()
        failed(run, "spark-2", "another content than its digest says", "damaged on the head's disk")
        nothing_half()
    finally:
        spark.shell("spark-1", flip)
    finishes()


def test_two_plays_at_once(empty_worker: None) -> None:
    """One of them may be refused when the other one ends the server first; it says so, and the next run finishes."""
    with slow(), in_background() as future:
        second = site()
        first = future.result()
    assert first.rc == 0
    if second.rc:
        failed(second, "spark-2")
    finishes()


def test_the_controller_is_killed_and_the_play_started_again(empty_worker: None) -> None:
    before = received()
    argv = ["ansible-playbook", str(spark.SITE), "-i", str(spark.LAB), "--tags", "image"]
    argv += ["-e", json.dumps({"spark_image": reference(1), "image_sync_inside": False})]
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "MOLECULE_"))},
        "ANSIBLE_CONFIG": str(spark.ROOT / "ansible.cfg"),
    }
    with slow():
        process = subprocess.Popen(
            argv,
            cwd=spark.ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(lambda: received() - before > 12 * MB, "the copy did not begin")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        run = site()
    assert run.rc == 0, run.output
    same_everywhere()
    assert received() - before <= 1.1 * 100 * MB + 2 * ANSIBLE  # the first copy went on, the second waited for it
    nothing_left()


# --- faults of the registry -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"status": 429}, "limits this address"),
        ({"status": 404}, "does not have this image"),
        ({"cut": 20 * MB}, "broke off in the middle"),
        ({"flip": True}, "another content than its digest says"),
    ],
)
def test_a_registry_that_misbehaves(usual: None, given: dict[str, t.Any], words: str) -> None:
    forget()
    fault(**given)
    failed(site(), "spark-1", words)
    nothing_half("spark-1")
    fault()
    finishes()


def test_a_registry_without_tls(usual: None) -> None:
    """Plain HTTP is for 127.0.0.0/8 only."""
    host = f"{spark.NODES['spark-1']}:{PORT}"
    failed(site(image=f"{host}/{NAME}:1"), "spark-1", "plain HTTP")


def test_the_tag_moves_during_the_run(empty_worker: None) -> None:
    """The worker gets what the head had when it was asked: content, not a name."""
    with slow(), in_background() as future:
        spark.shell("spark-1", f"cp {FOLDER}/tags/acme~app~2 {FOLDER}/tags/acme~app~1")
        spark.on("spark-1", "docker", "pull", "-q", reference(1))
        run = future.result()
    assert run.rc == 0, run.output
    moved = layers_of("spark-1", reference(1))
    assert layers_of("spark-2", reference(1)) != moved
    make(1)
    assert site().rc == 0  # the next run sees the difference
    assert layers_of("spark-2", reference(1)) == moved
    nothing_left()
    forget()
