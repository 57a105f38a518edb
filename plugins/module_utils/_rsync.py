# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The second way to copy a model: several rsync streams over the login user's own SSH access to the head.

PRIVATE to the collection. Standard library only. Used when the head's server is not reached (a firewall that passes SSH only) or when asked
for (the wire is encrypted). What arrives is hashed before it gets its final name, as with the first way.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._snapshot import Login

STAGE = "model_sync"
FOLDER = "rsync"
# AES with the CPU's own instructions: twice the rate of the default cipher. The server may refuse it, so the others follow.
CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr"
SSH = f"ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o Compression=no -c {CIPHERS}"


class Origin(t.NamedTuple):
    """Where the files are on the head."""

    address: str
    user: str
    path: str


def shares(rows: t.Sequence[t.Mapping[str, t.Any]], count: int) -> list[list[dict[str, t.Any]]]:
    """Rows in at most ``count`` lists of about equal size: the biggest first, each into the list that has least."""
    lists: list[list[dict[str, t.Any]]] = [[] for dummy in range(max(1, min(count, len(rows))))]
    sizes = [0] * len(lists)
    for row in sorted(rows, key=lambda row: -int(row["size"])):
        index = sizes.index(min(sizes))
        lists[index].append(dict(row))
        sizes[index] += int(row["size"])
    return lists


def argv(origin: Origin, names: str, target: str, stall: float) -> list[str]:
    """One rsync. Whole files; a broken one stays apart and is continued; links are followed, so that any layout of the head works."""
    host = f"[{origin.address}]" if ":" in origin.address else origin.address
    command = ["rsync", "--whole-file", "--copy-links", "--times", "--protect-args", "--stats", f"--timeout={max(1, int(stall))}"]
    command += ["--partial-dir=.partial", f"--files-from={names}", f"--rsh={SSH}"]
    return [*command, f"{origin.user}@{host}:{origin.path}/", f"{target}/"]


def received(text: str) -> int:
    """Bytes that crossed the wire, from rsync's statistics."""
    match = re.search(r"Total bytes received: ([\d,.]+)", text)
    return int(re.sub(r"\D", "", match[1])) if match else 0


def as_user(command: list[str], login: Login) -> list[str]:
    """The command as the login user, whose keys are used."""
    return ["runuser", "-u", login.name, "--", *command] if os.geteuid() == 0 and login.uid != 0 else command


def _problem(node: str, origin: Origin, found: str) -> Problem:
    return Problem(
        "sync-rsync",
        node=node,
        stage=STAGE,
        found=found,
        expected=f"rsync here and on the head, and a login as {origin.user}@{origin.address} without a password and with a known host key",
        remedy=f"try 'ssh {origin.user}@{origin.address} true' on this node as the login user, or let the server's port through instead",
    )


def pull(
    rows: t.Sequence[dict[str, t.Any]],
    origin: Origin,
    target: _transfer.Target,
    login: Login,
    *,
    streams: int,
    timeout: float,
    stall: float,
    node: str,
    progress: _transfer.Progress | None = None,
) -> dict[str, t.Any]:
    """Copy with rsync, hash, publish; {bytes_transferred, seconds}. Raises Problem; what arrived stays for the next run."""
    if not shutil.which("rsync"):
        raise _problem(node, origin, "no command rsync on this node")
    begin = time.monotonic()
    folder = os.path.join(target.staging, FOLDER)
    _transfer.make_dirs(folder, target.uid, target.gid)
    total = sum(int(row["size"]) for row in rows)

    def work(task: tuple[int, list[dict[str, t.Any]]], report: t.Callable[[int], None]) -> int:
        number, part = task
        names = os.path.join(folder, f".files-{number}")
        with open(names, "w", encoding="utf-8") as handle:
            handle.write("".join(f"{row['path']}\n" for row in part))
        _transfer.own(names, target.uid, target.gid, 0o644)
        seen = [0]

        def growth(child: _transfer.Child) -> int:
            size = _sizes(folder, part)
            report(max(0, size - seen[0]))
            seen[0] = max(size, seen[0])
            return size

        command = as_user(argv(origin, names, folder, stall), login)
        done = _transfer.watch(command, timeout=timeout, stall=stall + 15, progress=growth)
        if done.ended or done.rc:
            said = (done.err or done.out).strip().splitlines() or ["no message"]
            full = "no space left" in done.err.lower()
            if full:
                raise Problem(
                    "disk-model",
                    node=node,
                    stage=STAGE,
                    found=f"the disk of {folder} is full ({said[0][:200]})",
                    expected=f"{_transfer.human(total)} for these files",
                    remedy="free space, then run again: what arrived is reused",
                )
            raise _problem(node, origin, f"rsync ended with {done.ended or done.rc}: {said[0][:300]}")
        return received(done.out)

    def on_stall(kind: str, seconds: float) -> Problem:
        return _problem(node, origin, f"rsync: no byte for {seconds:.0f} s ({kind})")

    def tick(count: int) -> None:
        if progress:
            progress("copies", count, total)

    lists = list(enumerate(shares(rows, streams)))
    pool = _transfer.Pool(work, len(lists), timeout=timeout, stall=stall + 30, on_stall=on_stall, tick=tick)
    count = sum(pool.run(lists))
    _publish(rows, folder, target, streams, timeout, node, progress)
    return {"bytes_transferred": count, "seconds": time.monotonic() - begin}


def _sizes(folder: str, rows: t.Sequence[t.Mapping[str, t.Any]]) -> int:
    """Bytes of these files so far; a file that is being written has a temporary name beside its own."""
    total = 0
    for row in rows:
        path = os.path.join(folder, row["path"])
        parent, name = os.path.split(path)
        for place in (parent, os.path.join(parent, ".partial")):
            try:
                names = os.listdir(place)
            except OSError:
                continue
            for found in names:
                if found == name or found.startswith(f".{name}."):
                    try:
                        total += os.stat(os.path.join(place, found)).st_size
                    except OSError:
                        continue
    return total


def _publish(
    rows: t.Sequence[dict[str, t.Any]],
    folder: str,
    target: _transfer.Target,
    processes: int,
    timeout: float,
    node: str,
    progress: _transfer.Progress | None,
) -> None:
    """Final names for what has the right hash; the rest is removed and named."""
    jobs = [(os.path.join(folder, row["path"]), row["algo"]) for row in rows]
    digests = _transfer.hash_many(jobs, processes, timeout=timeout, node=node, stage=STAGE, progress=progress)
    wrong = []
    for row, (path, dummy), digest in zip(rows, jobs, digests, strict=True):
        if digest != row["blob"]:
            wrong.append(row)
            if os.path.lexists(path):
                os.unlink(path)
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            _transfer.drop_cache(fd)
        finally:
            os.close(fd)
        _transfer.own(path, target.uid, target.gid, 0o644)
        os.replace(path, os.path.join(target.blobs, row["blob"]))
    _transfer.fsync_dir(target.blobs)
    if wrong:
        raise Problem(
            "copy-hash",
            node=node,
            stage=STAGE,
            found=f"{len(wrong)} files arrived with a wrong hash, first {wrong[0]['path']}",
            expected=f"{wrong[0]['algo']} {wrong[0]['blob'][:16]}… as the manifest says",
            remedy="the file on the head is damaged or changed during the copy: verify the model on the head in full, then run again",
        )
    shutil.rmtree(folder, ignore_errors=True)
