# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the scenarios rollback and rollback_faults have in common."""

from __future__ import annotations

import spark

# More than the model supports: vLLM's parser takes it, so the probe of the image cannot know, and the server refuses it when it starts.
TOO_LONG = 200000
RECORD = f"{spark.STATE}/stopped.json"


def record_is_there(node: str) -> bool:
    return spark.shell(node, f"test -e {RECORD} && echo yes", check=False).strip() == "yes"


def last_message(run: spark.Run) -> str:
    """What the play ended with."""
    return run.message(run.failures[-1], last=True)


def identities() -> dict[str, list[str]]:
    return {node: sorted(c["Id"] for c in spark.inspect(node, *spark.OURS)) for node in spark.NODES}


def previous_is_back(run: spark.Run, before: dict[str, list[str]]) -> None:
    assert run.rc != 0
    assert "The version that ran before (sparklab/tiny-qwen3) serves again." in last_message(run)
    assert identities() == before
    for node, count in (("spark-1", 2), ("spark-2", 1)):
        assert len([name for name in spark.containers(node) if name.startswith("spark-")]) == count
        assert len(spark.on(node, "docker", "volume", "ls", "-q", "--filter", "name=spark-tmp").split()) == 1
        assert not record_is_there(node)
    assert spark.ray_nodes() == [[address, 1.0] for address in spark.NODES.values()]
    spark.answers()
