# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies in a Hugging Face cache: all models with their revisions, which of it is complete, and what may be removed.

PRIVATE to the collection. ``scan`` and ``remove`` touch the file system of the node; the rest are pure functions over plain data.
Nothing outside the
directories of a model is ever removed: links that lead elsewhere (blobs shared by several models) stay what they are.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _service, _snapshot
from ansible_collections.dgxspark.serving.plugins.module_utils._plan import LABEL, VLLM
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._status import columns

STAGE = "models"
UNUSED = "unused"
GIB = 1 << 30
_TARGET = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[0-9a-f]{7,40}))?")


def repo_of(folder: str) -> str:
    """``models--org--name`` as the hub names it."""
    return "/".join(folder.split("--")[1:])


def tree_bytes(path: str) -> int:
    """Bytes of the regular files below a directory; links are not followed. 0 when there is none."""
    total = 0
    for place, _folders, names in os.walk(path):
        for name in names:
            try:
                info = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def refs_of(folder: str) -> dict[str, str]:
    """Branches and tags that the cache knows, with their commits."""
    root = os.path.join(folder, "refs")
    found = {}
    for place, _folders, names in os.walk(root):
        for name in names:
            ref = os.path.relpath(os.path.join(place, name), root)
            commit = _snapshot.read_ref(folder, ref)
            if commit:
                found[ref] = commit
    return found


def folders_of(cache_dir: str) -> list[str]:
    """Names of the models' folders in the cache, and of models of which there are only parts of a copy that was interrupted. Raises OSError."""
    hub = os.path.join(cache_dir, "hub")
    staging = os.path.dirname(_snapshot.staging_dir(cache_dir, "any"))
    found = []
    for place in (hub, staging):
        for name in os.listdir(place) if os.path.isdir(place) else []:
            path = os.path.join(place, name)
            # a link in the hub stays what it is, and so does what belongs to it
            if (
                name.startswith("models--")
                and os.path.isdir(path)
                and not os.path.islink(path)
                and not os.path.islink(os.path.join(hub, name))
            ):
                found.append(name)
    return sorted(set(found))


def scan(cache_dir: str, stamp_dir: str | None = None) -> list[dict[str, t.Any]]:
    """Every model in the cache: ``{repo_id, bytes, partial, revisions: [{revision, refs, complete, verified, bytes, reason}]}``."""
    hub = os.path.join(cache_dir, "hub")
    models = []
    for name in folders_of(cache_dir):
        folder = os.path.join(hub, name)
        repo = repo_of(name)
        refs = refs_of(folder)
        snapshots = os.path.join(folder, "snapshots")
        revisions = []
        for commit in sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else []:
            state = _snapshot.local_state(cache_dir, repo, commit, stamp_dir=stamp_dir) or {}
            revisions.append(
                {
                    "revision": commit,
                    "refs": sorted(ref for ref, target in refs.items() if target == commit),
                    **{key: state.get(key) for key in ("complete", "verified", "bytes", "reason")},
                }
            )
        partial = sum(os.path.getsize(path) for path in glob.glob(os.path.join(folder, "blobs", "*.incomplete")))
        models.append(
            {
                "repo_id": repo,
                "bytes": tree_bytes(folder),
                "partial": partial + tree_bytes(_snapshot.staging_dir(cache_dir, repo)),
                "revisions": revisions,
            }
        )
    return models


