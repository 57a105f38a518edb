# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small local Hugging Face hub for the lab, which misbehaves on command.

It speaks the part of the HTTP API that huggingface_hub uses to download models.

``hub.py --root DIR --bind ADDR --port N``; models are plain directories::

    DIR/<org>/<name>/files/…              what is at revision "main"
    DIR/<org>/<name>/revisions/<rev>/…    other branches or tags (optional)
    DIR/<org>/<name>/access.json          {"gated": true, "private": true, "tokens": ["hf_x"], "denied": ["hf_y"], "xet": true} (optional)

The commit is a hash of all paths and contents, so the same files give the same commit everywhere. ``*.safetensors``, ``*.gguf`` and
``*.bin`` are LFS
files (named by sha256, served by a redirect as the real hub does), all others are named by git SHA-1.

Faults: a list of objects, in the file ``--faults`` (read at each request) or sent with ``PUT /control`` from loopback (``GET`` shows it,
``DELETE`` ends it)::

    [{"repo": "org/*", "on": "api"|"resolve"|"cdn"|"*", "file": "*.safetensors", "times": 2,
      "status": 429, "code": "", "message": "", "retry_after": 3}]
    instead of "status": "stall_after": N bytes (then "seconds", default 3600), "cut_after": N bytes,
    "flip_at": N (one bit of that byte)

``times`` limits how often a fault strikes (default: always). Only for tests and the lab; it has no protection.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import http.server
import json
import os
import re
import socketserver
import sys
import threading
import time
import typing as t
import urllib.parse

LFS = ("*.safetensors", "*.gguf", "*.bin")
BLOCK = 1 << 16


class Answer(Exception):
    """An HTTP answer with a status, X-Error-Code and X-Error-Message."""

    def __init__(self, status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


class Entry(t.NamedTuple):
    """One file of a model."""

    path: str
    real: str
    size: int
    oid: str
    sha256: str


_digests: dict[tuple[str, int, int], tuple[str, str]] = {}


def digests(path: str) -> tuple[str, str]:
    """(git SHA-1, sha256) of a file, remembered by path, size and time."""
    info = os.stat(path)
    key = (path, info.st_size, info.st_mtime_ns)
    if key not in _digests:
        git, sha = hashlib.sha1(b"blob %d\0" % info.st_size, usedforsecurity=False), hashlib.sha256()
        with open(path, "rb") as handle:
            while data := handle.read(1 << 20):
                git.update(data)
                sha.update(data)
        _digests[key] = (git.hexdigest(), sha.hexdigest())
    return _digests[key]


def is_lfs(path: str) -> bool:
    """Whether the hub would store this file in LFS."""
    return any(fnmatch.fnmatch(os.path.basename(path), pattern) for pattern in LFS)


def entries(top: str) -> list[Entry]:
    """Files below a directory, sorted by path."""
    found = []
    for parent, dirs, names in os.walk(top):
        dirs.sort()
        for name in names:
            real = os.path.join(parent, name)
            git, sha = digests(real)
            path = os.path.relpath(real, top)
            size = os.stat(real).st_size
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
            oid = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer, usedforsecurity=False).hexdigest() if is_lfs(path) else git
            found.append(Entry(path, real, size, oid, sha if is_lfs(path) else ""))
    return sorted(found)


def commit_of(files: t.Sequence[Entry]) -> str:
    """Deterministic 40 hex digits for a set of files."""
    return hashlib.sha1(json.dumps([[item.path, item.oid, item.sha256] for item in files]).encode(), usedforsecurity=False).hexdigest()


