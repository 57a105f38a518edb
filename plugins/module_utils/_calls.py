# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the units of two nodes talk to each other after a boot with the executor mp, which has no Ray that would know who is there.

PRIVATE to the collection. The unit of a worker listens at its fabric address on C(spark_mp_port) (vLLM uses that port on the head only); the
head's unit calls. One line each way: the question C(state) or C(start), the answer in JSON. Only the head's address is answered.
"""

from __future__ import annotations

import json
import socket
import time
import typing as t

LIMIT = 5.0  # seconds for one question and its answer
QUESTIONS = ("state", "start")


class Listener:
    """The worker's side: answers while the unit has nothing else to do."""

    def __init__(self, address: str, port: int, caller: str) -> None:
        self.place = (address, port)
        self.caller = caller
        self.socket: socket.socket | None = None

    def attend(self, seconds: float, state: t.Callable[[], t.Mapping[str, t.Any]], now: t.Callable[[], float] = time.monotonic) -> bool:
        """Answer for so many seconds; True at once when the head says C(start)."""
        end = now() + seconds
        while (left := end - now()) > 0:
            try:
                server = self._open()
                server.settimeout(left)
                connection, peer = server.accept()
            except TimeoutError:
                return False
            except OSError:  # the address has gone with its cable, or the port is held
                self.close()
                time.sleep(min(left, 1.0))
                continue
            with connection:
                if peer[0] == self.caller and self._answer(connection, state):
                    return True
        return False

    def close(self) -> None:
        """Callers are refused from now on."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _open(self) -> socket.socket:
        if self.socket is None:
            self.socket = socket.create_server(self.place, backlog=8)
        return self.socket

    @staticmethod
    def _answer(connection: socket.socket, state: t.Callable[[], t.Mapping[str, t.Any]]) -> bool:
        connection.settimeout(LIMIT)
        try:
            word = _line(connection)
            if word not in QUESTIONS:
                return False
            answer = dict(state())
            starts = word == "start" and bool(answer.get("ready"))
            connection.sendall(json.dumps({**answer, "starts": starts}).encode() + b"\n")
        except OSError:  # the head has hung up: it will call again
            return False
        return starts


def call(address: str, port: int, word: str) -> dict[str, t.Any] | None:
    """The head's side: the answer of a worker's unit, or None."""
    try:
        with socket.create_connection((address, port), timeout=LIMIT) as connection:
            connection.sendall(word.encode() + b"\n")
            answer = json.loads(_line(connection))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _line(connection: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n") and len(text) < 4096:
        got = connection.recv(4096)
        if not got:
            break
        text += got
    return text.decode(errors="replace").strip()


class Partners:
    """What the head knows of the other ranks' nodes. A state: ``{unit, rank, ready}``; another ``unit`` is another start of that unit."""

    def __init__(self, addresses: t.Iterable[str], patience: int) -> None:
        self.addresses = list(addresses)
        self.patience = patience
        self.known: dict[str, tuple[str, str]] = {}
        self.silent: dict[str, int] = {}

    def look(self, answers: t.Mapping[str, t.Mapping[str, t.Any] | None]) -> dict[str, str]:
        """{address: C(away), C(rebooted) or C(ended)} of those that are no more what they were when they were first seen with a rank, and
        C(not started) of those never seen with one whose unit waits for the head's word (the node was lost before the head's unit looked).
        """
        left = {}
        for address in self.addresses:
            answer = answers.get(address)
            if answer is None:
                self.silent[address] = self.silent.get(address, 0) + 1
                if address in self.known and self.silent[address] >= self.patience:
                    left[address] = "away"
                continue
            self.silent[address] = 0
            unit, rank = str(answer.get("unit")), str(answer.get("rank") or "")
            known = self.known.get(address)
            if known is None or rank == known[1]:  # a unit that was started anew beside its rank is no news
                if rank:
                    self.known[address] = (unit, rank)
                elif answer.get("ready"):
                    left[address] = "not started"
            else:
                left[address] = "ended" if unit == known[0] else "rebooted"
        return left

    def forget(self) -> None:
        """The gang is another one from now on."""
        self.known.clear()
        self.silent.clear()
