#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_sync
short_description: The same image content on every node
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - On the head O(source=registry) pulls the image when it is not there and O(source=file) loads it from a file; on workers O(source=peer) pulls the
    missing layers from the head.
  - Identity is a fingerprint of layers, platform and config, never a tag or the Id, because the two image stores of Docker name the same
    image differently.
  - A worker does a plain C(docker pull) by digest from its own loopback, relayed to the read-only view that
    M(dgxspark.serving.sync_server) gives of the
    head's blobs. Docker verifies each layer; nothing in C(daemon.json) is changed and nothing listens beyond loopback.
  - Where that is not possible, or with O(transport=archive), the head's C(docker save) goes straight into the worker's C(docker load);
    RV(method) tells which way it was.
  - Platform and free space are checked before anything is copied.
  - O(state=absent) removes the image, the versions of it that were kept for a way back, and what else this module brought for O(service).
    What another service has stays.
  - The image that a new one replaces is kept under a name of ours (C(dgxspark-) and its fingerprint) for a way back; older versions that this module
    brought are removed, other images never.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: Looks only at this node. A registry is not asked, so a wrong name is not noticed.
  diff_mode:
    support: full
    details: Fingerprint and Id before and after.
  idempotent:
    support: full
    details: Not with O(pull=always), which follows a moved tag.