def served(nodes: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """``repo@commit`` of what our servers run, from the containers of all nodes (facts of node_info)."""
    found = set()
    for node in nodes:
        for container in node.get("containers") or []:
            labels = container.get("labels") or {}
            if _service.role_of(container) == VLLM and container.get("running") and labels.get(f"{LABEL}.model"):
                found.add(f"{labels[f'{LABEL}.model']}@{labels.get(f'{LABEL}.revision', '')}")
    return sorted(found)


def is_served(repo: str, commit: str, running: t.Collection[str]) -> bool:
    """Whether a server runs this revision (one whose revision is not known protects them all)."""
    return f"{repo}@{commit}" in running or f"{repo}@" in running


def unused(models: t.Sequence[t.Mapping[str, t.Any]], running: t.Collection[str], keep: t.Collection[str]) -> dict[str, list[str]]:
    """What neither runs nor is the inventory's: ``{repo: commits}``, no commits for the whole model."""
    chosen: dict[str, list[str]] = {}
    for model in models:
        repo = model["repo_id"]
        wanted = {name for name in keep if name.startswith(f"{repo}@")}
        kept = [r["revision"] for r in model["revisions"] if {f"{repo}@{name}" for name in (r["revision"], *r["refs"])} & wanted]
        if wanted and not kept:
            continue  # the inventory's revision is not here yet, or its branch is not known: all stay
        stay = [*kept, *[r["revision"] for r in model["revisions"] if is_served(repo, r["revision"], running)]]
        going = [r["revision"] for r in model["revisions"] if r["revision"] not in stay]
        if not stay:
            chosen[repo] = []
        elif going:
            chosen[repo] = going
    return chosen


def targets(
    models: t.Sequence[t.Mapping[str, t.Any]], prune: t.Sequence[str], running: t.Collection[str], keep: t.Collection[str]
) -> list[tuple[str, list[str]]]:
    """What to remove: ``(repo, commits)``, no commits for the whole model. ``keep``: ``repo@commit`` or ``repo@branch`` of the inventory.

    Raises Problem for what is served, or what is no target.
    """
    chosen: dict[str, list[str]] = {}
    for target in prune:
        if target == UNUSED:
            chosen.update(unused(models, running, keep))
            continue
        match = _TARGET.fullmatch(target)
        if not match:
            raise Problem(
                "input",
                stage=STAGE,
                found=f"{target!r} in spark_prune",
                expected="organisation/name, organisation/name@commit (7 digits or more), or unused",
                remedy="see playbooks/models.yml for what is there",
            )
        repo, revision = match["repo"], match["revision"]
        for model in models:
            if model["repo_id"] != repo:
                continue
            commits = [r["revision"] for r in model["revisions"] if not revision or r["revision"].startswith(revision)]
            held = [commit for commit in commits if is_served(repo, commit, running)]
            if held:
                raise Problem(
                    "model-served",
                    stage=STAGE,
                    found=f"{repo}@{held[0][:12]}, which is being served",
                    expected="a model that is not in use",
                    remedy="serve another model or run playbooks/stop.yml first",
                )
            if not revision:
                chosen[repo] = []
            elif commits and chosen.get(repo) != []:
                chosen[repo] = sorted({*chosen.get(repo, []), *commits})
    return sorted(chosen.items())


def absent(models: t.Sequence[t.Mapping[str, t.Any]], prune: t.Sequence[str]) -> list[str]:
    """Targets that name nothing in this cache: already gone, or a spelling mistake."""
    names = {model["repo_id"] for model in models} | {name for name in names_of(models) if "@" in name}
    return [
        target
        for target in prune
        if target != UNUSED and not any(name == target or ("@" in target and name.startswith(target)) for name in names)
    ]


def doomed(cache_dir: str, repo: str, commits: t.Sequence[str], stamp_dir: str | None = None) -> list[str]:
    """Paths that go, in the order in which they go: names before content, so that what is left is never taken for complete."""
    folder = _snapshot.repo_dir(cache_dir, repo)
    stamps = _snapshot.stamp_path(folder, "*", stamp_dir)
    if not commits:
        locks = os.path.join(cache_dir, "hub", ".locks", _snapshot.repo_folder(repo))
        places = [os.path.join(folder, "refs"), os.path.join(folder, "snapshots"), folder, _snapshot.staging_dir(cache_dir, repo), locks]
        return [path for path in [*sorted(glob.glob(stamps)), *places] if os.path.lexists(path)]
    paths = [path for commit in commits for path in [_snapshot.stamp_path(folder, commit, stamp_dir)] if os.path.lexists(path)]
    paths += [os.path.join(folder, "refs", ref) for ref, commit in sorted(refs_of(folder).items()) if commit in commits]
    used: set[str] = set()
    going: set[str] = set()
    snapshots = os.path.join(folder, "snapshots")
    for commit in os.listdir(snapshots):
        for place, _folders, names in os.walk(os.path.join(snapshots, commit)):
            for name in names:
                path = os.path.join(place, name)
                if os.path.islink(path):
                    (going if commit in commits else used).add(os.path.realpath(path))
    paths += [os.path.join(snapshots, commit) for commit in commits]
    inside = os.path.realpath(os.path.join(folder, "blobs")) + os.sep
    return paths + sorted(path for path in going - used if path.startswith(inside) and os.path.isfile(path))


def size_of(paths: t.Sequence[str]) -> int:
    """Bytes that removing these paths frees."""
    total = 0
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            total += 0 if any(path != other and path.startswith(other + os.sep) for other in paths) else tree_bytes(path)
        elif not os.path.islink(path) and os.path.exists(path):
            total += os.path.getsize(path)
    return total


def remove(paths: t.Sequence[str]) -> None:
    """Removes what ``doomed`` named. Raises OSError."""
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


def names_of(models: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """The cache as a list of lines, for diffs."""
    return [f"{m['repo_id']}@{r['revision']}" for m in models for r in m["revisions"]] + [
        m["repo_id"] for m in models if not m["revisions"]
    ]


def text_of(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def table(rows: t.Sequence[t.Mapping[str, t.Any]], running: t.Collection[str], keep: t.Collection[str]) -> str:
    """One line for each revision on each node. ``rows``: ``{node, models}``."""
    lines = [["NODE", "MODEL", "REVISION", "SIZE", "STATE", "USE"]]
    for row in rows:
        if not row["models"]:
            lines.append([row["node"], "(none)", "", "", "", ""])
        for model in row["models"]:
            repo = model["repo_id"]
            for place, revision in enumerate(model["revisions"]):
                commit = revision["revision"]
                state = "verified" if revision["verified"] else "complete" if revision["complete"] else f"incomplete: {revision['reason']}"
                if place == 0 and model["partial"]:
                    state += f" (+ {text_of(model['partial'])} in parts)"
                names = {f"{repo}@{name}" for name in (commit, *revision["refs"])}
                use = "served" if is_served(repo, commit, running) else "inventory" if names & set(keep) else ""
                refs = f" ({', '.join(revision['refs'])})" if revision["refs"] else ""
                lines.append([row["node"], repo, commit[:12] + refs, text_of(revision["bytes"] or 0), state, use])
            if not model["revisions"]:
                state = "incomplete: no snapshot" + (f" (+ {text_of(model['partial'])} in parts)" if model["partial"] else "")
                lines.append([row["node"], repo, "-", text_of(model["bytes"]), state, ""])
    return "\n".join(columns(lines))
