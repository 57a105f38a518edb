# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a diagnostics bundle holds of a node, within bounds and without secrets, and how it lies on the controller.

PRIVATE to the collection. Only the last two functions touch a file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
import tempfile
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _redact

MOST_OF_A_FILE = 1 << 20  # characters
MOST_OF_A_NODE = 6 << 20
MOST_FILES = 80  # of a node
PREFIX = "spark-diagnostics-"
NAME = re.compile(rf"{PREFIX}(\d{{8}}T\d{{6}}Z)(?:-(\d+))?\.tar\.gz")

Files = dict[str, str]


def clip(text: str, most: int) -> str:
    """The beginning and, more of it, the end of a text that is too long; whole lines, and what is left out is said."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 4], text[len(text) - most * 3 // 4 :]
    head = head[: head.rfind("\n") + 1] or head + "\n"
    tail = tail[tail.find("\n") + 1 :] if "\n" in tail else tail
    return f"{head}... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def evidence(files: t.Iterable[tuple[str, str]], inspected: t.Any = None) -> Files:
    """Name and text of what is kept of one node, the most important first; the rest is named when it is too much.

    ``inspected`` is what ``docker inspect`` said; secrets that stand in it by name are taken out of every text.
    """
    known = _redact.values(inspected)
    kept: Files = {}
    if inspected:
        kept["inspect.json"] = json.dumps(_redact.data(inspected, known), indent=1)
    left = MOST_OF_A_NODE
    out = []
    for name, text in files:
        if not text:
            continue
        if len(kept) >= MOST_FILES or left <= 0:
            out.append(f"{name} ({len(text)} characters)")
            continue
        kept[name] = _redact.text(clip(text, min(MOST_OF_A_FILE, left)), known)
        left -= len(kept[name])
    if out:
        kept["left-out.txt"] = "\n".join(out) + "\n"
    return kept


def document(value: t.Any) -> str:
    """Anything that JSON can hold, without secrets."""
    return json.dumps(_redact.data(value, _redact.values(value)), indent=1, sort_keys=True, default=str) + "\n"


def safe(name: str) -> str:
    """A name for a file or a folder of the archive."""
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "_"


def contents(nodes: t.Mapping[str, Files | None], documents: t.Mapping[str, t.Any], message: str) -> Files:
    """Every file of the bundle by its path. A node of which nothing came (None) gets a file that says so."""
    files = {"message.txt": _redact.text(message).rstrip() + "\n"}
    files.update({f"{safe(name)}.json": document(value) for name, value in documents.items()})
    for node, found in sorted(nodes.items()):
        if found is None:
            files[f"{safe(node)}/NOT-REACHED.txt"] = f"{node} did not answer when the evidence was collected.\n"
            continue
        for name, text in found.items():
            files["/".join([safe(node), *(safe(part) for part in name.split("/"))])] = text
    return files


def archive(files: t.Mapping[str, str], top: str, at: float) -> bytes:
    """A tar.gz with one folder in it; its owner alone may read what comes out."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in files.items():
            data = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o600, int(at)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def too_many(names: t.Iterable[str], keep: int) -> list[str]:
    """The bundles to remove so that the ``keep`` newest stay; nothing that only lies beside them."""
    found = [(match[1], int(match[2] or 0), name) for name in names for match in [NAME.fullmatch(name)] if match]
    return [name for dummy, dummy2, name in sorted(found)[: max(0, len(found) - max(1, keep))]]


def publish(directory: str, stamp: str, files: t.Mapping[str, str], at: float) -> str:
    """Write the bundle, for its owner alone, under its final name only when it is whole; returns its path."""
    directory = os.path.abspath(os.path.expanduser(directory))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    number = 0
    top = f"{PREFIX}{stamp}"
    while os.path.lexists(os.path.join(directory, f"{top}.tar.gz")):
        number += 1
        top = f"{PREFIX}{stamp}-{number}"
    path = os.path.join(directory, f"{top}.tar.gz")
    handle, part = tempfile.mkstemp(prefix=".part-", dir=directory)  # 0600
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(archive(files, top, at))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path


def prune(directory: str, keep: int) -> list[str]:
    """Remove old bundles; returns their names. One that somebody else removes meanwhile is no failure."""
    directory = os.path.abspath(os.path.expanduser(directory))
    removed = []
    for name in too_many(os.listdir(directory), keep):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
            removed.append(name)
    return removed
