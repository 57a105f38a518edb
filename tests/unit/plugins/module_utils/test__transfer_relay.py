# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The relay of the image's pull when the head goes away without a word."""

from __future__ import annotations

import socket
import typing as t

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _transfer


def test_a_dead_head_is_noticed_but_not_a_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel asks a silent head, and gives up after more than 20 s (a cable that was out) and before Ansible's own patience ends."""
    made: list[socket.socket] = []
    connect = socket.create_connection

    def create(*args: t.Any, **kwargs: t.Any) -> socket.socket:
        made.append(connect(*args, **kwargs))
        return made[-1]

    with (
        socket.create_server(("127.0.0.1", 0)) as head,
        _transfer.Relay("127.0.0.1", head.getsockname()[1]) as relay,
        connect(("127.0.0.1", relay.port)) as near,
    ):
        monkeypatch.setattr(socket, "create_connection", create)
        near.sendall(b"GET / HTTP/1.1\r\n\r\n")
        far_end = head.accept()[0]
        assert far_end.recv(100).startswith(b"GET / ")  # so everything is set
        (far,) = made
        option = {
            name: far.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        }
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 20 < option["TCP_KEEPIDLE"] + option["TCP_KEEPINTVL"] * option["TCP_KEEPCNT"] <= 90
        assert relay.links == 1
        far_end.close()
