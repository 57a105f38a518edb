# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a Docker image *is*, whatever the store, the tag or the Id say (pure functions).

PRIVATE to the collection.

The two image stores of Docker name the same image differently: the classic store's ``Id`` is the digest of the config, the containerd
store's is the
digest of the manifest or index, ``RepoDigests`` are lost by save and load. What is equal on all nodes is the content: diff ids, platform
and config.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import ipaddress
import json
import os
import re
import tarfile
import typing as t

_CONFIG_KEYS = ("Env", "Cmd", "Entrypoint", "WorkingDir", "User")
_LIST_KEYS = ("Env", "Cmd", "Entrypoint")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def _config(inspect: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The five config fields that change how a container behaves; absent, null and empty are the same (Docker 29 omits empty ones)."""
    raw = inspect.get("Config") or {}
    return {key: list(raw.get(key) or []) if key in _LIST_KEYS else str(raw.get(key) or "") for key in _CONFIG_KEYS}


def image_fingerprint(inspect: t.Mapping[str, t.Any]) -> str:
    """Content identity of an image: 64 hex digits, equal on every node and in both Docker stores.

    ``inspect`` is one element of ``docker image inspect``. Never uses Id, RepoTags, RepoDigests, Created or Size: these depend on the
    store or on the way
    the image came. "" when the data has no layers at all (not an image).
    """
    layers = list((inspect.get("RootFS") or {}).get("Layers") or [])
    if not layers:
        return ""
    content = {
        "layers": layers,
        "architecture": str(inspect.get("Architecture") or ""),
        "os": str(inspect.get("Os") or ""),
        "config": _config(inspect),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def image_record(inspect: t.Mapping[str, t.Any] | None, reference: str) -> dict[str, t.Any]:
    """The shape ``image`` of our modules. ``inspect`` empty or None means: the reference is not on this node."""
    if not inspect:
        return absent_record(reference)
    config = _config(inspect)
    env = dict(item.partition("=")[::2] for item in config["Env"])
    return {
        "reference": reference,
        "present": True,
        "id": str(inspect.get("Id") or ""),
        "repo_digests": list(inspect.get("RepoDigests") or []),
        "repo_tags": list(inspect.get("RepoTags") or []),
        "fingerprint": image_fingerprint(inspect),
        "layers": list((inspect.get("RootFS") or {}).get("Layers") or []),
        "architecture": str(inspect.get("Architecture") or ""),
        "os": str(inspect.get("Os") or ""),
        "size": int(inspect.get("Size") or 0),
        "created": str(inspect.get("Created") or ""),
        "env": env,
        "entrypoint": config["Entrypoint"],
        "cmd": config["Cmd"],
        "user": config["User"],
    }


def absent_record(reference: str) -> dict[str, t.Any]:
    """The same shape for an image that is not there."""
    return {
        "reference": reference,
        "present": False,
        "id": "",
        "repo_digests": [],
        "repo_tags": [],
        "fingerprint": "",
        "layers": [],
        "architecture": "",
        "os": "",
        "size": 0,
        "created": "",
        "env": {},
        "entrypoint": [],
        "cmd": [],
        "user": "",
    }


class Reference(t.NamedTuple):
    """``name[:tag][@sha256:…]`` in parts; tag and digest are "" when not given."""

    name: str
    tag: str
    digest: str


def split_reference(reference: str) -> Reference:
    """Parts of a reference as Docker reads it. Raises ValueError naming the bad part."""
    name, at, digest = reference.strip().partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ValueError(f"'{reference}': after @ there must be sha256: and 64 hex digits")
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag):
        raise ValueError(f"'{reference}': '{tag}' is not a tag")
    path = head + slash + last
    if not re.fullmatch(r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*", path):
        raise ValueError(f"'{reference}': '{path}' is not an image name")
    return Reference(path, tag, digest)


def local_reference(reference: str) -> str:
    """The name under which an image runs on *every* node.

    A digest reference cannot be set by ``docker tag`` and is lost by save and load (DOC-09), so for ``name@sha256:…`` it is an own
    immutable tag made
    from that digest, the same on all nodes; ``name:tag`` stays as it is and ``name`` becomes ``name:latest``.
    """
    parts = split_reference(reference)
    if parts.digest:
        return f"{parts.name}:dgxspark-{parts.digest[7:23]}"
    return f"{parts.name}:{parts.tag or 'latest'}"


# --- platform and errors ---

_MACHINES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "amd64", "amd64": "amd64"}


def docker_architecture(machine: str) -> str:
    """``aarch64`` (uname) -> ``arm64`` (Docker)."""
    return _MACHINES.get(machine, machine)


# (pattern, problem id, cause, remedy); first match wins. Texts are those of Docker 20.10 to 29 with both stores.
PULL_ERRORS: tuple[tuple[str, str, str, str], ...] = (
    (
        r"permission denied while trying to connect to the (?:docker API|Docker daemon)|dial unix .*permission denied",
        "DOC-02",
        "this user may not talk to the Docker daemon",
        "run with become, or add the user to the group docker and log in again",
    ),
    (
        r"Cannot connect to the Docker daemon|failed to connect to the docker API",
        "docker-down",
        "the Docker daemon does not answer",
        "systemctl status docker on this node",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "disk-image",
        "the disk of Docker's data is full",
        "free space there (docker system df), then run again",
    ),
    (
        r"verification failed for digest|unexpected commit digest|failed size validation|layers from manifest don't match",
        "image-damaged",
        "a layer arrived with another content than its digest says",
        "run again; if it fails again, the copy that the source holds is damaged",
    ),
    (
        r"no matching manifest for|does not match the specified platform|image operating system .* cannot be used",
        "DOC-11",
        "the image has no variant for this machine's platform",
        "choose an image built for it (a DGX Spark is linux/arm64)",
    ),
    (
        r"toomanyrequests|429 Too Many Requests|rate limit",
        "registry-429",
        "the registry limits this address",
        "wait, or docker login on this node: the limit of an account is higher",
    ),
    (
        r"server gave HTTP response to HTTPS client",
        "registry-unreachable",
        "the registry speaks plain HTTP, which Docker refuses outside 127.0.0.0/8",
        "use TLS, or name it under insecure-registries in /etc/docker/daemon.json on this node",
    ),
    (
        r"x509:|certificate signed by unknown authority|tls: ",
        "registry-unreachable",
        "the registry's TLS certificate is not trusted",
        "install its CA below /etc/docker/certs.d on this node, and check the clock",
    ),
    (
        r"pull access denied|unauthorized|authentication required|no basic auth credentials|denied: requested access|403 Forbidden"
        r"|insufficient_scope",
        "image-denied",
        "the registry refuses: the repository does not exist, is private, or needs docker login",
        "check the name; for a private image run docker login on this node as root",
    ),
    (
        r"manifest unknown|manifest for .* not found|name unknown|repository .* not found|: not found",
        "image-unknown",
        "the registry does not have this image",
        "correct spark_image (name, tag or digest)",
    ),
    (
        r"unexpected EOF|failed to read expected number of bytes",
        "registry-unreachable",
        "the registry broke off in the middle of a layer",
        "run again: finished layers are reused; check proxy and Internet access of this node",
    ),
    (
        r"dial tcp|no such host|connection refused|i/o timeout|TLS handshake timeout|Client\.Timeout|net/http: request canceled"
        r"|network is unreachable|EOF\b|connection reset by peer|502 Bad Gateway|503 Service Unavailable|504 Gateway",
        "registry-unreachable",
        "the registry does not answer",
        "check DNS, proxy and Internet access of this node, and that the registry runs",
    ),
    (r"invalid reference format", "image-unknown", "this is not an image reference", "correct spark_image"),
)


def classify_pull_error(text: str) -> tuple[str, str, str]:
    """``(problem id, cause, remedy)`` of what docker pull printed; id ``image-pull`` for what nobody has seen yet."""
    for pattern, ident, cause, remedy in PULL_ERRORS:
        if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            return ident, cause, remedy
    return "image-pull", "docker pull failed", "see the message of Docker"


_AGAIN = re.compile(
    r"verification failed for digest|unexpected commit digest|failed size validation|unexpected EOF|connection reset|broken pipe"
    r"|failed to read expected number of bytes",
    re.IGNORECASE,
)


def worth_another_try(text: str) -> bool:
    """Whether a pull broke in the middle: Docker keeps the finished layers, so the same command goes on from there."""
    return bool(_AGAIN.search(text))


def last_line(text: str) -> str:
    """The line of an output that says what went wrong."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text).replace("\r", "\n")  # a terminal's cursor goes up and down
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no output"


# --- blobs of an image on the head ---

_OCI = "application/vnd.oci.image."
_MANIFEST_TYPES = (_OCI + "manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")


class NotServable(Exception):
    """The blobs of the image cannot be served as they lie; the text says why. Then they are staged with docker save."""


def content_roots(docker_root: str, config_toml: str = "") -> list[str]:
    """Directories where containerd's content store may be: the system's containerd (also with an own ``root`` in config.toml), dockerd's
    own one.
    """
    roots = [
        *re.findall(r'(?m)^\s*root\s*=\s*["\']([^"\']+)["\']', config_toml),
        "/var/lib/containerd",
        os.path.join(docker_root, "containerd", "daemon"),
    ]
    return [os.path.join(root, "io.containerd.content.v1.content", "blobs", "sha256") for root in dict.fromkeys(roots)]


def containerd_config() -> str:
    """The system containerd's configuration, "" without one."""
    with contextlib.suppress(OSError), open("/etc/containerd/config.toml", encoding="utf-8") as handle:
        return handle.read()
    return ""


def _blob(directory: str, digest: str, size: int | None = None) -> str:
    if not _DIGEST.fullmatch(digest):
        raise NotServable(f"'{digest}' is not a sha256 digest")
    path = os.path.join(directory, digest[7:])
    try:
        real = os.stat(path).st_size
    except OSError as exc:
        raise NotServable(f"{digest[:19]} is not in the content store") from exc
    if size is not None and real != size:
        raise NotServable(f"{digest[:19]} has {real} bytes, not {size}")
    return path


def _load(path: str) -> dict[str, t.Any]:
    with open(path, encoding="utf-8") as handle:
        data = json.load(handle)
    return data if isinstance(data, dict) else {}


def pick_manifest(index: t.Mapping[str, t.Any], architecture: str, os_name: str) -> dict[str, t.Any]:
    """Descriptor of the platform's image in an index; attestations (platform unknown) are left out. Raises NotServable."""
    for item in index.get("manifests") or []:
        platform = item.get("platform") or {}
        if "vnd.docker.reference.type" in (item.get("annotations") or {}):
            continue
        if platform.get("architecture") == architecture and platform.get("os") == os_name:
            return dict(item)
    raise NotServable(f"the index has no manifest for {os_name}/{architecture}")


def view_of_content(directory: str, inspect: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Registry view of an image in containerd's content store.

    {manifest_digest, manifests{digest: media type}, blobs{hex: {path, size}}, bytes}.

    Starts at ``Id`` (index or manifest), picks the platform, and only when config and every layer are there with the right size and the
    config has the
    layers that Docker shows. Anything else: NotServable.
    """
    descriptor: dict[str, t.Any] = {"digest": str(inspect.get("Id") or "")}
    document = _load(_blob(directory, descriptor["digest"]))
    for dummy in range(3):
        if "manifests" not in document:
            break
        descriptor = pick_manifest(document, str(inspect.get("Architecture")), str(inspect.get("Os")))
        document = _load(_blob(directory, descriptor["digest"], descriptor.get("size")))
    if "config" not in document or "layers" not in document:
        raise NotServable("its manifest is of an unknown kind")
    media = document.get("mediaType") or descriptor.get("mediaType") or _MANIFEST_TYPES[0]
    parts = [document["config"], *document["layers"]]
    if any("foreign" in str(part.get("mediaType")) or "nondistributable" in str(part.get("mediaType")) for part in parts):
        raise NotServable("a layer may not be distributed")
    blobs = {part["digest"][7:]: {"path": _blob(directory, part["digest"], part["size"]), "size": part["size"]} for part in parts}
    config = _load(blobs[document["config"]["digest"][7:]]["path"])
    diffs = (config.get("rootfs") or {}).get("diff_ids")
    if diffs != list((inspect.get("RootFS") or {}).get("Layers") or []):
        raise NotServable("the config in the content store has other layers than Docker shows")
    path = _blob(directory, descriptor["digest"])
    total = sum(part["size"] for part in parts)
    blobs[descriptor["digest"][7:]] = {"path": path, "size": os.stat(path).st_size}
    view = {"manifest_digest": descriptor["digest"], "manifests": {descriptor["digest"]: media}, "blobs": blobs, "bytes": total}
    return {**view, "layers": layer_sizes(diffs, document["layers"])}


def layer_sizes(diffs: t.Sequence[str], parts: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """[{diff_id, bytes}] of a manifest: what crosses the wire for each layer. [] when the two lists do not fit."""
    if len(diffs) != len(parts):
        return []
    return [{"diff_id": str(diff), "bytes": int(part["size"])} for diff, part in zip(diffs, parts, strict=True)]


def missing_bytes(layers: t.Iterable[t.Mapping[str, t.Any]], present: t.Iterable[str]) -> int:
    """Bytes of the layers whose content no image of this node has. A layer that an image has twice crosses once."""
    there = set(present)
    return sum({str(layer["diff_id"]): int(layer["bytes"]) for layer in layers if layer["diff_id"] not in there}.values())


def local_diff_id(roots: t.Iterable[str], digest: str) -> str:
    """The unpacked digest of a layer that the classic store of this node has met before under this digest on the wire; "" for an unknown one."""
    name = digest.removeprefix("sha256:")
    for root in roots:
        for path in glob.glob(os.path.join(glob.escape(root), "image", "*", "distribution", "diffid-by-digest", "sha256", name)):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as handle:
                return handle.read().strip()
    return ""


def has_blob(roots: t.Iterable[str], digest: str) -> bool:
    """Whether the containerd store of this node (its content directories) has this blob."""
    return any(os.path.isfile(os.path.join(root, digest.removeprefix("sha256:"))) for root in roots)


def space_for(missing: int, content: int, unpacked: int) -> int:
    """Bytes that a copy needs below Docker's root: what crosses and what it unpacks to, by the ratio of the whole image."""
    ratio = max(1.0, unpacked / content) if content else 1.0
    return int(missing * (1.0 + ratio))


def insecure_registry(text: str, host: str) -> bool:
    """Whether the daemon may ask this registry over plain HTTP. ``text``: RegistryConfig of ``docker info`` as JSON."""
    try:
        config = json.loads(text)
        name = host.rpartition(":")[0] or host
        if name == "localhost":
            return True
        if not ((config.get("IndexConfigs") or {}).get(host) or {"Secure": True}).get("Secure"):
            return True
        networks = [ipaddress.ip_network(item) for item in config.get("InsecureRegistryCIDRs") or []]
        return any(ipaddress.ip_address(name.strip("[]")) in network for network in networks)
    except (ValueError, AttributeError, TypeError):
        return False


_PULLED = re.compile(
    r"([0-9a-f]{12}): (?:Downloading[^/\r\n]*?([\d.]+[kMG]?B)/([\d.]+[kMG]?B)|(Download complete|Extracting|Pull complete))"
)


def pulled_bytes(text: str, layers: dict[str, tuple[int, int]]) -> int:
    """Bytes that ``docker pull`` says it has downloaded. ``layers`` remembers (done, total) of each layer from one call to the next."""
    for layer, done, total, over in _PULLED.findall(text):
        layers[layer] = (layers.get(layer, (0, 0))[1],) * 2 if over else (unpacked_size(done), unpacked_size(total))
    return sum(done for done, dummy in layers.values())


def unpacked_size(text: str) -> int:
    """``18.4MB`` as ``docker image ls`` prints it; 0 when it is not a size."""
    match = re.fullmatch(r"([\d.]+)([kMGT]?)B", text.strip())
    return int(float(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2]]) if match else 0


def pick_for_platform(document: t.Any, architecture: str, os_name: str = "linux") -> dict[str, t.Any] | None:
    """Of what ``docker manifest inspect`` printed: the manifest itself, or the descriptor of the platform's one. None: another kind of document.
    Raises NotServable when an index has nothing for the platform."""
    if not isinstance(document, dict):
        return None
    if "manifests" in document:
        return pick_manifest(document, architecture, os_name)
    return document if "layers" in document else None


def archive_inspect(path: str) -> dict[str, t.Any] | None:
    """What ``docker image inspect`` would say of the image in a tar file, without loading it; RepoTags are the names in it.

    None when that cannot be told (a compressed file, or one without manifest.json): Docker may still take it. Raises OSError.
    """
    with open(path, "rb") as handle:
        try:
            with tarfile.open(fileobj=handle, mode="r:") as tar:
                listing = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
                config = json.load(tar.extractfile(listing[0]["Config"]))  # type: ignore[arg-type]
        except (tarfile.TarError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None
    return {
        "Id": "",
        "RepoTags": [str(tag) for entry in listing for tag in entry.get("RepoTags") or []],
        "RootFS": {"Layers": list((config.get("rootfs") or {}).get("diff_ids") or [])},
        "Architecture": str(config.get("architecture") or ""),
        "Os": str(config.get("os") or ""),
        "Config": config.get("config") or {},
        "Images": len(listing),
    }


def loaded_names(text: str) -> list[str]:
    """Names and Ids that ``docker load`` told."""
    return re.findall(r"(?m)^Loaded image(?: ID)?: (\S+)\s*$", text)


def layer_media_type(head: bytes) -> str:
    """Media type of a layer by its first bytes: docker save of the containerd store gives layers as they were pulled."""
    if head[:2] == b"\x1f\x8b":
        return _OCI + "layer.v1.tar+gzip"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return _OCI + "layer.v1.tar+zstd"
    return _OCI + "layer.v1.tar"


def _store(source: t.Any, blobs: str) -> tuple[str, int, bytes]:
    """Write a stream under its sha256; (hex digest, size, first bytes)."""
    digest, size, head = hashlib.sha256(), 0, b""
    temp = os.path.join(blobs, ".tmp")
    with open(temp, "wb") as handle:
        while True:
            data = source.read(1 << 20)
            if not data:
                break
            head = head or data[:4]
            digest.update(data)
            size += len(data)
            handle.write(data)
    os.rename(temp, os.path.join(blobs, digest.hexdigest()))
    return digest.hexdigest(), size, head


def stage(stream: t.Any, directory: str) -> dict[str, t.Any]:
    """Unpack a ``docker save`` stream (old or OCI form) into ``directory``/blobs keyed by digest; the view (as view_of_content).

    An own OCI manifest is written; save's one is not trusted (moby #47065): only manifest.json, config and layers are used.
    Raises NotServable for a broken stream.
    """
    blobs = os.path.join(directory, "blobs")
    os.makedirs(blobs, exist_ok=True)
    seen: dict[str, tuple[str, int, bytes]] = {}
    links: dict[str, str] = {}
    listing: t.Any = None
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as tar:
            for member in tar:
                if member.issym():
                    links[member.name] = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
                elif member.islnk():
                    links[member.name] = member.linkname
                elif member.isfile():
                    content = tar.extractfile(member)
                    if member.name == "manifest.json":
                        listing = json.load(content)  # type: ignore[arg-type]
                    else:
                        seen[member.name] = _store(content, blobs)
    except (tarfile.TarError, ValueError) as exc:
        raise NotServable(f"docker save gave a broken stream: {exc}") from exc
    return _finish_stage(directory, listing, seen, links)


def _finish_stage(directory: str, listing: t.Any, seen: dict[str, tuple[str, int, bytes]], links: dict[str, str]) -> dict[str, t.Any]:
    for name, target in links.items():
        if target in seen:
            seen[name] = seen[target]
    try:
        entry = listing[0]
        config, layers = seen[entry["Config"]], [seen[name] for name in entry["Layers"]]
    except (KeyError, IndexError, TypeError) as exc:
        raise NotServable(f"docker save gave no complete image ({exc})") from exc
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST_TYPES[0],
        "config": {"mediaType": _OCI + "config.v1+json", "digest": f"sha256:{config[0]}", "size": config[1]},
        "layers": [{"mediaType": layer_media_type(layer[2]), "digest": f"sha256:{layer[0]}", "size": layer[1]} for layer in layers],
    }
    digest = _store(io.BytesIO(json.dumps(manifest, separators=(",", ":")).encode()), os.path.join(directory, "blobs"))[0]
    keep = {digest, config[0], *(layer[0] for layer in layers)}
    for name in os.listdir(os.path.join(directory, "blobs")):
        if name not in keep:
            os.unlink(os.path.join(directory, "blobs", name))
    with open(os.path.join(directory, "complete"), "w", encoding="ascii") as handle:
        handle.write(f"sha256:{digest}")
    return view_of_stage(directory)


def view_of_stage(directory: str) -> dict[str, t.Any]:
    """View of what ``stage`` left, checked by size. Raises NotServable when it is not (or no longer) whole."""
    try:
        with open(os.path.join(directory, "complete"), encoding="ascii") as handle:
            digest = handle.read().strip()
    except OSError as exc:
        raise NotServable("nothing is staged") from exc
    blobs = os.path.join(directory, "blobs")
    manifest = _load(_blob(blobs, digest))
    parts = [manifest["config"], *manifest["layers"]]
    view = {part["digest"][7:]: {"path": _blob(blobs, part["digest"], part["size"]), "size": part["size"]} for part in parts}
    path = _blob(blobs, digest)
    total = sum(part["size"] for part in parts)
    view[digest[7:]] = {"path": path, "size": os.stat(path).st_size}
    diffs = (_load(view[manifest["config"]["digest"][7:]]["path"]).get("rootfs") or {}).get("diff_ids") or []
    layers = layer_sizes(diffs, manifest["layers"])
    return {"manifest_digest": digest, "manifests": {digest: manifest["mediaType"]}, "blobs": view, "bytes": total, "layers": layers}
