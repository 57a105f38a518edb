# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import stat

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _record
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem


def test_a_record_is_there_as_long_as_there_is_something_in_it(tmp_path):
    path = str(tmp_path / "state" / "stopped.json")
    assert _record.load(path, "spark-1", "stop") is None
    _record.save(path, {"stopped": [], "own": {"spark-ray": {"id": "a"}}})
    assert stat.S_IMODE((tmp_path / "state" / "stopped.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    record = _record.load(path, "spark-1", "stop")
    assert record == {"version": 1, "stopped": [], "own": {"spark-ray": {"id": "a"}}}
    _record.save(path, {"stopped": [], "own": {}})
    _record.save(path, {"stopped": []})
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize("text", ["{broken", "[]", '{"stopped": "x"}'])
def test_what_is_no_record_is_left_alone(tmp_path, text):
    path = tmp_path / "stopped.json"
    path.write_text(text)
    with pytest.raises(Problem) as caught:
        _record.load(str(path), "spark-1", "stop")
    assert caught.value.id == "record-unreadable" and path.read_text() == text
