# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast bytes go from one node to another over TCP: a receiver and a sender for a few seconds.

PRIVATE to the collection. Not iperf3: DGX OS does not bring it and a worker has no Internet to get it from, and what is to be told apart (13 Gb/s from 90)
needs no more than this. Threads are enough: both ends spend their time in the kernel, without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import typing as t

CHUNK = 1 << 20
STREAMS = 4
RETRY = 0.1


class Receiver:
    """Takes what comes on these addresses until ``close``; ``wait`` says whether somebody has sent and gone."""

    def __init__(self, addresses: t.Iterable[str], port: int) -> None:
        self._listeners: list[socket.socket] = []
        self._lock = threading.Condition()
        self._open = 0
        self._seen = 0
        try:
            for address in addresses:
                self._listeners.append(socket.create_server((address, port), backlog=STREAMS))
        except OSError:
            self.close()
            raise
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                stream, _peer = listener.accept()
                with self._lock:
                    self._open += 1
                    self._seen += 1
                threading.Thread(target=self._drain, args=(stream,), daemon=True).start()

    def _drain(self, stream: socket.socket) -> None:
        buffer = bytearray(CHUNK)
        with stream, contextlib.suppress(OSError):
            while stream.recv_into(buffer):
                pass
        with self._lock:
            self._open -= 1
            self._lock.notify_all()

    def wait(self, streams: int, seconds: float) -> bool:
        """Until that many streams came and ended; False when they did not within the time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._seen >= streams and not self._open, timeout=seconds)

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _connect(source: str, address: str, port: int, until: float) -> socket.socket:
    """A connection; somebody who does not listen yet is asked again until then. Raises OSError."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.5, until - time.monotonic()), source_address=(source, 0))
        except ConnectionRefusedError:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY)


def send(source: str, address: str, port: int, seconds: float, patience: float = 8.0) -> float:
    """Gb/s from ``source`` to the receiver at ``address``, over some streams at once. Raises OSError when nobody listens within ``patience`` seconds."""
    until = time.monotonic() + patience
    streams = []
    try:
        for _number in range(STREAMS):
            streams.append(_connect(source, address, port, until))
        sent = [0] * len(streams)
        begin = time.monotonic()

        def push(number: int) -> None:
            data = memoryview(bytes(CHUNK))
            streams[number].settimeout(2.0)
            with contextlib.suppress(OSError):  # a stream that broke has sent what it has sent
                while time.monotonic() - begin < seconds:
                    sent[number] += streams[number].send(data)

        threads = [threading.Thread(target=push, args=(number,), daemon=True) for number in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 3)
        return sum(sent) * 8 / 1e9 / max(time.monotonic() - begin, 0.001)
    finally:
        for stream in streams:
            stream.close()
