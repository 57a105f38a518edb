# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image on every node: in all four pairs of image stores, only what is missing crosses, and nothing is left behind."""

from __future__ import annotations

import pytest
import spark
from copied_image import (
    ANSIBLE,
    FOLDER,
    LAYERS,
    MB,
    NAME,
    NEXT,
    forget,
    layers_of,
    make,
    nothing_left,
    received,
    reference,
    same_everywhere,
    site,
    small_disk,
    use_store,
)


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


def test_the_whole_image_when_asked(stores: tuple[str, str]) -> None:
    forget("spark-2")
    run = site(1, "-v", spark_image_transport="archive")
    assert run.rc == 0, stores
    assert "method: archive" in run.output
    same_everywhere()
    nothing_left()


def test_of_the_replaced_versions_one_is_kept(usual: None) -> None:
    """The third version of the moved tag: the second is kept under a name of ours, the first goes; what somebody else named stays."""
    make("latest", LAYERS)
    assert site("latest").rc == 0
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


def test_teardown_removes_every_version(usual: None) -> None:
    """After the test before: the present version and the one that was kept; what somebody else named stays. ``--check`` tells and does nothing."""

    def names(node: str) -> set[str]:
        return set(spark.on(node, "docker", "images", "--format", "{{.Repository}}:{{.Tag}}").split())

    wanted = {"spark_image": reference("latest"), "spark_remove_image": True}
    before = {node: names(node) for node in spark.NODES}
    assert any(":dgxspark-" in name for name in before["spark-2"]) and reference("latest") in before["spark-1"]
    check = spark.site("--check", playbook="teardown.yml", **wanted)
    assert check.rc == 0 and {node: names(node) for node in spark.NODES} == before
    for node in spark.NODES:
        assert check.recap[node]["changed"] > 0
    assert spark.site(playbook="teardown.yml", **wanted).rc == 0
    for node in spark.NODES:
        gone = {name for name in before[node] if name == reference("latest") or f"{NAME}:dgxspark-" in name}
        assert names(node) == before[node] - gone and "mine:keep" in names(node)
    again = spark.site(playbook="teardown.yml", **wanted)
    assert (again.rc, again.changed) == (0, 0)


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


def test_another_platform_is_refused_before_the_pull(usual: None) -> None:
    make("odd", [["opt/a", MB, "odd"]], architecture="s390x")
    run = site("odd")
    spark.refused(run, "spark-1", "linux/s390x" if "linux/s390x" in run.text else "no manifest for linux/")
    assert not layers_of("spark-1", reference("odd"))


def test_a_full_disk_of_a_worker_is_refused_before_the_download(usual: None) -> None:
    forget()
    with small_disk("spark-2", "150m"):
        run = site()
    assert run.rc != 0
    message = run.message("spark-2")
    for words in ("spark-2: image_sync: found ", " free at ", "expected at least ", "Remedy: "):
        assert words in message
    assert not layers_of("spark-1", reference(1))  # nothing was downloaded
