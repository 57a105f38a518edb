# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parts of ended downloads: which are surely nobody's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _leftovers as leftovers

MOUNTS = """overlay / overlay rw,relatime 0 0
/dev/nvme0n1p2 /home ext4 rw 0 0
nas:/models /home/spark/my\\040models nfs4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
host /mnt/host fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/var/cache", False),
        ("/home/spark/.cache/huggingface", False),
        ("/home/spark/my models/hub", True),
        ("/home/spark/my models", True),
        ("/home/spark/my modelsX", False),
        ("/mnt/host/x", True),
    ],
)
def test_a_disk_of_several_machines(path: str, shared: bool) -> None:
    assert leftovers.on_shared_disk(path, MOUNTS) is shared


def test_mounts_that_tell_nothing() -> None:
    assert leftovers.on_shared_disk("/x", "") and leftovers.on_shared_disk("/x", "junk\n")


@pytest.mark.parametrize(
    ("age", "held", "sees_all", "dead"),
    [
        (61, False, True, True),
        (59, False, True, False),  # closed, and not yet under its name
        (10**6, True, True, False),
        (-5, False, True, False),  # a clock that was set back
        (86399, False, False, False),
        (86401, False, False, True),
        (10**6, True, False, False),
    ],
)
def test_dead(age: float, held: bool, sees_all: bool, dead: bool) -> None:
    part = leftovers.Part("/x", 1, (1, 2), 1000.0)
    assert leftovers.dead([part], {(1, 2)} if held else set(), 1000.0 + age, sees_all) == ([part] if dead else [])


def test_names(tmp_path: Path) -> None:
    for name in ("a.01234567.incomplete", "a.incomplete", "a.0123456g.incomplete", "a.012345678.incomplete", "b" * 64):
        (tmp_path / name).write_bytes(b"")
    assert [os.path.basename(part.path) for part in leftovers.parts_in(str(tmp_path))] == ["a.01234567.incomplete"]
    assert leftovers.parts_in(str(tmp_path / "none")) == []


def test_what_another_process_has_open(tmp_path: Path) -> None:
    path = tmp_path / "a.01234567.incomplete"
    program = "import sys; f = open(sys.argv[1], 'wb'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "open\n"
        os.utime(path, (1, 1))
        assert leftovers.dead_parts(str(tmp_path)) == []
        process.communicate()
    assert [part.path for part in leftovers.dead_parts(str(tmp_path))] == [str(path)]
