# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The other way for an image to a worker: the head's ``docker save`` straight into ``docker load``, without a file in between.

PRIVATE to the collection. Always the whole image, so it is only the fall-back; see ``_sync_server`` for the other end.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import subprocess
import tempfile
import time
import typing as t

CHUNK = 1 << 20


class Broken(Exception):
    """Why the image did not arrive: ``where`` is "source" (the head), "load" (this node's Docker) or "stall"."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(text)
        self.where = where


class Counted:
    """A stream that knows how much of it was read."""

    def __init__(self, source: http.client.HTTPResponse) -> None:
        self.source = source
        self.bytes = 0

    def read(self, size: int) -> bytes:
        """As a file."""
        data = self.source.read(size)
        self.bytes += len(data)
        return data


def open_archive(address: str, port: int, token: str, timeout: float) -> http.client.HTTPResponse:
    """The head's archive. Raises Broken."""
    try:
        connection = http.client.HTTPConnection(address, port, timeout=timeout)
        connection.request("GET", f"/{token}/archive")
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as exc:
        raise Broken("stall", f"no connection to {address}:{port}: {exc}") from exc
    if response.status != 200:
        raise Broken("denied" if response.status == 403 else "source", f"the server on the head answers {response.status}")
    return response


def load(
    source: t.IO[bytes] | Counted,
    argv: t.Sequence[str],
    *,
    stall: float,
    timeout: float,
    report: t.Callable[[int], None] = lambda count: None,
) -> str:
    """Feed ``source`` to ``docker load``; what it printed. Raises Broken. When the source breaks, the load is ended: Docker then keeps no image."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=told, stderr=subprocess.STDOUT)

        def words() -> str:
            told.seek(0)
            return told.read().decode("utf-8", "replace").strip()

        try:
            _feed(source, process, stall, deadline, report)
            rc = process.wait(max(1.0, min(deadline - time.monotonic(), stall)))
            if rc:
                raise Broken("load", words() or f"docker load ended with {rc}")
            return words()
        except subprocess.TimeoutExpired as exc:
            raise Broken("stall", f"docker load did not end within {exc.timeout:.0f} s after the last byte") from exc
        except BrokenPipeError as exc:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            raise Broken("load", words() or "docker load ended early") from exc
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]


def _feed(source: t.Any, process: subprocess.Popen[bytes], stall: float, deadline: float, report: t.Callable[[int], None]) -> None:
    sink = process.stdin.fileno()  # type: ignore[union-attr]
    os.set_blocking(sink, False)
    while True:
        try:
            data = source.read(CHUNK)
        except (OSError, http.client.HTTPException) as exc:
            raise Broken("source", f"the stream from the head broke off: {exc}") from exc
        if not data:
            break
        report(len(data))
        view = memoryview(data)
        while view:
            if time.monotonic() > deadline or not select.select([], [sink], [], stall)[1]:
                raise Broken("stall", "docker load takes nothing any more")
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(sink, view) :]
    process.stdin.close()  # type: ignore[union-attr]
