# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real rsync on both ends; in place of SSH a script that runs the far command here."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _rsync, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._snapshot import Login

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")

SSH = """#!/bin/sh
echo "$*" >> {root}/ssh.log
[ -e {root}/refuse ] && {{ echo 'Host key verification failed.' >&2; exit 255; }}
while [ $# -gt 0 ]; do case $1 in -o|-c|-l) shift 2;; -*) shift;; *) break;; esac; done
shift
exec "$@"
"""


class Pair:
    """A head's folder whose files are links, and a worker's directories."""

    def __init__(self, root: Path) -> None:
        self.root, self.head, self.staging, self.blobs = root, root / "head", root / "staging", root / "blobs"
        rng = random.Random(5)
        self.data = {f"sub {index}/f{index}": rng.randbytes(size) for index, size in enumerate((900_000, 10, 0, 300_000))}
        self.rows = []
        for path, data in self.data.items():
            blob = hashlib.sha256(data).hexdigest()
            (root / "store").mkdir(exist_ok=True)
            (root / "store" / blob).write_bytes(data)
            (self.head / path).parent.mkdir(parents=True)
            (self.head / path).symlink_to(root / "store" / blob)
            self.rows.append({"path": path, "size": len(data), "blob": blob, "algo": "sha256"})
        self.staging.mkdir()
        self.blobs.mkdir()

    def pull(self, **over: t.Any) -> dict[str, t.Any]:
        target = _transfer.Target(str(self.staging), str(self.blobs), os.getuid(), os.getgid())
        origin = _rsync.Origin("192.0.2.1", "spark", str(self.head))
        login = Login("me", 0, 0, str(self.root))
        return _rsync.pull(self.rows, origin, target, login, **{"streams": 3, "timeout": 60, "stall": 20, "node": "spark-2", **over})


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(root=tmp_path))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Pair(tmp_path)


@needs_rsync
def test_copies_in_streams_and_hashes(pair: Pair) -> None:
    stats = pair.pull()
    assert {path.name: path.read_bytes() for path in pair.blobs.iterdir()} == {row["blob"]: pair.data[row["path"]] for row in pair.rows}
    assert 1_200_010 < stats["bytes_transferred"] < 1_250_000
    assert list(pair.staging.iterdir()) == []
    calls = (pair.root / "ssh.log").read_text().splitlines()
    assert len(calls) == 3 and all("BatchMode=yes" in call and "-l spark 192.0.2.1" in call for call in calls)


@needs_rsync
def test_a_wrong_file_is_never_published_and_the_rest_is_kept(pair: Pair) -> None:
    bad = pair.rows[0]
    (pair.root / "store" / bad["blob"]).write_bytes(b"x" * bad["size"])
    with pytest.raises(Problem) as info:
        pair.pull()
    assert (info.value.id, info.value.node) == ("copy-hash", "spark-2") and bad["path"] in info.value.found
    assert sorted(path.name for path in pair.blobs.iterdir()) == sorted(row["blob"] for row in pair.rows[1:])


@needs_rsync
def test_no_login_on_the_head(pair: Pair) -> None:
    (pair.root / "refuse").touch()
    with pytest.raises(Problem) as info:
        pair.pull()
    assert info.value.id == "sync-rsync" and "Host key verification failed" in info.value.found
    assert "spark@192.0.2.1" in info.value.expected


def test_without_rsync(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(pair.root / "bin"))
    with pytest.raises(Problem) as info:
        pair.pull()
    assert info.value.id == "sync-rsync" and "no command rsync" in info.value.found


def test_shares_are_of_about_equal_size() -> None:
    rows = [{"path": str(size), "size": size} for size in (5, 9, 1, 4, 8, 2)]
    assert [sum(row["size"] for row in part) for part in _rsync.shares(rows, 3)] == [10, 10, 9]
    assert len(_rsync.shares(rows, 99)) == 6 and _rsync.shares([], 3) == [[]]


def test_one_command() -> None:
    command = _rsync.argv(_rsync.Origin("fd00::1", "u", "/data/m"), "/s/.files-0", "/s", 60.0)
    assert command[-2:] == ["u@[fd00::1]:/data/m/", "/s/"]
    assert "--partial-dir=.partial" in command and "--inplace" not in command and "--timeout=60" in command


@pytest.mark.parametrize(("text", "count"), [("x\nTotal bytes received: 1,234,567\n", 1234567), ("Total bytes received: 12", 12), ("", 0)])
def test_received(text: str, count: int) -> None:
    assert _rsync.received(text) == count
