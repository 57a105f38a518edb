# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""State of one model snapshot in a Hugging Face cache on this node: cheap (stat only), and the stamps of full verifications.

PRIVATE to the collection. The layout is the documented one of huggingface_hub: ``<cache>/hub/models--org--name/{refs,blobs,snapshots}``;
a blob is named
by the sha256 of its content (LFS files, 64 hex digits) or by its git SHA-1 (40 hex digits), so every file can be checked without the hub.

A path instead of a repository is a plain model: a directory, or one GGUF file (with its siblings when it is one of a numbered series). Its
files lie where they are and are named by sha256 in manifests; ``PLAIN`` stands where a commit stands for a snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _download

STAMP_DIR = "/var/lib/dgxspark-serving/snapshots"
PLAIN = "plain"
STAGING = ".dgxspark-sync"
WHOLE = "whole-files"  # in the staging of a plain model: what is complete until all is
# What tools leave in a plain model: no part of it.
_NOT_MODEL = {STAGING, ".cache", ".git"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5,6})-of-(?P<count>\d{5,6})(?P<ext>\.[A-Za-z0-9.]+)")


class Login(t.NamedTuple):
    """The user who logged in (before sudo)."""

    name: str
    uid: int
    gid: int
    home: str


def login_user(environ: t.Mapping[str, str] | None = None, getpwuid: t.Callable[[int], t.Any] = pwd.getpwuid) -> Login:
    """Who owns files in a home directory: SUDO_UID when become is used, else the current user."""
    env = os.environ if environ is None else environ
    raw = env.get("SUDO_UID", "")
    uid = int(raw) if raw.isdigit() and os.geteuid() == 0 else os.geteuid()
    try:
        entry = getpwuid(uid)
    except KeyError:
        return Login(str(uid), uid, os.getegid(), env.get("HOME", "/"))
    return Login(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


def resolve_cache_dir(cache_dir: str, login: Login | None = None) -> str:
    """Absolute path of the cache on this node; ``~`` is the home of the login user on the node, never of root or of the controller
    (MOD-07).
    """
    path = cache_dir.strip()
    if path == "~" or path.startswith("~/"):
        path = (login or login_user()).home + path[1:]
    elif path.startswith("~"):
        path = os.path.expanduser(path)
    return os.path.normpath(path) if path else ""


def repo_folder(repo_id: str) -> str:
    """``org/name`` -> ``models--org--name`` as huggingface_hub does."""
    return "--".join(["models", *repo_id.split("/")])


def repo_dir(cache_dir: str, repo_id: str) -> str:
    """Directory of one model in the hub cache below ``cache_dir`` (= HF_HOME)."""
    return os.path.join(cache_dir, "hub", repo_folder(repo_id))


def is_plain(repo_id: str) -> bool:
    """Whether this names a path on the nodes and not a repository of a hub."""
    return repo_id.startswith(("/", "~/"))


def plain_place(repo_id: str, login: Login | None = None) -> tuple[str, str]:
    """``(folder, key)`` of a plain model; the key stands for the commit and says which files of the folder belong to it."""
    path = resolve_cache_dir(repo_id, login)
    if path.lower().endswith(".gguf"):
        return os.path.dirname(path), f"{PLAIN}-{os.path.basename(path)}"
    return path, PLAIN


def place_of(cache_dir: str, repo_id: str, commit: str, login: Login | None = None) -> tuple[str, str]:
    """``(folder, commit)`` of any model; for a plain one the key instead of the commit."""
    return plain_place(repo_id, login) if is_plain(repo_id) else (repo_dir(cache_dir, repo_id), commit)


def top_of(folder: str, commit: str) -> str:
    """Directory below which the paths of the manifest are."""
    return folder if commit.startswith(PLAIN) else os.path.join(folder, "snapshots", commit)


def model_path(folder: str, commit: str) -> str:
    """What a user would call the model: the directory, or the GGUF file."""
    return os.path.join(top_of(folder, commit), commit[len(PLAIN) + 1 :]) if commit.startswith(f"{PLAIN}-") else top_of(folder, commit)


def plain_revision(manifest: t.Iterable[t.Mapping[str, t.Any]]) -> str:
    """What stands for the commit of a plain model: its content."""
    return manifest_digest(manifest)[:40]


def blob_algo(blob: str) -> str:
    """Which hash a blob name is: ``sha256`` (64 hex digits), ``git-sha1`` (40), else "" (not checkable by its name)."""
    if re.fullmatch(r"[0-9a-f]{64}", blob):
        return "sha256"
    return "git-sha1" if _COMMIT.fullmatch(blob) else ""


def manifest_digest(manifest: t.Iterable[t.Mapping[str, t.Any]]) -> str:
    """sha256 of the canonical manifest: rows path, size, blob, algo, sorted by path. Equal manifests have equal digests on all nodes."""
    rows = sorted([str(row["path"]), int(row["size"]), str(row["blob"]), str(row["algo"])] for row in manifest)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def missing_shards(paths: t.Iterable[str]) -> list[str]:
    """Names of a ``x-00001-of-00039.safetensors`` series that are not in ``paths`` (MOD-01), sorted."""
    groups: dict[tuple[str, str, str], set[int]] = {}
    for path in paths:
        match = _SHARD.fullmatch(path)
        if match:
            groups.setdefault((match["stem"], match["count"], match["ext"]), set()).add(int(match["index"]))
    missing = []
    for (stem, count, ext), have in sorted(groups.items()):
        width = len(count)
        missing += [f"{stem}-{index:0{width}d}-of-{count}{ext}" for index in range(1, int(count) + 1) if index not in have]
    return missing


def resolve_revision(folder: str, revision: str) -> str | None:
    """Commit of a branch, tag or commit as the cache knows it (refs/), None when it does not."""
    if _COMMIT.fullmatch(revision):
        return revision
    if revision.startswith("/") or ".." in revision.split("/"):
        return None
    try:
        with open(os.path.join(folder, "refs", revision), encoding="utf-8", errors="replace") as handle:
            commit = handle.read(256).strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def stamp_path(folder: str, commit: str, stamp_dir: str | None = None) -> str:
    """Stamp file of one snapshot; the same model in two caches has two stamps."""
    key = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()[:12]
    commit = commit.replace("/", "-")
    return os.path.join(stamp_dir or STAMP_DIR, f"{os.path.basename(folder)}@{commit}@{key}.json")


def read_stamp(path: str) -> dict[str, t.Any] | None:
    """The stamp, None when there is none, it is not readable by us or damaged (then the files are verified again)."""
    try:
        with open(path, encoding="utf-8") as handle:
            stamp = json.load(handle)
    except (OSError, ValueError):
        return None
    if not isinstance(stamp, dict) or not isinstance(stamp.get("files"), list) or stamp.get("version") != 1:
        return None
    return stamp


def write_stamp(
    folder: str, commit: str, manifest: t.Sequence[t.Mapping[str, t.Any]], stamp_dir: str | None = None, **extra: t.Any
) -> dict[str, t.Any]:
    """Record that every file of ``manifest`` was just verified: size, mtime_ns and inode of each. Atomic; needs write access to the
    stamp dir.
    """
    snapshot = top_of(folder, commit)
    files = []
    for row in manifest:
        info = os.stat(os.path.join(snapshot, row["path"]))
        files.append({**row, "mtime_ns": info.st_mtime_ns, "inode": info.st_ino})
    stamp = {"version": 1, "snapshot": snapshot, "revision": commit, "manifest_digest": manifest_digest(manifest), "files": files, **extra}
    path = stamp_path(folder, commit, stamp_dir)
    for directory in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "w", encoding="utf-8") as handle:
        json.dump(stamp, handle, separators=(",", ":"))
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temp, path)
    return stamp


