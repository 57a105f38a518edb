# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import tarfile

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _bundle as b
from ansible_collections.dgxspark.serving.plugins.module_utils._redact import REMOVED


def test_a_short_text_is_kept_as_it_is():
    assert b.clip("a\nb\n", 4) == "a\nb\n"


def test_of_a_long_text_the_beginning_and_the_end_stay_in_whole_lines():
    lines = [f"line {number:04}" for number in range(1000)]
    done = b.clip("\n".join(lines), 1000)
    kept = done.splitlines()
    assert len(done) < 1100 and kept[0] == "line 0000" and kept[-1] == "line 0999"
    (gap,) = [line for line in kept if line not in lines]
    assert "characters left out" in gap and kept.index(gap) < len(kept) / 2  # more of the end, where the failure is


def test_evidence_has_no_secret_that_inspect_names():
    inspected = [{"Config": {"Env": ["MY_TOKEN=verysecretvalue"]}}]
    found = b.evidence([("spark-vllm.log", "it read verysecretvalue\nHF_TOKEN=x1\n"), ("empty", "")], inspected)
    assert list(found) == ["inspect.json", "spark-vllm.log"]
    assert json.loads(found["inspect.json"])[0]["Config"]["Env"] == [f"MY_TOKEN={REMOVED}"]
    assert found["spark-vllm.log"] == f"it read {REMOVED}\nHF_TOKEN={REMOVED}\n"


def test_evidence_is_bounded_and_says_what_is_not_there(monkeypatch):
    monkeypatch.setattr(b, "MOST_OF_A_FILE", 1000)
    monkeypatch.setattr(b, "MOST_OF_A_NODE", 2500)
    found = b.evidence((f"{number}.log", "x" * 5000) for number in range(5))
    assert sum(map(len, found.values())) < 3500
    assert "4.log (5000 characters)" in found["left-out.txt"] and "4.log" not in found
    monkeypatch.setattr(b, "MOST_FILES", 2)
    assert list(b.evidence((f"{number}.log", "x") for number in range(4))) == ["0.log", "1.log", "left-out.txt"]


def test_contents():
    files = b.contents(
        {"spark-1": {"spark-vllm.log": "a", "ray/../worker 1.out": "b"}, "spark-2": None},
        {"settings": {"spark-1": {"api_key": "secretvalue1", "env": {"A": "secretvalue1"}}}},
        "spark-1: it broke, token=abc",
    )
    assert sorted(files) == [
        "message.txt",
        "settings.json",
        "spark-1/ray/_/worker_1.out",
        "spark-1/spark-vllm.log",
        "spark-2/NOT-REACHED.txt",
    ]
    assert "spark-2 did not answer" in files["spark-2/NOT-REACHED.txt"]
    assert files["message.txt"] == f"spark-1: it broke, token={REMOVED}\n"
    assert json.loads(files["settings.json"]) == {"spark-1": {"api_key": REMOVED, "env": {"A": REMOVED}}}


def test_publish(tmp_path):
    folder = tmp_path / "a" / "b"
    path = b.publish(str(folder), "20261130T190000Z", {"x/y.log": "text\udcff"}, 1.0)
    assert path == str(folder / "spark-diagnostics-20261130T190000Z.tar.gz")
    assert os.stat(path).st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    with tarfile.open(path) as tar:
        (member,) = tar.getmembers()
        assert member.name == "spark-diagnostics-20261130T190000Z/x/y.log" and member.mode == 0o600
    again = b.publish(str(folder), "20261130T190000Z", {"z": ""}, 1.0)
    assert again.endswith("Z-1.tar.gz") and sorted(os.listdir(folder)) == sorted(map(os.path.basename, (path, again)))


def test_nothing_half_is_left_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*dummy):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(b, "archive", full)
    with pytest.raises(OSError):
        b.publish(str(tmp_path), "20261130T190000Z", {"z": ""}, 1.0)
    assert os.listdir(tmp_path) == []


def bundle(second, number=""):
    return f"spark-diagnostics-20261130T1900{second:02}Z{number}.tar.gz"


@pytest.mark.parametrize(
    ("names", "keep", "gone"),
    [
        ([], 2, []),
        ([bundle(3), bundle(1), bundle(2)], 2, [bundle(1)]),
        ([bundle(3), bundle(1), bundle(2)], 3, []),
        ([bundle(1, "-1"), bundle(1), bundle(1, "-10"), bundle(1, "-2")], 2, [bundle(1), bundle(1, "-1")]),
        ([bundle(1), bundle(2), "notes.txt", "spark-diagnostics-mine.tar.gz", ".part-x"], 1, [bundle(1)]),
        ([bundle(1), bundle(2)], 0, [bundle(1)]),  # the one that was just written stays
    ],
)
def test_what_is_pruned(names, keep, gone, tmp_path):
    assert b.too_many(names, keep) == gone
    for name in names:
        (tmp_path / name).touch()
    assert b.prune(str(tmp_path), keep) == gone
    assert sorted(os.listdir(tmp_path)) == sorted(set(names) - set(gone))
