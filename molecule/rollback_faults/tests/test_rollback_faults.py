# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upgrades whose controller dies in the middle, and the run after it. In this order."""

from __future__ import annotations

import spark
from rolled_back import TOO_LONG, identities, previous_is_back, record_is_there


def test_an_upgrade_that_was_cut_off_and_then_fails_gives_the_version_before_back() -> None:
    """The controller dies while the new server loads, and the next run cannot start its own either."""
    assert spark.site().rc == 0
    before = identities()
    spark.cut_off(
        lambda: "spark-vllm-previous" in spark.containers("spark-1") and "spark-vllm" in spark.running("spark-1"), spark_max_model_len=512
    )
    assert record_is_there("spark-1")
    previous_is_back(spark.site(spark_max_model_len=TOO_LONG), before)


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
