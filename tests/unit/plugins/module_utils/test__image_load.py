# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Feeding an archive to a command that stands for ``docker load``."""

from __future__ import annotations

import http.client
import io
import os
import socket
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _image_load

COUNT = "import sys; n = len(sys.stdin.buffer.read()); print('Loaded', n)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def load(source: t.Any, code: str, stall: float = 20.0, timeout: float = 20.0, **more: t.Any) -> str:
    return _image_load.load(source, python(code), stall=stall, timeout=timeout, **more)


class Breaks(io.RawIOBase):
    """A stream that breaks off after some blocks."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.blocks = 3

    def read(self, size: int = -1) -> bytes:
        self.blocks -= 1
        if self.blocks < 0:
            raise self.error
        return b"x" * 1000


def test_everything_arrives() -> None:
    seen: list[int] = []
    assert load(io.BytesIO(b"x" * 5_000_000), COUNT, report=seen.append) == "Loaded 5000000"
    assert sum(seen) == 5_000_000


@pytest.mark.parametrize(
    ("source", "code", "limits", "where", "text"),
    [
        (Breaks(http.client.IncompleteRead(b"")), COUNT, {}, "source", "broke off"),
        (Breaks(TimeoutError("timed out")), COUNT, {}, "source", "timed out"),
        (io.BytesIO(b"x"), COUNT + "; print('no space left on device'); sys.exit(1)", {}, "load", "no space left on device"),
        (io.BytesIO(b"x" * 9_000_000), "import sys; print('bad archive'); sys.exit(1)", {}, "load", "bad archive"),
        (io.BytesIO(b"x" * 9_000_000), "import time; time.sleep(60)", {"stall": 0.2}, "stall", "takes nothing"),
        (io.BytesIO(b"x"), "import time; time.sleep(60)", {"stall": 0.2}, "stall", "did not end"),
    ],
)
def test_what_breaks_is_told_apart(source: t.Any, code: str, limits: dict[str, float], where: str, text: str) -> None:
    with pytest.raises(_image_load.Broken, match=text) as caught:
        load(source, code, **limits)
    assert caught.value.where == where


def test_a_load_whose_source_broke_is_ended(tmp_path: Path) -> None:
    """An archive that stops in the middle must not look like its end to Docker."""
    code = f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); sys.stdin.buffer.read(); open({str(tmp_path / 'end')!r}, 'w')"

    class Later(Breaks):
        def read(self, size: int = -1) -> bytes:
            if self.blocks == 0:
                while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                    pass
            return super().read(size)

    with pytest.raises(_image_load.Broken):
        load(Later(OSError("reset")), code)
    assert not (tmp_path / "end").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(_image_load.Broken, match=f"no connection to 127.0.0.1:{port}") as caught:
        _image_load.open_archive("127.0.0.1", port, "t", 5)
    assert caught.value.where == "stall"
