# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read-only server of one model's or one image's blobs, for the length of a play.

PRIVATE to the collection. This file is also the program that runs on the head: its source is written there and started as a transient
systemd unit, so it
uses the standard library only and imports nothing of the collection.

``python3 _sync_server.py CONFIG``; CONFIG (JSON, mode 0600)::

    {"what": "model"|"image", "bind": "192.168.200.12", "port": 0, "token": "<32 hex digits>", "peers": ["192.168.200.13"],
     "lifetime": 3600, "idle": 900, "state": "/run/…/x.state", "manifest_digest": "…",
     "blobs": {"<hash>": {"path": "/…", "size": 123, "also": ["/…"], "part": "/…"}},
     "manifests": {"sha256:…": "application/vnd.oci.image.manifest.v1+json"}}

Model: ``/<token>/blobs/<hash>``. Image (OCI distribution, pull only): ``/v2/``, ``/v2/<token>/app/manifests/sha256:…``,
``/v2/<token>/app/blobs/sha256:…``, and ``/<token>/archive``: what the command ``archive`` of the config
prints (``docker save``), in chunks, without the last chunk when the command failed.
Both: ``/<token>/stats``. GET and HEAD only, one Range; only names of the config; a client whose address is not a peer (or this node itself)
is refused.

A blob with ``part`` (and whole under ``path`` or one of ``also``) may still be arriving on this node: what is there is sent at once and
the rest as it comes, so that workers can stand in a chain. Nobody trusts it, because everyone hashes what it receives.

The server ends by itself after its lifetime, or when nobody asked for ``idle`` seconds: a play that was killed leaves nothing for long.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import typing as t

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_BLOCK = 1 << 24
_IDLE_SECONDS = 120
# How long a request waits for a blob that has not begun to arrive, and for more of one that has.
APPEAR_SECONDS = 5.0
GROW_SECONDS = 10.0


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """First and last byte for a Range header of one range; the whole file without one. None: not satisfiable (416). A malformed one is
    ignored (RFC 9110).
    """
    whole = (0, size - 1)
    match = _RANGE.fullmatch(header.strip()) if header else None
    if not match or not (match[1] or match[2]):
        return whole
    if not match[1]:
        count = int(match[2])
        return (max(0, size - count), size - 1) if count and size else None
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if first >= size:
        return None
    return (first, last) if last >= first else whole


def blob_of(path: str, config: t.Mapping[str, t.Any]) -> tuple[str, str]:
    """``(kind, name)`` for a request path: kind is ping, stats, archive, blob, manifest, "" (unknown) or token (wrong token)."""
    if config["what"] == "image" and path in ("/v2/", "/v2"):
        return "ping", ""
    image = re.fullmatch(r"/v2/([^/]+)/app/(manifests|blobs)/sha256:([0-9a-f]{64})", path)
    model = re.fullmatch(r"/([^/]+)/(?:(stats|archive)|blobs/([0-9a-f]{40,64}))", path)
    token = image[1] if image else model[1] if model else ""
    if not token or not hmac.compare_digest(token.encode(), str(config["token"]).encode()):
        return "token", ""
    if image:
        return ("manifest" if image[2] == "manifests" else "blob"), image[3]
    if model and model[2]:
        return (model[2] if model[2] == "stats" or config.get("archive") else ""), ""
    return ("blob", model[3]) if model and config["what"] == "model" else ("", "")


