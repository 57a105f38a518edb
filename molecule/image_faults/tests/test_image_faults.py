# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the copy of an image, on real daemons and a real network: nothing half-written, and a rerun finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import typing as t

import pytest
import spark
from copied_image import (
    ANSIBLE,
    FOLDER,
    LAYERS,
    MB,
    NAME,
    PORT,
    blob_of_head,
    failed,
    fault,
    finishes,
    forget,
    in_background,
    layers_of,
    make,
    nothing_half,
    nothing_left,
    received,
    reference,
    same_everywhere,
    site,
    slow,
    small_disk,
    until,
)


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
    version = "new-" + "-".join(given)
    make(version, [["opt/n", 60 * MB, version], *LAYERS[1:]])  # a layer that no store keeps of an earlier pull
    fault(**given)
    failed(site(version), "spark-1", words)
    assert not layers_of("spark-1", reference(version))
    fault()
    assert site(version).rc == 0
    assert layers_of("spark-1", reference(version)) == layers_of("spark-2", reference(version)) != []
    nothing_left()


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