class Models:
    """The directory tree behind the hub."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def folder(self, repo: str) -> str:
        """Directory of a model; 404 when there is none."""
        folder = os.path.join(self.root, repo)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or ".." in repo or not os.path.isdir(os.path.join(folder, "files")):
            raise Answer(404, "RepoNotFound", "Repository not found")
        return folder

    def access(self, repo: str) -> dict[str, t.Any]:
        """access.json of a model, {} without one."""
        path = os.path.join(self.root, repo, "access.json")
        if not os.path.isfile(path):
            return {}
        with open(path, encoding="utf-8") as handle:
            return dict(json.load(handle))

    def authorize(self, repo: str, token: str, content: bool) -> None:
        """401 or 403 as the real hub: metadata of a gated model are public, its files are not."""
        access = self.access(repo)
        known = token in access.get("tokens", [])
        if access.get("private") and not known:
            raise Answer(401, "RepoNotFound", "Invalid username or password.")
        if access.get("gated") and content and not known:
            if token in access.get("denied", []):
                raise Answer(403, "GatedRepo", f"Access to model {repo} is restricted and you are not in the authorized list.")
            raise Answer(
                401, "GatedRepo", f"Access to model {repo} is restricted. You must have access to it and be authenticated to access it."
            )

    def revision(self, repo: str, revision: str) -> tuple[str, list[Entry]]:
        """(commit, files) of a branch, tag or (possibly short) commit."""
        folder = self.folder(repo)
        tops = {"main": os.path.join(folder, "files")}
        extra = os.path.join(folder, "revisions")
        if os.path.isdir(extra):
            tops.update({name: os.path.join(extra, name) for name in os.listdir(extra)})
        if revision in tops:
            files = entries(tops[revision])
            return commit_of(files), files
        for top in tops.values():
            files = entries(top)
            if len(revision) >= 7 and commit_of(files).startswith(revision):
                return commit_of(files), files
        raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")


def model_info(repo: str, commit: str, files: t.Sequence[Entry], blobs: bool) -> dict[str, t.Any]:
    """Answer of /api/models/<repo>."""
    siblings = []
    for item in files:
        row: dict[str, t.Any] = {"rfilename": item.path}
        if blobs:
            row.update(size=item.size, blobId=item.oid)
            if item.sha256:
                row["lfs"] = {"sha256": item.sha256, "size": item.size, "pointerSize": 130}
        siblings.append(row)
    date = "2026-01-01T00:00:00.000Z"
    info = {"_id": commit[:24], "id": repo, "modelId": repo, "author": repo.split("/")[0], "sha": commit, "private": False, "gated": False}
    return {
        **info,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "createdAt": date,
        "lastModified": date,
        "siblings": siblings,
    }


def tree(files: t.Sequence[Entry]) -> list[dict[str, t.Any]]:
    """Answer of /api/models/<repo>/tree/<rev>?recursive=true."""
    rows: list[dict[str, t.Any]] = []
    for item in files:
        row: dict[str, t.Any] = {"type": "file", "oid": item.oid, "size": item.size, "path": item.path}
        if item.sha256:
            row["lfs"] = {"oid": item.sha256, "size": item.size, "pointerSize": 130}
        rows.append(row)
    return rows


class Faults:
    """Misbehaviour on command."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sent: list[dict[str, t.Any]] = []
        self.used: dict[str, int] = {}
        self.guard = threading.Lock()

    def all(self) -> list[dict[str, t.Any]]:
        """Faults of the file and of /control."""
        try:
            with open(self.path, encoding="utf-8") as handle:
                return [*json.load(handle), *self.sent]
        except (OSError, ValueError):
            return list(self.sent)

    def find(self, kind: str, repo: str, file: str) -> dict[str, t.Any]:
        """The first fault that strikes now, {} when none; counts ``times``."""
        for fault in self.all():
            if fault.get("on", "*") not in ("*", kind) or not fnmatch.fnmatch(repo, fault.get("repo", "*")):
                continue
            if not fnmatch.fnmatch(file, fault.get("file", "*")):
                continue
            key = json.dumps(fault, sort_keys=True)
            with self.guard:
                self.used[key] = self.used.get(key, 0) + 1
                if "times" in fault and self.used[key] > int(fault["times"]):
                    continue
            return fault
        return {}


