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
  - On the head O(source=registry) pulls the image when it is not there; on workers O(source=peer) pulls the missing layers from the head.
  - Identity is a fingerprint of layers, platform and config, never a tag or the Id, because the two image stores of Docker name the same
    image differently.
  - A worker does a plain C(docker pull) by digest from its own loopback, relayed to the read-only view that
    M(dgxspark.serving.sync_server) gives of the
    head's blobs. Docker verifies each layer; nothing in C(daemon.json) is changed and nothing listens beyond loopback.
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
      - V(present) only verifies that it is there.
      - V(peer) pulls it from the head.
    type: str
    choices: [registry, present, peer]
    required: true
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
    description: Size of the image in bytes (RV(image.size) of the head), to check free space before the copy. V(0) skips that check.
    type: int
    default: 0
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
        description: Digest of the manifest to pull.
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
method:
  description: V(none), V(tag), V(registry) or V(relay).
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

import json
import os
import platform
import re
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "image_sync"
RUN_DIR = "/run/dgxspark-serving"
_TEMPORARY = re.compile(r"127\.0\.0\.1:\d+/[0-9a-f]{32}/app(?:@sha256:[0-9a-f]{64}|:[\w.-]+)")


def temporary_names(images: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """Names that relayed pulls (also broken ones) left behind."""
    names = []
    for item in images:
        names += [name for name in [*(item.get("RepoTags") or []), *(item.get("RepoDigests") or [])] if _TEMPORARY.fullmatch(name)]
    return sorted(set(names))


class ImageSync:
    """State of one run."""

    def __init__(self, module: AnsibleModule, result: dict[str, t.Any], machine: str, run_dir: str = RUN_DIR) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.node: str = self.params["node"]
        self.machine = machine
        self.run_dir = run_dir
        self.reference: str = self.params["reference"]
        self.local: str = ""

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
        try:
            self.local = self.result["reference"] = _image.local_reference(self.reference)
        except ValueError as exc:
            raise self.problem("image-unknown", str(exc), "an image reference", "correct spark_image") from exc
        before = self._find()
        if self.params["source"] == "present":
            if not before:
                raise self.problem(
                    "image-missing", f"image {self.reference} is not on this node", "the image", "pull or load it, then run again"
                )
            self._accept(before)
        elif self.params["source"] == "registry":
            self._registry(before)
        else:
            self._peer(before)

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

    def _accept(self, image: dict[str, t.Any]) -> None:
        """Platform, wanted fingerprint and local name of an image that is there."""
        wanted = _image.docker_architecture(self.machine)
        has = str(image.get("Architecture") or "")
        if has and has != wanted:
            remedy = f"choose an image built for linux/{wanted}"
            raise self.problem(
                "DOC-11", f"{self.reference} is built for {image.get('Os')}/{has}", f"linux/{wanted}, this node's platform", remedy
            )
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

    # -- head

    def _registry(self, before: dict[str, t.Any]) -> None:
        if before and self.params["pull"] == "missing":
            self._accept(before)
            return
        if self.module.check_mode:
            self.result["changed"] = not before
            self.result["actions"].append(f"would pull {self.reference}")
            self.result["diff"]["after"] = {"reference": self.local, "id": "(pulled)", "fingerprint": "(unknown)"}
            return
        self._pull(self.reference, relay=None)
        images = self.inspect(self.reference)
        if not images:
            raise self.problem("image-pull", f"docker pull {self.reference} ended well but left no image", "the image", "run again")
        image = images[0]
        if self._short(image) != self.result["diff"]["before"]:
            self.result["changed"] = True
            self.result["method"] = "registry"
            self.result["actions"].append(f"pulled {self.reference}")
        self._accept(image)

    def _pull(self, name: str, relay: _transfer.Relay | None) -> None:
        watched = _transfer.watch(
            ["docker", "pull", name],
            timeout=self.params["timeout"],
            stall=self.params["stall_timeout"],
            progress=(lambda child: (len(child.seen), relay.bytes if relay else 0)),
            terminal=True,
        )
        self.result["seconds"] = round(watched.seconds, 3)
        if watched.rc == 0:
            return
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
        return ident, cause, remedy

    # -- worker

    def _peer(self, before: dict[str, t.Any]) -> None:
        wanted = self.params["fingerprint"]
        if not wanted and not self.module.check_mode:
            raise self.problem(
                "sync-input", "no fingerprint", "image.fingerprint of the head", "run image_sync on the head first (role image_sync does)"
            )
        if before and _image.image_fingerprint(before) == wanted:
            self._accept(before)
            return
        images = self._all_images()
        self._clean(temporary_names(images))
        same = [image for image in images if wanted and _image.image_fingerprint(image) == wanted]
        if same:
            self.result["method"] = "tag"
            self._tag(str(same[0]["Id"]), self.local)
            self._done(same[0])
            return
        self.result["changed"] = True
        if self.module.check_mode:
            self.result["actions"].append(f"would pull {self.local} from the head")
            self.result["diff"]["after"] = {"reference": self.local, "id": "(pulled)", "fingerprint": wanted or "(unknown)"}
            return
        self._check_space()
        lock = os.path.join(self.run_dir, "image.lock")
        with _transfer.exclusive(lock, self.params["timeout"], node=self.node, stage=STAGE, what="an image"):
            self._relayed(wanted)

    def _all_images(self) -> list[dict[str, t.Any]]:
        rc, out, dummy = self.docker("image", "ls", "--quiet", "--no-trunc")
        return self.inspect(*dict.fromkeys(out.split())) if rc == 0 else []

    def _clean(self, names: list[str]) -> None:
        """Remove names of broken relayed pulls; the layers stay as long as another name holds them."""
        if names and not self.module.check_mode:
            self.docker("image", "rm", "--no-prune", *names)

    def _check_space(self) -> None:
        rc, out, dummy = self.docker("info", "--format", "{{.DockerRootDir}}")
        if rc == 0 and out.strip() and self.params["size"]:
            what = f"the image {self.local}"
            _transfer.check_space(
                out.strip(), self.params["size"], 0, node=self.node, stage=STAGE, problem="disk-image", what=what, factor=1.2
            )

    def _relayed(self, wanted: str) -> None:
        server = self.params["server"]
        if not server:
            found = f"image {self.local} is not on this node and no server was given"
            raise self.problem("sync-no-server", found, "server of sync_server on the head", "start it first (role image_sync does)")
        with _transfer.Relay(server["address"], server["port"]) as relay:
            # docker pull takes no secret but in its argv. The token opens nothing but these blobs, only from this node's address, only
            # during this play.
            name = f"127.0.0.1:{relay.port}/{server['token']}/app@{server['manifest_digest']}"
            self._pull(name, relay)
            self.result["bytes_transferred"] = relay.bytes
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

    def _done(self, image: dict[str, t.Any]) -> None:
        now = image if self.module.check_mode else (self.inspect(self.local) or [image])[0]
        self._accept({**now, "RepoTags": [*(now.get("RepoTags") or []), self.local]})
        self._set_image(now)


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
    }
    return {
        "node": {"type": "str", "default": ""},
        "reference": {"type": "str", "required": True},
        "source": {"type": "str", "choices": ["registry", "present", "peer"], "required": True},
        "pull": {"type": "str", "choices": ["missing", "always"], "default": "missing"},
        "fingerprint": {"type": "str", "default": ""},
        "size": {"type": "int", "default": 0},
        "server": {"type": "dict", "options": server},
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
        "seconds": 0.0,
        "method": "none",
        "actions": [],
        "diff": {"before": empty, "after": empty},
    }


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    result = new_result(module.params)
    try:
        ImageSync(module, result, platform.machine(), run_dir=RUN_DIR).run()
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
