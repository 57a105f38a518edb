#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_probe
short_description: Proves from inside the image that it can serve the model
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Starts the serving image once, without network and without a GPU, and asks it what would otherwise only show when the old service is gone.
  - Found are the versions of vLLM, Ray, Python, torch, NCCL and transformers, the entrypoint and the environment that are baked in, whether config, tokenizer
    and every shard of the index can be read at the mounted path, whether vLLM knows the model, and whether the parser of C(vllm serve) takes
    all arguments. No engine is loaded.
  - What cannot be told without a GPU is V(null) in the result and no failure.
  - A good answer is kept in C(/var/lib/dgxspark-serving/probes) and used again as long as image, model files, arguments and environment are the same.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - The image is asked in check mode too, when it is there; an answer is not kept.
      - Without the image the module is skipped; without the model only the image and the arguments are checked.
  diff_mode:
    support: N/A
    details: This module does not change anything.
  idempotent:
    support: full
    details: This module never reports a change; its container is removed.
options:
  image:
    description: Reference of the image. Nothing is pulled. Needed unless O(probes) is given.
    type: str
  command:
    description: Arguments of C(vllm) as they will be given, beginning with V(serve).
    type: list
    elements: str
    default: []
  model:
    description: Path of the model inside the container. Empty means that the files and the model type are not checked.
    type: str
    default: ""
  volumes:
    description:
      - Mounts of the container as C(source:target:mode).
      - Directories of the node that are mounted C(ro) are mounted; all others become empty directories in memory.
    type: list
    elements: str
    default: []
  env:
    description: Environment of the container. It decides which baked variables are overridden, and the probe runs with it.
    type: dict
    default: {}
  executor:
    description: With V(ray), an image without Ray is refused.
    type: str
    default: ray
  scope:
    description:
      - V(full) imports vLLM and asks it for the model and the arguments.
      - V(versions) only reads the versions of the packages and of NCCL and, with O(model), whether its files can be read; about a second.
    type: str
    choices: [full, versions]
    default: full
  timeout:
    description: Seconds after which the probe is ended.
    type: int
    default: 300
  force:
    description: Ask the image even if an answer is kept.
    type: bool
    default: false
  probes:
    description: RV(probe) of every node by its name. When given, nothing is started; the versions are compared.
    type: dict
"""

EXAMPLES = r"""
- name: Prove that the image can serve the model
  dgxspark.serving.image_probe:
    node: "{{ inventory_hostname }}"
    image: hellohal2064/vllm-qwen3.5-gb10:latest
    command: [serve, /models/hub/models--Qwen--Qwen3.5-122B-A10B-FP8/snapshots/main, --max-model-len, "16384"]
    model: /models/hub/models--Qwen--Qwen3.5-122B-A10B-FP8/snapshots/main
    volumes: [/home/nvidia/.cache/huggingface/hub:/models/hub:ro]
  become: true
  register: probed

- name: Prove that all nodes have the same versions
  dgxspark.serving.image_probe:
    probes: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, ['probed', 'probe']))) }}"
  run_once: true