class Handler(http.server.BaseHTTPRequestHandler):
    """Routes of the hub."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: t.Any) -> None:  # noqa: A002 - the name of the base class
        if self.server.verbose:
            sys.stderr.write(f"{self.client_address[0]} {format % args}\n")

    def do_GET(self) -> None:  # pylint: disable=invalid-name
        self._handle()

    do_HEAD = do_GET
    do_PUT = do_GET
    do_DELETE = do_GET

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), urllib.parse.parse_qs(url.query)
        try:
            if path == "/control":
                return self._control()
            if self.command not in ("GET", "HEAD"):
                raise Answer(405)
            for pattern, handler in ROUTES:
                match = re.fullmatch(pattern, path)
                if match:
                    return handler(self, match, query)
            raise Answer(404, "", "no such page")
        except Answer as exc:
            self._json({"error": str(exc)}, exc.status, exc.headers)
        except ConnectionError:
            self.close_connection = True

    def _json(self, data: t.Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _control(self) -> None:
        if not self.client_address[0].startswith("127."):
            raise Answer(403, "", "control is for loopback only")
        if self.command == "PUT":
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.server.faults.sent = json.loads(body)
            self.server.faults.used.clear()
        elif self.command == "DELETE":
            self.server.faults.sent = []
            self.server.faults.used.clear()
        self._json(self.server.faults.all())

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()

    def _strike(self, kind: str, repo: str, file: str = "") -> dict[str, t.Any]:
        fault = self.server.faults.find(kind, repo, file)
        if "status" in fault:
            headers = {"Retry-After": str(fault["retry_after"])} if "retry_after" in fault else {}
            raise Answer(int(fault["status"]), fault.get("code", ""), fault.get("message", "as told"), headers)
        return fault

    def info(self, match: re.Match[str], query: dict[str, list[str]]) -> None:
        """/api/models/<repo>[/revision/<rev>]"""
        repo, revision = match["repo"], match["rev"] or "main"
        self._strike("api", repo)
        self.server.models.authorize(repo, self._token(), False)
        commit, files = self.server.models.revision(repo, revision)
        self._json(model_info(repo, commit, files, bool(query.get("blobs"))))

    def tree(self, match: re.Match[str], dummy: dict[str, list[str]]) -> None:
        """/api/models/<repo>/tree/<rev>"""
        self._strike("api", match["repo"])
        self.server.models.authorize(match["repo"], self._token(), False)
        self._json(tree(self.server.models.revision(match["repo"], match["rev"])[1]))

    def resolve(self, match: re.Match[str], dummy: dict[str, list[str]]) -> None:
        """/<repo>/resolve/<rev>/<file>"""
        repo, path = match["repo"], match["file"]
        fault = self._strike("resolve", repo, path)
        self.server.models.folder(repo)
        self.server.models.authorize(repo, self._token(), True)
        commit, files = self.server.models.revision(repo, match["rev"])
        item = next((item for item in files if item.path == path), None)
        if item is None:
            raise Answer(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{item.oid}"'}
        if not item.sha256:
            return self._file(item, headers, fault)
        host = self.headers.get("Host") or f"{self.server.server_name}:{self.server.server_port}"
        headers.update({"X-Linked-Size": str(item.size), "X-Linked-Etag": f'"{item.sha256}"'})
        headers["Location"] = f"http://{host}/cdn/{repo}/{commit}/{urllib.parse.quote(path)}"
        headers.update(self._xet(repo, item, headers["Location"]))
        return self._json({}, 302, headers)

    def _xet(self, repo: str, item: Entry, url: str) -> dict[str, str]:
        """As a hub with Xet storage says; its protocol is not spoken here, so the "refresh route" is just the file."""
        return {"X-Xet-Hash": item.sha256, "X-Xet-Refresh-Route": url} if self.server.models.access(repo).get("xet") else {}

    def cdn(self, match: re.Match[str], dummy: dict[str, list[str]]) -> None:
        """/cdn/<repo>/<commit>/<file>: what a signed URL is on the real hub (so no token is asked for)."""
        fault = self._strike("cdn", match["repo"], match["file"])
        commit, files = self.server.models.revision(match["repo"], match["rev"])
        item = next((item for item in files if item.path == match["file"]), None)
        if item is None:
            raise Answer(404, "EntryNotFound", "Entry not found")
        # huggingface_hub follows a redirect that stays on the host also for HEAD, and then wants these here
        headers = {
            "ETag": f'"{item.sha256}"',
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(item.size),
            "X-Linked-Etag": f'"{item.sha256}"',
            **self._xet(match["repo"], item, f"http://{self.headers.get('Host')}{self.path}"),
        }
        self._file(item, headers, fault)

    def whoami(self, *dummy: t.Any) -> None:
        """/api/whoami-v2"""
        if not self._token():
            raise Answer(401, "", "Invalid username or password.")
        self._json({"type": "user", "name": "lab"})

    def _file(self, item: Entry, headers: dict[str, str], fault: dict[str, t.Any]) -> None:
        first, last = 0, item.size - 1
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span:
            first, last = int(span[1]), min(int(span[2] or last), last)
            if first > last:
                raise Answer(416, "", "", {"Content-Range": f"bytes */{item.size}"})
            headers["Content-Range"] = f"bytes {first}-{last}/{item.size}"
        self.send_response(206 if span else 200)
        headers = {**headers, "Content-Length": str(last - first + 1), "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with open(item.real, "rb") as handle:
            handle.seek(first)
            self._body(handle, first, last - first + 1, fault)

    def _body(self, handle: t.BinaryIO, offset: int, left: int, fault: dict[str, t.Any]) -> None:
        sent = 0
        stop = min(int(fault.get("stall_after", left)), int(fault.get("cut_after", left)))
        while left > 0:
            if sent >= stop and ("stall_after" in fault or "cut_after" in fault):
                self.wfile.flush()
                if "stall_after" in fault:
                    self.server.sleep(float(fault.get("seconds", 3600)))
                self.close_connection = True
                return
            data = bytearray(handle.read(min(BLOCK, left, max(1, stop - sent))))
            if not data:
                return
            flip = int(fault.get("flip_at", -1)) - offset - sent
            if 0 <= flip < len(data):
                data[flip] ^= 1
            self.wfile.write(data)
            sent += len(data)
            left -= len(data)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES: tuple[tuple[str, t.Callable[..., None]], ...] = (
    (r"/api/whoami-v2", Handler.whoami),
    (rf"/api/models/{_REPO}(?:/revision/(?P<rev>.+))?", Handler.info),
    (rf"/api/models/{_REPO}/tree/(?P<rev>[^/]+)", Handler.tree),
    (rf"/cdn/{_REPO}/(?P<rev>[^/]+)/(?P<file>.+)", Handler.cdn),
    (rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", Handler.resolve),
)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The hub."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, root: str, bind: str, port: int, faults: str = "", verbose: bool = False) -> None:
        self.models = Models(root)
        self.faults = Faults(faults)
        self.verbose = verbose
        self.ending = threading.Event()
        super().__init__((bind, port), Handler)

    def server_bind(self) -> None:
        """Without the reverse DNS look-up of the base class."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def sleep(self, seconds: float) -> None:
        """A stall that ends with the server."""
        self.ending.wait(seconds)

    def handle_error(self, request: t.Any, client_address: t.Any) -> None:
        """A client that goes away is normal here."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {client_address[0]} {type(error).__name__}: {error}\n")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="local Hugging Face hub for the lab")
    parser.add_argument("--root", required=True, help="directory with <org>/<name>/files")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--faults", default="/run/hub-faults.json", help="JSON file with faults, read at each request")
    parser.add_argument("--verbose", action="store_true", help="write requests to stderr")
    args = parser.parse_args()
    server = Server(args.root, args.bind, args.port, args.faults, args.verbose)
    if args.bind not in ("127.0.0.1", "0.0.0.0"):
        # the same hub on loopback, so that /control can be reached from inside its own machine only
        near = Server(args.root, "127.0.0.1", server.server_port, args.faults, args.verbose)
        near.faults = server.faults
        threading.Thread(target=near.serve_forever, daemon=True).start()
    sys.stdout.write(f"hub at http://{args.bind}:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
