# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Over loopback."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _throughput as tp


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_what_is_sent_is_received(port):
    receiver = tp.Receiver(["127.0.0.1", "127.0.0.2"], port)
    try:
        assert tp.send("127.0.0.1", "127.0.0.1", port, 0.1) > 0
        assert tp.send("127.0.0.1", "127.0.0.2", port, 0.1) > 0
        assert receiver.wait(2 * tp.STREAMS, 5) is True
        assert receiver.wait(2 * tp.STREAMS + 1, 0.01) is False
    finally:
        receiver.close()
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_a_receiver_that_comes_later_is_waited_for(port):
    late = []
    timer = threading.Timer(0.3, lambda: late.append(tp.Receiver(["127.0.0.1"], port)))
    timer.start()
    try:
        assert tp.send("127.0.0.1", "127.0.0.1", port, 0.1) > 0
    finally:
        timer.join()
        late[0].close()


def test_nobody_there_is_an_error_in_time(port):
    begin = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        tp.send("127.0.0.1", "127.0.0.1", port, 0.1, patience=0.2)
    assert time.monotonic() - begin < 5


def test_one_address_that_is_not_here_frees_the_others(port):
    with pytest.raises(OSError):
        tp.Receiver(["127.0.0.1", "192.0.2.1"], port)
    with socket.create_server(("127.0.0.1", port)):
        pass
