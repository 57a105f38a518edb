# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parts of downloads that a reboot or a kill ended: which of them surely nobody writes any more.

PRIVATE to the collection. huggingface_hub 1.31 and newer writes each file as ``blobs/<name>.<8 random hex digits>.incomplete``, holds it open
from the first byte to the last, and removes it unless it is killed. Such a part can never be continued, by nobody. The older form without
random digits can be continued, and is none of these.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import typing as t

_PART = re.compile(r".+\.[0-9a-f]{8}\.incomplete")
# File systems that another machine may write to as well: no look at this node's processes tells who does.
_SHARED = re.compile(r"(nfs|cifs|smb|fuse|ceph|lustre|gluster|beegfs|gpfs|glusterfs|9p|virtiofs|afs|ocfs|gfs)\w*(\..*)?")
# Where this node's processes are all that can write: between the last byte and the new name the library has closed the file for a moment.
QUIET_SECONDS = 60.0
# Where they are not, or cannot all be seen: no download stands still for that long and goes on.
OLD_SECONDS = 86400.0


class Part(t.NamedTuple):
    """One file: what it occupies, which file it is, when it was written last."""

    path: str
    bytes: int
    file: tuple[int, int]
    written: float


def parts_in(directory: str) -> list[Part]:
    """Parts with a random name; [] where there is no such directory."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                info = os.lstat(path)
                if _PART.fullmatch(name):
                    found.append(Part(path, info.st_blocks * 512, (info.st_dev, info.st_ino), info.st_mtime))
    return found


def held_open(proc: str = "/proc") -> set[tuple[int, int]]:
    """``(device, inode)`` of the parts that a process of this node has open, also one in a container."""
    held = set()
    for pid in filter(str.isdigit, os.listdir(proc)):
        directory = os.path.join(proc, pid, "fd")
        try:
            names = os.listdir(directory)
        except OSError:  # ended, or of another user
            continue
        for name in names:
            with contextlib.suppress(OSError):
                if ".incomplete" in os.readlink(os.path.join(directory, name)):
                    info = os.stat(os.path.join(directory, name))
                    held.add((info.st_dev, info.st_ino))
    return held


def on_shared_disk(path: str, mounts: str) -> bool:
    """Whether ``path`` lies on a file system of several machines. ``mounts`` is the text of /proc/mounts; True when it does not tell."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[1])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fields[2]
    return not kind or bool(_SHARED.fullmatch(kind))


def dead(parts: t.Iterable[Part], held: t.Container[tuple[int, int]], now: float, sees_all: bool) -> list[Part]:
    """Those that nobody writes. ``sees_all``: whatever can write them is a process of this node, and ``held`` is of all processes."""
    quiet = QUIET_SECONDS if sees_all else OLD_SECONDS
    return [part for part in parts if part.file not in held and now - part.written > quiet]


def dead_parts(directory: str) -> list[Part]:
    """Parts in a directory of this node that can be removed."""
    parts = parts_in(directory)
    if not parts:
        return []
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as handle:
            shared = on_shared_disk(os.path.realpath(directory), handle.read())
    except OSError:
        shared = True
    now = time.time()
    # looked at after the parts were listed: one that is opened later has a name of its own
    return dead(parts, held_open(), now, os.geteuid() == 0 and not shared)