"""

RETURN = r"""
probe:
  description: What the image says. Empty when the module was skipped or only compared.
  returned: always
  type: dict
  contains:
    image:
      description: The image.
      type: str
    fingerprint:
      description: Its content, as RV(dgxspark.serving.image_sync#module:image.fingerprint).
      type: str
    entrypoint:
      description: Baked entrypoint; this collection always overrides it.
      type: list
      elements: str
    cmd:
      description: Baked command.
      type: list
      elements: str
    environment:
      description: Baked variables that begin with C(NCCL_), C(GLOO_), C(TP_), C(RAY_), C(VLLM_), C(UCX_), C(HF_), C(OMPI_MCA_), C(MN_IF_NAME) or
        C(MASTER_). Values of secrets are hidden.
      type: dict
    inherited:
      description: Those of them that O(env) does not set.
      type: dict
    ring:
      description: Whether O(env) has the settings of a ring of nodes, which an old NCCL does not know.
      type: bool
    versions:
      description: Versions of C(vllm), C(ray), C(python), C(torch), C(nccl), C(transformers) and C(huggingface_hub); V(null) when not found.
      type: dict
    commands:
      description: Paths of the commands C(vllm) and C(ray); V(null) when not found.
      type: dict
    imports:
      description: For C(vllm) and C(ray) whether they can be imported; V(null) when only the missing GPU may be the reason.
      type: dict
    errors:
      description: What went wrong when they were imported.
      type: dict
    platform:
      description: vLLM's name for the platform of the probe.
      type: str
    files:
      description: C(path), number of files C(checked), C(missing) (C(path), C(reason)) and whether there are C(tokenizer) files.
      type: dict
    model:
      description: >-
        C(known) (V(null) when it could not be told), C(by) (V(vllm), V(transformers) or V(code of the model)), C(model_type), C(architectures) and
        C(reason).
      type: dict
    arguments:
      description: C(accepted) (V(null) when it could not be told), C(refused) (C(flag), C(reason), C(close)) and C(reason).
      type: dict
    complete:
      description: Whether the probe ran to its end.
      type: bool
    seconds:
      description: Duration of each part and in total.
      type: dict
cached:
  description: Whether the answer is one of an earlier run.
  returned: always
  type: bool
skip_reason:
  description: Why nothing was asked.
  returned: when skipped
  type: str
problem:
  description: The failure as data (C(id), C(node), C(stage), C(found), C(expected), C(remedy)).
  returned: failure
  type: dict
"""

import json
import os
import platform
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _probe, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import bounded

RUN_DIR = "/run/dgxspark-serving"
STATE_DIR = "/var/lib/dgxspark-serving"
COMMAND_TIMEOUT = 60


class ImageProbe:
    """State of one run."""

    def __init__(self, module: AnsibleModule, result: dict[str, t.Any], machine: str) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.node: str = self.params["node"]
        self.machine = machine
        self.command = bounded(module.run_command)
        self.mounted: list[_probe.Volume] = []
        self.model: str = self.params["model"]

    def problem(self, ident: str, found: str, expected: str, remedy: str) -> Problem:
        """A Problem of this module."""
        return Problem(ident, node=self.node, stage=_probe.STAGE, found=found, expected=expected, remedy=remedy)

    def run(self) -> None:
        """The whole module; fills ``result``. Raises Problem."""
        if self.params["probes"] is not None:
            different = _probe.compare(self.params["probes"])
            if different:
                raise different
            return
        image = self.image()
        if not image["present"]:
            if self.module.check_mode:
                self.result.update(skipped=True, skip_reason=f"the image {self.params['image']} is not here yet")
                return
            raise self.problem(
                "image-missing", f"image {self.params['image']} is not on this node", "the image", "run the stage sync first (--tags sync)"
            )
        self.mounts()
        probe = _probe.new_probe(image, self.params["env"])
        stamp = self.stamp_path(image)
        kept = None if self.params["force"] else self.kept(stamp)
        self.result["cached"] = kept is not None
        self.result["probe"] = kept if kept is not None else probe
        if kept is None:
            self.ask(probe)
        if self.params["scope"] == "full":  # one node says it for all: they have the same image
            for text in _probe.warnings(self.result["probe"], self.node):
                self.module.warn(text)
        found = _probe.problem_of(self.result["probe"], self.params["executor"], self.node, self.there)
        if found:
            raise found
        if kept is None and not self.module.check_mode:
            self.keep(stamp)

    def image(self) -> dict[str, t.Any]:
        """The image as a record; not present when Docker does not know it. Problem when Docker does not answer or the platform is wrong."""
        try:
            reference = _image.local_reference(self.params["image"])
        except ValueError as exc:
            raise self.problem("image-unknown", str(exc), "an image reference", "correct spark_image") from exc
        rc, out, err = self.command(["docker", "image", "inspect", reference], timeout=COMMAND_TIMEOUT)
        if rc in (124, 137):
            raise self.problem("docker-down", "the Docker daemon did not answer", "an answer within 60 s", "systemctl status docker")
        if rc:
            ident, cause, remedy = _image.classify_pull_error(err)
            if ident in ("DOC-02", "docker-down"):
                raise self.problem(ident, cause, "a Docker daemon that answers", remedy)
            return _image.absent_record(reference)
        record = _image.image_record(json.loads(out)[0], reference)
        wanted = _image.docker_architecture(self.machine)
        if record["architecture"] and record["architecture"] != wanted:
            found = f"{reference} is built for {record['os']}/{record['architecture']}"
            raise self.problem("DOC-11", found, f"linux/{wanted}, this node's platform", f"choose an image built for linux/{wanted}")
        return record

    def mounts(self) -> None:
        """What is mounted. A directory that is not there would be made by Docker, so that is refused (check mode: left out)."""
        try:
            self.mounted = _probe.volumes(self.params["volumes"])
        except ValueError as exc:
            raise self.problem("input", str(exc), "source:target:mode", "correct volumes") from exc
        for volume in [v for v in self.mounted if v.read_only and v.source.startswith("/") and not os.path.exists(v.source)]:
            self.mounted.remove(volume)
            if self.model and not self.module.check_mode:
                remedy = "run the stages model and sync first (--tags model,sync)"
                raise self.problem("MOD-01", f"no directory {volume.source}", "the directory with the model", remedy)
        if self.model and self.module.check_mode and not self.there(self.model):
            self.model = ""  # not downloaded yet

    def there(self, path: str) -> bool:
        """Whether a path of the container exists on the node."""
        host = _probe.on_host(path, self.mounted)
        return bool(host and os.path.exists(host))

    def arguments(self) -> list[str]:
        """What follows ``vllm serve``."""
        command = [str(item) for item in self.params["command"]]
        return command[1:] if command[:1] == ["serve"] else command

    # -- kept answers

    def stamp_path(self, image: t.Mapping[str, t.Any]) -> str:
        values = {
            "fingerprint": image["fingerprint"],
            "reference": image["reference"],
            "model": self.model,
            "files": _probe.model_identity(_probe.on_host(self.model, self.mounted) if self.model else None),
            "arguments": self.arguments(),
            "volumes": self.params["volumes"],
            "env": self.params["env"],
            "executor": self.params["executor"],
            "scope": self.params["scope"],
        }
        return os.path.join(STATE_DIR, "probes", _probe.key(values, _probe.program_source()) + ".json")

    def kept(self, path: str) -> dict[str, t.Any] | None:
        """The answer of an earlier run; None when there is none that can be used."""
        try:
            with open(path, encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) and data.get("complete") else None

    def keep(self, path: str) -> None:
        """Write a good answer under its key, and remove the oldest ones."""
        folder = os.path.dirname(path)
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        temporary = os.path.join(folder, ".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
            json.dump(self.result["probe"], handle)
        os.replace(temporary, path)
        stamps = sorted((os.path.join(folder, name) for name in os.listdir(folder)), key=os.path.getmtime, reverse=True)
        for old in stamps[_probe.KEPT_STAMPS :]:
            os.unlink(old)

    # -- container

    def ask(self, probe: dict[str, t.Any]) -> None:
        """Run the program in the image. Whatever happens, no container of ours is left."""
        timeout = self.params["timeout"]
        request = {
            "model": self.model,
            "arguments": self.arguments(),
            "env": self.params["env"],
            "timeout": timeout,
            "scope": self.params["scope"],
        }
        name = f"spark-probe-{os.getpid()}"
        lock = os.path.join(RUN_DIR, "probe.lock")
        with _transfer.exclusive(lock, timeout + 30, node=self.node, stage=_probe.STAGE, what="the image"):
            self.remove_leftovers()
            started = time.monotonic()
            argv = ["docker", *_probe.docker_argv(probe["image"], name, self.mounted)]
            rc, out, err = self.command(argv, timeout=timeout + 30, data=_probe.program(request))
            parts = _probe.parse_output(out)
            if rc:
                self.command(["docker", "rm", "--force", name], timeout=COMMAND_TIMEOUT)
        self.result["probe"] = _probe.answer(probe, parts)
        self.result["probe"]["seconds"]["total"] = round(time.monotonic() - started, 2)
        broken = _probe.run_problem(probe, rc, err, parts, timeout, self.node)
        if broken:
            raise broken

    def remove_leftovers(self) -> None:
        """Probes of runs that were killed. Nobody else has one: we hold the lock."""
        rc, out, dummy = self.command(
            ["docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={_probe.LABEL}"], timeout=COMMAND_TIMEOUT
        )
        if rc == 0 and out.split():
            self.command(["docker", "rm", "--force", *out.split()], timeout=COMMAND_TIMEOUT)


def argument_spec() -> dict[str, t.Any]:
    """Options of the module."""
    return {
        "node": {"type": "str", "default": ""},
        "image": {"type": "str"},
        "command": {"type": "list", "elements": "str", "default": []},
        "model": {"type": "str", "default": ""},
        "volumes": {"type": "list", "elements": "str", "default": []},
        "env": {"type": "dict", "default": {}},
        "executor": {"type": "str", "default": "ray"},
        "scope": {"type": "str", "choices": ["full", "versions"], "default": "full"},
        "timeout": {"type": "int", "default": 300},
        "force": {"type": "bool", "default": False},
        "probes": {"type": "dict"},
    }


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        required_one_of=[("image", "probes")],
        mutually_exclusive=[("image", "probes")],
    )
    result: dict[str, t.Any] = {"changed": False, "probe": {}, "cached": False}
    try:
        ImageProbe(module, result, platform.machine()).run()
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **result)
    except OSError as exc:
        problem = Problem(
            "probe-failed",
            node=module.params["node"],
            stage=_probe.STAGE,
            found=f"{exc.filename or RUN_DIR}: {exc.strerror}",
            expected="root, and room for a small file",
            remedy="run the task with become, and look at the free space of /var/lib and /run",
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
