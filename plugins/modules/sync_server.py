#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sync_server
short_description: Serve a model or an image read-only to the workers, for the length of a play
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Runs as root on the head, and on workers that pass on what they receive (O(manifest)). Starts a small read-only HTTP server (GET and HEAD
    only) as a transient systemd unit that is bound to one address, knows only the files of one verified model or of one image, wants a random
    token in the path, refuses addresses that are not peers, and ends by itself.
  - Nothing is installed and nothing stays after O(state=absent), after O(lifetime), or O(idle) seconds after the last request. So a play
    that was killed leaves nothing for long. What an earlier one left behind is removed at the next start.
  - An image is served as an OCI registry view of its blobs. Where Docker keeps them in containerd's content store they are served as they
    lie; otherwise
    they are staged once per image with C(docker save).
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: Nothing is started, stopped or staged; RV(server) is then empty where no server runs.
  diff_mode:
    support: full
    details: Whether the server runs before and after.
  idempotent:
    support: full
    details: A running server of the same content, address and peers is kept, unless O(unique) is set.
options:
  name:
    description: Names the unit C(dgxspark-sync-NAME).
    type: str
    required: true
  unique:
    description:
      - Start a server of this run's own, named O(name) and a random suffix. RV(name) is what O(state=absent) takes. Two plays at once then do
        not end each other's server.
    type: bool
    default: false
  state:
    description: Whether the server shall run.
    type: str
    choices: [present, absent]
    default: present
  what:
    description: What is served. Required for O(state=present).
    type: str
    choices: [model, image]
  address:
    description: Address of this node on the fabric; the server is bound to it only. Required for O(state=present).
    type: str
    default: ""
  port:
    description: TCP port. V(0) takes a free one.
    type: int
    default: 0
  peers:
    description: Addresses that may ask. Required for O(state=present).
    type: list
    elements: str
    default: []
  lifetime:
    description: Seconds after which the server ends by itself.
    type: int
    default: 14400
  idle:
    description: Seconds without any connection after which the server ends by itself. V(0) means never.
    type: int
    default: 900
  repo_id:
    description: The model, for O(what=model); C(organisation/name), or the path of a directory or GGUF file.
    type: str
    default: ""
  manifest:
    description:
      - The model is still to arrive on this node (a worker that M(dgxspark.serving.model_sync) fills). What of these files is there is served
        at once, the rest as it comes. Rows of C(path), C(size), C(blob), C(algo) as RV(dgxspark.serving.hf_snapshot#module:manifest) has them.
    type: list
    elements: dict
    default: []
  revision:
    description: Its branch, tag or commit; must be verified on this node (M(dgxspark.serving.hf_snapshot)).
    type: str
    default: main
  cache_dir:
    description: C(HF_HOME) on this node. V(~) is the home of the login user, also with become.
    type: str
    default: ~/.cache/huggingface
  image:
    description: Reference of the image, for O(what=image); must be on this node.
    type: str
    default: ""
  fingerprint:
    description: Fingerprint that the image must have, when given.
    type: str
    default: ""
  transport:
    description:
      - For O(what=image). V(relay) offers layers, V(archive) only C(docker save), so that nothing has to be staged.
      - V(auto) offers layers where that is possible.
    type: str
    choices: [auto, relay, archive]
    default: auto
  staging:
    description: For O(state=absent), whether a staged copy of an image is kept for the next run or removed with the server.
    type: str
    choices: [kept, absent]
    default: kept
  timeout:
    description: Seconds for staging an image.
    type: int
    default: 3600
"""

EXAMPLES = r"""
- name: Serve the model to the workers
  dgxspark.serving.sync_server:
    name: model
    what: model
    repo_id: Qwen/Qwen3.5-122B-A10B-FP8
    address: 192.168.200.12
    peers: [192.168.200.13]
  become: true
  no_log: true
  register: __model_sync_server

- name: Stop serving
  dgxspark.serving.sync_server:
    name: model
    state: absent
  become: true
"""

RETURN = r"""
server:
  description:
    - Where the workers pull from; pass it to M(dgxspark.serving.model_sync) or M(dgxspark.serving.image_sync).
    - It holds the token, so register it with no_log.
  returned: always
  type: dict
  contains:
    address:
      description: Address.
      type: str
    port:
      description: Port.
      type: int
    token:
      description: Capability of this play.
      type: str
    path:
      description: Directory of the model's files on this node.
      type: str
    unit:
      description: The systemd unit.
      type: str
    url:
      description: Base URL without the token.
      type: str
    manifest_digest:
      description: For a model the digest of its manifest, for an image the digest of the OCI manifest to pull.
      type: str
    bytes:
      description: Size of all that is served.
      type: int
    source:
      description: V(cache), V(arriving), V(containerd), V(staged) or V(archive).
      type: str
    archive:
      description: Whether C(docker save) is offered too.
      returned: for O(what=image)
      type: bool
    layers:
      description: Layers of the image with C(diff_id) and C(bytes), what crosses for each.
      returned: for O(what=image)
      type: list
      elements: dict
bytes_sent:
  description: Bytes the server sent, for O(state=absent).
  returned: when a server was stopped
  type: int
unit:
  description: The systemd unit.
  returned: always
  type: str
name:
  description: Name of this server, with its suffix for O(unique=true).
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
import hashlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import shutil
import sys
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _snapshot, _sync_server, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "sync_server"
RUN_DIR = "/run/dgxspark-serving"
IMAGE_DIR = "/var/lib/dgxspark-serving/images"
START_SECONDS = 15
# Workers that wait or hash ask every 30 s, those that copy all the time.
ABANDONED_SECONDS = 90.0


def unit_argv(unit: str, lifetime: int, python: str, program: str, config: str, run_dir: str) -> list[str]:
    """``systemd-run`` of the server. Hardened so that it can read files and answer on the network, and write its own state file."""
    properties = {
        "RuntimeMaxSec": str(lifetime + 30),
        "ProtectSystem": "strict",
        "ReadWritePaths": run_dir,
        "PrivateTmp": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "CAP_DAC_READ_SEARCH",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "RestrictNamespaces": "yes",
        "LockPersonality": "yes",
        "MemoryDenyWriteExecute": "yes",
        "Restart": "no",
        "KillMode": "mixed",
        "TimeoutStopSec": "10",
        "LimitNOFILE": "4096",
    }
    if run_dir.startswith("/run/"):
        # removed by systemd whatever ends the unit: the token must not lie around
        properties.update(RuntimeDirectory=run_dir.removeprefix("/run/"), RuntimeDirectoryMode="0700")
    argv = ["systemd-run", "--quiet", "--no-ask-password", "--collect", f"--unit={unit}", "--service-type=exec"]
    argv += [f"--description=dgxspark.serving: read-only {unit}"]
    argv += [f"--property={key}={value}" for key, value in properties.items()]
    return [*argv, python, "-I", program, config]


def content_key(config: t.Mapping[str, t.Any], port: int) -> str:
    """What makes a running server the wanted one (not its token)."""
    wanted = [
        config["what"],
        config["bind"],
        sorted(config["peers"]),
        config["manifest_digest"],
        port,
        config["blobs"],
        config.get("archive"),
    ]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


class SyncServer:
    """State of one run."""

    def __init__(
        self,
        module: AnsibleModule,
        result: dict[str, t.Any],
        run_dir: str = RUN_DIR,
        image_dir: str = IMAGE_DIR,
        stamp_dir: str | None = None,
    ) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.node: str = self.params["node"]
        self.unit: str = result["unit"]
        self.run_dir = run_dir
        self.directory = os.path.join(run_dir, f"sync-{result['name']}")
        self.image_dir = image_dir
        self.stamp_dir = stamp_dir
        self.source = ""
        self.bytes = 0

    def problem(self, ident: str, found: str, expected: str, remedy: str) -> Problem:
        """A Problem of this module."""
        return Problem(ident, node=self.node, stage=STAGE, found=found, expected=expected, remedy=remedy)

    def command(self, argv: list[str], timeout: int = 60) -> tuple[int, str, str]:
        """A bounded command."""
        return self.module.run_command(["timeout", "-k", "5", str(timeout), *argv])

    # -- running server

    def active(self) -> bool:
        """Whether the unit runs."""
        return self.command(["systemctl", "is-active", "--quiet", f"{self.unit}.service"])[0] == 0

    def _read(self, name: str, directory: str = "") -> dict[str, t.Any]:
        try:
            with open(os.path.join(directory or self.directory, name), encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def absent(self) -> None:
        """Stop the server and remove what it left."""
        running = self.active()
        left = os.path.isdir(self.directory)
        staged = self.params["staging"] == "absent" and os.path.isdir(self.image_dir)
        self.result["changed"] = running or left or staged
        self.result["diff"] = {"before": {"running": running}, "after": {"running": False}}
        if not self.result["changed"]:
            return
        self.result["actions"].append(("would stop " if self.module.check_mode else "stopped ") + self.unit)
        if self.module.check_mode:
            return
        if running:
            self.result["bytes_sent"] = int(self._ask(self.directory).get("bytes_sent", 0))
        if running or left:
            self._stop()
        if staged:
            shutil.rmtree(self.image_dir, ignore_errors=True)

    def _ask(self, directory: str) -> dict[str, t.Any]:
        """What a server says about itself; {} when it says nothing."""
        config, state = self._read("config.json", directory), self._read("state.json", directory)
        try:
            conn = http.client.HTTPConnection(config["bind"], int(state["port"]), timeout=5, source_address=(config["bind"], 0))
            conn.request("GET", f"/{config['token']}/stats")
            return dict(json.loads(conn.getresponse().read()))
        except (OSError, KeyError, ValueError, TypeError, http.client.HTTPException):
            return {}

    def _clean_abandoned(self) -> None:
        """End servers of this name that a killed play left: nobody has asked them for long, although workers that wait or hash do so
        every half minute. The server of another play at work stays.
        """
        form = re.compile(rf"sync-{re.escape(self.params['name'])}-[0-9a-f]{{8}}")
        try:
            names = sorted(os.listdir(self.run_dir))
        except OSError:
            return
        for left in filter(form.fullmatch, names):
            directory, unit = os.path.join(self.run_dir, left), f"dgxspark-{left}.service"
            running = self.command(["systemctl", "is-active", "--quiet", unit])[0] == 0
            if running and float(self._ask(directory).get("quiet", ABANDONED_SECONDS)) < ABANDONED_SECONDS:
                continue
            if running:
                self.command(["systemctl", "stop", unit])
            self.result["actions"].append(f"removed {unit}, which an ended run had left")
            shutil.rmtree(directory, ignore_errors=True)

    def _stop(self) -> None:
        rc, dummy, err = self.command(["systemctl", "stop", f"{self.unit}.service"])
        if rc and "not loaded" not in err:
            raise self.problem(
                "sync-stop", f"{self.unit} cannot be stopped: {err.strip()[-200:]}", "a unit that stops", f"systemctl kill {self.unit}"
            )
        self.command(["systemctl", "reset-failed", f"{self.unit}.service"])
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- wanted server

    def present(self) -> None:
        """Start the server, or keep the one that already serves this."""
        self._check_input()
        try:
            config = self._model() if self.params["what"] == "model" else self._image()
        except Problem as exc:
            if not self.module.check_mode or exc.id not in ("sync-source", "image-missing"):
                raise
            # what an earlier task of this check run would have brought
            config = None
            self.result["actions"].append(f"cannot be looked at yet: {exc.found}")
        running = self.active()
        self.result["diff"] = {"before": {"running": running}, "after": {"running": True}}
        if config is None:
            self.result["changed"] = True
            self.result["actions"].append(f"would start {self.unit}")
            return
        self.result["server"].update(
            address=config["bind"], manifest_digest=config["manifest_digest"], bytes=self.bytes, source=self.source
        )
        old, state = self._read("config.json"), self._read("state.json")
        if running and old.get("key") == config["key"] and state.get("port"):
            self._report(old["token"], int(state["port"]))
            return
        self.result["changed"] = True
        if self.module.check_mode:
            self.result["actions"].append(f"would start {self.unit}")
            return
        if self.params["unique"]:
            self._clean_abandoned()
        else:
            self._stop()
        self._start(config)

    def _check_input(self) -> None:
        try:
            for address in [self.params["address"], *self.params["peers"]]:
                ipaddress.ip_address(address)
        except ValueError as exc:
            raise self.problem("sync-input", str(exc), "addresses of this node and of the workers", "set address and peers") from exc
        if not self.params["peers"]:
            raise self.problem(
                "sync-input", "no peers", "at least one address that may ask", "set peers to the fabric addresses of the workers"
            )

    def _config(self, view: dict[str, t.Any]) -> dict[str, t.Any]:
        config = {
            "what": self.params["what"],
            "bind": self.params["address"],
            "port": self.params["port"],
            "peers": list(self.params["peers"]),
            "lifetime": self.params["lifetime"],
            "idle": self.params["idle"],
            "state": os.path.join(self.directory, "state.json"),
            **view,
        }
        config["key"] = content_key(config, self.params["port"])
        return config

    def _model(self) -> dict[str, t.Any]:
        cache = _snapshot.resolve_cache_dir(self.params["cache_dir"])
        repo, revision = self.params["repo_id"], self.params["revision"]
        folder, key = _snapshot.place_of(cache, repo, revision)
        commit: str | None = key if _snapshot.is_plain(repo) else _snapshot.resolve_revision(folder, revision)
        snapshot = _snapshot.top_of(folder, str(commit))
        self.result["server"]["path"] = snapshot
        if self.params["manifest"]:
            return self._arriving(cache, folder, snapshot)
        stamp = _snapshot.read_stamp(_snapshot.stamp_path(folder, commit, self.stamp_dir)) if commit else None
        why = "it was never verified here" if not stamp else _snapshot.stamp_mismatch(stamp, snapshot)
        if why or not stamp:
            raise self.problem(
                "sync-source", f"{repo} at {revision}: {why}", "a verified snapshot on this node", "run hf_snapshot first (tag model)"
            )
        blobs = {
            row["blob"]: {"path": os.path.realpath(os.path.join(snapshot, row["path"])), "size": row["size"]} for row in stamp["files"]
        }
        self.source, self.bytes = "cache", sum(blob["size"] for blob in blobs.values())
        return self._config({"manifest_digest": stamp["manifest_digest"], "blobs": blobs})

    def _arriving(self, cache: str, folder: str, snapshot: str) -> dict[str, t.Any]:
        """Config of a worker that passes on what it receives: where model_sync puts each file, first its parts, then the whole."""
        rows = self.params["manifest"]
        wrong = _snapshot.check_manifest(rows)
        if wrong:
            raise self.problem("sync-input", f"the manifest: {wrong}", "the manifest of hf_snapshot", "pass it unchanged")
        staging = _snapshot.staging_dir(cache, self.params["repo_id"])
        plain = _snapshot.is_plain(self.params["repo_id"])
        blobs: dict[str, dict[str, t.Any]] = {}
        for row in rows:
            place = os.path.join(snapshot, row["path"]) if plain else os.path.join(folder, "blobs", row["blob"])
            whole = [os.path.join(staging, _snapshot.WHOLE, row["blob"])] if plain else []
            part = os.path.join(staging, row["blob"] + _transfer.PART)
            blobs[row["blob"]] = {"path": place, "size": int(row["size"]), "also": whole, "part": part}
        self.source, self.bytes = "arriving", sum(int(row["size"]) for row in _snapshot.unique_blobs(rows))
        return self._config({"manifest_digest": _snapshot.manifest_digest(rows), "blobs": blobs})

    def _image(self) -> dict[str, t.Any] | None:
        """Config for an image, None when it would have to be staged first (check mode)."""
        reference = self.params["image"]
        inspect = self._inspect(reference)
        fingerprint = _image.image_fingerprint(inspect)
        wanted = self.params["fingerprint"]
        if wanted and wanted != fingerprint:
            found = f"{reference} has the fingerprint {fingerprint[:16]}"
            raise self.problem("image-changed", found, wanted[:16], "run the image stage again: the tag was moved in between")
        view = self._view(inspect, fingerprint)
        if view is None:
            return None
        self.bytes = view.pop("bytes")
        self.result["server"].update(layers=view.pop("layers"), archive=True)
        program = shutil.which("docker") or "docker"
        return self._config({**view, "archive": [program, "save", str(inspect["Id"])]})

    def _view(self, inspect: dict[str, t.Any], fingerprint: str) -> dict[str, t.Any] | None:
        """What is served: the blobs in place, else staged ones, else (O(transport)) only the archive. None: would have to be staged."""
        archive: dict[str, t.Any] = {
            "manifest_digest": "",
            "manifests": {},
            "blobs": {},
            "bytes": int(inspect.get("Size") or 0),
            "layers": [],
        }
        if self.params["transport"] == "archive":
            self.source = "archive"
            return archive
        try:
            view = self._content(inspect)
            self.source = "containerd"
            return view
        except _image.NotServable as exc:
            self.result["actions"].append(f"not served in place: {exc}")
        try:
            self.source = "staged"
            lock = os.path.join(self.run_dir, "staging.lock")
            with _transfer.exclusive(lock, self.params["timeout"], node=self.node, stage=STAGE, what="an image"):
                return self._staged(inspect, fingerprint)
        except Problem as exc:
            if self.params["transport"] == "relay" or exc.id != "disk-image":
                raise
            self.result["actions"].append(f"not staged: {exc.found}; the whole image is offered instead")
            self.source = "archive"
            return archive

    def _inspect(self, reference: str) -> dict[str, t.Any]:
        rc, out, err = self.command(["docker", "image", "inspect", reference])
        if rc == 0:
            return dict(json.loads(out)[0])
        ident, cause, remedy = _image.classify_pull_error(err)
        if ident in ("DOC-02", "docker-down"):
            raise self.problem(ident, cause, "a Docker daemon that answers", remedy)
        raise self.problem(
            "image-missing", f"image {reference} is not on this node", "the image that shall be served", "run image_sync on the head first"
        )

    def _content(self, inspect: dict[str, t.Any]) -> dict[str, t.Any]:
        rc, out, dummy = self.command(["docker", "info", "--format", "{{json .DriverStatus}}|{{.DockerRootDir}}"])
        status, dummy2, root = out.strip().rpartition("|")
        if rc or "io.containerd.snapshotter" not in status:
            raise _image.NotServable("Docker uses its classic image store")
        why = "containerd's content store was not found"
        for directory in _image.content_roots(root, _image.containerd_config()):
            if not os.path.isdir(directory):
                continue
            try:
                return _image.view_of_content(directory, inspect)
            except _image.NotServable as exc:
                why = str(exc)
        raise _image.NotServable(why)

    def _staged(self, inspect: dict[str, t.Any], fingerprint: str) -> dict[str, t.Any] | None:
        directory = os.path.join(self.image_dir, fingerprint)
        with contextlib.suppress(_image.NotServable):
            return _image.view_of_stage(directory)
        size = int(inspect.get("Size") or 0)
        what = "staging the image (Docker's own copy and ours)"
        _transfer.check_space(self.image_dir, size, 1 << 30, node=self.node, stage=STAGE, problem="disk-image", what=what, factor=2.0)
        if self.module.check_mode:
            return None
        os.makedirs(self.image_dir, mode=0o700, exist_ok=True)
        for name in os.listdir(self.image_dir):
            # one version is kept: the staging of an older one, or of a broken run, is of no use any more
            shutil.rmtree(os.path.join(self.image_dir, name), ignore_errors=True)
        temp = f"{directory}.partial"
        self.result["actions"].append("staged the image with docker save")
        self._save(str(inspect["Id"]), temp)
        os.rename(temp, directory)
        return _image.view_of_stage(directory)

    def _save(self, ident: str, directory: str) -> None:
        child = _transfer.Child(["timeout", "-k", "5", str(self.params["timeout"]), "docker", "save", ident], raw=True)
        why = ""
        try:
            with os.fdopen(os.dup(child.stdout), "rb", buffering=1 << 20) as stream:
                _image.stage(stream, directory)
                while stream.read(1 << 20):
                    pass
        except _image.NotServable as exc:
            why = str(exc)
        except OSError as exc:
            why = f"{exc.filename or directory}: {exc.strerror}"
        rc = child.poll(5.0)
        deadline = time.monotonic() + 10
        while rc is None and time.monotonic() < deadline:
            rc = child.poll(0.2)
        text = child.text
        child.close()
        if rc == 0 and not why:
            return
        shutil.rmtree(directory, ignore_errors=True)
        full = "no space left" in (why + text).lower()
        remedy = "free space there (twice the image is needed for a moment), then run again" if full else "see the message of Docker"
        found = f"docker save failed: {_image.last_line(text or why)}"
        raise self.problem("disk-image" if full else "image-save", found, "an image that can be saved", remedy)

    # -- start

    def _start(self, config: dict[str, t.Any]) -> None:
        os.makedirs(self.run_dir, mode=0o711, exist_ok=True)
        os.mkdir(self.directory, 0o700)
        token = secrets.token_hex(16)
        source = _sync_server.__loader__.get_source(_sync_server.__name__)  # type: ignore[union-attr]
        # the token lies in a 0600 file below a 0700 directory, never in the argv of the server
        _sync_server.write_state(os.path.join(self.directory, "config.json"), {**config, "token": token})
        program = os.path.join(self.directory, "server.py")
        with open(program, "w", encoding="utf-8") as handle:
            handle.write(source)
        argv = unit_argv(
            self.unit, config["lifetime"], sys.executable, program, os.path.join(self.directory, "config.json"), self.directory
        )
        rc, dummy, err = self.command(argv)
        if rc:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise self.problem("sync-start", f"systemd-run: {err.strip()[-300:]}", "a unit that starts", f"journalctl -u {self.unit}")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            state = self._read("state.json")
            if state.get("port"):
                self._report(token, int(state["port"]))
                self.result["actions"].append(f"started {self.unit}")
                return
            if state.get("error") or not self.active():
                break
            time.sleep(0.05)
        self._failed(config)

    def _failed(self, config: dict[str, t.Any]) -> None:
        error = self._read("state.json").get("error")
        journal = self.command(["journalctl", "--no-pager", "-q", "-n", "3", "-o", "cat", "-u", f"{self.unit}.service"])[1]
        self._stop()
        found = f"the server did not start on {config['bind']}: {error or journal.strip()[-300:] or 'no message'}"
        remedy = "check that this address is on this node (spark_fabric_address) and that the port is free"
        raise self.problem("sync-start", found, "a server on the fabric address", remedy)

    def _report(self, token: str, port: int) -> None:
        address = self.result["server"]["address"]
        host = f"[{address}]" if ":" in address else address
        self.result["server"].update(port=port, token=token, url=f"http://{host}:{port}")


def argument_spec() -> dict[str, t.Any]:
    """Options of the module."""
    return {
        "node": {"type": "str", "default": ""},
        "name": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "what": {"type": "str", "choices": ["model", "image"]},
        "address": {"type": "str", "default": ""},
        "port": {"type": "int", "default": 0},
        "peers": {"type": "list", "elements": "str", "default": []},
        "lifetime": {"type": "int", "default": 14400},
        "idle": {"type": "int", "default": 900},
        "unique": {"type": "bool", "default": False},
        "manifest": {"type": "list", "elements": "dict", "default": []},
        "repo_id": {"type": "str", "default": ""},
        "revision": {"type": "str", "default": "main"},
        "cache_dir": {"type": "str", "default": "~/.cache/huggingface"},
        "image": {"type": "str", "default": ""},
        "fingerprint": {"type": "str", "default": ""},
        "transport": {"type": "str", "choices": ["auto", "relay", "archive"], "default": "auto"},
        "staging": {"type": "str", "choices": ["kept", "absent"], "default": "kept"},
        "timeout": {"type": "int", "default": 3600},
    }


def new_result(params: dict[str, t.Any]) -> dict[str, t.Any]:
    """The result before anything happened."""
    suffix = f"-{secrets.token_hex(4)}" if params["unique"] and params["state"] == "present" else ""
    name = params["name"] + suffix
    unit = f"dgxspark-sync-{name}"
    server = {"address": params["address"], "port": 0, "token": "", "url": "", "manifest_digest": "", "bytes": 0, "source": ""}
    return {
        "changed": False,
        "server": {**server, "path": "", "unit": unit},
        "name": name,
        "unit": unit,
        "actions": [],
        "diff": {"before": {}, "after": {}},
    }


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        required_if=[("state", "present", ("what", "address", "peers")), ("what", "model", ("repo_id",)), ("what", "image", ("image",))],
    )
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", module.params["name"]):
        module.fail_json(msg=f"name '{module.params['name']}' must be lower-case letters, digits and dashes")
    result = new_result(module.params)
    try:
        run = SyncServer(module, result, run_dir=RUN_DIR, image_dir=IMAGE_DIR)
        if module.params["state"] == "present":
            run.present()
        else:
            run.absent()
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **{**result, "changed": False})
    except OSError as exc:
        found = f"{exc.filename or RUN_DIR}: {exc.strerror}"
        problem = Problem(
            "sync-access", node=module.params["node"], stage=STAGE, found=found, expected="root", remedy="run the task with become"
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    module.exit_json(**result)


if __name__ == "__main__":
    main()
