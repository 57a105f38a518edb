# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _memory

FIXTURES = pathlib.Path(_memory.__file__).resolve().parents[2] / "tests" / "unit" / "fixtures" / "node"
GIB = 1 << 30
# A Spark after a download of the model: most of the memory is page cache.
CACHED = {"total": 121 * GIB, "free": 18 * GIB, "available": 112 * GIB}


def test_parse():
    memory = _memory.parse((FIXTURES / "meminfo").read_text(encoding="utf-8"))
    assert memory == {"total": 127535084 * 1024, "free": 19000000 * 1024, "available": 117440512 * 1024}
    assert _memory.parse("") == {"total": 0, "free": 0, "available": 0}


@pytest.mark.parametrize(
    ("memory", "need", "expected"),
    [
        (CACHED, 97 * GIB, "cache"),
        (CACHED, 10 * GIB, "enough"),
        ({**CACHED, "available": 60 * GIB}, 97 * GIB, "short"),
        ({**CACHED, "free": 110 * GIB}, 97 * GIB, "enough"),
        ({**CACHED, "free": 110 * GIB}, 112 * GIB, "cache"),
        (CACHED, 112 * GIB + 1, "short"),
        ({}, 97 * GIB, "enough"),
    ],
)
def test_room(memory, need, expected):
    assert _memory.room(memory, need) == expected


def test_top_users():
    texts = [
        "Name:\tearlyoom\nPid:\t19958\nVmRSS:\t    1704 kB\n",
        "Name:\tpython3\nPid:\t812\nVmRSS:\t31562137 kB\n",
        "Name:\tkthreadd\nPid:\t2\n",  # no memory of its own
        "",  # gone
        "Name:\tsshd\nPid:\t9\nVmRSS:\t    9704 kB\n",
    ]
    assert _memory.top_users(texts, 2) == ["python3 (pid 812) 30.1 GiB", "sshd (pid 9) 0.0 GiB"]