def stamp_mismatch(stamp: t.Mapping[str, t.Any], snapshot: str) -> str | None:
    """First file that is not as it was when it was verified ("x is gone", "x changed"), None when all are. Stats only."""
    for row in stamp["files"]:
        try:
            info = os.stat(os.path.join(snapshot, row["path"]))
        except OSError:
            return f"{row['path']} is gone"
        if (info.st_size, info.st_mtime_ns, info.st_ino) != (row["size"], row["mtime_ns"], row["inode"]):
            return f"{row['path']} changed since it was verified"
    return None


def list_plain(folder: str, key: str) -> tuple[list[dict[str, t.Any]], list[str]]:
    """What belongs to a plain model: ``(manifest rows without hashes, paths of links without a file)``."""
    name = key[len(PLAIN) + 1 :]
    # a GGUF file lies among anything (a home directory): what is below is no part of it
    rows, dangling = list_snapshot(folder, deep=not name)
    series = _SHARD.fullmatch(name)

    def belongs(path: str) -> bool:
        if not name:
            return not _NOT_MODEL.intersection(path.split("/"))
        other = _SHARD.fullmatch(path)
        return path == name or bool(series and other and series.group("stem", "count", "ext") == other.group("stem", "count", "ext"))

    return [{**row, "blob": "", "algo": ""} for row in rows if belongs(row["path"])], [path for path in dangling if belongs(path)]


