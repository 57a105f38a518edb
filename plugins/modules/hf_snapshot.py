#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hf_snapshot
short_description: A complete and verified model on a node
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Downloads one revision of a model into the Hugging Face cache of the node and proves every file by the hash that names it (sha256 for
    large
    files, git SHA-1 for the others) and by its size.
  - A snapshot that was verified before and whose files did not change since (size, time, inode) costs a few milliseconds; no hub is asked.
  - What is in the cache already is adopted, not downloaded again, whoever put it there; also what lies in plain folders (O(adopt)). Files
    whose content is wrong are fetched again.
  - A path instead of a repository is a model that is there already, a directory or a GGUF file. It is checked for completeness and its
    files are hashed once.
  - The hub is asked for metadata first, so that a wrong name, a missing right, a rate limit, an unreachable hub and a disk that is too
    small are told
    apart before anything is downloaded.
  - Parts of files that downloads left which were cut off (by a reboot, for example) are removed when no process has them open and nobody
    wrote them for a while; nothing could continue them.
  - The download itself uses C(huggingface_hub) of the serving image in a short-lived container, or a given Python. It is watched by the
    growth of
    bytes on disk; when it stands still it is stopped and tried again without Xet.
  - E(HTTP_PROXY), E(HTTPS_PROXY) and E(NO_PROXY) (also in small letters) of the task's environment or of C(/etc/environment) count for the
    metadata and for the download. A login in them is in no argument, in no result and not in C(docker inspect).
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: Asks the hub for metadata and compares sizes; downloads nothing, hashes nothing.
  diff_mode:
    support: full
    details: Files, bytes and commit before and after.
  idempotent:
    support: full
    details: A moved branch on the hub is not noticed while the cache holds a verified snapshot of it; name a commit to pin it.
options:
  repo_id:
    description: The model on the hub, C(organisation/name), or the absolute path (or C(~/…)) of a directory or of a GGUF file on the node.
    type: str
    required: true
  revision:
    description: Branch, tag or commit. A branch is resolved once and the commit is returned.
    type: str
    default: main
  cache_dir:
    description:
      - C(HF_HOME) on the node; the hub cache is C(hub) below it. V(~) is the home of the login user, also with become.
      - Everything that is created belongs to the login user.
    type: str
    default: ~/.cache/huggingface
  image:
    description:
      - Image whose C(python3) has C(huggingface_hub); must be on the node when something is to be downloaded.
      - Either this or O(python) is needed for a download.
    type: str
    default: ""
  python:
    description: Path of a Python on the node that has C(huggingface_hub); used instead of O(image).
    type: str
    default: ""
  endpoint:
    description: Base URL of the hub.
    type: str
    default: https://huggingface.co
  token_file:
    description: File on the node with an access token, mode 0600. It is mounted, never put into arguments, environment or results.
    type: str
    default: ""
  allow_patterns:
    description: Only files that match one of these are part of the snapshot.
    type: list
    elements: str
    default: []
  ignore_patterns:
    description: Files that match one of these are left out.
    type: list
    elements: str
    default: []
  adopt:
    description:
      - Folders on the node that may hold files of this model under their own names (C(hf download --local-dir)). What has the right content is
        linked into the cache and not downloaded. It is copied where the file systems differ, and where the cache would need another owner or
        mode (the login user, 0644 at least); the files in the folder stay as they are.
      - In check mode a file of the right size counts as right.
    type: list
    elements: str
    default: []
  offline:
    description: Ask no hub. What is on disk is verified by its own names; missing links or shards are an error.
    type: bool
    default: false
  verify:
    description: V(stamp) hashes only what was not verified before; V(full) hashes everything.
    type: str
    choices: [stamp, full]
    default: stamp
  processes:
    description: Processes that hash files. V(0) means as many as there are cores, at most 8.
    type: int
    default: 0
  workers:
    description: Files that are downloaded at the same time.
    type: int
    default: 8
  timeout:
    description: Seconds after which the whole download is given up. It is not tried again then; finished files are reused by the next run.
    type: int
    default: 14400
  stall_timeout:
    description: Seconds without growth of bytes on disk after which a download is stopped and tried again without Xet.
    type: int
    default: 300
  retries:
    description: Further attempts after a stall, a rate limit or a broken connection.
    type: int
    default: 3
  min_free_bytes:
    description: Bytes that must stay free on the disk beyond 1.1 times what is missing.
    type: int
    default: 1073741824
  progress:
    description: Name under which the progress is written to C(/run/dgxspark-serving). Set by the action plugin.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Download and verify the model on the head
  dgxspark.serving.hf_snapshot:
    repo_id: Qwen/Qwen3.5-122B-A10B-FP8
    revision: main
    image: hellohal2064/vllm-qwen3.5-gb10
    token_file: /root/.hf-token
  become: true
  register: __model_download_snapshot
"""

RETURN = r"""
snapshot:
  description: The snapshot on this node.
  returned: always
  type: dict
  contains:
    repo_id:
      description: The model.
      type: str
    revision:
      description: The commit; empty while unknown.
      type: str
    ref:
      description: The branch or tag that was asked for, empty for a commit.
      type: str
    path:
      description: Absolute path of the snapshot directory. Serve this path; it needs no hub and no refs.
      type: str
    cache_dir:
      description: The resolved cache directory.
      type: str
    files:
      description: Number of files.
      type: int
    bytes:
      description: Their size.
      type: int
    verified:
      description: Whether every file is proven by its hash.
      type: bool