options:
  state:
    description:
      - V(present) ensures the image, V(absent) that it is gone, with the versions that it replaced.
      - Names that somebody else gave stay, and with them their image. One that a container uses is an error.
      - V(forgotten) removes no image, but what the list of versions has of O(service); Docker is not asked.
    type: str
    choices: [present, absent, forgotten]
    default: present
  service:
    description: Name of the service, as in C(spark_service). Versions are kept and removed for each service by itself.
    type: str
    default: ""
  beside:
    description:
      - Containers of other services on this node, each with C(service), C(image) and C(image_id), as C(beside) of
        RV(dgxspark.serving.serving_status#module:row). O(state=absent) leaves what they use.
    type: list
    elements: dict
    default: []
  reference:
    description:
      - The image, C(name:tag) or C(name@sha256:…).
      - A digest cannot be a local name on every node, so for a digest reference an own tag made from it is set; RV(reference) is what to
        run.
    type: str
    required: true
  source:
    description:
      - V(registry) ensures the image by C(docker pull).
      - V(file) ensures it by C(docker load) of O(path).
      - V(present) only verifies that it is there.
      - V(peer) pulls it from the head.
      - Required for O(state=present).
    type: str
    choices: [registry, file, present, peer]
  path:
    description: A file that C(docker save) wrote, on this node, for O(source=file). It must hold one image; the name in it does not matter.
    type: path
    default: ""
  pull:
    description: For O(source=registry), whether a tag that is there is pulled again.
    type: str
    choices: [missing, always]
    default: missing
  fingerprint:
    description: >-
      The fingerprint the image must have; RV(image.fingerprint) of the head. Needed for O(source=peer); may be
      empty in check mode, when the head does not have the image yet.
    type: str
    default: ""
  size:
    description: Unpacked size of the image in bytes (RV(image.size) of the head), to check free space before the copy.
    type: int
    default: 0
  layers:
    description: RV(dgxspark.serving.sync_server#module:server.layers) of the head, where there is no O(server) yet; layers that are here need no space.
    type: list
    elements: dict
    default: []
  architecture:
    description: RV(image.architecture) of the head; another one than this node's is refused before the copy.
    type: str
    default: ""
  transport:
    description:
      - V(relay) pulls missing layers, V(archive) always sends the whole image.
      - V(auto) sends the whole image only where the head cannot offer layers or this node's Docker cannot reach its own loopback.
    type: str
    choices: [auto, relay, archive]
    default: auto
  keep:
    description: Number of replaced versions that are kept, beside the present one.
    type: int
    default: 1
  progress:
    description: Name under which the progress is written to C(/run/dgxspark-serving). Set by the action plugin.
    type: str
    default: ""
  server:
    description:
      - RV(dgxspark.serving.sync_server#module:server) of the head, for O(source=peer). Only needed when the image is not there yet.
    type: dict
    suboptions:
      address:
        description: Fabric address of the head.
        type: str
        required: true
      port:
        description: Its port.
        type: int
        required: true
      token:
        description: Capability of this play.
        type: str
        required: true
      manifest_digest:
        description: Digest of the manifest to pull; empty when only the archive is offered.
        type: str
        required: true
      url:
        description: Not used here; accepted so that the whole result can be passed on.
        type: str
      bytes:
        description: Not used here.
        type: int
      source:
        description: Not used here.
        type: str
      path:
        description: Not used here.
        type: str
      unit:
        description: Not used here.
        type: str
      archive:
        description: Whether it offers C(docker save).
        type: bool
        default: false
      layers:
        description: Layers with C(diff_id) and C(bytes).
        type: list
        elements: dict
        default: []
  timeout:
    description: Seconds after which the pull is given up.
    type: int
    default: 7200
  stall_timeout:
    description: Seconds without any sign of progress after which the pull is given up.
    type: int
    default: 600
"""

EXAMPLES = r"""
- name: Have the image on the head
  dgxspark.serving.image_sync:
    reference: hellohal2064/vllm-qwen3.5-gb10:latest
    source: registry
  become: true
  register: __image_sync_head

- name: Have the same image on a worker
  dgxspark.serving.image_sync:
    reference: hellohal2064/vllm-qwen3.5-gb10:latest
    source: peer
    fingerprint: "{{ hostvars['spark-1'].__image_sync_head.image.fingerprint }}"
    server: "{{ hostvars['spark-1'].__image_sync_server.server }}"
  become: true

- name: Have nothing of it any more
  dgxspark.serving.image_sync:
    reference: hellohal2064/vllm-qwen3.5-gb10:latest
    state: absent
  become: true
"""

RETURN = r"""
image:
  description: The image on this node.
  returned: always
  type: dict
  contains:
    reference:
      description: The name it was looked up by.
      type: str
    present:
      description: Whether it is there.
      type: bool
    id:
      description: C(Id); depends on the image store.
      type: str
    repo_digests:
      description: C(RepoDigests).
      type: list
      elements: str
    repo_tags:
      description: C(RepoTags).
      type: list
      elements: str
    fingerprint:
      description: Identity of its content, equal on all nodes.
      type: str
    layers:
      description: Digests of the unpacked layers.
      type: list
      elements: str
    architecture:
      description: As Docker names it.
      type: str
    os:
      description: Operating system.
      type: str
    size:
      description: Bytes, as Docker counts them.
      type: int
    created:
      description: Time of its creation.
      type: str
    env:
      description: Environment that is baked in.
      type: dict
    entrypoint:
      description: Entrypoint that is baked in.
      type: list
      elements: str
    cmd:
      description: Command that is baked in.
      type: list
      elements: str
reference:
  description: The name to run it by, the same on all nodes.
  returned: always
  type: str
bytes_transferred:
  description: Bytes that came from the head (O(source=peer)).
  returned: always
  type: int
seconds:
  description: Duration of the pull.
  returned: always
  type: float
missing_bytes:
  description: Bytes of the layers that no image of this node had, as far as that is known before the copy.
  returned: always
  type: int
incoming:
  description: C(layers) and unpacked size (C(unpacked)) of what the head will bring, as far as that is known; for the space of the workers.
  returned: always
  type: dict
pruned:
  description: Names of older versions that were removed; for O(state=absent) all names that were, or in check mode would be.
  returned: always
  type: list
  elements: str
left:
  description: Names that O(state=absent) left because another service has the image.
  returned: always
  type: list
  elements: str
others:
  description: Names of the other services that the list of versions has, for O(state=absent) and O(state=forgotten).
  returned: always
  type: list
  elements: str
method:
  description: V(none), V(tag), V(registry), V(file), V(relay) or V(archive).
  returned: always
  type: str
actions:
  description: What was or would be done.
  returned: always
  type: list
  elements: str
problem:
  description: The failure as data (C(id), C(node), C(stage), C(found), C(expected), C(remedy)).
  returned: failure
  type: dict
"""

import contextlib
import functools
import json
import os
import platform
import re
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _image_load, _image_versions, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "image_sync"
RUN_DIR = "/run/dgxspark-serving"
STATE_DIR = "/var/lib/dgxspark-serving"
TRIES = 3
UNPACKED = 2.5  # what an image of vLLM unpacks to, at most, where only its packed size is known
_TEMPORARY = re.compile(r"127\.0\.0\.1:\d+/[0-9a-f]{32}/app(?:@sha256:[0-9a-f]{64}|:[\w.-]+)")


def temporary_names(images: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """Names that relayed pulls (also broken ones) left behind."""
    names = []
    for item in images:
        names += [name for name in [*(item.get("RepoTags") or []), *(item.get("RepoDigests") or [])] if _TEMPORARY.fullmatch(name)]
    return sorted(set(names))


class ImageSync:
    """State of one run."""

    def __init__(
        self,
        module: AnsibleModule,
        result: dict[str, t.Any],
        machine: str,
        progress: _transfer.Progress,
        run_dir: str = RUN_DIR,
        state_dir: str = STATE_DIR,
    ) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.node: str = self.params["node"]
        self.architecture = _image.docker_architecture(machine)
        self.run_dir = run_dir
        self.record = os.path.join(state_dir, "images.json")
        self.progress = progress
        self.reference: str = self.params["reference"]
        self.local: str = ""
        self.total = 0

    def problem(self, ident: str, found: str, expected: str, remedy: str) -> Problem:
        """A Problem of this module."""
        return Problem(ident, node=self.node, stage=STAGE, found=found, expected=expected, remedy=remedy)

    def docker(self, *argv: str, timeout: int = 60) -> tuple[int, str, str]:
        """A bounded docker command."""
        return self.module.run_command(["timeout", "-k", "5", str(timeout), "docker", *argv])

    def inspect(self, *names: str) -> list[dict[str, t.Any]]:
        """``docker image inspect`` of those names that exist; Problem when Docker does not answer."""
        if not names:
            return []
        rc, out, err = self.docker("image", "inspect", *names)
        ident, cause, remedy = _image.classify_pull_error(err) if rc else ("", "", "")
        if ident in ("DOC-02", "docker-down"):
            raise self.problem(ident, cause, "a Docker daemon that answers", remedy)
        if rc in (124, 137):
            raise self.problem(
                "docker-down", "the Docker daemon did not answer within 60 s", "a Docker daemon that answers", "systemctl status docker"
            )
        try:
            return list(json.loads(out or "[]"))
        except ValueError:
            return []

    def run(self) -> None:
        """The whole module; fills ``result``."""
        if self.params["state"] == "forgotten":
            self._forget()
            return
        try:
            self.local = self.result["reference"] = _image.local_reference(self.reference)
        except ValueError as exc:
            raise self.problem("image-unknown", str(exc), "an image reference", "correct spark_image") from exc
        if self.params["state"] == "absent":
            self._absent()
            return
        before = self._find()
        if self.params["source"] == "present":
            if not before:
                raise self.problem(
                    "image-missing", f"image {self.reference} is not on this node", "the image", "pull or load it, then run again"
                )
            self._accept(before)
        elif self.params["source"] == "registry":
            self._registry(before)
        elif self.params["source"] == "file":
            self._file(before)
        else:
            self._peer(before)
        if self.params["source"] != "present" and not self.module.check_mode:
            self._versions(before)

    def _find(self) -> dict[str, t.Any]:
        """The image under its local name, else under the given reference; {} when it is not there."""
        found = self.inspect(*dict.fromkeys([self.local, self.reference]))
        image = found[0] if found else {}
        self._set_image(image)
        self.result["diff"] = {"before": self._short(image), "after": self._short(image)}
        return image

    def _set_image(self, image: dict[str, t.Any]) -> None:
        self.result["image"] = _image.image_record(image, self.local)

    def _short(self, image: dict[str, t.Any]) -> dict[str, str]:
        if not image:
            return {"reference": "", "id": "", "fingerprint": ""}
        return {"reference": self.local, "id": str(image.get("Id") or ""), "fingerprint": _image.image_fingerprint(image)}

    def _platform(self, architecture: str, os_name: str) -> None:
        """Refuse an image for another platform (DOC-11), also before anything of it was copied."""
        if architecture and architecture != self.architecture:
            raise self.problem(
                "DOC-11",
                f"{self.reference} is built for {os_name or 'linux'}/{architecture}",
                f"linux/{self.architecture}, this node's platform",
                f"choose an image built for linux/{self.architecture}",
            )

    def _accept(self, image: dict[str, t.Any]) -> None:
        """Platform, wanted fingerprint and local name of an image that is there."""
        self._platform(str(image.get("Architecture") or ""), str(image.get("Os") or ""))
        fingerprint = _image.image_fingerprint(image)
        if self.params["fingerprint"] and fingerprint != self.params["fingerprint"]:
            remedy = "copy it from the head again (source peer), or remove this node's tag"
            raise self.problem("DOC-03", f"{self.local} has the fingerprint {fingerprint[:16]}", self.params["fingerprint"][:16], remedy)
        if self.local not in (image.get("RepoTags") or []):
            self._tag(str(image["Id"]), self.local)
        self._set_image(image)
        self.result["diff"]["after"] = self._short(image)

    def _tag(self, source: str, name: str) -> None:
        self.result["changed"] = True
        self.result["actions"].append(("would tag " if self.module.check_mode else "tagged ") + name)
        if self.module.check_mode:
            return
        rc, dummy, err = self.docker("tag", source, name)
        if rc:
            raise self.problem(
                "image-tag", f"docker tag {name}: {_image.last_line(err)}", "a tag that can be set", "see the message of Docker"
            )

    def _would(self, what: str, fingerprint: str = "") -> None:
        """Check mode: say it, and what the image would be."""
        self.result["changed"] = True
        self.result["actions"].append(f"would {what}")
        self.result["diff"]["after"] = {"reference": self.local, "id": "(new)", "fingerprint": fingerprint or "(unknown)"}

    # -- space

    def _data_roots(self) -> list[str]:
        """Where Docker of this node writes images: its root, and the content store beside it when it has one."""
        rc, out, dummy = self.docker("info", "--format", "{{.DockerRootDir}}|{{json .DriverStatus}}")
        root, dummy2, status = out.strip().partition("|")
        if rc or not root:
            return []
        if "io.containerd.snapshotter" not in status:
            return [root]
        return [path for path in _image.content_roots(root, _image.containerd_config()) if os.path.isdir(path)][:1] or [root]

    def _space(self, layers: list[dict[str, t.Any]], unpacked: int) -> None:
        """Refuse with the numbers when what is missing does not fit. Layers that any image of this node has do not count."""
        present = {layer for image in self._all_images() for layer in (image.get("RootFS") or {}).get("Layers") or []}
        content = sum(int(layer["bytes"]) for layer in layers)
        missing = _image.missing_bytes(layers, present) if layers else 0
        self.result["missing_bytes"] = missing
        need = _image.space_for(missing, content, unpacked) if layers else int(2 * unpacked)
        for root in self._data_roots():
            what = f"the image {self.local} (what is missing of it, and unpacked)"
            _transfer.check_space(root, need, 1 << 26, node=self.node, stage=STAGE, problem="disk-image", what=what)

    # -- head

    def _registry(self, before: dict[str, t.Any]) -> None:
        if before and self.params["pull"] == "missing":
            self._accept(before)
            return
        document = self._ask_registry()
        if document:
            self._incoming({str(part.get("digest")): int(part.get("size") or 0) for part in document["layers"]})
        if self.module.check_mode:
            self._would(f"pull {self.reference}")
            self.result["changed"] = not before
            return
        with self._lock():
            self._pull(self.reference, relay=None)
        images = self.inspect(self.reference)
        if not images:
            raise self.problem("image-pull", f"docker pull {self.reference} ended well but left no image", "the image", "run again")
        self._brought(images[0], "registry", f"pulled {self.reference}")
        self._accept(images[0])

    def _incoming(self, sizes: dict[str, int]) -> None:
        """Space for what the registry would send of these layers (by their digest on the wire)."""
        roots = self._data_roots()
        layers: list[dict[str, t.Any]] = [
            {"diff_id": _image.local_diff_id(roots, digest) or digest, "bytes": size} for digest, size in sizes.items()
        ]
        self.result["incoming"] = {"layers": layers, "unpacked": int(UNPACKED * sum(sizes.values()))}
        missing = [layer for layer in layers if not _image.has_blob(roots, layer["diff_id"])]
        self._space(missing, int(UNPACKED * sum(layer["bytes"] for layer in missing)))
        self.total = self.result["missing_bytes"]

    def _brought(self, image: dict[str, t.Any], method: str, action: str) -> None:
        if self._short(image) != self.result["diff"]["before"]:
            self.result.update(changed=True, method=method)
            self.result["actions"].append(action)

    def _lock(self) -> t.ContextManager[None]:
        lock = os.path.join(self.run_dir, "image.lock")

        def tick() -> None:
            self.progress("waits for another run")

        return _transfer.exclusive(lock, self.params["timeout"], node=self.node, stage=STAGE, what="an image", tick=tick)

    def _ask_registry(self) -> dict[str, t.Any] | None:
        """The manifest of this node's platform, to refuse before anything is downloaded; None when the registry does not tell. Then the pull will say
        why."""
        host = self.reference.partition("/")[0]
        rc, out, dummy = self.docker("info", "--format", "{{json .RegistryConfig}}")
        insecure = rc == 0 and _image.insecure_registry(out, host)
        argv = ["manifest", "inspect", *(["--insecure"] if insecure else [])]
        rc, out, dummy = self.docker(*argv, self.reference, timeout=30)
        if rc:
            return None
        try:
            found = _image.pick_for_platform(json.loads(out), self.architecture)
            if found and "layers" not in found:
                name = _image.split_reference(self.reference).name
                rc, out, dummy = self.docker(*argv, f"{name}@{found['digest']}", timeout=30)
                found = json.loads(out) if rc == 0 else None
        except _image.NotServable as exc:
            raise self.problem(
                "DOC-11",
                f"{self.reference}: {exc}",
                f"linux/{self.architecture}, this node's platform",
                f"choose an image built for linux/{self.architecture}",
            ) from exc
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("layers"), list) else None

    def _pull(self, name: str, relay: _transfer.Relay | None) -> None:
        """``docker pull``; a connection that broke off, or one damaged layer, is tried again: finished layers stay."""
        begin = time.monotonic()
        layers: dict[str, tuple[int, int]] = {}

        def progress(child: _transfer.Child) -> tuple[int, int]:
            done = relay.bytes if relay else _image.pulled_bytes(child.out.decode("utf-8", "replace"), layers)
            self.progress(f"pulls {self.reference}", done, self.total)
            return len(child.seen), done

        for number in range(TRIES):
            if relay:
                relay.error = ""
            watched = _transfer.watch(
                ["docker", "pull", name],
                timeout=max(1.0, self.params["timeout"] - (time.monotonic() - begin)),
                stall=self.params["stall_timeout"],
                progress=progress,
                terminal=True,
            )
            self.result["seconds"] = round(time.monotonic() - begin, 3)
            if watched.rc == 0:
                return
            if watched.ended or number + 1 == TRIES or not _image.worth_another_try(watched.err + watched.out[-2000:]):
                break
            self.result["actions"].append(f"pulled again: {_image.last_line(watched.err or watched.out)}")
        self._pull_failed(name, relay, watched)

    def _pull_failed(self, name: str, relay: _transfer.Relay | None, watched: _transfer.Watched) -> None:
        shown = self.reference if relay else name
        text = watched.err or watched.out
        where = f"the head ({relay.target[0]}:{relay.target[1]})" if relay else "the registry"
        if relay and relay.error:
            remedy = "check the fabric and that no firewall on the head blocks this port, then run again"
            raise self.problem("sync-stalled", f"{shown}: no connection to {relay.error}", "the server on the head", remedy)
        if watched.ended:
            limit = self.params["timeout"] if watched.ended == "timeout" else self.params["stall_timeout"]
            word = "took longer than" if watched.ended == "timeout" else "showed no progress for"
            found = f"the pull of {shown} from {where} {word} {limit} s"
            raise self.problem(
                "image-stalled",
                found,
                "progress",
                "check the network and the disk of this node, then run again: finished layers are reused",
            )
        ident, cause, remedy = _image.classify_pull_error(text)
        if watched.rc < 0:
            cause = f"docker pull was killed by signal {-watched.rc}"
            remedy = "run again: finished layers are reused; if nobody killed it, look for 'out of memory' in dmesg"
        if relay:
            ident, cause, remedy = self._relay_error(ident, cause, remedy)
            text = text.replace(self.params["server"]["token"], "…")
        raise self.problem(ident, f"{shown}: {cause} ({_image.last_line(text)})", f"an image that can be pulled from {where}", remedy)

    @staticmethod
    def _relay_error(ident: str, cause: str, remedy: str) -> tuple[str, str, str]:
        """The same texts mean something else when the registry is our own server."""
        if ident == "image-denied":
            return (
                "sync-denied",
                "the server on the head refuses this node or its token",
                "run the whole stage again, so that the server knows this node",
            )
        if ident == "image-unknown":
            return "sync-source", "the server on the head does not have this image (any more)", "run the image stage again from the head on"
        if ident == "registry-unreachable":
            return "sync-stalled", "the server on the head does not answer", "check the fabric, then run again"
        if ident == "image-damaged":
            remedy = (
                "run again; if it fails again, the layer is damaged on the head's disk: there, remove the image (docker image rm), bring it again, "
                "and look at dmesg for disk errors"
            )
        return ident, cause, remedy

    # -- head, from a file

    def _file(self, before: dict[str, t.Any]) -> None:
        """``docker load``. What is in the file is looked at first: it may be here already, or be for another platform."""
        path = self.params["path"]
        try:
            told = _image.archive_inspect(path)
            size = os.stat(path).st_size
        except OSError as exc:
            raise self.problem(
                "image-file", f"{path}: {exc.strerror}", "a readable file that docker save wrote", "correct spark_image_file"
            ) from exc
        fingerprint = _image.image_fingerprint(told) if told else ""
        if told:
            self._platform(told["Architecture"], told["Os"])
            if told["Images"] != 1:
                raise self.problem(
                    "image-file", f"{path} holds {told['Images']} images", "a file with one image", "docker save only the one to serve"
                )
        if before and (not told or _image.image_fingerprint(before) == fingerprint):
            self._accept(before)
            return
        same = [image for image in self._all_images() if fingerprint and _image.image_fingerprint(image) == fingerprint]
        if same:
            self._use(same[0])
            return
        self.result["incoming"] = {"layers": [], "unpacked": size}
        for root in self._data_roots():
            _transfer.check_space(
                root, size, 1 << 26, node=self.node, stage=STAGE, problem="disk-image", what=f"the image in {path}", factor=2.0
            )
        if self.module.check_mode:
            self._would(f"load {self.local} from {path}", fingerprint)
            return
        inside = told["RepoTags"] if told else []
        held = {name: str(image["Id"]) for name in inside for image in self.inspect(name)}
        with self._lock(), open(path, "rb") as source:
            names = self._load(source, size, path)
        self.result["method"] = "file"
        self._loaded(names, fingerprint, f"loaded {self.local} from {path} in {self.result['seconds']:.1f} s")
        # The names in the file are those of whoever wrote it: what they stood for here before stays.
        for name in {*inside, *names} - {self.local}:
            if name in held:
                self.docker("tag", held[name], name)
            elif not name.startswith("sha256:"):
                self.docker("image", "rm", "--no-prune", name)

    def _load(self, source: t.Any, size: int, where: str) -> list[str]:
        """Feed an archive to ``docker load``; names and Ids that it told."""
        begin = time.monotonic()
        seen = [0]

        def report(count: int) -> None:
            seen[0] += count
            self.progress(f"loads {self.reference}", seen[0], size)

        try:
            text = _image_load.load(
                source, ["docker", "load"], stall=self.params["stall_timeout"], timeout=self.params["timeout"], report=report
            )
        except _image_load.Broken as exc:
            raise self._load_failed(exc, where) from exc
        self.result["seconds"] = round(time.monotonic() - begin, 3)
        return _image.loaded_names(text)

    def _load_failed(self, exc: _image_load.Broken, where: str) -> Problem:
        text = f"docker load of {self.reference} from {where}: {_image.last_line(str(exc))}"
        if exc.where == "load":
            ident, dummy, remedy = _image.classify_pull_error(str(exc))
            if ident not in ("disk-image", "docker-down", "DOC-02"):
                ident, remedy = "image-load", "see the message of Docker; is the file whole, and written by docker save?"
            return self.problem(ident, text, "an image that can be loaded", remedy)
        ids = {"denied": "sync-denied", "source": "sync-source"}
        remedy = (
            "see on the head why docker save ended, then run again"
            if exc.where == "source"
            else "check the fabric and the disk, then run again"
        )
        return self.problem(ids.get(exc.where, "sync-stalled"), text, "the whole image", remedy)

    def _loaded(self, names: list[str], fingerprint: str, action: str) -> None:
        """Give what was loaded its name, when it is the right content."""
        images = self.inspect(*names)
        right = [image for image in images if not fingerprint or _image.image_fingerprint(image) == fingerprint]
        if not right or (not fingerprint and len(images) > 1):
            for name in names:
                if name != self.local:
                    self.docker("image", "rm", name)
            shown = ", ".join(_image.image_fingerprint(image)[:16] for image in images) or "no image"
            raise self.problem(
                "DOC-03", f"docker load brought {shown}", fingerprint[:16] or "one image", "run the image stage again from the head on"
            )
        self.result["changed"] = True
        self.result["actions"].append(action)
        self._platform(str(right[0].get("Architecture") or ""), str(right[0].get("Os") or ""))
        if self.local not in (right[0].get("RepoTags") or []):
            self._tag(str(right[0]["Id"]), self.local)
        self._done(right[0])

    # -- worker

    def _peer(self, before: dict[str, t.Any]) -> None:
        wanted = self.params["fingerprint"]
        if not wanted and not self.module.check_mode:
            raise self.problem(
                "sync-input", "no fingerprint", "image.fingerprint of the head", "run image_sync on the head first (role image_sync does)"
            )
        self._platform(self.params["architecture"], "linux")
        if before and _image.image_fingerprint(before) == wanted:
            self._accept(before)
            return
        if self.module.check_mode:
            self._peer_check(wanted)
            return
        with self._lock():
            self._clean(temporary_names(self._all_images()))
            same = self._same(wanted)  # also what another run brought while this one waited
            if same:
                self._use(same)
                return
            self._check_server()
            self.result["changed"] = True
            self._copy(wanted)

    def _peer_check(self, wanted: str) -> None:
        same = self._same(wanted)
        if same:
            self.result["method"] = "tag"
            self._tag(str(same["Id"]), self.local)
            return
        if self.params["layers"] or self.params["size"]:
            roots = self._data_roots()
            layers = [
                {**layer, "diff_id": _image.local_diff_id(roots, layer["diff_id"]) or layer["diff_id"]} for layer in self.params["layers"]
            ]
            missing = [layer for layer in layers if not _image.has_blob(roots, layer["diff_id"])]
            if missing or not layers:
                self._space(missing, self.params["size"])
        self._would(f"pull {self.local} from the head", wanted)

    def _use(self, image: dict[str, t.Any]) -> None:
        """The right content is here, perhaps under another name."""
        if self.local in (image.get("RepoTags") or []):
            self._accept(image)
            return
        self.result["method"] = "tag"
        self._tag(str(image["Id"]), self.local)
        self._done(image)

    def _same(self, wanted: str) -> dict[str, t.Any] | None:
        return next((image for image in self._all_images() if wanted and _image.image_fingerprint(image) == wanted), None)

    def _all_images(self) -> list[dict[str, t.Any]]:
        rc, out, dummy = self.docker("image", "ls", "--quiet", "--no-trunc")
        return self.inspect(*dict.fromkeys(out.split())) if rc == 0 else []

    def _clean(self, names: list[str]) -> None:
        """Remove names of broken relayed pulls; the layers stay as long as another name holds them."""
        if names:
            self.docker("image", "rm", "--no-prune", *names)

    def _check_server(self) -> None:
        if not self.params["server"]:
            found = f"image {self.local} is not on this node and no server was given"
            raise self.problem("sync-no-server", found, "server of sync_server on the head", "start it first (role image_sync does)")
        server = self.params["server"]
        self._space(server["layers"] or self.params["layers"], self.params["size"])
        self.total = self.result["missing_bytes"]

    def _copy(self, wanted: str) -> None:
        """The first way that is possible; the result names it."""
        server, transport = self.params["server"], self.params["transport"]
        if transport == "archive" or not server["manifest_digest"]:
            if transport == "relay":
                raise self.problem(
                    "sync-source",
                    "the head cannot offer its image layer by layer",
                    "a head that can",
                    "set spark_image_transport to auto or archive",
                )
            self._archived(wanted)
            return
        with _transfer.Relay(server["address"], server["port"]) as relay:
            # docker pull takes no secret but in its argv. The token opens nothing but these blobs, only from this node's address, only
            # during this play.
            name = f"127.0.0.1:{relay.port}/{server['token']}/app@{server['manifest_digest']}"
            try:
                self._pull(name, relay)
            except Problem:
                self._clean(temporary_names(self._all_images()))
                if transport != "auto" or relay.links or not server["archive"]:
                    raise
                relay.error = "never asked"
            self.result["bytes_transferred"] = relay.bytes
        if relay.error == "never asked":
            # Docker did not come to the relay at all: another network namespace (rootless), or a daemon that may not use plain HTTP here.
            self.result["actions"].append("Docker of this node cannot reach its own loopback: the whole image is sent")
            self._archived(wanted)
            return
        self.result["method"] = "relay"
        image = (self.inspect(name) or [{}])[0]
        fingerprint = _image.image_fingerprint(image)
        if fingerprint != wanted:
            self.docker("image", "rm", name)
            remedy = "the head's image and its server do not fit: run the image stage again from the head on"
            raise self.problem("DOC-03", f"what came from the head has the fingerprint {fingerprint[:16]}", wanted[:16], remedy)
        self._tag(str(image["Id"]), self.local)
        self.docker("image", "rm", "--no-prune", name)
        size = _transfer.human(self.result["bytes_transferred"])
        self.result["actions"].append(f"pulled {self.local} from the head ({size} in {self.result['seconds']:.1f} s)")
        self._done(image)

    def _archived(self, wanted: str) -> None:
        server = self.params["server"]
        if not server["archive"]:
            raise self.problem(
                "sync-source",
                "the server on the head offers no archive",
                "a server of this version",
                "run the image stage again from the head on",
            )
        where = f"the head ({server['address']}:{server['port']})"
        try:
            source = _image_load.open_archive(server["address"], server["port"], server["token"], self.params["stall_timeout"])
        except _image_load.Broken as exc:
            raise self._load_failed(exc, where) from exc
        counted = _image_load.Counted(source)
        try:
            names = self._load(counted, self.params["size"], where)
        finally:
            self.result["bytes_transferred"] = counted.bytes
            source.close()
        self.result["method"] = "archive"
        size = _transfer.human(counted.bytes)
        self._loaded(names, wanted, f"loaded {self.local} from the head ({size} in {self.result['seconds']:.1f} s)")

    def _done(self, image: dict[str, t.Any]) -> None:
        now = image if self.module.check_mode else (self.inspect(self.local) or [image])[0]
        self._accept({**now, "RepoTags": [*(now.get("RepoTags") or []), self.local]})
        self._set_image(now)

    # -- versions

    def _recorded(self) -> list[dict[str, t.Any]]:
        try:
            with open(self.record, encoding="utf-8") as handle:
                return _image_versions.readable(json.load(handle))
        except (OSError, ValueError):
            return []

    def _absent(self) -> None:
        """Remove the image and its versions, name by name: a name may go with another one."""
        self._find()
        images, wanted, versions, service = self._all_images(), [self.local, self.reference], self._recorded(), self.params["service"]
        own = _image_versions.of_service(versions, service)
        others = _image_versions.of_others(versions, service)
        others += _image_versions.run_by(self.params["beside"], images, _image.image_fingerprint)
        names = _image_versions.names_to_forget(own, wanted, images, _image.image_fingerprint, others)
        left = [name for name in _image_versions.names_to_forget(own, wanted, images, _image.image_fingerprint) if name not in names]
        self.result["left"] = left
        if left:
            self.result["actions"].append(f"left {', '.join(left)}: another service has it")
        self.result["diff"]["after"] = self._short({})
        if names:
            self.result.update(changed=True, pruned=names)
            self.result["actions"].append(("would remove " if self.module.check_mode else "removed ") + ", ".join(names))
        if self.module.check_mode:
            self._forget()
            return
        for name in names:
            rc, dummy, err = self.docker("image", "rm", name, timeout=300) if self.inspect(name) else (0, "", "")
            if rc:
                remedy = "remove the container that uses it, or leave the image (spark_remove_image: false)"
                raise self.problem(
                    "image-remove", f"docker image rm {name}: {_image.last_line(err)}", "an image that can be removed", remedy
                )
        self._set_image((self.inspect(self.local) or [{}])[0] if left else {})
        self._forget()

    def _forget(self) -> None:
        """Take the service out of the list; without any other there is no list."""
        others = _image_versions.of_others(self._recorded(), self.params["service"])
        self.result["others"] = sorted({item["service"] for item in others})
        if not os.path.exists(self.record) or (others and others == self._recorded()):
            return
        self.result["changed"] = True
        self.result["actions"].append(("would forget" if self.module.check_mode else "forgot") + " its versions")
        if not self.module.check_mode:
            self._write(others)

    def _write(self, versions: list[dict[str, t.Any]]) -> None:
        if not versions:
            os.unlink(self.record)
            return
        os.makedirs(os.path.dirname(self.record), mode=0o700, exist_ok=True)
        with open(f"{self.record}.new", "w", encoding="utf-8") as handle:
            json.dump({"versions": versions}, handle, indent=1)
        os.replace(f"{self.record}.new", self.record)

    def _versions(self, before: dict[str, t.Any]) -> None:
        """Remember what is served now, keep the version before it under a name of ours, remove the older ones that we brought."""
        versions, service = self._recorded(), self.params["service"]
        known = list(versions)
        old = _image.image_fingerprint(before) if before else ""
        now = self.result["image"]
        if old and old != now["fingerprint"]:
            if not any(item["fingerprint"] == old for item in _image_versions.of_service(versions, service)):
                versions = _image_versions.remember(
                    versions, {"fingerprint": old, "reference": self.local, "id": str(before["Id"]), "ours": False, "service": service}
                )
            name = _image_versions.keep_tag(self.local, old)
            if self.docker("tag", str(before["Id"]), name)[0] == 0:
                self.result["actions"].append(f"kept the version before as {name}")
        ours = self.result["method"] != "none"
        versions = _image_versions.remember(
            versions, {"fingerprint": now["fingerprint"], "reference": self.local, "id": now["id"], "ours": ours, "service": service}
        )
        others = _image_versions.of_others(versions, service)
        gone = [item for item in _image_versions.surplus(versions, self.params["keep"], service) if self._remove_version(item, others)]
        versions = [item for item in versions if item not in gone]
        if versions != known:
            self._write(versions)

    def _remove_version(self, version: dict[str, t.Any], others: list[dict[str, t.Any]]) -> bool:
        """Whether nothing of ours is left of it but what other services have. What a container still uses, Docker refuses to remove: then the next run
        tries again.
        """
        names = _image_versions.names_to_remove(version, self._all_images(), _image.image_fingerprint, others)
        if not names:
            return True
        rc, dummy, err = self.docker("image", "rm", *names, timeout=300)
        if rc:
            self.result["actions"].append(f"left {names[0]}: {_image.last_line(err)}")
            return False
        self.result["changed"] = True
        self.result["pruned"] += names
        self.result["actions"].append(f"removed {', '.join(names)}")
        return True


def argument_spec() -> dict[str, t.Any]:
    """Options of the module."""
    server = {
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "token": {"type": "str", "required": True, "no_log": True},
        "url": {"type": "str"},
        "bytes": {"type": "int"},
        "source": {"type": "str"},
        "manifest_digest": {"type": "str", "required": True},
        "path": {"type": "str"},
        "unit": {"type": "str"},
        "archive": {"type": "bool", "default": False},
        "layers": {"type": "list", "elements": "dict", "default": []},
    }
    return {
        "node": {"type": "str", "default": ""},
        "state": {"type": "str", "choices": ["present", "absent", "forgotten"], "default": "present"},
        "service": {"type": "str", "default": ""},
        "beside": {"type": "list", "elements": "dict", "default": []},
        "reference": {"type": "str", "required": True},
        "source": {"type": "str", "choices": ["registry", "file", "present", "peer"]},
        "path": {"type": "path", "default": ""},
        "pull": {"type": "str", "choices": ["missing", "always"], "default": "missing"},
        "fingerprint": {"type": "str", "default": ""},
        "size": {"type": "int", "default": 0},
        "architecture": {"type": "str", "default": ""},
        "layers": {"type": "list", "elements": "dict", "default": []},
        "server": {"type": "dict", "options": server},
        "transport": {"type": "str", "choices": ["auto", "relay", "archive"], "default": "auto"},
        "keep": {"type": "int", "default": 1},
        "progress": {"type": "str", "default": ""},
        "timeout": {"type": "int", "default": 7200},
        "stall_timeout": {"type": "int", "default": 600},
    }


def new_result(params: dict[str, t.Any]) -> dict[str, t.Any]:
    """The result before anything happened."""
    empty = {"reference": "", "id": "", "fingerprint": ""}
    return {
        "changed": False,
        "image": _image.absent_record(params["reference"]),
        "reference": params["reference"],
        "bytes_transferred": 0,
        "missing_bytes": 0,
        "incoming": {},
        "pruned": [],
        "left": [],
        "others": [],
        "seconds": 0.0,
        "method": "none",
        "actions": [],
        "diff": {"before": empty, "after": empty},
    }


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, required_if=[("state", "present", ("source",))])
    result = new_result(module.params)
    name = module.params["progress"]
    server = module.params["server"]
    awake = functools.partial(_transfer.ping, _transfer.Source(server["address"], server["port"], server["token"])) if server else None
    progress = _transfer.Progress(os.path.join(RUN_DIR, f"progress-{name}") if name else "", also=awake)
    try:
        with contextlib.closing(progress):
            ImageSync(module, result, platform.machine(), progress, run_dir=RUN_DIR, state_dir=STATE_DIR).run()
    except Problem as exc:
        problem = (
            exc
            if exc.node
            else Problem(
                exc.id, **{**{k: getattr(exc, k) for k in ("found", "expected", "remedy")}, "node": module.params["node"], "stage": STAGE}
            )
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    except OSError as exc:
        found = f"{exc.filename or RUN_DIR}: {exc.strerror}"
        problem = Problem(
            "sync-access", node=module.params["node"], stage=STAGE, found=found, expected="root", remedy="run the task with become"
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    module.exit_json(**result)


if __name__ == "__main__":
    main()