def missing_of_index(top: str, paths: t.Iterable[str]) -> list[str]:
    """Files that the index of the weights names and that are not in ``paths`` (MOD-01), sorted. An index that cannot be read names itself."""
    have = set(paths)
    missing: set[str] = set()
    for path in sorted(have):
        if not path.endswith(".safetensors.index.json"):
            continue
        try:
            with open(os.path.join(top, path), encoding="utf-8") as handle:
                names = set(json.load(handle)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            missing.add(path)
            continue
        missing.update(found for found in (os.path.join(os.path.dirname(path), str(name)) for name in names) if found not in have)
    return sorted(missing)


def list_snapshot(snapshot: str, deep: bool = True) -> tuple[list[dict[str, t.Any]], list[str]]:
    """What lies in a snapshot directory, with ``deep`` also below it: ``(manifest rows, paths of links without a file)``. Stats and
    readlinks only. Raises OSError.
    """
    rows: list[dict[str, t.Any]] = []
    dangling: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(snapshot, prefix)) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if deep:
                        pending.append(path + "/")
                    continue
                try:
                    info = entry.stat()
                except OSError:
                    dangling.append(path)
                    continue
                if not stat.S_ISREG(info.st_mode):
                    continue
                blob = os.path.basename(os.readlink(entry.path)) if entry.is_symlink() else ""
                rows.append({"path": path, "size": info.st_size, "blob": blob, "algo": blob_algo(blob)})
    return sorted(rows, key=lambda row: row["path"]), sorted(dangling)


def weight_bytes(rows: t.Iterable[t.Mapping[str, t.Any]]) -> int:
    """Bytes of the weights that vLLM loads, from rows of ``path`` and ``size``; 0 when there are none.

    A repository may hold them several times: in folders for other programs (``original/``), as ``consolidated.safetensors``, in an older format.
    """
    sizes = {row["path"]: int(row["size"] or 0) for row in rows if "/" not in row["path"]}
    tensors = {path: size for path, size in sizes.items() if path.endswith(".safetensors")}
    usual = {path: size for path, size in tensors.items() if not path.startswith("consolidated")}
    return sum((usual or tensors or {path: size for path, size in sizes.items() if re.fullmatch(r"pytorch_model.*\.bin", path)}).values())


def _state(repo_id: str, commit: str | None, path: str, **over: t.Any) -> dict[str, t.Any]:
    base: dict[str, t.Any] = {
        "repo_id": repo_id,
        "revision": commit,
        "path": path,
        "complete": False,
        "reason": "",
        "files": 0,
        "bytes": 0,
        "weights": 0,
        "manifest_digest": "",
        "verified": False,
    }
    return {**base, **over}


