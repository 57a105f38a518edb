# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Images made by hand and a registry that can be told to misbehave: for tests and benchmarks of the copy of images.

Standard library only; it runs on a node of the lab as well. Layout of a directory: ``blobs/<hex>``, ``tags/<name>~<tag>`` (a digest), and ``fault``
(JSON, see ``Fault``), read again for every request.

    registry.py serve DIR PORT [ADDRESS]
    registry.py make DIR NAME:TAG '{"layers": [["etc/a", 1000, "seed"]], "attest": true}'
    registry.py tar DIR NAME:TAG FILE
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import platform
import random
import re
import socket
import socketserver
import sys
import tarfile
import typing as t

OCI = "application/vnd.oci.image."
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
BLOCK = 1 << 20
EPOCH = "2026-01-01T00:00:00Z"


# --- making ----------------------------------------------------------------------------------------------------------------


class Noise(io.RawIOBase):
    """``size`` bytes that cannot be compressed, always the same for a seed."""

    def __init__(self, size: int, seed: str) -> None:
        self.left = size
        self.random = random.Random(seed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: t.Any) -> int:
        count = min(len(buffer), self.left)
        buffer[:count] = self.random.randbytes(count)
        self.left -= count
        return count


class Hashed:
    """A file that is written under its own digest."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.temporary = os.path.join(directory, f".{os.getpid()}-{id(self)}")
        self.file = open(self.temporary, "wb")  # noqa: SIM115  # pylint: disable=consider-using-with
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: t.Any) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def done(self) -> tuple[str, int]:
        self.file.close()
        os.replace(self.temporary, os.path.join(self.directory, self.hash.hexdigest()))
        return f"sha256:{self.hash.hexdigest()}", self.size


class Tee:
    """Counts and hashes what goes through to another file."""

    def __init__(self, sink: t.Any) -> None:
        self.sink = sink
        self.hash = hashlib.sha256()

    def write(self, data: t.Any) -> int:
        self.hash.update(data)
        self.sink.write(data)
        return len(data)


def put(directory: str, content: bytes) -> tuple[str, int]:
    sink = Hashed(os.path.join(directory, "blobs"))
    sink.write(content)
    return sink.done()


def layer(directory: str, path: str, size: int, seed: str) -> tuple[str, int, str]:
    """(digest, size, diff id) of a gzip layer with one file of noise."""
    sink = Hashed(os.path.join(directory, "blobs"))
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=t.cast(t.Any, sink), mtime=0) as packed:
        plain = Tee(packed)
        with tarfile.open(fileobj=t.cast(t.Any, plain), mode="w|", bufsize=BLOCK) as tar:
            info = tarfile.TarInfo(path)
            info.size, info.mode = size, 0o644
            tar.addfile(info, io.BufferedReader(Noise(size, seed), BLOCK))
    digest, count = sink.done()
    return digest, count, f"sha256:{plain.hash.hexdigest()}"


def make(
    directory: str,
    reference: str,
    layers: t.Sequence[t.Sequence[t.Any]],
    *,
    attest: bool = False,
    architecture: str = "",
    env: t.Sequence[str] = (),
) -> dict[str, t.Any]:
    """Makes an image and tags it: {digest, manifest, layers: [{digest, size}]}. ``attest``: an index with a provenance beside the image, as BuildKit
    pushes it."""
    for name in ("blobs", "tags"):
        os.makedirs(os.path.join(directory, name), exist_ok=True)
    architecture = architecture or ARCHITECTURES[platform.machine()]
    made = [layer(directory, *item) for item in layers]
    config = {
        "architecture": architecture, "os": "linux", "created": EPOCH,
        "config": {"Env": ["PATH=/bin", *env], "Cmd": ["/none"]},
        "rootfs": {"type": "layers", "diff_ids": [item[2] for item in made]},
        "history": [{"created": EPOCH, "created_by": f"lab {item[0]}"} for item in layers],
    }  # fmt: skip
    parts = [{"mediaType": OCI + "layer.v1.tar+gzip", "digest": item[0], "size": item[1]} for item in made]
    digest, size = manifest(directory, put(directory, json.dumps(config).encode()), parts)
    result = {"digest": digest, "manifest": digest, "layers": [{"digest": part["digest"], "size": part["size"]} for part in parts]}
    if attest:
        result["digest"] = index(directory, digest, size, architecture)
    tag(directory, reference, str(result["digest"]))
    return result


def manifest(directory: str, config: tuple[str, int], layers: list[dict[str, t.Any]]) -> tuple[str, int]:
    document = {
        "schemaVersion": 2, "mediaType": OCI + "manifest.v1+json",
        "config": {"mediaType": OCI + "config.v1+json", "digest": config[0], "size": config[1]}, "layers": layers,
    }  # fmt: skip
    return put(directory, json.dumps(document).encode())


def index(directory: str, digest: str, size: int, architecture: str) -> str:
    statement = json.dumps({"_type": "https://in-toto.io/Statement/v0.1", "predicateType": "https://slsa.dev/provenance/v0.2"}).encode()
    blob = put(directory, statement)
    diff = {"architecture": "unknown", "os": "unknown", "config": {}, "rootfs": {"type": "layers", "diff_ids": [blob[0]]}}
    layers = [{"mediaType": "application/vnd.in-toto+json", "digest": blob[0], "size": blob[1]}]
    proof = manifest(directory, put(directory, json.dumps(diff).encode()), layers)
    described = {"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": digest}
    kind = OCI + "manifest.v1+json"
    document = {
        "schemaVersion": 2, "mediaType": OCI + "index.v1+json",
        "manifests": [
            {"mediaType": kind, "digest": digest, "size": size, "platform": {"architecture": architecture, "os": "linux"}},
            {"mediaType": kind, "digest": proof[0], "size": proof[1], "annotations": described,
             "platform": {"architecture": "unknown", "os": "unknown"}},
        ],
    }  # fmt: skip
    return put(directory, json.dumps(document).encode())[0]


def tag_path(directory: str, reference: str) -> str:
    name, dummy, version = reference.rpartition(":")
    return os.path.join(directory, "tags", f"{name.replace('/', '~')}~{version}")


def tag(directory: str, reference: str, digest: str) -> None:
    with open(tag_path(directory, reference), "w", encoding="ascii") as handle:
        handle.write(digest)


def full_name(reference: str) -> str:
    """As containerd writes it."""
    first = reference.split("/")[0]
    return reference if "." in first or ":" in first or first == "localhost" else f"docker.io/{reference}"


def read(directory: str, digest: str) -> t.Any:
    with open(os.path.join(directory, "blobs", digest[7:]), "rb") as handle:
        return json.load(handle)


def write_tar(directory: str, reference: str, target: str) -> None:
    """The image as ``docker save`` of Docker 25 and newer writes it: an OCI layout with a manifest.json."""
    with open(tag_path(directory, reference), encoding="ascii") as handle:
        digest = handle.read()
    document = read(directory, digest)
    wanted = [digest]
    for item in document.get("manifests", []):
        wanted.append(item["digest"])
    image = read(directory, document["manifests"][0]["digest"]) if "manifests" in document else document
    for name in list(wanted):
        inner = read(directory, name)
        wanted += [part["digest"] for part in [inner.get("config"), *inner.get("layers", [])] if part]
    with open(os.path.join(directory, "blobs", digest[7:]), "rb") as handle:
        size = len(handle.read())
    top = {
        "mediaType": document["mediaType"],
        "digest": digest,
        "size": size,
        "annotations": {"io.containerd.image.name": full_name(reference)},
    }
    listing = [{"Config": f"blobs/sha256/{image['config']['digest'][7:]}", "RepoTags": [reference],
                "Layers": [f"blobs/sha256/{part['digest'][7:]}" for part in image["layers"]]}]  # fmt: skip
    small = {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": {"schemaVersion": 2, "manifests": [top]},
        "manifest.json": listing,
    }
    with tarfile.open(target, "w") as tar:
        for name in dict.fromkeys(wanted):
            tar.add(os.path.join(directory, "blobs", name[7:]), f"blobs/sha256/{name[7:]}")
        for name, content in small.items():
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


# --- serving ---------------------------------------------------------------------------------------------------------------


class Fault(t.NamedTuple):
    """``{"status": 429}`` answers everything so; ``{"cut": n}`` ends each blob after n bytes; ``{"flip": true}`` changes a byte of each blob."""

    status: int = 0
    cut: int = 0
    flip: bool = False


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    directory = ""

    def log_message(self, format: str, *args: t.Any) -> None:  # noqa: A002  # pylint: disable=redefined-builtin
        with contextlib.suppress(OSError), open(os.path.join(self.directory, "log"), "a", encoding="utf-8") as handle:
            handle.write(f"{self.command} {self.path}\n")

    def handle(self) -> None:
        """The containerd store tries TLS first; only an answer in plain HTTP makes it fall back."""
        with contextlib.suppress(OSError):
            if self.connection.recv(1, socket.MSG_PEEK) == b"\x16":
                self.connection.sendall(b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                return
            super().handle()

    def do_GET(self) -> None:  # pylint: disable=invalid-name
        self.answer(True)

    def do_HEAD(self) -> None:  # pylint: disable=invalid-name
        self.answer(False)

    def small(self, status: int, body: bytes, kind: str, digest: str, send: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Distribution-API-Version", "registry/2.0")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if send:
            self.wfile.write(body)

    def error(self, status: int, code: str, send: bool) -> None:
        self.small(status, json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode(), "application/json", "", send)

    def answer(self, send: bool) -> None:
        fault = Fault()
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.directory, "fault"), encoding="utf-8") as handle:
            fault = Fault(**json.load(handle))
        if self.path.rstrip("/") == "/v2":
            return self.small(200, b"{}", "application/json", "", send)
        if fault.status:
            return self.error(fault.status, {429: "TOOMANYREQUESTS", 404: "MANIFEST_UNKNOWN"}.get(fault.status, "DENIED"), send)
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+)", self.path)
        digest = found[3] if found else ""
        if found and not digest.startswith("sha256:"):
            with contextlib.suppress(OSError), open(tag_path(self.directory, f"{found[1]}:{digest}"), encoding="ascii") as handle:
                digest = handle.read()
        path = os.path.join(self.directory, "blobs", digest[7:])
        if not found or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or not os.path.isfile(path):
            return self.error(404, "MANIFEST_UNKNOWN" if found and found[2] == "manifests" else "BLOB_UNKNOWN", send)
        if found[2] == "manifests":
            with open(path, "rb") as handle:
                body = handle.read()
            return self.small(200, body, json.loads(body)["mediaType"], digest, send)
        return self.blob(path, digest, send, fault)

    def blob(self, path: str, digest: str, send: bool, fault: Fault) -> None:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(wanted[1]), int(wanted[2] or size - 1)) if wanted else (0, size - 1)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            handle.seek(first)
            left, sent = last - first + 1, first
            while send and left:
                data = bytearray(handle.read(min(BLOCK, left)))
                if fault.flip and size > BLOCK and sent <= size // 2 < sent + len(data):
                    data[size // 2 - sent] ^= 1
                if fault.cut and sent + len(data) > fault.cut:
                    self.wfile.write(data[: max(0, fault.cut - sent)])
                    self.close_connection = True
                    return
                self.wfile.write(data)
                sent += len(data)
                left -= len(data)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: t.Any, client_address: t.Any) -> None:
        """A client that goes away is no error."""


def main(argv: t.Sequence[str]) -> int:
    command, directory, *rest = argv
    if command == "serve":
        address = rest[1] if len(rest) > 1 else "127.0.0.1"
        Server((address, int(rest[0])), type("Bound", (Handler,), {"directory": directory})).serve_forever()
    elif command == "make":
        print(json.dumps(make(directory, rest[0], **json.loads(rest[1]))))
    elif command == "tar":
        write_tar(directory, rest[0], rest[1])
    else:
        print(__doc__, file=sys.stderr)
        return 64
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
