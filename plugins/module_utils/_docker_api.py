# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Docker daemon's own API, for what its command cannot do: many questions in one round trip, a container from its definition.

PRIVATE to the collection.
"""

from __future__ import annotations

import http.client
import json
import socket
import typing as t

TIMEOUT = 10
SOCKET = "/var/run/docker.sock"


class DockerApi:
    """Requests over the daemon's Unix socket on one connection; a path without version gets the daemon's own newest API."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: http.client.HTTPConnection | None = None

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(TIMEOUT)
            try:
                sock.connect(self._path)
            except OSError:
                sock.close()
                raise
            self._connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
            self._connection.sock = sock
        return self._connection

    def get(self, path: str) -> tuple[int, t.Any]:
        """Status and decoded body (text when it is not JSON). Raises OSError."""
        return self.call("GET", path)

    def call(self, method: str, path: str, data: t.Mapping[str, t.Any] | None = None) -> tuple[int, t.Any]:
        """The same with any method; ``data`` goes as JSON."""
        connection = self._connect()
        headers = {"Host": "docker", **({"Content-Type": "application/json"} if data is not None else {})}
        try:
            connection.request(method, path, json.dumps(data) if data is not None else None, headers)
            response = connection.getresponse()
            body = response.read()
        except http.client.HTTPException as exc:
            raise OSError(f"no HTTP answer to {method} {path}: {exc!r}") from exc
        if response.will_close:
            connection.close()
            self._connection = None
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, body.decode("utf-8", "replace")