def local_state(
    cache_dir: str, repo_id: str, revision: str, *, stamp_dir: str | None = None, patterns: t.Mapping[str, t.Any] | None = None
) -> dict[str, t.Any] | None:
    """Cheap state of one snapshot on this node: stats and reads of small state files only, nothing is hashed, no hub is asked.

    ``cache_dir`` is HF_HOME (``~`` = login user's home), ``revision`` a branch, tag or commit. ``complete`` without ``verified`` means:
    every link has its file and no shard of a numbered series is missing. ``verified`` means: a full verification happened, with these
    ``patterns`` if given (allow, ignore), and no file changed since (size, mtime_ns, inode). ``reason`` says why it is not complete. None
    when ``cache_dir`` is "" or does not exist. Never raises for what lies on the disk.
    """
    if is_plain(repo_id):
        return _plain_state(repo_id, stamp_dir, patterns)
    root = resolve_cache_dir(cache_dir)
    if not root or not os.path.isdir(root):
        return None
    folder = repo_dir(root, repo_id)
    commit = resolve_revision(folder, revision)
    if commit is None:
        why = f"revision '{revision}' is not in the cache" if os.path.isdir(folder) else "the model is not in the cache"
        return _state(repo_id, None, "", reason=why)
    snapshot = os.path.join(folder, "snapshots", commit)
    stamp = read_stamp(stamp_path(folder, commit, stamp_dir))
    changed = stamp_mismatch(stamp, snapshot) if stamp else None
    if stamp and not changed and other_patterns(stamp, patterns):
        changed = "it was verified with other patterns"
    if stamp and changed is None:
        total = sum(row["size"] for row in stamp["files"])
        digest = str(stamp.get("manifest_digest", ""))
        facts = {"files": len(stamp["files"]), "bytes": total, "weights": weight_bytes(stamp["files"]), "manifest_digest": digest}
        return _state(repo_id, commit, snapshot, complete=True, verified=True, **facts)
    try:
        rows, dangling = list_snapshot(snapshot)
    except OSError as exc:
        return _state(repo_id, commit, snapshot, reason=f"no snapshot of {commit[:12]}: {exc.strerror}")
    missing = missing_shards([row["path"] for row in rows] + dangling)
    reason = ""
    if dangling:
        reason = f"{len(dangling)} links without a file, first {dangling[0]}"
    elif missing:
        reason = f"{len(missing)} shards are missing, first {missing[0]}"
    elif not rows:
        reason = "the snapshot is empty"
    elif changed:
        reason = changed
    facts = {
        "files": len(rows),
        "bytes": sum(row["size"] for row in rows),
        "weights": weight_bytes(rows),
        "manifest_digest": manifest_digest(rows),
    }
    return _state(repo_id, commit, snapshot, complete=not reason, reason=reason, **facts)


def other_patterns(stamp: t.Mapping[str, t.Any], patterns: t.Mapping[str, t.Any] | None) -> bool:
    """Whether a snapshot was verified with other allow and ignore patterns (a worker knows none: it gets the manifest of the head)."""
    return patterns is not None and stamp.get("patterns") is not None and stamp["patterns"] != patterns


def plain_error(path: str, error: OSError) -> str:
    """Why the files of the plain model ``path`` cannot be listed."""
    if isinstance(error, NotADirectoryError) and os.path.isfile(path):
        return "it is a file; only a directory or a GGUF file is a model"
    return f"{error.filename or path}: {error.strerror}"


