# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launch to which something happens: the error names it, soon, and what served before serves again."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
import spark

# Ray is started and proven while the old service still serves.
UNTOUCHED = "The old service was not stopped."
SOON = 5.0  # seconds from the kill of a container to the error


@contextlib.contextmanager
def stranger(node: str, *argv: str) -> t.Iterator[None]:
    """A container of somebody else, from our image, with the node's own network."""
    image = spark.settings()["spark_image"]
    spark.on(node, "docker", "run", "-d", "--name", "stranger", "--network", "host", "--entrypoint", argv[0], image, *argv[1:])
    try:
        yield
    finally:
        spark.on(node, "docker", "rm", "-f", "stranger", check=False)


def says(line: str, log_of: str = "spark-vllm") -> bool:
    """Whether the log of a container on the head has this line."""
    return line in spark.shell(spark.HEAD, f"docker logs {log_of} 2>&1", check=False)


def killed(node: str, name: str, ready: t.Callable[[], bool], kills: list[float]) -> t.Callable[[], bool]:
    """Kill a container when it is time; ``kills`` then has the moment."""

    def look() -> bool:
        if not ready():
            return False
        kills.append(time.monotonic())
        spark.on(node, "docker", "kill", name, check=False)
        return True

    return look


def failed(run: spark.Run, *words: str, back: str = "The old service serves again.") -> str:
    """The run ended with one message that has these words; what served before serves, and nothing of ours is left."""
    if back == UNTOUCHED:
        assert "Stop the old service" not in run.output
        spark.old_service_answers()
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message(run.failures[-1], last=True)
    for word in (*words, "Remedy: ", back):
        assert word in message, f"{word!r} is not in: {message}"
    spark.old_service_answers(seconds=30)
    spark.nothing_of_ours()
    return message


# --- a container is killed, at each stage


@pytest.mark.parametrize(
    ("node", "name", "line"),
    [
        pytest.param(spark.WORKER, "spark-ray", "", id="ray of the worker before the cluster is complete"),
        pytest.param(spark.HEAD, "spark-ray", "Initializing a V1 LLM engine", id="ray of the head"),
        pytest.param(spark.WORKER, "spark-ray", "Starting to load model", id="ray of the worker in weights"),
        pytest.param(spark.HEAD, "spark-vllm", "Starting to load model", id="server of the head in weights"),
        pytest.param(spark.WORKER, "spark-ray", "Application startup complete", id="ray of the worker after ready"),
    ],
)
def test_a_container_is_killed_while_the_server_starts(node: str, name: str, line: str) -> None:
    kills: list[float] = []
    ready = (lambda: says(line)) if line else (lambda: name in spark.running(node))
    with spark.meanwhile(killed(node, name, ready, kills)):
        run = spark.site()
    assert kills, "it was not killed"
    found = (f"{node}: ", f"found container {name} exited with code 137")
    failed(run, *found, back="The old service serves again." if line else UNTOUCHED)
    assert run.failed_at() - kills[0] <= SOON
    files = run.bundle
    for other in spark.NODES:
        assert "/spark-ray" in {item["Name"] for item in json.loads(files[f"{other}/inspect.json"])}
        if line:  # one that was killed in its first second has said nothing
            assert {f"{other}/spark-ray.log", f"{other}/ray/raylet.out"} <= set(files)
    assert json.loads(files["diagnosis.json"])["first_ended"]["container"] == name


def test_a_worker_killed_when_all_is_done_is_told_and_mended() -> None:
    assert spark.site().rc == 0
    spark.on(spark.WORKER, "docker", "kill", "spark-ray")
    told = spark.site(playbook="status.yml")
    assert told.rc == 0 and "spark-2: container spark-ray exited with code 137" in told.text
    assert spark.site().rc == 0
    spark.answers()


@pytest.fixture
def old_service() -> None:
    """As the preparation leaves it: the old service on both nodes, nothing of ours."""
    subprocess.run(
        ["ansible-playbook", "-i", str(spark.LAB), str(spark.ROOT / "molecule" / "shared" / "old_service.yml")],
        cwd=spark.ROOT, env=spark.shell_of_a_person(), stdin=subprocess.DEVNULL, check=True, timeout=120,
    )  # fmt: skip


