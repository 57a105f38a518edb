#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_sync
short_description: Pull a verified model from the head
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Runs on a worker. Compares the manifest of the head with the disk and pulls what is missing from a server
    that M(dgxspark.serving.sync_server) started on the head, in several processes, biggest files first, hashing on the way.
  - The manifest comes over Ansible's own connection and is the root of trust; the wire need not be. A wrong byte is noticed and fetched
    again.
  - A file gets its final name only when it is whole and proven; the snapshot appears as a whole; the branch is switched last. What a
    broken run
    left is continued.
  - With O(peers) several workers stand in a chain. Each takes a file from the worker before it while that one still receives it, and from the
    head when that worker fails. So the head sends about one copy, whatever the number of workers.
  - When the head's server is not reached at all, several C(rsync) streams over SSH are tried, where the login user of this node may log
    in on the
    head without a password.
  - When nothing is missing and no file changed since it was verified, nothing is opened or hashed and no server is needed.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: Compares by size and earlier verification only; says how many files and bytes would be copied. Needs no server.
  diff_mode:
    support: full
    details: Files, bytes and commit before and after.
  idempotent:
    support: full
    details: Nothing is written when the snapshot is whole and verified.
options:
  repo_id:
    description: The model, C(organisation/name), or the absolute path of a directory or of a GGUF file.
    type: str
    required: true
  revision:
    description: The commit; RV(dgxspark.serving.hf_snapshot#module:snapshot.revision) of the head. For a path the first 40 digits of the digest.
    type: str
    required: true
  ref:
    description:
      - Branch or tag that shall name this commit in the cache; RV(dgxspark.serving.hf_snapshot#module:snapshot.ref). Empty for none.
    type: str
    default: ""
  cache_dir:
    description: C(HF_HOME) on this node. V(~) is the home of the login user, also with become. What is created belongs to that user.
    type: str
    default: ~/.cache/huggingface
  manifest:
    description: "Rows of C(path), C(size), C(blob), C(algo); RV(dgxspark.serving.hf_snapshot#module:manifest) of the head."
    type: list
    elements: dict
    required: true
  server:
    description:
      - Where to pull from; RV(dgxspark.serving.sync_server#module:server). Only needed when something is missing.
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
      path:
        description: Directory of the model's files on the head, for C(rsync).
        type: str
      url:
        description: Not used here; accepted so that the whole result can be passed on.
        type: str
      unit:
        description: Not used here.
        type: str
      bytes:
        description: Not used here.
        type: int
      source:
        description: Not used here.
        type: str
      manifest_digest:
        description: Not used here.
        type: str
  peers:
    description:
      - Servers of other workers that stand before this one in the chain, the nearest first, each like O(server); started with
        RV(dgxspark.serving.sync_server#module:server) on those workers.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Fabric address of the worker.
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
      path:
        description: Not used here; accepted so that the whole result can be passed on.
        type: str
      url:
        description: Not used here.
        type: str
      unit:
        description: Not used here.
        type: str
      bytes:
        description: Not used here.
        type: int
      source:
        description: Not used here.
        type: str
      manifest_digest:
        description: Not used here.
        type: str
  onward:
    description: Other workers read from this one while it receives. Otherwise the files are written past the page cache.
    type: bool
    default: false
  transport:
    description:
      - V(http) pulls from the server, V(rsync) uses C(rsync) over SSH as the login user, V(auto) takes the first and falls back to the second
        when the server is not reached at all.
    type: str
    choices: [auto, http, rsync]
    default: auto
  ssh_user:
    description: User on the head for V(rsync). Empty means the name of the login user of this node.
    type: str
    default: ""
  processes:
    description: Files that are pulled at the same time. V(0) means as many as there are cores, at least 4 and at most 8.
    type: int
    default: 0
  prune:
    description:
      - Remove what the head does not have of this model, revisions that are not in O(keep), files that are not in O(manifest) and what only
        these need. Otherwise they are left alone.
    type: bool
    default: false
  keep:
    description: Commits that O(prune) leaves alone; RV(dgxspark.serving.hf_snapshot#module:revisions) of the head.
    type: list
    elements: str
    default: []
  progress:
    description: Name under which the progress is written to C(/run/dgxspark-serving). Set by the action plugin.
    type: str
    default: ""
  verify:
    description: V(stamp) hashes only files that were not verified before; V(full) hashes everything.
    type: str
    choices: [stamp, full]
    default: stamp
  timeout:
    description: Seconds after which the whole copy is given up.
    type: int
    default: 7200
  stall_timeout:
    description: Seconds without a byte after which the copy is given up. Shorter breaks of the link are survived.
    type: int
    default: 60
  min_free_bytes:
    description: Bytes that must stay free on the disk beyond what is missing.
    type: int
    default: 1073741824
"""

EXAMPLES = r"""
- name: Pull the model from the head
  dgxspark.serving.model_sync:
    repo_id: "{{ hostvars['spark-1'].model.snapshot.repo_id }}"
    revision: "{{ hostvars['spark-1'].model.snapshot.revision }}"
    ref: "{{ hostvars['spark-1'].model.snapshot.ref }}"
    manifest: "{{ hostvars['spark-1'].model.manifest }}"
    server: "{{ hostvars['spark-1'].server }}"
  become: true
"""

RETURN = r"""
snapshot:
  description: "The snapshot on this node: C(repo_id), C(revision), C(ref), C(path), C(cache_dir), C(files), C(bytes), C(verified)."
  returned: always
  type: dict
manifest_digest:
  description: sha256 of the manifest.
  returned: always
  type: str
missing:
  description: C(files) and C(bytes) that were missing on this node before the run.
  returned: always
  type: dict
files:
  description: Files of the snapshot.
  returned: always
  type: int
bytes:
  description: Their size.
  returned: always
  type: int
bytes_transferred:
  description: Bytes that crossed the wire in this run (less than missing when an earlier run was continued).
  returned: always
  type: int
hashed:
  description: Files that were read and hashed because they had not been verified before.
  returned: always
  type: int
seconds:
  description: Duration of the copy.
  returned: always
  type: float
rate:
  description: Bytes per second of the copy.
  returned: always
  type: int
method:
  description: V(http), V(rsync) or V(none).
  returned: always
  type: str
pruned:
  description: What O(prune) removed or would remove.
  returned: always
  type: list
  elements: str
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
import os
import re
import shutil
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _rsync, _snapshot, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "model_sync"
RUN_DIR = "/run/dgxspark-serving"


def source_of(server: t.Mapping[str, t.Any]) -> _transfer.Source:
    """What the puller needs of a server."""
    return _transfer.Source(str(server["address"]), int(server["port"]), str(server["token"]))


class ModelSync:
    """State of one run."""

    def __init__(self, module: AnsibleModule, result: dict[str, t.Any], stamp_dir: str | None = None, run_dir: str = RUN_DIR) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.stamp_dir = stamp_dir
        self.run_dir = run_dir
        self.node: str = self.params["node"]
        self.login = _snapshot.login_user()
        self.owner = _snapshot.Owner(self.login.uid, self.login.gid)
        self.cache = _snapshot.resolve_cache_dir(self.params["cache_dir"], self.login)
        self.repo: str = self.params["repo_id"]
        self.plain = _snapshot.is_plain(self.repo)
        # for a plain model the key stands for the commit in every path
        self.folder, self.commit = _snapshot.place_of(self.cache, self.repo, self.params["revision"], self.login)
        self.staging = _snapshot.staging_dir(self.cache, self.repo)
        self.blobs = os.path.join(self.staging, _snapshot.WHOLE) if self.plain else os.path.join(self.folder, "blobs")
        self.processes: int = self.params["processes"] or _transfer.default_processes()
        self.rows: list[dict[str, t.Any]] = []
        name = self.params["progress"]
        self.progress = _transfer.Progress(os.path.join(run_dir, f"progress-{name}") if name else "", also=self._ping)

    def _ping(self) -> None:
        """While this node hashes or waits, the servers must not take it for gone."""
        for server in [self.params["server"], *self.params["peers"]]:
            if server:
                _transfer.ping(source_of(server))

    def problem(self, ident: str, found: str, expected: str, remedy: str) -> Problem:
        """A Problem of this module."""
        return Problem(ident, node=self.node, stage=STAGE, found=found, expected=expected, remedy=remedy)

    def run(self) -> None:
        """The whole module; fills ``result``."""
        if self.module.check_mode and not self.params["manifest"]:
            self.result["changed"] = True
            self.result["actions"].append(f"would copy {self.repo} from the head; its files are not known yet")
            return
        self._check_input()
        if self._stamped():
            self.result["snapshot"]["verified"] = True
            return
        if self.module.check_mode:
            self._predict(self._sort_out())
            return
        lock = os.path.join(self.run_dir, f"model-{hashlib.sha256(self.folder.encode()).hexdigest()[:12]}.lock")
        wait = self.params["timeout"]
        guard = _transfer.exclusive(
            lock, wait, node=self.node, stage=STAGE, what=self.repo, tick=lambda: self.progress("waits for another run")
        )
        try:
            with guard:
                # while we waited another run may have brought it
                if self._stamped():
                    self.result["snapshot"]["verified"] = True
                    return
                missing = self._sort_out()
                if missing:
                    self._pull(missing)
                self._publish()
        finally:
            self.progress.close()

    def _check_input(self) -> None:
        revision = self.params["revision"]
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            found = f"revision '{revision}'"
            raise self.problem("sync-input", found, "a commit (40 hex digits)", "pass snapshot.revision of hf_snapshot, not a branch")
        for row in self.params["manifest"]:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self.rows.append({"path": str(row["path"]), "size": int(row["size"]), "blob": str(row["blob"]), "algo": str(row["algo"])})
        wrong = _snapshot.check_manifest(self.rows)
        if not wrong and len(self.rows) != len(self.params["manifest"]):
            wrong = "a row lacks path, size, blob or algo"
        if wrong or not (self.plain or _snapshot.safe_path(self.repo)):
            raise self.problem(
                "sync-input", f"the manifest of '{self.repo}': {wrong or 'bad name'}", "the manifest of hf_snapshot", "pass it unchanged"
            )
        total = sum(row["size"] for row in self.rows)
        self.result.update(files=len(self.rows), bytes=total, manifest_digest=_snapshot.manifest_digest(self.rows))
        self.result["snapshot"].update(path=_snapshot.model_path(self.folder, self.commit), files=len(self.rows), bytes=total)

    def _stamped(self) -> bool:
        """Whole, verified and untouched: nothing to do."""
        if self.params["verify"] == "full" or self.params["prune"]:
            return False
        stamp = _snapshot.read_stamp(_snapshot.stamp_path(self.folder, self.commit, self.stamp_dir))
        if not stamp or stamp.get("manifest_digest") != self.result["manifest_digest"]:
            return False
        if _snapshot.stamp_mismatch(stamp, _snapshot.top_of(self.folder, self.commit)):
            return False
        ref = self.params["ref"]
        return self.plain or not ref or ref == self.commit or _snapshot.read_ref(self.folder, ref) == self.commit

    def _sort_out(self) -> list[dict[str, t.Any]]:
        """Rows to pull (one per blob). Unknown files are hashed, wrong ones removed; in check mode unknown ones count as good."""
        trusted = {} if self.params["verify"] == "full" else _snapshot.trusted_files(self.folder, self.stamp_dir)
        found = _snapshot.look(self.folder, self.commit, self.rows, trusted)
        missing = list(found.missing)
        if found.unknown and not self.module.check_mode:
            # a plain model has a file for each path, a cache one for each content
            unique = found.unknown if self.plain else _snapshot.unique_blobs(found.unknown)
            jobs = [(_snapshot.file_of(self.folder, self.commit, row), row["algo"]) for row in unique]
            digests = self._hash(jobs)
            wrong = {row["path"] for row, digest in zip(unique, digests, strict=True) if digest != row["blob"]}
            bad = {row["blob"] for row in unique if row["path"] in wrong}
            self.result["hashed"] = len(unique)
            self.result["actions"].append(f"verified {len(unique)} files by hash, {len(wrong)} were wrong")
            for row in found.unknown:
                if row["path"] in wrong or (not self.plain and row["blob"] in bad):
                    _snapshot.discard(self.folder, self.commit, row)
                    missing.append(row)
        unique_missing = _snapshot.unique_blobs(missing)
        if self.plain:
            unique_missing = [row for row in unique_missing if not self._kept(row)]
        self.result["missing"] = {"files": len(unique_missing), "bytes": sum(row["size"] for row in unique_missing)}
        return unique_missing

    def _kept(self, row: dict[str, t.Any]) -> bool:
        """Whether an interrupted run had finished this file of a plain model; it is published from there."""
        path = os.path.join(self.blobs, row["blob"])
        try:
            if os.stat(path).st_size != row["size"]:
                return False
        except OSError:
            return False
        return self.module.check_mode or self._hash([(path, row["algo"])]) == [row["blob"]]

    def _hash(self, jobs: list[tuple[str, str]]) -> list[str]:
        return _transfer.hash_many(
            jobs, self.processes, timeout=self.params["timeout"], node=self.node, stage=STAGE, progress=self.progress
        )

    def _predict(self, missing: list[dict[str, t.Any]]) -> None:
        self._check_space(missing)
        if missing:
            size = _transfer.human(self.result["missing"]["bytes"])
            what = f"{self.repo} at {self.params['revision'][:12]}"
            self.result["actions"].append(f"would copy {len(missing)} files ({size}) of {what} from the head")
        top = _snapshot.top_of(self.folder, self.commit)
        unlinked = [row for row in self.rows if not os.path.lexists(os.path.join(top, row["path"]))]
        ref = self.params["ref"]
        moved = not self.plain and bool(ref) and ref != self.commit and _snapshot.read_ref(self.folder, ref) != self.commit
        self.result["changed"] = bool(missing or unlinked or moved)

    def _check_space(self, missing: list[dict[str, t.Any]]) -> None:
        needed = sum(max(0, row["size"] - self._part_size(self.staging, row)) for row in missing)
        what = f"{self.repo} ({len(missing)} files)"
        place = self.folder if self.plain else os.path.join(self.cache, "hub")
        _transfer.check_space(
            place, needed, self.params["min_free_bytes"], node=self.node, stage=STAGE, problem="disk-model", what=what, factor=1.05
        )

    @staticmethod
    def _part_size(staging: str, row: dict[str, t.Any]) -> int:
        total = 0
        for name in (row["blob"] + _transfer.PART, os.path.join(_rsync.FOLDER, row["path"])):
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(staging, name)).st_size
        return min(total, int(row["size"]))

    def _pull(self, missing: list[dict[str, t.Any]]) -> None:
        if not self.params["server"]:
            raise self.problem(
                "sync-no-server",
                f"{len(missing)} files ({_transfer.human(self.result['missing']['bytes'])}) of {self.repo} are missing, no server",
                "server of sync_server on the head",
                "start it first (role model_sync does)",
            )
        self._check_space(missing)
        uid, gid = self.owner
        if not self.plain:
            _transfer.make_dirs(os.path.join(self.cache, "hub"), uid, gid)
            # where it lies depends on the file system of hub/, which is there only now
            self.staging = _snapshot.staging_dir(self.cache, self.repo)
        for path in (self.staging, self.blobs):
            _transfer.make_dirs(path, uid, gid)
        self._clean({row["blob"] for row in missing})
        for row in missing:
            # a link into the shared store whose file is gone, or a file of a wrong size, would be in the way or be written through
            path = os.path.join(self.blobs, row["blob"])
            if os.path.lexists(path):
                os.unlink(path)
        method, stats = self._transport(missing)
        seconds = max(stats["seconds"], 0.001)
        rate = int(stats["bytes_transferred"] / seconds)
        self.result.update(changed=True, method=method, bytes_transferred=stats["bytes_transferred"], seconds=round(seconds, 3), rate=rate)
        how = "" if method == "http" else f" with {method}"
        self.result["actions"].append(
            f"copied {len(missing)} files ({_transfer.human(stats['bytes_transferred'])}) from the head{how}, {_transfer.human(rate)}/s"
        )

    def _transport(self, missing: list[dict[str, t.Any]]) -> tuple[str, dict[str, t.Any]]:
        """(method, figures) of the way that worked."""
        choice = self.params["transport"]
        if choice != "rsync":
            try:
                return "http", self._http(missing)
            except Problem as exc:
                if choice == "http" or exc.id != "sync-stalled" or exc.details.get("reached") or not self.params["server"].get("path"):
                    raise
                first = exc
            try:
                answer = self._rsync(missing)
            except Problem as exc:
                # the first way is the usual one: its failure is the one to be repaired, unless rsync got further
                if exc.id == "sync-rsync":
                    first.remedy += f" (rsync over SSH, tried next, does not work either: {exc.found})"
                    raise first from exc
                raise
            server = self.params["server"]
            self.module.warn(
                f"{self.node}: {server['address']}:{server['port']} was not reached ({first.found}); copied with rsync over SSH instead"
            )
            return "rsync", answer
        return "rsync", self._rsync(missing)

    def _http(self, missing: list[dict[str, t.Any]]) -> dict[str, t.Any]:
        return _transfer.pull_blobs(
            missing,
            [source_of(server) for server in [*self.params["peers"], self.params["server"]]],
            _transfer.Target(self.staging, self.blobs, *self.owner),
            processes=self.processes,
            timeout=self.params["timeout"],
            stall=self.params["stall_timeout"],
            node=self.node,
            progress=self.progress,
            direct=not self.params["onward"],
        )

    def _rsync(self, missing: list[dict[str, t.Any]]) -> dict[str, t.Any]:
        server = self.params["server"]
        return _rsync.pull(
            missing,
            _rsync.Origin(server["address"], self.params["ssh_user"] or self.login.name, server.get("path") or ""),
            _transfer.Target(self.staging, self.blobs, *self.owner),
            self.login,
            streams=self.processes,
            timeout=self.params["timeout"],
            stall=self.params["stall_timeout"],
            node=self.node,
            progress=self.progress,
        )

    def _clean(self, wanted: set[str]) -> None:
        """Remove what no manifest wants any more; parts of this manifest are continued, and what rsync has is looked at by rsync."""
        for name in os.listdir(self.staging):
            path = os.path.join(self.staging, name)
            if path == self.blobs or name == _rsync.FOLDER:
                continue
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            elif name[: -len(_transfer.PART)] not in wanted:
                os.unlink(path)

    def _publish(self) -> None:
        if self.plain:
            linked = _snapshot.publish_plain(self.folder, self.rows, self.blobs, self.staging, self.owner)
        else:
            linked = _snapshot.publish(self.folder, self.commit, self.rows, self.staging, self.owner)
        revision = self.params["revision"][:12]
        if linked:
            self.result["changed"] = True
            self.result["actions"].append(f"linked {len(linked)} files in the snapshot {revision}")
        if not self.plain and self.params["ref"] and _snapshot.write_ref(self.folder, self.params["ref"], self.commit, self.owner):
            self.result["changed"] = True
            self.result["actions"].append(f"{self.params['ref']} now is {revision}")
        if not self.plain:
            repaired = _snapshot.repair_access(self.cache, self.repo, self.owner)
            if repaired:
                self.result["actions"].append(f"repaired owner or mode of {len(repaired)} paths of the cache (user {self.login.name})")
        if self.params["prune"]:
            pruned = _snapshot.prune(self.folder, self.commit, self.rows, self.params["keep"])
            self.result["pruned"] = pruned
            if pruned:
                self.result["changed"] = True
                self.result["actions"].append(f"removed {len(pruned)} files or revisions that the head does not have")
        _snapshot.write_stamp(self.folder, self.commit, self.rows, self.stamp_dir, patterns=None)
        self.result["snapshot"]["verified"] = True
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.staging))


def argument_spec() -> dict[str, t.Any]:
    """Options of the module."""
    server = {
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "token": {"type": "str", "required": True, "no_log": True},
        "path": {"type": "str"},
        "url": {"type": "str"},
        "unit": {"type": "str"},
        "bytes": {"type": "int"},
        "source": {"type": "str"},
        "manifest_digest": {"type": "str"},
    }
    return {
        "node": {"type": "str", "default": ""},
        "repo_id": {"type": "str", "required": True},
        "revision": {"type": "str", "required": True},
        "ref": {"type": "str", "default": ""},
        "cache_dir": {"type": "str", "default": "~/.cache/huggingface"},
        "manifest": {"type": "list", "elements": "dict", "required": True},
        "server": {"type": "dict", "options": server},
        "peers": {"type": "list", "elements": "dict", "default": [], "options": server},
        "onward": {"type": "bool", "default": False},
        "transport": {"type": "str", "choices": ["auto", "http", "rsync"], "default": "auto"},
        "ssh_user": {"type": "str", "default": ""},
        "prune": {"type": "bool", "default": False},
        "keep": {"type": "list", "elements": "str", "default": []},
        "progress": {"type": "str", "default": ""},
        "processes": {"type": "int", "default": 0},
        "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
        "timeout": {"type": "int", "default": 7200},
        "stall_timeout": {"type": "int", "default": 60},
        "min_free_bytes": {"type": "int", "default": 1073741824},
    }


def new_result(params: dict[str, t.Any], cache: str) -> dict[str, t.Any]:
    """The result before anything happened."""
    snapshot = {"repo_id": params["repo_id"], "revision": params["revision"], "ref": params["ref"], "path": "", "cache_dir": cache}
    return {
        "changed": False,
        "snapshot": {**snapshot, "files": 0, "bytes": 0, "verified": False},
        "manifest_digest": "",
        "missing": {"files": 0, "bytes": 0},
        "files": 0,
        "bytes": 0,
        "bytes_transferred": 0,
        "hashed": 0,
        "seconds": 0.0,
        "rate": 0,
        "method": "none",
        "pruned": [],
        "actions": [],
    }


def set_diff(result: dict[str, t.Any], before: dict[str, t.Any] | None) -> None:
    """before/after of the snapshot for --diff."""
    old = {key: (before or {}).get(key) for key in ("revision", "files", "bytes", "verified", "complete")}
    if result["changed"]:
        new = {
            "revision": result["snapshot"]["revision"],
            "files": result["files"],
            "bytes": result["bytes"],
            "verified": True,
            "complete": True,
        }
        result["diff"] = {"before": old, "after": new}
    else:
        result["diff"] = {"before": old, "after": old}


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    cache = _snapshot.resolve_cache_dir(module.params["cache_dir"])
    result = new_result(module.params, cache)
    before = _snapshot.local_state(cache, module.params["repo_id"], module.params["ref"] or module.params["revision"])
    problem: Problem | None = None
    try:
        ModelSync(module, result, run_dir=RUN_DIR).run()
    except Problem as exc:
        problem = exc
    except OSError as exc:
        text = f"{exc.filename or cache}: {exc.strerror}"
        remedy = "run the task with become, and check this path"
        problem = Problem(
            "cache-access", node=module.params["node"], stage=STAGE, found=text, expected="a cache this module may write", remedy=remedy
        )
    except RuntimeError as exc:
        remedy = "run again (what arrived is reused); if it stays, look at dmesg for out of memory"
        problem = Problem(
            "sync-process", node=module.params["node"], stage=STAGE, found=str(exc), expected="transfer processes that live", remedy=remedy
        )
    set_diff(result, before)
    if problem:
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    module.exit_json(**result)


if __name__ == "__main__":
    main()