def _plain_state(repo_id: str, stamp_dir: str | None, patterns: t.Mapping[str, t.Any] | None = None) -> dict[str, t.Any] | None:
    folder, key = plain_place(repo_id)
    path = model_path(folder, key)
    if not os.path.exists(path):
        return _state(repo_id, None, "", reason=f"there is no {path}")
    stamp = read_stamp(stamp_path(folder, key, stamp_dir))
    try:
        rows, dangling = list_plain(folder, key)
    except OSError as exc:
        return _state(repo_id, None, path, reason=plain_error(path, exc))
    chosen = (stamp or {}).get("patterns") if patterns is None else patterns
    if isinstance(chosen, dict):
        rows = [row for row in rows if _download.wanted(row["path"], chosen.get("allow") or [], chosen.get("ignore") or [])]
    paths = [row["path"] for row in rows]
    missing = dangling + missing_shards(paths + dangling) + missing_of_index(folder, paths)
    changed = stamp_mismatch(stamp, folder) if stamp else None
    # on a worker the head decides what belongs to the model (its stamps name no patterns)
    if stamp and not changed and stamp.get("patterns") is not None and {row["path"] for row in stamp["files"]} != set(paths):
        changed = "it has other files than were verified"
    size = sum(row["size"] for row in rows)
    # of a GGUF model every file is weights
    facts: dict[str, t.Any] = {"files": len(rows), "bytes": size, "weights": weight_bytes(rows) if key == PLAIN else size}
    nothing = "the directory is empty" if key == PLAIN else "there is no GGUF file of that name"
    reason = f"{len(missing)} files are missing, first {missing[0]}" if missing else "" if rows else nothing
    if stamp and not changed and not reason:
        digest = str(stamp["manifest_digest"])
        return _state(repo_id, digest[:40], path, complete=True, verified=True, manifest_digest=digest, **facts)
    return _state(repo_id, None, path, complete=not (reason or changed), reason=reason or changed or "", **facts)


def model_config(snapshot: str) -> dict[str, t.Any] | None:
    """config.json of a snapshot directory, or None where there is none that can be read (a GGUF model has none)."""
    try:
        with open(os.path.join(snapshot, "config.json"), encoding="utf-8") as handle:
            config = json.load(handle)
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


# --- what is there, what is missing ---


class Found(t.NamedTuple):
    """Rows of a manifest sorted by what the disk says. ``good``: verified before and untouched; ``unknown``: right size, to be hashed;
    ``missing``.
    """

    good: list[dict[str, t.Any]]
    unknown: list[dict[str, t.Any]]
    missing: list[dict[str, t.Any]]


def _key(info: os.stat_result) -> tuple[int, int, int]:
    return (info.st_ino, info.st_size, info.st_mtime_ns)


def trusted_files(folder: str, stamp_dir: str | None = None) -> dict[tuple[int, int, int], str]:
    """``(inode, size, mtime_ns) -> blob`` over the stamps of all revisions of one model: a new revision does not hash what an old one
    proved.
    """
    trusted: dict[tuple[int, int, int], str] = {}
    suffix = stamp_path(folder, "0" * 40, stamp_dir)[-18:]
    directory = stamp_dir or STAMP_DIR
    try:
        names = os.listdir(directory)
    except OSError:
        return trusted
    for name in names:
        if not (name.startswith(os.path.basename(folder) + "@") and name.endswith(suffix)):
            continue
        for row in (read_stamp(os.path.join(directory, name)) or {"files": []})["files"]:
            trusted[(row["inode"], row["size"], row["mtime_ns"])] = row["blob"]
    return trusted


def file_of(folder: str, commit: str, row: t.Mapping[str, t.Any]) -> str:
    """Where the content of a row is now: through the snapshot when that has the right size, else the blob; the path need not exist."""
    pointer = os.path.join(top_of(folder, commit), row["path"])
    if commit.startswith(PLAIN):
        return pointer
    with_size = [pointer, os.path.join(folder, "blobs", row["blob"])]
    for path in with_size:
        try:
            if os.stat(path).st_size == row["size"]:
                return path
        except OSError:
            continue
    return with_size[1]


def look(folder: str, commit: str, rows: t.Iterable[t.Mapping[str, t.Any]], trusted: t.Mapping[tuple[int, int, int], str]) -> Found:
    """Compare a manifest with the disk by stat only."""
    found = Found([], [], [])
    for item in rows:
        row = dict(item)
        try:
            info = os.stat(file_of(folder, commit, row))
        except OSError:
            found.missing.append(row)
            continue
        if info.st_size != row["size"]:
            found.missing.append(row)
        elif trusted.get(_key(info)) == row["blob"]:
            found.good.append(row)
        else:
            found.unknown.append(row)
    return found