manifest:
  description: "Rows of C(path), C(size), C(blob), C(algo); the input of M(dgxspark.serving.model_sync). Empty while unknown."
  returned: always
  type: list
  elements: dict
manifest_digest:
  description: sha256 of the manifest; equal on nodes that hold the same files.
  returned: always
  type: str
revisions:
  description: Commits that the cache of this node holds of this model.
  returned: always
  type: list
  elements: str
missing:
  description: C(files) and C(bytes) that were (or in check mode, would be) downloaded.
  returned: always
  type: dict
actions:
  description: What was or would be done.
  returned: always
  type: list
  elements: str
timings:
  description: Seconds of C(metadata), C(download) and C(verify).
  returned: always
  type: dict
problem:
  description: The failure as data (C(id), C(node), C(stage), C(found), C(expected), C(remedy)).
  returned: failure
  type: dict
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
import typing as t
import urllib.parse

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _download, _leftovers, _snapshot, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "hf_snapshot"
RUN_DIR = "/run/dgxspark-serving"
_RETRY_KINDS = ("hub-unreachable", "hub-429", "hub-download", "stall")
# Not ALL_PROXY: urllib, which asks for the metadata, knows none, and a SOCKS proxy needs a library that images do not have.
PROXIES = tuple(spelling for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY") for spelling in (name, name.lower()))


def tree_bytes(paths: t.Iterable[str], limit: int = 20000) -> int:
    """Bytes that files below some directories really occupy (growth = progress); looks at about ``limit`` entries of each, so that a large
    one hides no growth of another.
    """
    total = 0
    for path in paths:
        pending, left = [path], limit
        while pending and left > 0:
            try:
                with os.scandir(pending.pop()) as entries:
                    for entry in entries:
                        left -= 1
                        with contextlib.suppress(OSError):
                            if entry.is_dir(follow_symlinks=False):
                                pending.append(entry.path)
                            else:
                                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return total


def proxy_logins(environ: t.Mapping[str, str]) -> set[str]:
    """``user:password`` of the proxies in an environment, as it is written there and decoded: what no result may show."""
    logins = set()
    for name in PROXIES:
        login = environ.get(name, "").rpartition("@")[0].rpartition("//")[2]
        if ":" in login:
            logins |= {login, urllib.parse.unquote(login)}
    return logins


def container_argv(params: dict[str, t.Any], place: dict[str, str], login: _snapshot.Login, xet: bool) -> list[str]:
    """``docker run`` of the downloader: no GPU, no secrets in argv, no token in the environment, the user's uid, everything that an image
    may have baked in overridden. Proxies are in the job's file, because one may hold a password, which docker inspect would show.
    """
    env = {
        "HOME": "/tmp",
        "HF_HOME": "/hf",
        "HF_HUB_CACHE": "/hf/hub",
        "HF_XET_CACHE": "/hf/xet",
        "HF_ENDPOINT": params["endpoint"],
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_ENABLE_HF_TRANSFER": "0",
        "HF_HUB_DISABLE_XET": "0" if xet else "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        "HF_HUB_DOWNLOAD_TIMEOUT": "30",
        "HF_HUB_ETAG_TIMEOUT": "30",
        "HF_TOKEN_PATH": "/job/token",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    argv = ["docker", "run", "--detach", "--name", place["name"], "--network", "host", "--user", f"{login.uid}:{login.gid}", "--init"]
    argv += ["--restart", "no", "--entrypoint", "python3", "--workdir", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    argv += [
        "--label",
        "dgxspark.serving=1",
        "--label",
        "dgxspark.serving.role=download",
        "--label",
        f"dgxspark.serving.key={place['key']}",
    ]
    argv += ["--label", f"dgxspark.serving.job={place['job']}"]
    argv += ["--volume", f"{place['hub']}:/hf/hub", "--volume", f"{place['xet']}:/hf/xet", "--volume", f"{place['job']}:/job"]
    for key, value in env.items():
        argv += ["--env", f"{key}={value}"]
    # a token in the image's environment would win over the file; an empty value counts as none for huggingface_hub
    argv += ["--env", "HF_TOKEN=", "--env", "HUGGING_FACE_HUB_TOKEN="]
    return [*argv, params["image"], "/job/_download.py", "/job/job.json"]


class HfSnapshot:
    """State of one run."""

    def __init__(self, module: AnsibleModule, result: dict[str, t.Any], stamp_dir: str | None = None, run_dir: str = RUN_DIR) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.result = result
        self.stamp_dir = stamp_dir
        self.run_dir = run_dir
        self.login = _snapshot.login_user()
        self.owner = _snapshot.Owner(self.login.uid, self.login.gid)
        self.cache = _snapshot.resolve_cache_dir(self.params["cache_dir"], self.login)
        self.repo: str = self.params["repo_id"]
        self.plain = _snapshot.is_plain(self.repo)
        self.folder, self.key = _snapshot.place_of(self.cache, self.repo, "", self.login)
        self.processes: int = self.params["processes"] or _transfer.default_processes()
        self.token = ""
        name = self.params["progress"]
        self.progress = _transfer.Progress(os.path.join(run_dir, f"progress-{name}") if name else "")

    def problem(self, ident: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
        """A Problem of this module."""
        return Problem(ident, node=self.params["node"], stage=STAGE, found=found, expected=expected, remedy=remedy, **details)

    def hub_problem(self, error: t.Mapping[str, t.Any]) -> Problem:
        """A classified hub failure as Problem."""
        fields = _download.problem_fields(
            error, repo_id=self.repo, revision=self.params["revision"], endpoint=self.params["endpoint"], token=bool(self.token)
        )
        extra = {key: error[key] for key in ("status", "retry_after") if error.get(key)}
        return Problem(error["kind"], node=self.params["node"], stage=STAGE, **fields, **extra)

    # -- steps

    def run(self) -> None:
        """The whole module; fills ``result``."""
        if self._stamped():
            return
        if not (self.params["offline"] or self.plain):
            self.module.no_log_values.update(proxy_logins(os.environ))
            self._read_token()
        lock = os.path.join(self.run_dir, f"hf-{hashlib.sha256(self.folder.encode()).hexdigest()[:12]}.lock")
        guard = (
            contextlib.nullcontext()
            if self.module.check_mode
            else _transfer.exclusive(
                lock,
                self.params["timeout"],
                node=self.params["node"],
                stage=STAGE,
                what=self.repo,
                tick=lambda: self.progress("waits for another run"),
            )
        )
        try:
            with guard:
                self._locked()
        finally:
            self.progress.close()

    def _locked(self) -> None:
        """What only one run at a time may do."""
        if self._stamped():
            return
        if self.plain:
            self._plain_model()
            return
        commit, rows = self._from_disk() if self.params["offline"] else self._from_hub()
        self._report(commit, rows)
        missing = self._sort_out(commit, rows)
        dead = self._remove_dead_parts()
        reclaimed = dead if self.module.check_mode else 0
        if missing and self.params["adopt"]:
            missing = self._adopt(missing, reclaimed)
        if missing:
            self._get(commit, rows, missing, reclaimed)
        if not self.module.check_mode:
            self._finish(commit, rows)

    def _remove_dead_parts(self) -> int:
        """Remove what downloads left that ended without a word (a reboot); its bytes. Never a part that somebody may still write."""
        parts = _leftovers.dead_parts(os.path.join(self.folder, "blobs"))
        size = sum(part.bytes for part in parts)
        if parts:
            verb = "would remove" if self.module.check_mode else "removed"
            self.result["changed"] = True
            self.result["actions"].append(f"{verb} {len(parts)} parts ({_transfer.human(size)}) of downloads that were cut off")
        if not self.module.check_mode:
            for part in parts:
                with contextlib.suppress(OSError):
                    os.unlink(part.path)
        return size

    def _stamped(self) -> bool:
        """Everything as it was when it was verified: nothing to do."""
        if self.params["verify"] == "full":
            return False
        commit = self.key if self.plain else _snapshot.resolve_revision(self.folder, self.params["revision"])
        stamp = _snapshot.read_stamp(_snapshot.stamp_path(self.folder, commit, self.stamp_dir)) if commit else None
        if not commit or not stamp or stamp.get("patterns") != self._patterns():
            return False
        if _snapshot.stamp_mismatch(stamp, _snapshot.top_of(self.folder, commit)):
            return False
        if self.plain and {row["path"] for row in stamp["files"]} != {row["path"] for row in self._plain_rows()}:
            return False
        self._report(commit, [{key: row[key] for key in ("path", "size", "blob", "algo")} for row in stamp["files"]], verified=True)
        return True

    def _patterns(self) -> dict[str, list[str]]:
        return {"allow": sorted(self.params["allow_patterns"]), "ignore": sorted(self.params["ignore_patterns"])}

    def _report(self, commit: str, rows: list[dict[str, t.Any]], verified: bool = False) -> None:
        revision = self.params["revision"]
        self.result["snapshot"].update(
            revision=_snapshot.plain_revision(rows) if self.plain else commit,
            ref="" if self.plain or revision == commit else revision,
            path=_snapshot.model_path(self.folder, commit),
            files=len(rows),
            bytes=sum(row["size"] for row in rows),
            verified=verified,
        )
        self.result["manifest"] = rows
        self.result["manifest_digest"] = _snapshot.manifest_digest(rows)
        if not self.plain:
            with contextlib.suppress(OSError):
                self.result["revisions"] = sorted(os.listdir(os.path.join(self.folder, "snapshots")))

    # -- a path

    def _plain_rows(self) -> list[dict[str, t.Any]]:
        try:
            rows, dangling = _snapshot.list_plain(self.folder, self.key)
        except OSError as exc:
            raise self._incomplete(_snapshot.plain_error(_snapshot.model_path(self.folder, self.key), exc)) from exc
        rows = [row for row in rows if _download.wanted(row["path"], self.params["allow_patterns"], self.params["ignore_patterns"])]
        paths = [row["path"] for row in rows]
        missing = dangling + _snapshot.missing_shards(paths + dangling) + _snapshot.missing_of_index(self.folder, paths)
        if missing or not rows:
            raise self._incomplete(f"{len(missing)} files are missing, first {missing[0]}" if missing else "there is no file of it")
        return rows

    def _incomplete(self, why: str) -> Problem:
        remedy = "complete it on this node, or correct spark_model"
        path = _snapshot.model_path(self.folder, self.key)
        return self.problem("model-incomplete", f"{path}: {why}", "a complete model at this path", remedy)

    def _plain_model(self) -> None:
        """A directory or GGUF file: nobody but its earlier stamp knows what it should be; its files are hashed once."""
        rows = self._plain_rows()
        known = _snapshot.trusted_files(self.folder, self.stamp_dir)
        new = []
        for row in rows:
            info = os.stat(os.path.join(self.folder, row["path"]))
            row.update(blob=known.get((info.st_ino, info.st_size, info.st_mtime_ns), ""), algo="sha256")
            if not row["blob"] or self.params["verify"] == "full":
                new.append(row)
        if self.module.check_mode:
            if new:
                self.result["changed"] = any(not row["blob"] for row in new)
                self.result["actions"].append(f"would hash {len(new)} files of {self.repo}")
            known_rows = [row for row in rows if row["blob"]]
            if len(known_rows) == len(rows):
                self._report(self.key, rows)
            return
        for row, digest in zip(new, self._hash([(os.path.join(self.folder, row["path"]), "sha256") for row in new]), strict=True):
            if not digest or (row["blob"] and row["blob"] != digest):
                found = f"{row['path']} of {self.repo} " + ("changed although its time did not" if digest else "cannot be read")
                raise self.problem("model-damaged", found, "the content that was verified before", "copy this file here again")
            row["blob"] = digest
        if new:
            self.result["actions"].append(f"verified {len(new)} files of {_transfer.human(sum(row['size'] for row in new))} by hash")
        _snapshot.write_stamp(self.folder, self.key, rows, self.stamp_dir, patterns=self._patterns())
        self._report(self.key, rows, verified=True)

    def _adopt(self, missing: list[dict[str, t.Any]], reclaimed: int) -> list[dict[str, t.Any]]:
        """Take what plain folders have; the rows that are still missing. In check mode what has the right size counts as right.
        ``reclaimed``: bytes that a run would free first.
        """
        found = self._adoptable(missing)
        if not self.module.check_mode:
            digests = self._hash([(path, row["algo"]) for row, path in found])
            found = [(row, path) for (row, path), digest in zip(found, digests, strict=True) if digest == row["blob"]]
        taken = {row["blob"]: (row, path) for row, path in found}
        copies = []
        for row, path in taken.values():
            if not self._link(row, path):
                copies.append((row, path))
        left = [row for row in missing if row["blob"] not in taken]
        size = sum(row["size"] for row in _snapshot.unique_blobs(left))
        self.result["missing"] = {"files": len(left), "bytes": size}
        if copies:
            reason = f"of another file system, not {self.login.name}'s or without mode 0644"
            what = f"{self.repo} ({len(left)} files to download, {len(copies)} to copy from spark_model_adopt: {reason})"
            self._check_space(size + sum(row["size"] for row, path in copies), reclaimed, what)
        if taken:
            verb = "would adopt" if self.module.check_mode else "adopted"
            self.result["changed"] = True
            how = f" ({len(copies)} of them as copies)" if copies else ""
            self.result["actions"].append(f"{verb} {len(taken)} files from {', '.join(self.params['adopt'])}{how}")
        if not self.module.check_mode:
            for row, path in copies:
                self._copy(row, path)
        return left

    def _adoptable(self, missing: list[dict[str, t.Any]]) -> list[tuple[dict[str, t.Any], str]]:
        """Rows that a folder of ``adopt`` has in the right size, with the file there."""
        found = []
        for row in missing:
            for folder in self.params["adopt"]:
                path = os.path.join(_snapshot.resolve_cache_dir(folder, self.login), row["path"])
                with contextlib.suppress(OSError):
                    if os.stat(path).st_size == row["size"]:
                        found.append((row, os.path.realpath(path)))
                        break
        return found

    def _link(self, row: dict[str, t.Any], path: str) -> bool:
        """Link an adopted file into the cache; False when it has to be copied. In check mode whether it could be."""
        blobs = os.path.join(self.folder, "blobs")
        info = os.stat(path)
        # a link is the user's own file: what the cache needs of owner and mode would be done to it
        if _snapshot.needs_repair(info, self.owner) or info.st_dev != os.stat(_transfer.nearest_existing(blobs)).st_dev:
            return False
        if self.module.check_mode:
            return True
        _transfer.make_dirs(blobs, self.login.uid, self.login.gid)
        target = os.path.join(blobs, row["blob"])
        temp = f"{target}.{os.getpid()}.adopt"
        try:
            os.link(path, temp)
        except OSError:
            return False
        os.replace(temp, target)
        return True

    def _copy(self, row: dict[str, t.Any], path: str) -> None:
        """Copy an adopted file into the cache."""
        blobs = os.path.join(self.folder, "blobs")
        _transfer.make_dirs(blobs, self.login.uid, self.login.gid)
        target = os.path.join(blobs, row["blob"])
        temp = f"{target}.{os.getpid()}.adopt"
        try:
            shutil.copyfile(path, temp)
            _transfer.own(temp, self.login.uid, self.login.gid, 0o644)
            os.replace(temp, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)

    # -- a repository

    def _read_token(self) -> None:
        path = self.params["token_file"]
        if not path:
            return
        path = _snapshot.resolve_cache_dir(path, self.login)
        try:
            with open(path, encoding="utf-8") as handle:
                self.token = handle.read().strip()
        except OSError as exc:
            remedy = "create it with mode 0600, or correct spark_hf_token_file"
            raise self.problem("hub-token", f"token file {path}: {exc.strerror}", "a readable file with a token", remedy) from exc
        if not self.token:
            remedy = "write the token into it, or unset spark_hf_token_file"
            raise self.problem("hub-token", f"token file {path} is empty", "a token", remedy)
        self.module.no_log_values.add(self.token)
        if os.stat(path).st_mode & 0o077:
            self.module.warn(f"{path} is readable by other users: chmod 0600 it")

    def _from_hub(self) -> tuple[str, list[dict[str, t.Any]]]:
        begin = time.monotonic()
        hub = _download.Hub(self.params["endpoint"], self.token, retries=self.params["retries"])
        try:
            commit, rows = hub.snapshot(self.repo, self.params["revision"])
        except _download.HubError as exc:
            raise self.hub_problem(exc.data) from exc
        self.result["timings"]["metadata"] = round(time.monotonic() - begin, 3)
        rows = [row for row in rows if _download.wanted(row["path"], self.params["allow_patterns"], self.params["ignore_patterns"])]
        wrong = _snapshot.check_manifest(rows)
        if wrong:
            remedy = "correct the patterns" if not rows else "use another endpoint"
            raise self.problem("hub-manifest", f"the list of files of {self.repo}: {wrong}", "a usable list of files", remedy)
        self._report(commit, rows)
        found = _snapshot.look(self.folder, commit, rows, {})
        if found.missing:
            try:
                hub.check_access(self.repo, commit, min(found.missing, key=lambda row: row["size"])["path"])
            except _download.HubError as exc:
                raise self.hub_problem(exc.data) from exc
        return commit, rows

    def _from_disk(self) -> tuple[str, list[dict[str, t.Any]]]:
        state = _snapshot.local_state(self.cache, self.repo, self.params["revision"], stamp_dir=self.stamp_dir)
        if not state or not state["revision"] or not state["files"]:
            why = state["reason"] if state else f"there is no cache at {self.cache}"
            remedy = "copy the model there, or run without offline"
            raise self.problem("model-incomplete", f"{self.repo}: {why}", "a complete snapshot on disk, because offline is set", remedy)
        rows, dangling = _snapshot.list_snapshot(state["path"])
        paths = [row["path"] for row in rows]
        missing = dangling + _snapshot.missing_shards(paths + dangling)
        missing += [
            path
            for path in _snapshot.missing_of_index(state["path"], paths + dangling)
            if path not in missing and _download.wanted(path, self.params["allow_patterns"], self.params["ignore_patterns"])
        ]
        if missing:
            remedy = "complete it, or run without offline"
            found = f"{self.repo}: {len(missing)} files are missing, first {missing[0]}"
            raise self.problem("model-incomplete", found, "a complete snapshot on disk", remedy)
        plain = [row for row in rows if not row["algo"]]
        jobs = [(os.path.join(state["path"], row["path"]), "sha256") for row in plain]
        for row, digest in zip(plain, self._hash(jobs), strict=True):
            row.update(blob=digest, algo="sha256")
        rows = [row for row in rows if _download.wanted(row["path"], self.params["allow_patterns"], self.params["ignore_patterns"])]
        return str(state["revision"]), rows

    def _hash(self, jobs: list[tuple[str, str]]) -> list[str]:
        begin = time.monotonic()
        digests = _transfer.hash_many(
            jobs, self.processes, timeout=self.params["timeout"], node=self.params["node"], stage=STAGE, progress=self.progress
        )
        timings = self.result["timings"]
        timings["verify"] = round(timings["verify"] + time.monotonic() - begin, 3)
        return digests

    def _sort_out(self, commit: str, rows: list[dict[str, t.Any]]) -> list[dict[str, t.Any]]:
        """Rows that have to be downloaded; present files are proven first, wrong ones removed (not in check mode)."""
        trusted = {} if self.params["verify"] == "full" else _snapshot.trusted_files(self.folder, self.stamp_dir)
        found = _snapshot.look(self.folder, commit, rows, trusted)
        missing = list(found.missing)
        if not self.module.check_mode:
            bad = self._verify(commit, found.unknown)
            if bad and self.params["offline"]:
                text = f"{len(bad)} files of {self.repo} have a wrong hash, first {bad[0]['path']}"
                raise self.problem(
                    "model-damaged", text, "files whose content is what their name says", "copy them again, or run without offline"
                )
            for row in bad:
                _snapshot.discard(self.folder, commit, row)
                self.result["actions"].append(f"removed {row['path']}: its content was wrong")
            missing += bad
        self.result["missing"] = {"files": len(missing), "bytes": sum(row["size"] for row in _snapshot.unique_blobs(missing))}
        return missing

    def _verify(self, commit: str, rows: list[dict[str, t.Any]]) -> list[dict[str, t.Any]]:
        """Rows whose content is not what the name says."""
        unique = _snapshot.unique_blobs(rows)
        digests = self._hash([(_snapshot.file_of(self.folder, commit, row), row["algo"]) for row in unique])
        wrong = {row["blob"] for row, digest in zip(unique, digests, strict=True) if digest != row["blob"]}
        if rows:
            self.result["actions"].append(f"verified {len(rows)} files of {_transfer.human(sum(row['size'] for row in rows))} by hash")
        return [row for row in rows if row["blob"] in wrong]

    def _check_space(self, size: int, reclaimed: int, what: str) -> None:
        """Raises Problem when ``size`` bytes do not fit into the cache."""
        _transfer.check_space(
            os.path.join(self.cache, "hub"),
            size,
            self.params["min_free_bytes"] - reclaimed,
            node=self.params["node"],
            stage=STAGE,
            problem="disk-model",
            what=what,
            factor=1.1,
        )

    def _get(self, commit: str, rows: list[dict[str, t.Any]], missing: list[dict[str, t.Any]], reclaimed: int) -> None:
        """Download what is missing; twice when the hub sent wrong content. ``reclaimed``: bytes that a run would free first."""
        size = self.result["missing"]["bytes"]
        self._check_space(size, reclaimed, f"{self.repo} ({len(missing)} files)")
        self.result["changed"] = True
        verb = "would download" if self.module.check_mode else "downloaded"
        self.result["actions"].append(f"{verb} {len(missing)} files ({_transfer.human(size)}) of {self.repo} at {commit[:12]}")
        if self.module.check_mode:
            return
        for dummy in range(2):
            Downloader(self, commit).run(missing)
            found = _snapshot.look(self.folder, commit, missing, {})
            bad = self._verify(commit, found.unknown)
            for row in bad:
                _snapshot.discard(self.folder, commit, row)
            missing = found.missing + bad
            if not missing:
                return
        first = missing[0]
        raise self.problem(
            "hub-hash",
            f"{len(missing)} files came twice with a wrong content, first {first['path']}",
            f"{first['algo']} {first['blob'][:16]}… and {first['size']} bytes as the hub's own list says",
            "the hub or a proxy in between is damaged: try another spark_hf_endpoint, or later",
        )

    def _finish(self, commit: str, rows: list[dict[str, t.Any]]) -> None:
        for linked in _snapshot.publish(self.folder, commit, rows, _snapshot.staging_dir(self.cache, self.repo), self.owner):
            self.result["changed"] = True
            if not self.result["missing"]["files"]:
                self.result["actions"].append(f"linked {linked}")
        if _snapshot.write_ref(self.folder, self.params["revision"], commit, self.owner):
            self.result["changed"] = True
            self.result["actions"].append(f"{self.params['revision']} now is {commit[:12]}")
        repaired = _snapshot.repair_access(self.cache, self.repo, self.owner)
        if repaired:
            self.result["actions"].append(f"repaired owner or mode of {len(repaired)} paths of the cache (user {self.login.name})")
        _snapshot.write_stamp(self.folder, commit, rows, self.stamp_dir, patterns=self._patterns())
        self._report(commit, rows, verified=True)


class Downloader:
    """One download of missing files: container (or given Python), watched, retried."""

    def __init__(self, parent: HfSnapshot, commit: str) -> None:
        self.parent = parent
        self.params = parent.params
        self.commit = commit
        self.deadline = time.monotonic() + self.params["timeout"]
        self.blobs = os.path.join(parent.folder, "blobs")
        self.xet_dir = os.path.join(parent.cache, "xet")
        self.base = self.total = 0

    def _docker(self, *argv: str, timeout: int = 60) -> tuple[int, str, str]:
        return self.parent.module.run_command(["timeout", "-k", "5", str(timeout), "docker", *argv])

    def run(self, missing: list[dict[str, t.Any]]) -> None:
        """Raises Problem; returns when the program says that everything is there."""
        if not (self.params["image"] or self.params["python"]):
            raise self.parent.problem(
                "hub-no-library", "neither image nor python is given", "one of them, with huggingface_hub", "set image or python"
            )
        begin = time.monotonic()
        hub = os.path.join(self.parent.cache, "hub")
        for path in (hub, self.xet_dir, self.parent.folder, self.blobs):
            _transfer.make_dirs(path, self.parent.login.uid, self.parent.login.gid)
        _snapshot.repair_access(self.parent.cache, self.parent.repo, self.parent.owner)
        before = self._incomplete()
        self.base = tree_bytes([self.blobs, self.xet_dir])
        self.total = sum(row["size"] for row in _snapshot.unique_blobs(missing))
        xet = True
        for attempt in range(self.params["retries"] + 1):
            error = self._attempt(missing, xet)
            self._clean_incomplete(before)
            if not error:
                break
            wait = error.get("retry_after") or 2.0**attempt
            # an attempt that could only begin when the time is over would hide why this one ended
            late = time.monotonic() + wait >= self.deadline
            if error["kind"] not in _RETRY_KINDS or attempt == self.params["retries"] or late:
                raise self._final(error)
            xet = False
            self.parent.result["actions"].append(
                f"attempt {attempt + 1} ended ({error['message']}); tried again without Xet after {wait:.0f} s"
            )
            time.sleep(wait)
        timings = self.parent.result["timings"]
        timings["download"] = round(timings["download"] + time.monotonic() - begin, 3)

    def _final(self, error: dict[str, t.Any]) -> Problem:
        if error["kind"] == "stall":
            return self.parent.problem(
                "MOD-02",
                f"the download of {self.parent.repo} {error['message']}, {_transfer.human(tree_bytes([self.blobs]))} are on disk",
                f"growth of bytes on disk within {self.params['stall_timeout']} s",
                "check the Internet connection of this node and run again: finished files are reused",
            )
        if error["kind"] == "download-timeout":
            return self.parent.problem(
                "download-timeout",
                f"the download of {self.parent.repo} {error['message']}, {_transfer.human(tree_bytes([self.blobs]))} are on disk",
                f"the whole download within {self.params['timeout']} s",
                "raise spark_download_timeout and run again: finished files are reused",
            )
        if error["kind"] == "hub-no-library":
            where = self.params["python"] or self.params["image"]
            remedy = "use an image (or a python) that has huggingface_hub"
            return self.parent.problem("hub-no-library", f"{where}: {error['message']}", "huggingface_hub in it", remedy)
        return self.parent.hub_problem(error)

    def _incomplete(self) -> set[str]:
        try:
            return {name for name in os.listdir(self.blobs) if name.endswith(".incomplete")}
        except OSError:
            return set()

    def _clean_incomplete(self, before: set[str]) -> None:
        """Parts with a random name can never be continued (huggingface_hub 1.31 and newer): remove those of our own stopped attempt."""
        for name in self._incomplete() - before:
            if name.count(".") >= 2:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.blobs, name))

    def _attempt(self, missing: list[dict[str, t.Any]], xet: bool) -> dict[str, t.Any] | None:
        """One run of the program; None or the classified error."""
        paths = sorted(row["path"] for row in missing)
        # not the list of files: what an interrupted run started is still wanted although some of it has arrived
        wanted = [self.parent.folder, self.commit, self.params["endpoint"], sorted(row["path"] for row in self.parent.result["manifest"])]
        key = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
        name = "dgxspark-hf-" + hashlib.sha256(self.parent.folder.encode()).hexdigest()[:12]
        job = self._running(name, key) if not self.params["python"] else ""
        if not job:
            job = self._job_dir(paths)
        try:
            if self.params["python"]:
                ended, text = self._run_python(job, xet)
            else:
                ended, text = self._run_container(job, name, key, xet)
            if ended:
                if ended == "stall":
                    return {"kind": "stall", "message": f"stood still for {self.params['stall_timeout']} s"}
                return {"kind": "download-timeout", "message": "took longer than the timeout"}
            return self._result(job, text)
        finally:
            shutil.rmtree(job, ignore_errors=True)

    def _result(self, job: str, text: str) -> dict[str, t.Any] | None:
        try:
            with open(os.path.join(job, "result.json"), encoding="utf-8") as handle:
                answer = json.load(handle)
        except (OSError, ValueError):
            return {"kind": "hub-download", "message": f"the program ended without a result: {text[-400:] or 'no output'}"}
        self.parent.result["huggingface_hub"] = answer.get("version", "")
        return None if answer.get("ok") else dict(answer.get("error") or {"kind": "hub-download", "message": "unknown"})

    def _job_dir(self, paths: list[str]) -> str:
        """Directory of one attempt: program, job, token; only the login user (and root) can read it."""
        os.makedirs(self.parent.run_dir, mode=0o711, exist_ok=True)
        job = os.path.join(self.parent.run_dir, f"hf-{secrets.token_hex(8)}")
        os.mkdir(job, 0o700)
        source = _download.__loader__.get_source(_download.__name__)  # type: ignore[union-attr]
        data = {"repo_id": self.parent.repo, "commit": self.commit, "paths": paths, "workers": self.params["workers"]}
        data["environment"] = {name: os.environ[name] for name in PROXIES if name in os.environ}
        files = {"_download.py": source, "job.json": json.dumps(data), "token": self.parent.token}
        for name, content in files.items():
            if name == "token" and not content:
                continue
            fd = os.open(os.path.join(job, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as handle:
                handle.write(content)
            _transfer.own(os.path.join(job, name), self.parent.login.uid, self.parent.login.gid)
        _transfer.own(job, self.parent.login.uid, self.parent.login.gid)
        return job

    def _running(self, name: str, key: str) -> str:
        """Job directory of a container that an earlier, interrupted run left working on exactly this; another one of ours is removed."""
        form = '{{.State.Running}}|{{index .Config.Labels "dgxspark.serving.key"}}|{{index .Config.Labels "dgxspark.serving.job"}}'
        rc, out, dummy = self._docker("container", "inspect", "--format", form, name)
        if rc:
            return ""
        running, label, job = [*out.strip().split("|"), "", ""][:3]
        if running == "true" and label == key and os.path.isdir(job):
            self.parent.result["actions"].append("joined the download that an interrupted run left working")
            return job
        self._docker("rm", "--force", name)
        if os.path.dirname(job) == self.parent.run_dir:
            shutil.rmtree(job, ignore_errors=True)
        return ""

    def _watch(self, argv: list[str], env: dict[str, str] | None = None) -> _transfer.Watched:
        paths = [self.blobs, self.xet_dir]
        left = max(1.0, self.deadline - time.monotonic())

        def growth(child: _transfer.Child) -> int:
            size = tree_bytes(paths)
            self.parent.progress("downloads", max(0, size - self.base), self.total)
            return size

        return _transfer.watch(argv, timeout=left, stall=self.params["stall_timeout"], progress=growth, interval=0.5, env=env)

    def _run_container(self, job: str, name: str, key: str, xet: bool) -> tuple[str, str]:
        place = {"name": name, "key": key, "job": job, "hub": os.path.realpath(os.path.join(self.parent.cache, "hub")), "xet": self.xet_dir}
        rc, dummy, dummy2 = self._docker("container", "inspect", name)
        if rc:
            rc, dummy, err = self._docker(*container_argv(self.params, place, self.parent.login, xet)[1:], timeout=120)
            if rc:
                self._docker("rm", "--force", name)
                raise self._no_container(err)
        try:
            watched = self._watch(["docker", "wait", name])
            dummy3, logs, err = self._docker("logs", "--tail", "20", name)
            return watched.ended, (logs + err).strip()
        finally:
            self._docker("rm", "--force", name)

    def _no_container(self, err: str) -> Problem:
        if "Unable to find image" in err or "No such image" in err or "pull access denied" in err:
            remedy = "bring the image to this node first (tag image), or give python"
            return self.parent.problem("image-missing", f"image {self.params['image']} is not on this node", "the serving image", remedy)
        if "python3" in err:
            remedy = "use an image with Python and huggingface_hub, or give python"
            return self.parent.problem("hub-no-library", f"{self.params['image']} has no python3", "python3 in the image", remedy)
        return self.parent.problem("download-container", err.strip()[-400:], "a container that starts", "see the message of Docker")

    def _run_python(self, job: str, xet: bool) -> tuple[str, str]:
        hub = os.path.join(self.parent.cache, "hub")
        env = {"HF_HOME": self.parent.cache, "HF_HUB_CACHE": hub, "HF_XET_CACHE": self.xet_dir, "HF_ENDPOINT": self.params["endpoint"]}
        env.update(
            HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="0" if xet else "1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1"
        )
        env.update(HF_TOKEN="", HUGGING_FACE_HUB_TOKEN="", HF_TOKEN_PATH=os.path.join(job, "token"), HF_HUB_DOWNLOAD_TIMEOUT="30")
        argv = [self.params["python"], os.path.join(job, "_download.py"), os.path.join(job, "job.json")]
        watched = self._watch(argv, env)
        return watched.ended, watched.err.strip()


def argument_spec() -> dict[str, t.Any]:
    """Options of the module."""
    return {
        "node": {"type": "str", "default": ""},
        "repo_id": {"type": "str", "required": True},
        "revision": {"type": "str", "default": "main"},
        "cache_dir": {"type": "str", "default": "~/.cache/huggingface"},
        "image": {"type": "str", "default": ""},
        "python": {"type": "str", "default": ""},
        "endpoint": {"type": "str", "default": "https://huggingface.co"},
        "token_file": {"type": "str", "default": "", "no_log": False},
        "allow_patterns": {"type": "list", "elements": "str", "default": []},
        "ignore_patterns": {"type": "list", "elements": "str", "default": []},
        "offline": {"type": "bool", "default": False},
        "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
        "processes": {"type": "int", "default": 0},
        "workers": {"type": "int", "default": 8},
        "timeout": {"type": "int", "default": 14400},
        "adopt": {"type": "list", "elements": "str", "default": []},
        "stall_timeout": {"type": "int", "default": 300},
        "retries": {"type": "int", "default": 3},
        "min_free_bytes": {"type": "int", "default": 1073741824},
        "progress": {"type": "str", "default": ""},
    }


def new_result(params: dict[str, t.Any], cache: str) -> dict[str, t.Any]:
    """The result before anything happened."""
    snapshot = {
        "repo_id": params["repo_id"],
        "revision": "",
        "ref": "",
        "path": "",
        "cache_dir": cache,
        "files": 0,
        "bytes": 0,
        "verified": False,
    }
    return {
        "changed": False,
        "snapshot": snapshot,
        "manifest": [],
        "manifest_digest": "",
        "revisions": [],
        "missing": {"files": 0, "bytes": 0},
        "actions": [],
        "timings": {"metadata": 0.0, "download": 0.0, "verify": 0.0},
    }


def set_diff(result: dict[str, t.Any], before: dict[str, t.Any] | None) -> None:
    """before/after of the snapshot for --diff."""
    keys = ("revision", "files", "bytes", "verified")
    old = {key: (before or {}).get(key) for key in keys}
    new = {key: result["snapshot"][key] for key in keys} if result["snapshot"]["revision"] else old
    if result["changed"]:
        new["verified"] = True  # also in check mode: that is what a run ends with
    result["diff"] = {"before": old, "after": new}


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    module.params["endpoint"] = (module.params["endpoint"] or _download.DEFAULT_ENDPOINT).rstrip("/")
    cache = _snapshot.resolve_cache_dir(module.params["cache_dir"])
    result = new_result(module.params, cache)
    before = _snapshot.local_state(cache, module.params["repo_id"], module.params["revision"])
    try:
        HfSnapshot(module, result, run_dir=RUN_DIR).run()
    except Problem as exc:
        set_diff(result, before)
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **{**result, "changed": False})
    except OSError as exc:
        text = f"{exc.filename or cache}: {exc.strerror}"
        remedy = "run the task with become, and check this path"
        problem = Problem(
            "cache-access", node=module.params["node"], stage=STAGE, found=text, expected="a cache this module may write", remedy=remedy
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    except RuntimeError as exc:
        set_diff(result, before)
        remedy = "run again; if it stays, look at dmesg for out of memory or disk errors"
        problem = Problem(
            "sync-process", node=module.params["node"], stage=STAGE, found=str(exc), expected="processes that live", remedy=remedy
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **{**result, "changed": False})
    set_diff(result, before)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