# --- Ray


def test_ray_of_somebody_else_on_our_port(old_service: None) -> None:
    with stranger(spark.HEAD, "ray", "start", "--head", "--block", "--port=6379", "--include-dashboard=false", "--num-gpus=0"):
        spark.shell(spark.HEAD, "for i in $(seq 60); do ss -Htln 'sport = :6379' | grep -q . && exit; sleep 0.5; done; exit 1")
        spark.refused(spark.site(), spark.HEAD, "container stranger", "6379")


def test_a_node_that_joins_ray_under_another_address(old_service: None) -> None:
    """What RAY-01 looks like: Ray knows a node by an address that is not its fabric address."""
    wrong = "192.0.2.7"
    join = f"until ray start --address={spark.NODES[spark.HEAD]}:6379 --node-ip-address={wrong} --num-gpus=0 --block; do sleep 0.5; done"
    spark.shell(spark.WORKER, f"ip address add {wrong}/32 dev lo")
    try:
        with stranger(spark.WORKER, "sh", "-c", join):
            run = spark.site()
    finally:
        spark.shell(spark.WORKER, f"ip address del {wrong}/32 dev lo", check=False)
    failed(
        run,
        f"found {wrong} is in the cluster and not in the plan",
        f"expected exactly {spark.NODES[spark.HEAD]}, {spark.NODES[spark.WORKER]}",
        back=UNTOUCHED,
    )


RESERVE = """
import ray, time
for left in range(60, -1, -1):
    try:
        ray.init(address="auto", log_to_driver=False)
        break
    except Exception:
        if not left:
            raise
        time.sleep(0.5)
from ray.util import placement_group
assert placement_group([{"GPU": 1}], name="holder", lifetime="detached").wait(20)
"""


def test_a_gpu_that_somebody_has_reserved_in_ray(old_service: None) -> None:
    """On the head, before the worker has joined: its way to the head's Ray is closed until then."""
    rule = f"INPUT -p tcp --dport 6379 -s {spark.NODES[spark.WORKER]} -j DROP"

    def reserve() -> bool:
        if "spark-ray" not in spark.running(spark.HEAD):
            return False
        with spark.undone(spark.HEAD, f"iptables -I {rule}", f"iptables -D {rule}"):
            spark.on(spark.HEAD, "docker", "exec", "spark-ray", "python3", "-c", RESERVE)
        return True

    with spark.meanwhile(reserve) as when:
        run = spark.site(spark_ray_timeout=20)
    assert when
    failed(run, f"1 GPU of {spark.NODES[spark.HEAD]} is reserved", "expected every GPU free", back=UNTOUCHED)


# --- image and model


def test_an_image_without_ray(old_service: None) -> None:
    """Refused by the probe, before anything is stopped."""
    image = spark.settings()["spark_image"]
    bare = image.rpartition(":")[0] + ":noray"
    remove = "rm -rf $(python3 -c 'import ray, os; print(os.path.dirname(ray.__file__))')"
    spark.on(spark.HEAD, "docker", "run", "--name", "stranger", "--network", "none", "--entrypoint", "sh", image, "-c", remove)
    spark.on(spark.HEAD, "docker", "commit", "stranger", bare, timeout=300)
    spark.on(spark.HEAD, "docker", "rm", "stranger")
    try:
        run = spark.site(spark_image=bare)
        spark.refused(run, spark.HEAD, "Ray", "spark_executor: mp")
    finally:
        for node in spark.NODES:
            spark.on(node, "docker", "rmi", "-f", bare, check=False)


def test_a_shard_is_missing_on_the_worker(old_service: None) -> None:
    """Lost after it was verified and before it is read."""
    cache = "/home/spark/.cache/huggingface/hub"

    def lose() -> bool:
        if "spark-ray" not in spark.running(spark.WORKER):
            return False
        spark.shell(spark.WORKER, f"ls {cache}/models--*/snapshots/*/*.safetensors | tail -n 1 | xargs readlink -f | xargs rm -v")
        return True

    with spark.meanwhile(lose) as when:
        run = spark.site()
    assert when
    failed(run, "a file of the model is missing or damaged", ".safetensors")
    assert spark.site("--tags", "model,sync").rc == 0  # the remedy