def unique_blobs(rows: t.Iterable[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """One row per blob: two paths with equal content are copied once."""
    return list({row["blob"]: dict(row) for row in rows}.values())


def discard(folder: str, commit: str, row: t.Mapping[str, t.Any]) -> None:
    """Remove a file whose content is wrong, and the link to it; the shared store's copy of it too (it is just as wrong)."""
    pointer = os.path.join(top_of(folder, commit), row["path"])
    if commit.startswith(PLAIN):
        if os.path.lexists(pointer):
            os.unlink(pointer)
        return
    blob = os.path.join(folder, "blobs", row["blob"])
    real = os.path.realpath(file_of(folder, commit, row))
    inside = os.path.realpath(os.path.dirname(folder)) + os.sep
    for path in (pointer, blob, real):
        if path == real and not real.startswith(inside):
            continue
        if os.path.lexists(path):
            os.unlink(path)


class Owner(t.NamedTuple):
    """uid and gid that what we make belongs to."""

    uid: int
    gid: int


def _give(path: str, owner: Owner, mode: int | None = None) -> None:
    if os.geteuid() == 0:
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
    if mode is not None and not os.path.islink(path):
        os.chmod(path, mode)


def _make_dirs(path: str, owner: Owner) -> None:
    todo = []
    while not os.path.isdir(path):
        todo.append(path)
        path = os.path.dirname(path)
    for directory in reversed(todo):
        os.mkdir(directory, 0o755)
        _give(directory, owner, 0o755)


def _link(root: str, top: str, blobs: str, row: t.Mapping[str, t.Any], owner: Owner) -> None:
    """Atomic relative link below ``root`` as it will be when ``root`` is at ``top``."""
    pointer = os.path.join(root, row["path"])
    _make_dirs(os.path.dirname(pointer), owner)
    text = os.path.relpath(os.path.join(blobs, row["blob"]), os.path.dirname(os.path.join(top, row["path"])))
    temp = f"{pointer}.{os.getpid()}.tmp"
    if os.path.lexists(temp):
        os.unlink(temp)
    os.symlink(text, temp)
    _give(temp, owner)
    os.replace(temp, pointer)


def safe_path(path: str) -> bool:
    """Whether a path of a manifest stays inside its snapshot."""
    parts = path.split("/")
    return bool(path) and not path.startswith("/") and "\0" not in path and not any(part in ("", ".", "..") for part in parts)


def check_manifest(rows: t.Sequence[t.Mapping[str, t.Any]]) -> str | None:
    """What is wrong with a manifest (None: nothing): it decides which names are written."""
    if not rows:
        return "it is empty"
    for row in rows:
        if not safe_path(str(row.get("path", ""))):
            return f"'{row.get('path')}' is not a path inside a snapshot"
        if blob_algo(str(row.get("blob", ""))) != row.get("algo") or not row.get("algo"):
            return f"{row['path']}: '{row.get('blob')}' is not a {row.get('algo') or 'known'} name"
        if not isinstance(row.get("size"), int) or row["size"] < 0:
            return f"{row['path']}: no size"
    if len({row["path"] for row in rows}) != len(rows):
        return "a path is there twice"
    return None


def publish(folder: str, commit: str, rows: t.Sequence[t.Mapping[str, t.Any]], staging: str, owner: Owner) -> list[str]:
    """Make ``snapshots/<commit>`` show every row; paths that were linked. All blobs must be in place.

    A new snapshot is built in ``staging`` (same file system, outside hub/) and renamed, so nobody sees half of it; in an existing one
    each missing or
    wrong link is replaced by rename.
    """
    top = os.path.join(folder, "snapshots", commit)
    blobs = os.path.join(folder, "blobs")
    if not os.path.isdir(top):
        temp = os.path.join(staging, f"snapshot-{commit}-{os.getpid()}")
        _make_dirs(temp, owner)
        for row in rows:
            _link(temp, top, blobs, row, owner)
        _make_dirs(os.path.dirname(top), owner)
        os.rename(temp, top)
        return [str(row["path"]) for row in rows]
    linked = []
    for row in rows:
        try:
            right = os.stat(os.path.join(top, row["path"])).st_size == row["size"]
        except OSError:
            right = False
        if right and os.path.islink(os.path.join(top, row["path"])):
            right = os.path.basename(os.readlink(os.path.join(top, row["path"]))) == row["blob"]
        if not right:
            _link(top, top, blobs, row, owner)
            linked.append(str(row["path"]))
    return linked


def publish_plain(folder: str, rows: t.Sequence[t.Mapping[str, t.Any]], store: str, staging: str, owner: Owner) -> list[str]:
    """Put what was pulled into ``store`` (named by hash, same file system) where the model has it; paths that were placed.

    A model that is not there at all appears as a whole by one rename; else each file is replaced by rename, the small ones that say
    what the
    others are (configuration, index) last.
    """
    fresh = not os.path.isdir(folder)
    top = os.path.join(staging, "whole") if fresh else folder
    _make_dirs(top, owner)
    placed = []
    used: set[str] = set()
    for row in sorted(rows, key=lambda row: -int(row["size"])):
        source = os.path.join(store, row["blob"])
        if not os.path.exists(source):
            continue
        target = os.path.join(top, row["path"])
        _make_dirs(os.path.dirname(target), owner)
        temp = f"{target}.{os.getpid()}.tmp"
        if row["blob"] in used:
            # a file of its own: a change of one must not change the other
            shutil.copyfile(source, temp)
            _give(temp, owner, 0o644)
        else:
            os.link(source, temp)
        used.add(row["blob"])
        os.replace(temp, target)
        placed.append(str(row["path"]))
    if fresh:
        _make_dirs(os.path.dirname(folder), owner)
        os.rename(top, folder)
    return sorted(placed)


def prune(folder: str, commit: str, rows: t.Sequence[t.Mapping[str, t.Any]], keep: t.Iterable[str]) -> list[str]:
    """Remove what the head does not have: revisions that are not in ``keep``, files of this one that are not in its manifest, blobs and refs
    that nothing names any more. Paths relative to ``folder`` of what was removed. Nothing outside ``folder`` is touched.
    """
    wanted = {str(row["path"]) for row in rows}
    removed: list[str] = []
    top = top_of(folder, commit)
    if not os.path.isdir(top):
        return removed
    found, dangling = list_plain(folder, commit) if commit.startswith(PLAIN) else list_snapshot(top)
    for path in [row["path"] for row in found] + dangling:
        if path not in wanted:
            os.unlink(os.path.join(top, path))
            removed.append(os.path.relpath(os.path.join(top, path), folder))
    if commit.startswith(PLAIN):
        return sorted(removed)
    snapshots = os.path.join(folder, "snapshots")
    for name in sorted(set(os.listdir(snapshots)) - {commit, *keep}):
        shutil.rmtree(os.path.join(snapshots, name), ignore_errors=True)
        removed.append(f"snapshots/{name}")
    removed += _prune_refs(folder) + _prune_blobs(folder, {str(row["blob"]) for row in rows})
    return sorted(removed)


def _prune_refs(folder: str) -> list[str]:
    removed = []
    refs = os.path.join(folder, "refs")
    for parent, dummy, names in os.walk(refs):
        for name in names:
            ref = os.path.relpath(os.path.join(parent, name), refs)
            commit = read_ref(folder, ref)
            if not commit or not os.path.isdir(os.path.join(folder, "snapshots", commit)):
                os.unlink(os.path.join(parent, name))
                removed.append(f"refs/{ref}")
    return removed


def _prune_blobs(folder: str, wanted: set[str]) -> list[str]:
    for parent, dummy, names in os.walk(os.path.join(folder, "snapshots")):
        for name in names:
            path = os.path.join(parent, name)
            wanted.add(os.path.basename(os.readlink(path)) if os.path.islink(path) else "")
    blobs = os.path.join(folder, "blobs")
    removed = sorted(set(os.listdir(blobs) if os.path.isdir(blobs) else []) - wanted)
    for name in removed:
        os.unlink(os.path.join(blobs, name))
    return [f"blobs/{name}" for name in removed]


def read_ref(folder: str, ref: str) -> str:
    """Commit a branch or tag points at in the cache, "" when unknown."""
    return "" if _COMMIT.fullmatch(ref) else resolve_revision(folder, ref) or ""


def write_ref(folder: str, ref: str, commit: str, owner: Owner) -> bool:
    """Let ``refs/<ref>`` name ``commit`` (atomic, last step of a publication); True when it was different. A commit needs no ref."""
    if not ref or _COMMIT.fullmatch(ref) or not safe_path(ref) or read_ref(folder, ref) == commit:
        return False
    path = os.path.join(folder, "refs", ref)
    _make_dirs(os.path.dirname(path), owner)
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "w", encoding="ascii") as handle:
        handle.write(commit)
        handle.flush()
        os.fsync(handle.fileno())
    _give(temp, owner, 0o644)
    os.replace(temp, path)
    return True


def _wanted_mode(mode: int) -> int:
    """Permissions that a directory or file of the cache has at least, with those that it has."""
    return (0o755 if stat.S_ISDIR(mode) else 0o644) | stat.S_IMODE(mode)


def needs_repair(info: os.stat_result, owner: Owner) -> bool:
    """Whether ``repair_access`` would change the owner or the mode of this directory, file or link."""
    if os.geteuid() == 0 and info.st_uid != owner.uid:
        return True
    return not stat.S_ISLNK(info.st_mode) and _wanted_mode(info.st_mode) != stat.S_IMODE(info.st_mode)


def repair_access(cache_dir: str, repo_id: str, owner: Owner) -> list[str]:
    """Give what another user (root in a container, MOD-06) left of this model to the login user, readable for all; paths that were changed.

    Only inside this model's folder, its lock folder and the two directories above; links are changed themselves, not what they point to.
    """
    folder = repo_dir(cache_dir, repo_id)
    locks = os.path.join(os.path.dirname(folder), ".locks", os.path.basename(folder))
    changed: list[str] = []

    def fix(path: str) -> None:
        info = os.lstat(path)
        if needs_repair(info, owner):
            own = info.st_uid == owner.uid or os.geteuid() != 0
            mode = None if stat.S_ISLNK(info.st_mode) else _wanted_mode(info.st_mode)
            _give(path, Owner(info.st_uid, info.st_gid) if own else owner, mode)
            changed.append(path)

    for top in (os.path.dirname(folder), os.path.dirname(locks)):
        if os.path.isdir(top):
            fix(top)
    for top in (folder, locks):
        for parent, dirs, names in os.walk(top):
            fix(parent)
            for name in names + [item for item in dirs if os.path.islink(os.path.join(parent, item))]:
                fix(os.path.join(parent, name))
    return changed


def staging_dir(cache_dir: str, repo_id: str) -> str:
    """Where parts of this model lie until they are whole: beside hub/ when that is the same file system, else hidden inside it. For a plain
    model inside its folder, or beside it when there is none yet.
    """
    if is_plain(repo_id):
        folder, key = plain_place(repo_id)
        inside = os.path.isdir(folder)
        return os.path.join(folder if inside else os.path.dirname(folder), STAGING, f"{os.path.basename(folder)}-{key}")
    hub = os.path.join(cache_dir, "hub")
    beside = os.path.join(cache_dir, STAGING, repo_folder(repo_id))
    try:
        same = os.stat(hub).st_dev == os.stat(cache_dir).st_dev
    except OSError:
        return beside
    return beside if same else os.path.join(hub, STAGING, repo_folder(repo_id))
