# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The units of two nodes talk over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _calls

READY = {"unit": "u1", "rank": "r1", "ready": True}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def worker(state, caller="127.0.0.1"):
    """A worker's unit that attends until it is told to start, or the test is over: (port, what it was told)."""
    listener = _calls.Listener("127.0.0.1", free_port(), caller)
    over = threading.Event()
    told = []

    def attend():
        while not over.is_set() and not told:
            if listener.attend(0.1, lambda: state):
                told.append("start")
        listener.close()

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield listener.place[1], told
    finally:
        over.set()
        thread.join(10)


def asked(port, word):
    """Until the other thread listens."""
    for dummy in range(500):
        answer = _calls.call("127.0.0.1", port, word)
        if answer is not None:
            return answer
        time.sleep(0.02)
    return None


def test_a_worker_answers_and_starts():
    with worker(READY) as (port, told):
        assert asked(port, "state") == {**READY, "starts": False} and not told
        assert asked(port, "start") == {**READY, "starts": True}
    assert told == ["start"]


def test_what_is_not_ready_does_not_start():
    with worker({**READY, "ready": False}) as (port, told):
        assert asked(port, "start")["starts"] is False
    assert not told


def test_only_the_head_is_answered():
    with worker(READY, caller="192.0.2.1") as (port, told), contextlib.suppress(ConnectionRefusedError):
        assert [_calls.call("127.0.0.1", port, "start") for dummy in range(20)] == [None] * 20
    assert not told


@pytest.mark.parametrize("sent", [b"", b"rubbish\n", b"\xff\xfe\n", b"start" + b"x" * 5000], ids=["nothing", "rubbish", "bytes", "endless"])
def test_rubbish_neither_starts_nor_ends_it(sent):
    with worker(READY) as (port, told):
        assert asked(port, "state")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(sent)
        assert asked(port, "state") and not told


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400\r\n\r\n", b"[1]\n"], ids=["hangs up", "no JSON", "no state"])
def test_a_stranger_on_the_port_is_no_partner(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, dummy = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        assert _calls.call("127.0.0.1", server.getsockname()[1], "state") is None
        thread.join(10)


def test_nobody_there():
    assert _calls.call("127.0.0.1", free_port(), "state") is None


def test_an_address_that_has_gone_is_waited_for():
    listener = _calls.Listener("192.0.2.1", free_port(), "127.0.0.1")  # not of this machine
    assert listener.attend(0.2, lambda: READY) is False


STATES = {
    "first seen": ([READY], {}),
    "the same": ([READY, READY], {}),
    "its unit was started anew": ([READY, {**READY, "unit": "u2"}], {}),
    "rebooted": ([READY, {**READY, "unit": "u2", "rank": ""}], {"a": "rebooted"}),
    "rebooted and its rank was started": ([READY, {**READY, "unit": "u2", "rank": "r2"}], {"a": "rebooted"}),
    "its rank ended": ([READY, {**READY, "rank": ""}], {"a": "ended"}),
    "silent for a while": ([READY, None, None], {}),
    "silent for long": ([READY, None, None, None], {"a": "away"}),
    "silent, then the same": ([READY, None, None, READY, None, None], {}),
    "never seen": ([None] * 9, {}),
    "no rank yet": ([{**READY, "rank": "", "ready": False}] * 9, {}),
    "its rank was lost before the first look": ([None, None, {**READY, "rank": ""}], {"a": "not started"}),
    "its rank was started after that": ([{**READY, "rank": ""}, READY], {}),
}


@pytest.mark.parametrize("name", STATES)
def test_partners(name):
    answers, left = STATES[name]
    partners = _calls.Partners(["a"], patience=3)
    for answer in answers:
        found = partners.look({"a": answer})
    assert found == left