def test_health_is_fine_and_completions_fail(old_service: None) -> None:
    """The lab's image has no compiler. With --enforce-eager it loads, and what a first request compiles cannot be."""
    run = spark.site(spark_env={**spark.settings()["spark_env"], "TORCHDYNAMO_DISABLE": "0"})
    message = failed(run, "compiler", "TORCHDYNAMO_DISABLE=1")
    assert message.startswith("spark-1: completion")  # and not an earlier stage


# --- the connection and the nodes


def test_the_port_is_taken_at_the_last_moment(old_service: None) -> None:
    """After the old service was stopped and before the server binds it. Nothing but the server's own log can tell."""

    def take() -> bool:
        if "spark-vllm" not in spark.running(spark.HEAD):
            return False
        spark.shell(spark.HEAD, "systemd-run --quiet --collect --unit=stranger python3 -m http.server 30000")
        return True

    try:
        with spark.meanwhile(take) as when:
            run = spark.site()
        assert when and run.rc != 0
        message = run.message(run.failures[-1], last=True)
        assert "30000" in message and "could not be brought back" in message
    finally:
        spark.on(spark.HEAD, "systemctl", "stop", "stranger", check=False)


def test_the_run_after_it_brings_the_old_service_back_or_serves() -> None:
    assert spark.site().rc == 0
    spark.answers()


def test_the_controller_dies_while_the_server_loads_and_the_next_run_takes_over(old_service: None) -> None:
    spark.cut_off(lambda: "spark-vllm" in spark.running(spark.HEAD) and says("Initializing a V1 LLM engine"))
    before = spark.ours()
    run = spark.site()
    assert run.rc == 0 and spark.ours() == before
    spark.answers()
    assert spark.site().changed == 0


def test_ssh_is_cut_for_a_minute_while_the_server_loads(old_service: None) -> None:
    rule = "INPUT -p tcp --dport 22 -j DROP"

    def cut() -> bool:
        if not says("Initializing a V1 LLM engine"):
            return False
        # Its first process stands still meanwhile: the lab's model would be loaded before the minute is over.
        spark.on(spark.HEAD, "docker", "kill", "--signal", "STOP", "spark-vllm")
        with spark.undone(spark.HEAD, f"iptables -I {rule}", f"iptables -D {rule}", seconds=120):
            time.sleep(60)
        spark.on(spark.HEAD, "docker", "kill", "--signal", "CONT", "spark-vllm")
        return True

    with spark.meanwhile(cut) as when:
        run = spark.site()
    assert when and run.rc == 0, "the run did not survive the cut"
    assert "does not answer" in run.text
    spark.answers()


def test_a_node_that_stops_answering(old_service: None, tmp_path: Path) -> None:
    container = f"{spark.NAME}-{spark.WORKER}"

    def freeze() -> bool:
        if not says("Initializing a V1 LLM engine"):
            return False
        # A paused node of the lab does not stop the containers in it: without this, the server would get ready.
        spark.on(spark.HEAD, "docker", "kill", "--signal", "STOP", "spark-vllm")
        subprocess.run(["docker", "pause", container], check=True, timeout=60, capture_output=True)
        return True

    try:
        with spark.meanwhile(freeze) as when:
            run = spark.site(vllm_server_unreachable_grace=20, spark_diagnostics_dir=str(tmp_path / "bundles"))
    finally:
        subprocess.run(["docker", "unpause", container], check=False, timeout=60, capture_output=True)
    assert when and run.rc != 0 and "Traceback" not in run.output
    message = run.message(run.failures[-1], last=True)
    for word in ("spark-2: ", "the node did not answer for", "Remedy: ", "The old service serves again.", "spark-2 did not answer"):
        assert word in message, f"{word!r} is not in: {message}"
    assert "spark-2 did not answer" in run.bundle["spark-2/NOT-REACHED.txt"]
    assert "zai-org/GLM-4.7-FP8" in spark.on(spark.HEAD, "curl", "-s", "-m", "5", "http://127.0.0.1:30000/v1/models")


def test_the_run_after_it_serves_on_all_nodes() -> None:
    assert spark.site(new_connections=True).rc == 0
    spark.answers()
