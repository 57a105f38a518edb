# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record on a node of what was stopped for a server that is not proven yet, so that it can be brought back.

PRIVATE to the collection. ``{version, node, stopped: [what service_stop stopped], own: {our previous containers, of serving_previous}}``.
It exists exactly as long as there may be something to bring back. Readable for root only.
"""

from __future__ import annotations

import json
import os
import tempfile
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

VERSION = 1


def read_text(path: str) -> str:
    """The text of a file, "" when it cannot be read (a process that ended meanwhile)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def write_atomic(path: str, text: str) -> None:
    """All or nothing, on disk before it returns; directory 0700, file 0600."""
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".stopped.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder_handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_handle)
    finally:
        os.close(folder_handle)


def load(path: str, node: str, stage: str, read: t.Callable[[str], str] = read_text) -> dict[str, t.Any] | None:
    """The record, None when there is none. Raises Problem when it is not one of ours."""
    text = read(path)
    if not text:
        return None
    try:
        record = json.loads(text)
        if not isinstance(record.get("stopped"), list):
            raise ValueError("no list of what was stopped")
    except (ValueError, AttributeError) as exc:
        raise Problem(
            "record-unreadable",
            node=node,
            stage=stage,
            found=f"{path}: {exc}",
            expected="a record of this collection",
            remedy="move the file away; what it named must be started by hand",
        ) from exc
    return dict(record)


def save(path: str, record: t.Mapping[str, t.Any]) -> None:
    """Write it down; a record with nothing in it is removed."""
    if record.get("stopped") or record.get("own"):
        write_atomic(path, json.dumps({"version": VERSION, **record}, indent=1, sort_keys=True) + "\n")
    elif os.path.exists(path):
        os.unlink(path)


def unwritable(exc: OSError, path: str, node: str, stage: str) -> Problem:
    """The problem of an OSError while writing."""
    expected = f"{path} to be writable"
    return Problem("record-unwritable", node=node, stage=stage, found=str(exc), expected=expected, remedy="run as root (become)")


def no_docker(exc: Exception, node: str, stage: str) -> Problem:
    """The problem of a Docker that does not answer."""
    found, expected = f"docker: {exc}", "an answer of docker"
    return Problem("DOC-02", node=node, stage=stage, found=found, expected=expected, remedy="see systemctl status docker")