class Handler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD; everything else is refused by the base class (501)."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # so that nonsense is answered with a status line, not as HTTP/0.9
    server_version = "dgxspark-sync"
    sys_version = ""
    timeout = _IDLE_SECONDS
    server: Server

    def log_message(self, format: str, *args: t.Any) -> None:  # noqa: A002  # pylint: disable=redefined-builtin
        """No access log: the path holds the token."""

    def do_GET(self) -> None:  # pylint: disable=invalid-name
        """Headers and body."""
        self._answer(True)

    def do_HEAD(self) -> None:  # pylint: disable=invalid-name
        """Headers only."""
        self._answer(False)

    def _small(self, status: int, body: bytes, send: bool, headers: t.Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if send:
            self.wfile.write(body)

    def _error(self, status: int, reason: str, send: bool) -> None:
        code = {"blob": "BLOB_UNKNOWN", "manifest": "MANIFEST_UNKNOWN"}.get(reason, "DENIED")
        body = json.dumps({"errors": [{"code": code, "message": reason}]}).encode()
        self._small(status, body, send, {"X-Reason": reason})

    def handle(self) -> None:
        """All requests of one connection: as long as there is one, the server is not idle."""
        with self.server.busy():
            super().handle()

    def _answer(self, send: bool) -> None:
        config = self.server.config
        peer = self.client_address[0]
        if peer not in config["peers"] and peer != self.server.server_address[0]:
            self.close_connection = True
            return self._error(403, "peer", send)
        kind, name = blob_of(self.path, config)
        if kind == "ping":
            return self._small(200, b"{}", send, {"Docker-Distribution-API-Version": "registry/2.0"})
        if kind == "token":
            self.close_connection = True
            return self._error(403, "token", send)
        if kind == "stats":
            return self._small(200, json.dumps(self.server.stats()).encode(), send)
        if kind == "archive":
            return self._archive(config["archive"], send)
        entry = config["blobs"].get(name)
        media = "application/octet-stream"
        if kind == "manifest":
            media = config.get("manifests", {}).get(f"sha256:{name}", "")
        if entry is None or kind == "" or not media:
            return self._error(404, kind or "path", send)
        return self._file(name, entry, media, send)

    def _archive(self, argv: t.Sequence[str], send: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-tar")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if not send:
            return
        self.close_connection = True
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                while data := process.stdout.read(1 << 20):  # type: ignore[union-attr]
                    self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
                    self.server.count(self.client_address[0], len(data))
                if process.wait() == 0:
                    self.wfile.write(b"0\r\n\r\n")
            finally:
                if process.poll() is None:
                    process.kill()

    @staticmethod
    def _arriving(entry: t.Mapping[str, t.Any]) -> int | None:
        """The whole file, else the part of it that is there, as soon as there is one."""
        deadline = time.monotonic() + APPEAR_SECONDS
        while True:
            for path in (entry["path"], *entry.get("also", ()), entry["part"]):
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if path == entry["part"] or os.fstat(fd).st_size == entry["size"]:
                        return fd
                    os.close(fd)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def _file(self, name: str, entry: t.Mapping[str, t.Any], media: str, send: bool) -> None:
        size = int(entry["size"])
        if "part" in entry:
            found = self._arriving(entry)
            if found is None:
                return self._error(503, "later", send)
            fd = found
        else:
            try:
                fd = os.open(entry["path"], os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return self._error(404, "blob", send)
        try:
            if "part" not in entry and os.fstat(fd).st_size != size:
                return self._error(409, "changed", send)
            span = parse_range(self.headers.get("Range", ""), size)
            if span is None:
                return self._small(416, b"", send, {"Content-Range": f"bytes */{size}"})
            first, last = span
            partial = last - first + 1 != size
            self.send_response(206 if partial else 200)
            if partial:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Content-Type", media)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{name}"')
            if self.server.config["what"] == "image":
                self.send_header("Docker-Content-Digest", f"sha256:{name}")
            self.end_headers()
            if send:
                self._send(fd, first, last - first + 1, "part" in entry)
        finally:
            os.close(fd)

    def _grown(self, fd: int, offset: int) -> int:
        """Bytes behind ``offset``, waiting for the first of them; 0 when none came or the file was begun anew."""
        deadline = time.monotonic() + GROW_SECONDS
        while True:
            there = os.fstat(fd).st_size - offset
            if there > 0 or time.monotonic() >= deadline:
                return max(0, there)
            if there < 0:
                return 0
            time.sleep(0.01)

    def _send(self, fd: int, offset: int, left: int, growing: bool = False) -> None:
        self.wfile.flush()
        out = self.connection.fileno()
        while left > 0:
            there = self._grown(fd, offset) if growing else left
            if not there:
                self.close_connection = True
                return
            try:
                count = os.sendfile(out, fd, offset, min(left, there, _BLOCK))
            except BlockingIOError:
                # the socket has a timeout, so it is non-blocking for sendfile: wait until the client takes more
                if not self._writable():
                    self.close_connection = True
                    return
                continue
            except OSError:
                self.close_connection = True
                return
            if not count:
                self.close_connection = True
                return
            offset += count
            left -= count
            self.server.count(self.client_address[0], count)

    def _writable(self) -> bool:
        import select  # pylint: disable=import-outside-toplevel

        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        return bool(poll.poll(_IDLE_SECONDS * 1000))


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One thread per connection; counts what each peer got."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, config: dict[str, t.Any]) -> None:
        self.config = config
        self._sent: dict[str, int] = {}
        self._guard = threading.Lock()
        self._open = 0
        self._last = time.monotonic()
        if ":" in config["bind"]:
            self.address_family = socket.AF_INET6
        super().__init__((config["bind"], int(config["port"])), Handler)

    def server_bind(self) -> None:
        """Without the reverse DNS look-up of the base class (it can hang for seconds where there is no DNS)."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def handle_error(self, request: t.Any, client_address: t.Any) -> None:
        """A client that goes away is not an error of ours; anything else is one line in the journal, without the path."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError, socket.timeout)):
            sys.stderr.write(f"{client_address[0]}: {type(error).__name__}\n")

    @contextlib.contextmanager
    def busy(self) -> t.Iterator[None]:
        """Around each connection."""
        with self._guard:
            self._open += 1
        try:
            yield
        finally:
            with self._guard:
                self._open -= 1
                self._last = time.monotonic()

    def idle_seconds(self) -> float:
        """How long there has been no connection."""
        with self._guard:
            return 0.0 if self._open else time.monotonic() - self._last

    def count(self, peer: str, size: int) -> None:
        """Add sent bytes."""
        with self._guard:
            self._sent[peer] = self._sent.get(peer, 0) + size

    def stats(self) -> dict[str, t.Any]:
        """{bytes_sent, peers: {address: bytes}, quiet: seconds without another connection than that of the one who asks}."""
        with self._guard:
            quiet = 0.0 if self._open > 1 else time.monotonic() - self._last
            return {"bytes_sent": sum(self._sent.values()), "peers": dict(self._sent), "quiet": round(quiet, 1)}


def drop_caches(config: t.Mapping[str, t.Any]) -> None:
    """Give the page cache of the served files back: on a GB10 it is GPU memory."""
    for entry in config["blobs"].values():
        with contextlib.suppress(OSError):
            fd = os.open(entry["path"], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def write_state(path: str, data: t.Mapping[str, t.Any]) -> None:
    """Atomic 0600 JSON: the module reads port and pid there."""
    temp = f"{path}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as handle:
        json.dump(data, handle)
    os.replace(temp, path)


def serve(config: dict[str, t.Any]) -> Server:
    """Bind and serve in a thread; the caller waits and shuts down."""
    server = Server(config)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    return server


def main(argv: t.Sequence[str]) -> int:
    """Serve until TERM or the end of the lifetime."""
    with open(argv[1], encoding="utf-8") as handle:
        config = json.load(handle)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *dummy: done.set())
    try:
        server = serve(config)
    except OSError as exc:
        error = f"{config['bind']}:{config['port']}: {exc.strerror}"
        write_state(config["state"], {"error": error})
        sys.stderr.write(error + "\n")
        return 1
    write_state(config["state"], {"port": server.server_port, "pid": os.getpid()})
    end = time.monotonic() + float(config.get("lifetime") or 3600)
    idle = float(config.get("idle") or 0)
    while not done.wait(max(0.0, min(1.0, end - time.monotonic()))):
        if time.monotonic() >= end or (idle and server.idle_seconds() >= idle):
            break
    server.shutdown()
    drop_caches(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
