# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upgrades whose controller dies in the middle, and the run after it. In this order."""

from __future__ import annotations

import re

import spark
from rolled_back import TOO_LONG, identities, last_message, previous_is_back, record_is_there


def test_an_upgrade_that_was_cut_off_and_then_fails_gives_the_version_before_back() -> None:
    """The controller dies while the new server loads, and the next run cannot start its own either."""
    assert spark.site().rc == 0
    before = identities()
    spark.cut_off(
        lambda: "spark-vllm-previous" in spark.containers("spark-1") and "spark-vllm" in spark.running("spark-1"), spark_max_model_len=512
    )
    assert record_is_there("spark-1")
    previous_is_back(spark.site(spark_max_model_len=TOO_LONG), before)


def test_a_node_that_lacks_memory_when_the_version_before_is_stopped_gives_it_back() -> None:
    """Nothing of it can be known before: what runs holds memory until then. The worker's kernel says what that of a Spark said, with less available."""
    assert spark.site().rc == 0
    before = identities()
    text = (spark.ROOT / "tests" / "unit" / "fixtures" / "node" / "meminfo").read_text(encoding="utf-8")
    text = re.sub(r"^MemAvailable: .*$", f"MemAvailable: {60 << 20} kB", text, flags=re.MULTILINE)
    begin = f"cat >/run/meminfo <<'EOF'\n{text}EOF\nmount --bind /run/meminfo /proc/meminfo"
    with spark.undone("spark-2", begin, "umount /proc/meminfo || true", seconds=600):
        run = spark.site(spark_max_model_len=512, spark_gate={"memory_available": "error", "memory_uneven": "ignore"})
    previous_is_back(run, before)
    for words in (
        "spark-2: memory: found 60.0 GiB of memory available of 121.6 GiB",
        "asks for 97.3 GiB",
        "the most is held by ",
        "(rule memory_available)",
    ):
        assert words in last_message(run)


def test_what_an_upgrade_made_that_was_cut_off_before_the_stop_goes_with_the_next_run() -> None:
    assert spark.site().rc == 0
    before = identities()
    image = spark.inspect("spark-1", "spark-vllm")[0]["Config"]["Image"]
    spark.shell("spark-1", f"docker create --name spark-vllm-next --label dgxspark.serving=1 {image}")
    assert spark.site().rc == 0
    assert "spark-vllm-next" not in spark.containers("spark-1") and identities() == before
    assert spark.site().changed == 0


def test_the_page_cache_is_dropped_between_the_stop_and_the_start() -> None:
    """As on a Spark, where the kernel's page cache is GPU memory: the new server is made before the stop and started after that."""
    assert spark.site().rc == 0
    new = {"spark_max_model_len": 640, "spark_gate": {"memory_available": "ignore", "page_cache": "warn"}}
    assert spark.site(**new).rc == 0
    assert spark.containers("spark-1") == [spark.OLD, "spark-ray", "spark-vllm"] and not record_is_there("spark-1")
    assert spark.call("/v1/models")["data"][0]["max_model_len"] == 640
    assert spark.site(**new).changed == 0


def test_an_upgrade_that_is_proven_leaves_nothing_of_the_version_before() -> None:
    """Cut off too: the next run takes over what it finds loading."""
    spark.cut_off(
        lambda: "spark-vllm-previous" in spark.containers("spark-1") and "spark-vllm" in spark.running("spark-1"), spark_max_model_len=512
    )
    new = spark.inspect("spark-1", "spark-vllm")[0]["Id"]
    assert spark.site(spark_max_model_len=512).rc == 0
    assert spark.containers("spark-1") == [spark.OLD, "spark-ray", "spark-vllm"] and spark.inspect("spark-1", "spark-vllm")[0]["Id"] == new
    assert not record_is_there("spark-1")
    assert spark.call("/v1/models")["data"][0]["max_model_len"] == 512
    assert spark.site(spark_max_model_len=512).changed == 0
