# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Moving and checking large files: a small process pool, hashing, a resuming puller, a loopback relay, a watched child process, locks.

PRIVATE to the collection. Standard library only; Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import pty
import select
import shutil
import signal
import socket
import threading
import time
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

CHUNK = 1 << 20
# Reading waits until so much is there: small enough that little is lost with a connection and that a chain of workers streams. A direct write
# is a request to the disk, and costs the less the more it holds: with 1 MiB a copy takes a fifth less CPU than with 256 KiB, more gains nothing.
PIECE = 1 << 18
DIRECT_PIECE = CHUNK
WINDOW = 1 << 24
BLOCK = 4096
CONNECT_SECONDS = 20.0
# A peer in the chain that gives nothing for this long is left alone for that long; the head has everything.
PEER_SECONDS = 10.0
PEER_REST_SECONDS = 30.0
_REPORT_SECONDS = 0.25
PART = ".part"

Row = dict[str, t.Any]


# --- disk ---


def nearest_existing(path: str) -> str:
    """The path itself or its nearest parent that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def free_bytes(path: str) -> int:
    """Bytes an ordinary user may still write below ``path`` (which need not exist yet)."""
    info = os.statvfs(nearest_existing(path))
    return info.f_bavail * info.f_frsize


def human(count: float) -> str:
    """``1536`` -> ``1.5 KB`` (powers of 1024 up to KB for small, decimal GB as disks are sold)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


def check_space(path: str, needed: int, margin: int, *, node: str, stage: str, problem: str, what: str, factor: float = 1.0) -> None:
    """Raise Problem ``problem`` with the numbers when ``needed * factor + margin`` bytes do not fit below ``path``. Nothing needed
    always fits.
    """
    if needed <= 0:
        return
    free = free_bytes(path)
    want = int(needed * factor) + margin
    if free < want:
        raise Problem(
            problem,
            node=node,
            stage=stage,
            found=f"{human(free)} free at {nearest_existing(path)}",
            expected=f"at least {human(want)} for {what} ({human(needed)} still to come, with room to spare)",
            remedy="free space on this disk or choose another place for it, then run again; nothing was copied yet",
            needed_bytes=want,
            free_bytes=free,
            path=path,
        )


def drop_cache(fd: int) -> None:
    """Tell the kernel that the pages of this (synced) file are not needed: on a GB10 page cache is GPU memory."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def start_writeback(fd: int, offset: int, count: int) -> None:
    """Let the kernel begin to write this range to the disk."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)


def fsync_dir(path: str) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def own(path: str, uid: int, gid: int, mode: int | None = None) -> None:
    """Give a path (not what a link points to) to the login user when we are root; ``mode`` only for what is not a link."""
    if os.geteuid() == 0:
        os.chown(path, uid, gid, follow_symlinks=False)
    if mode is not None and not os.path.islink(path):
        os.chmod(path, mode)


def make_dirs(path: str, uid: int, gid: int) -> None:
    """Like ``mkdir -p`` with mode 0755; every directory that had to be made belongs to the login user (MOD-06, MOD-08)."""
    todo = []
    probe = os.path.abspath(path)
    while not os.path.isdir(probe):
        todo.append(probe)
        probe = os.path.dirname(probe)
    for directory in reversed(todo):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
        own(directory, uid, gid, 0o755)


# --- locks ---


@contextlib.contextmanager
def exclusive(path: str, wait: float, *, node: str, stage: str, what: str, tick: t.Callable[[], None] = lambda: None) -> t.Iterator[None]:
    """Hold an flock; a second play on the same node waits at most ``wait`` seconds. The kernel frees it when we die. ``tick`` is called
    again and again while we wait.
    """
    os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                raise Problem(
                    "busy",
                    node=node,
                    stage=stage,
                    found=f"another run still works on {what} (lock {path}, waited {wait:.0f} s)",
                    expected="one run at a time",
                    remedy="wait for the other run, or end it, then run again: what it copied is reused",
                )
            tick()
            time.sleep(0.2)
        yield
    finally:
        os.close(fd)


# --- progress ---


class Progress:
    """A small file that says how far this node is; the action plugin reads it over the connection and shows a line. Without a path
    nothing is written. ``also`` is called at most every ``also_every`` seconds (it keeps a server of ours awake).
    """

    def __init__(self, path: str, *, also: t.Callable[[], None] | None = None, also_every: float = 30.0) -> None:
        self.path = path
        self.also = also
        self.also_every = also_every
        self._written = self._called = 0.0

    def __call__(self, what: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """``unit`` is what is counted; without one it is bytes."""
        now = time.monotonic()
        if self.also and now - self._called >= self.also_every:
            self._called = now
            self.also()
        if not self.path or now - self._written < 0.5:
            return
        self._written = now
        data = json.dumps({"what": what, "done": min(done, total), "total": total, "at": now, **({"unit": unit} if unit else {})})
        # only shows something, so a full disk or a lost directory must not end the copy; no secrets in it, any user may read it
        with contextlib.suppress(OSError):
            with open(f"{self.path}.tmp", "w", encoding="utf-8") as handle:
                handle.write(data)
            os.chmod(f"{self.path}.tmp", 0o644)
            os.replace(f"{self.path}.tmp", self.path)

    def close(self) -> None:
        """Remove the file."""
        if self.path:
            for path in (self.path, f"{self.path}.tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(path)


# --- pool ---


def _serve_tasks(conn: t.Any, inherited: t.Sequence[t.Any], work: t.Callable[[t.Any, t.Callable[[int], None]], t.Any]) -> None:
    """Child of run_pool: one task after the other until the parent says None or dies."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    state = {"pending": 0, "at": time.monotonic()}

    def report(count: int) -> None:
        state["pending"] += count
        now = time.monotonic()
        if now - state["at"] >= _REPORT_SECONDS:
            conn.send(("bytes", state["pending"]))
            state["pending"], state["at"] = 0, now

    try:
        while True:
            task = conn.recv()
            if task is None:
                return
            answer: tuple[t.Any, ...]
            try:
                answer = ("done", task[0], work(task[1], report))
            except Problem as exc:
                answer = ("problem", task[0], exc.id, exc.as_dict())
            except Exception as exc:  # pylint: disable=broad-except
                answer = ("error", task[0], f"{type(exc).__name__}: {exc}")
            conn.send(("bytes", state["pending"]))
            state["pending"] = 0
            conn.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def problem_from(data: t.Mapping[str, t.Any]) -> Problem:
    """A Problem from its ``as_dict()`` (it crossed a process border)."""
    plain = {key: data[key] for key in ("found", "expected", "remedy", "node", "stage")}
    return Problem(data["id"], **plain, **data.get("details", {}))


class Pool:
    """Run ``work(task, report)`` for tasks in forked children; the parent schedules, counts bytes and enforces both limits.

    Only pipes are used (no semaphores), so it works wherever fork does. A Problem raised by ``work`` ends the pool with that Problem.
    """

    def __init__(
        self,
        work: t.Callable[[t.Any, t.Callable[[int], None]], t.Any],
        processes: int,
        *,
        timeout: float,
        stall: float,
        on_stall: t.Callable[[str, float], Problem],
        tick: t.Callable[[int], None] = lambda count: None,
    ) -> None:
        self.tick = tick
        self.work = work
        self.processes = max(1, processes)
        self.timeout = timeout
        self.stall = stall
        self.on_stall = on_stall
        self.bytes = 0
        self._children: list[t.Any] = []
        self._conns: list[t.Any] = []

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        for dummy in range(count):
            mine, theirs = context.Pipe()
            child = context.Process(target=_serve_tasks, args=(theirs, [*self._conns, mine], self.work), daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._conns.append(mine)

    def _stop(self, patience: float) -> None:
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send(None)
            conn.close()
        deadline = time.monotonic() + patience
        for child in self._children:
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join(2)

    def run(self, tasks: t.Sequence[t.Any]) -> list[t.Any]:
        """Results in the order of ``tasks``. Raises Problem, or RuntimeError for a child that died or a fault of ``work``."""
        if not tasks:
            return []
        results: list[t.Any] = [None] * len(tasks)
        self._start(min(self.processes, len(tasks)))
        patience = 0.0
        try:
            self._loop(tasks, results)
            patience = 2.0
        finally:
            self._stop(patience)
        return results

    def _loop(self, tasks: t.Sequence[t.Any], results: list[t.Any]) -> None:
        begin = last = time.monotonic()
        waiting = list(range(len(tasks)))[::-1]
        open_tasks = len(tasks)
        for conn in self._conns:
            index = waiting.pop()
            conn.send((index, tasks[index]))
        while open_tasks:
            ready: list[t.Any] = multiprocessing.connection.wait(self._conns, timeout=0.5)
            now = time.monotonic()
            for conn in ready:
                message = self._receive(conn)
                if message[0] == "bytes":
                    if message[1]:
                        self.bytes += message[1]
                        last = now
                    continue
                self._raise_failure(message, tasks)
                results[message[1]] = message[2]
                open_tasks -= 1
                last = now
                if waiting:
                    index = waiting.pop()
                    conn.send((index, tasks[index]))
            self.tick(self.bytes)
            if now - begin > self.timeout:
                raise self.on_stall("timeout", now - begin)
            if now - last > self.stall:
                raise self.on_stall("stall", now - last)

    @staticmethod
    def _receive(conn: t.Any) -> t.Any:
        try:
            return conn.recv()
        except (EOFError, OSError) as exc:
            raise RuntimeError("a transfer process died (killed, or out of memory)") from exc

    @staticmethod
    def _raise_failure(message: t.Any, tasks: t.Sequence[t.Any]) -> None:
        if message[0] == "problem":
            raise problem_from(message[3])
        if message[0] == "error":
            raise RuntimeError(f"{tasks[message[1]]}: {message[2]}")


def default_processes(limit: int = 8) -> int:
    """As many as there are cores we may use, at most ``limit``, at least 4: while one waits for the disk, another receives."""
    return max(4, min(limit, len(os.sched_getaffinity(0))))


# --- hashing ---


def new_hash(algo: str, size: int) -> t.Any:
    """Hash object whose digest is the blob's name: sha256 of the content, or git's SHA-1 of ``blob <size>\\0`` + content."""
    if algo == "sha256":
        return hashlib.sha256()
    if algo == "git-sha1":
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    raise ValueError(f"unknown hash '{algo}'")


def hash_file(path: str, algo: str, report: t.Callable[[int], None] = lambda count: None) -> str:
    """Digest of a file; leaves no page cache of pages that it had to read itself."""
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as handle:
        digest = new_hash(algo, os.fstat(handle.fileno()).st_size)
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while True:
            count = handle.readinto(buffer)
            if not count:
                break
            digest.update(view[:count])
            report(count)
        drop_cache(handle.fileno())
    return digest.hexdigest()


def hash_many(
    jobs: t.Sequence[tuple[str, str]], processes: int, *, timeout: float, node: str, stage: str, progress: Progress | None = None
) -> list[str]:
    """Digests of ``(path, algo)`` jobs, biggest first in several processes. A file that cannot be read gives ""."""

    def work(job: tuple[str, str], report: t.Callable[[int], None]) -> str:
        try:
            return hash_file(job[0], job[1], report)
        except OSError:
            return ""

    def on_stall(kind: str, seconds: float) -> Problem:
        return Problem(
            "disk-slow",
            node=node,
            stage=stage,
            found=f"hashing {len(jobs)} files gave no result for {seconds:.0f} s ({kind})",
            expected="a disk that can be read",
            remedy="look at dmesg for disk errors, or raise the timeout",
        )

    order = sorted(range(len(jobs)), key=lambda index: -_size(jobs[index][0]))
    total = sum(max(0, _size(path)) for path, dummy in jobs)

    def tick(count: int) -> None:
        if progress:
            progress("verifies", count, total)

    pool = Pool(work, processes, timeout=timeout, stall=min(timeout, 300.0), on_stall=on_stall, tick=tick)
    answers = pool.run([jobs[index] for index in order])
    digests = [""] * len(jobs)
    for index, answer in zip(order, answers, strict=True):
        digests[index] = answer
    return digests


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


# --- puller ---


class Source(t.NamedTuple):
    """One read-only server of blobs. The token is a capability for one play; it is sent in the path and never logged."""

    address: str
    port: int
    token: str


class Target(t.NamedTuple):
    """Where blobs go: ``staging`` (parts) and ``blobs`` (final names), same file system; owner of both."""

    staging: str
    blobs: str
    uid: int
    gid: int


class Puller:
    """Fetches one blob after the other over kept connections; used inside a Pool child.

    ``sources``: the head last; before it the workers that stand before us in the chain, the nearest first. A peer that fails or has
    nothing to give is left alone for a while and the next one asked; only what the head says is final. A blob whose hash is wrong is
    fetched once more,
    then from the head.
    """

    def __init__(self, sources: t.Sequence[Source], target: Target, *, stall: float, node: str = "", direct: bool = False) -> None:
        self.direct = direct
        self._direct_fd = -1
        self.sources = list(sources)
        self.target = target
        self.stall = stall
        self.node = node
        self.reached = False
        self._conns: dict[Source, http.client.HTTPConnection] = {}
        self._avoid: dict[Source, float] = {}
        # of whole pages, as direct writing wants it
        self._view = memoryview(mmap.mmap(-1, CHUNK))

    @property
    def head(self) -> Source:
        """Who has everything."""
        return self.sources[-1]

    def _choose(self, head_only: bool) -> Source:
        now = time.monotonic()
        usable = [source for source in self.sources[:-1] if self._avoid.get(source, 0.0) <= now]
        return self.head if head_only or not usable else usable[0]

    def problem(self, ident: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
        """A Problem of this node's model_sync."""
        return Problem(ident, node=self.node, stage="model_sync", found=found, expected=expected, remedy=remedy, **details)

    def fetch(self, row: Row, report: t.Callable[[int], None]) -> int:
        """Bring one blob to its final name; returns the bytes that crossed the wire. Raises Problem.

        An existing part is hashed and continued with Range. A blob whose hash is wrong is thrown away and fetched once more from the start.
        """
        part = os.path.join(self.target.staging, row["blob"] + PART)
        received = 0
        for again in (False, True):
            digest, count = self._fill(row, part, report, again)
            received += count
            if digest == row["blob"]:
                self._publish(part, row)
                return received
            os.truncate(part, 0)
        os.unlink(part)
        raise self.problem(
            "copy-hash",
            f"{row['path']} arrived twice with the hash {digest[:16]}…",
            f"{row['algo']} {row['blob'][:16]}… as the manifest says",
            "the file on the head is damaged (or the network corrupts data): verify the model on the head in full, then run again",
        )

    def _publish(self, part: str, row: Row) -> None:
        fd = os.open(part, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            drop_cache(fd)
        finally:
            os.close(fd)
        own(part, self.target.uid, self.target.gid, 0o644)
        os.replace(part, os.path.join(self.target.blobs, row["blob"]))

    def _fill(self, row: Row, part: str, report: t.Callable[[int], None], head_only: bool = False) -> tuple[str, int]:
        """Bring the part to the full size; (digest, received bytes)."""
        size = int(row["size"])
        digest = new_hash(row["algo"], size)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        received = 0
        self._direct_fd = self._open_direct(part)
        try:
            offset = self._rehash(fd, digest, size, report)
            if offset is None:
                digest, offset = new_hash(row["algo"], size), 0
            deadline = time.monotonic() + (self.stall if self.reached else min(self.stall, CONNECT_SECONDS))
            pause = 0.1
            while offset < size:
                source = self._choose(head_only)
                count, why = self._request(source, row, fd, offset, digest, report)
                received += count
                offset += count
                if count:
                    deadline, pause = time.monotonic() + self.stall, 0.1
                if offset >= size:
                    break
                if source != self.head:
                    self._avoid[source] = time.monotonic() + PEER_REST_SECONDS
                    continue
                self._retry_or_raise(row, why, deadline, offset)
                time.sleep(pause)
                pause = min(pause * 2, 2.0)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self.problem(
                    "disk-model",
                    f"the disk of {self.target.staging} is full ({exc.strerror}) at {row['path']}",
                    f"{human(size)} for this file",
                    "free space, then run again: what arrived is reused",
                ) from exc
            raise
        finally:
            os.close(fd)
            if self._direct_fd >= 0:
                os.close(self._direct_fd)
                self._direct_fd = -1
        return digest.hexdigest(), received

    def _open_direct(self, part: str) -> int:
        """A second way into the part, past the page cache: a sixth less CPU, and on a GB10 page cache is GPU memory. -1 where the file
        system knows no such thing, or where others read the part while it grows.
        """
        if self.direct:
            with contextlib.suppress(OSError):
                return os.open(part, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        return -1

    def _store(self, fd: int, view: memoryview, offset: int) -> None:
        """Write one piece: directly when it is of whole blocks."""
        if self._direct_fd >= 0 and not (offset % BLOCK or len(view) % BLOCK):
            try:
                self._write(self._direct_fd, view, offset)
                return
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                os.close(self._direct_fd)
                self._direct_fd = -1
        self._write(fd, view, offset)
        if offset // WINDOW != (offset + len(view)) // WINDOW:
            # begins to write these pages now (and keeps dirty memory small), so that little is left to wait for at the end
            start_writeback(fd, offset // WINDOW * WINDOW, WINDOW)

    def _rehash(self, fd: int, digest: t.Any, size: int, report: t.Callable[[int], None]) -> int | None:
        """Feed what is already there into ``digest``; its length, or None when it was too long (then truncated)."""
        have = os.fstat(fd).st_size
        if have > size:
            os.ftruncate(fd, 0)
            return None
        offset = 0
        while offset < have:
            count = os.preadv(fd, [self._view], offset)
            if count <= 0:
                break
            digest.update(self._view[:count])
            report(count)
            offset += count
        return offset

    def _retry_or_raise(self, row: Row, why: str, deadline: float, offset: int) -> None:
        if time.monotonic() >= deadline:
            raise self.problem(
                "sync-stalled",
                f"{row['path']}: no byte from {self.head.address}:{self.head.port} for {self.stall:.0f} s"
                f" at {human(offset)} of {human(row['size'])} ({why})",
                "a server on the head that answers over the fabric",
                "check the fabric cable and that no firewall on the head blocks this port, then run again: what arrived is reused",
                reached=self.reached,
            )

    def _connect(self, source: Source) -> http.client.HTTPConnection:
        if source not in self._conns:
            limit = min(self.stall, CONNECT_SECONDS if source == self.head else PEER_SECONDS)
            self._conns[source] = http.client.HTTPConnection(source.address, source.port, timeout=limit)
        return self._conns[source]

    def _drop(self, source: Source) -> None:
        conn = self._conns.pop(source, None)
        if conn is not None:
            conn.close()

    def _request(self, source: Source, row: Row, fd: int, offset: int, digest: t.Any, report: t.Callable[[int], None]) -> tuple[int, str]:
        """One GET from ``offset``; (bytes written, why it ended early)."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        try:
            conn = self._connect(source)
            conn.request("GET", f"/{source.token}/blobs/{row['blob']}", headers=headers)
            response = conn.getresponse()
        except (OSError, http.client.HTTPException) as exc:
            self._drop(source)
            return 0, str(exc) or type(exc).__name__
        self.reached = True
        if response.status != (206 if offset else 200) or not self._range_ok(response, offset):
            self._drop(source)
            if source == self.head:
                self._refused(row, response)
            return 0, f"HTTP {response.status}"
        done, left = 0, int(row["size"]) - offset
        piece = DIRECT_PIECE if self._direct_fd >= 0 else PIECE
        while left > 0:
            try:
                count = response.readinto(self._view[: min(piece, left)])
            except (OSError, http.client.HTTPException) as exc:
                self._drop(source)
                return done, str(exc) or type(exc).__name__
            if not count:
                self._drop(source)
                return done, "the connection was closed early"
            self._store(fd, self._view[:count], offset + done)
            digest.update(self._view[:count])
            report(count)
            done += count
            left -= count
        response.read()
        return done, ""

    @staticmethod
    def _range_ok(response: http.client.HTTPResponse, offset: int) -> bool:
        return not offset or (response.getheader("Content-Range") or "").startswith(f"bytes {offset}-")

    @staticmethod
    def _write(fd: int, view: memoryview, offset: int) -> None:
        while view:
            count = os.pwrite(fd, view, offset)
            view = view[count:]
            offset += count

    def _refused(self, row: Row, response: http.client.HTTPResponse) -> None:
        """Answers that no retry can change."""
        reason = response.getheader("X-Reason") or ""
        where = f"{self.head.address}:{self.head.port}"
        if response.status == 403:
            text = "this node is not among the peers it serves" if reason == "peer" else "the token is not (or no longer) its token"
            raise self.problem(
                "sync-denied",
                f"the server {where} refuses: {text}",
                "a server that was started for this play and this node",
                "run the whole stage again, so that the server is started with this node in its list",
            )
        if response.status in (404, 409, 410):
            text = "it changed on the head during the copy" if response.status == 409 else "the head does not have it (any more)"
            raise self.problem(
                "sync-source",
                f"{row['path']}: {text}",
                f"{human(row['size'])}, {row['algo']} {row['blob'][:16]}…",
                "verify the model on the head (tag model), then run again",
            )


def pull_blobs(
    rows: t.Sequence[Row],
    sources: t.Sequence[Source],
    target: Target,
    *,
    processes: int,
    timeout: float,
    stall: float,
    node: str = "",
    progress: Progress | None = None,
    direct: bool = False,
) -> dict[str, t.Any]:
    """Pull blobs, biggest first, in several processes; {bytes_transferred, seconds}. ``sources``: the head last. ``direct``: write past the
    page cache where that is possible. Raises Problem; what arrived stays for the next run.
    """
    order = sorted(rows, key=lambda row: -int(row["size"]))
    total = sum(int(row["size"]) for row in order)
    head = sources[-1]
    pullers: dict[int, Puller] = {}

    def work(row: Row, report: t.Callable[[int], None]) -> int:
        puller = pullers.setdefault(os.getpid(), Puller(sources, target, stall=stall, node=node, direct=direct))
        return puller.fetch(row, report)

    def on_stall(kind: str, seconds: float) -> Problem:
        text = f"no byte for {seconds:.0f} s" if kind == "stall" else f"not finished after {seconds:.0f} s"
        return Problem(
            "sync-stalled",
            node=node,
            stage="model_sync",
            found=f"{text} from {head.address}:{head.port}",
            expected=f"{len(order)} files from the head",
            remedy="check the fabric and the head, then run again: what arrived is reused",
            reached=pool.bytes > 0,
        )

    def tick(count: int) -> None:
        if progress:
            progress("copies", count, total)

    begin = time.monotonic()
    # with peers a file may have to wait for each of them before the head is asked
    patience = stall + 15.0 + PEER_SECONDS * (len(sources) - 1)
    pool = Pool(work, processes, timeout=timeout, stall=patience, on_stall=on_stall, tick=tick)
    received = pool.run(order)
    fsync_dir(target.blobs)
    return {"bytes_transferred": sum(received), "seconds": time.monotonic() - begin}


def ping(source: Source) -> None:
    """Let a server of ours know that it is still needed."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        conn = http.client.HTTPConnection(source.address, source.port, timeout=2)
        try:
            conn.request("HEAD", f"/{source.token}/stats")
            conn.getresponse().read()
        finally:
            conn.close()


# --- child processes ---


def _start(argv: list[str], environment: t.Mapping[str, str], standard: t.Sequence[int]) -> int:
    """Process id of a command in a process group of its own; ``standard`` becomes its stdin, stdout and stderr. FileNotFoundError
    when there is no such command.
    """
    path = shutil.which(argv[0], path=environment.get("PATH"))
    if path is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    pid = os.fork()
    if pid == 0:
        # Only system calls until the new program: other threads do not exist here, and what they held stays locked.
        try:
            os.setpgid(0, 0)
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            os.execve(path, argv, environment)
        finally:
            os._exit(127)  # pylint: disable=protected-access
    with contextlib.suppress(OSError):  # whoever comes first; the child may have done it and be gone
        os.setpgid(pid, pid)
    return pid


class Child:
    """A command with bounded life whose output is read while it runs (``run_command`` cannot be watched).

    With ``terminal=True`` its stdout is a pseudo terminal, so that docker shows bytes.
    It has its own process group, so that all of it can be ended.
    """

    def __init__(self, argv: t.Sequence[str], *, terminal: bool = False, raw: bool = False, env: t.Mapping[str, str] | None = None) -> None:
        self.argv = list(argv)
        self.rc: int | None = None
        self.out = b""
        self.err = b""
        self.seen: set[bytes] = set()
        self._raw = raw
        self._terminal = terminal
        read_fd, write_fd = pty.openpty() if terminal else os.pipe()
        err_read, err_write = os.pipe()
        devnull = os.open(os.devnull, os.O_RDONLY)
        environment = {**os.environ, "LC_ALL": "C", **(env or {})}
        try:
            self.pid = _start(self.argv, environment, (devnull, write_fd, err_write))
        except OSError:
            for fd in (read_fd, err_read):
                os.close(fd)
            raise
        finally:
            for fd in (write_fd, err_write, devnull):
                os.close(fd)
        self.stdout = read_fd
        self._stderr = err_read
        os.set_blocking(self._stderr, False)
        if not raw:
            os.set_blocking(self.stdout, False)

    def _drain(self, fd: int, keep: bytes) -> bytes:
        while True:
            try:
                data = os.read(fd, 65536)
            except (BlockingIOError, OSError):
                return keep
            if not data:
                return keep
            if fd == self.stdout:
                self.seen.update(hash(piece).to_bytes(8, "big", signed=True) for piece in data.replace(b"\r", b"\n").split(b"\n"))
            keep = (keep + data)[-65536:]

    def poll(self, wait: float = 0.0) -> int | None:
        """Read what came; the exit code once it ended (negative: signal)."""
        fds = [self._stderr] if self._raw else [self._stderr, self.stdout]
        if wait:
            with contextlib.suppress(OSError):
                if select.select(fds, [], [], wait)[0]:
                    time.sleep(min(wait, 0.05))
        self.err = self._drain(self._stderr, self.err)
        if not self._raw:
            self.out = self._drain(self.stdout, self.out)
        if self.rc is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.rc = os.waitstatus_to_exitcode(status)
                self.err = self._drain(self._stderr, self.err)
                if not self._raw:
                    self.out = self._drain(self.stdout, self.out)
        return self.rc

    def end(self, grace: float = 3.0) -> int:
        """TERM, then KILL; waits for the end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            deadline = time.monotonic() + grace
            while self.poll(0.05) is None and time.monotonic() < deadline:
                time.sleep(0.05)
        return self.rc if self.rc is not None else -signal.SIGKILL

    def close(self) -> None:
        """End it if it still runs, close the pipes."""
        if self.rc is None:
            self.end()
        for fd in (self.stdout, self._stderr):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.stdout = self._stderr = -1

    @property
    def text(self) -> str:
        """Output for a message: stderr, else the end of stdout."""
        return (self.err or self.out[-2000:]).decode("utf-8", "replace").strip()


class Watched(t.NamedTuple):
    """How a watched command ended. ``ended``: "" by itself, else "timeout" or "stall" (then we ended it)."""

    rc: int
    out: str
    err: str
    ended: str
    seconds: float


def watch(
    argv: t.Sequence[str],
    *,
    timeout: float,
    stall: float,
    progress: t.Callable[[Child], t.Any] | None = None,
    terminal: bool = False,
    env: t.Mapping[str, str] | None = None,
    interval: float = 0.5,
    grace: float = 3.0,
) -> Watched:
    """Run a command and end it when it takes longer than ``timeout`` or shows no progress for ``stall`` seconds.

    Progress is a change of ``progress(child)`` (default: output never seen before). Raises Problem ``command-missing`` when there is no
    such command. ``grace``: seconds between TERM and KILL.
    """
    begin = last = time.monotonic()
    try:
        child = Child(argv, terminal=terminal, env=env)
    except FileNotFoundError as exc:
        remedy = f"install {argv[0]} on this node"
        raise Problem("command-missing", found=f"no command {argv[0]}", expected=f"{argv[0]} on the PATH", remedy=remedy) from exc
    ended = ""
    value: t.Any = None
    try:
        while child.poll(min(interval, 0.5)) is None:
            now = time.monotonic()
            current = progress(child) if progress else len(child.seen)
            if current != value:
                value, last = current, now
            if now - begin > timeout or now - last > stall:
                ended = "timeout" if now - begin > timeout else "stall"
                child.end(grace)
                break
        rc = child.rc if child.rc is not None else -1
        out, err = child.out.decode("utf-8", "replace"), child.err.decode("utf-8", "replace")
    finally:
        child.close()
    return Watched(rc, out, err, ended, time.monotonic() - begin)


# --- relay ---


class Relay:
    """127.0.0.1:<free port> -> one address of the head.

    Docker trusts its own loopback, so no daemon.json is touched and nothing listens outside.

    Lives inside the module's process: when the module ends, it is gone. ``bytes`` counts what came from the head.
    """

    def __init__(self, address: str, port: int, *, connect_timeout: float = 10.0) -> None:
        self.target = (address, port)
        self.connect_timeout = connect_timeout
        self.bytes = 0
        self.links = 0
        self.error = ""
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.settimeout(0.5)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, dummy = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.links += 1
            threading.Thread(target=self._link, args=(near,), daemon=True).start()

    def _link(self, near: socket.socket) -> None:
        try:
            near.settimeout(self.connect_timeout)
            if near.recv(1, socket.MSG_PEEK) == b"\x16":
                # The containerd store tries TLS first, also on loopback; only an answer that begins with HTTP/ makes it fall back to
                # plain HTTP.
                near.sendall(b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                near.close()
                return
        except OSError:
            near.close()
            return
        try:
            far = socket.create_connection(self.target, timeout=self.connect_timeout)
        except OSError as exc:
            self.error = f"{self.target[0]}:{self.target[1]}: {exc.strerror or exc}"
            near.close()
            return
        pair = (near, far)
        for sock in pair:
            sock.settimeout(None)
        # A cable that is out for 20 s costs 20 s; after a minute of silence the connection is given up, and Docker tries again or says so.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 8), (socket.TCP_KEEPCNT, 5)):
            far.setsockopt(socket.IPPROTO_TCP, option, seconds)
        with self._guard:
            self._open.update(pair)
        up = threading.Thread(target=self._pump, args=(near, far, False), daemon=True)
        up.start()
        self._pump(far, near, True)
        up.join(30)
        with self._guard:
            self._open.difference_update(pair)
        for sock in pair:
            sock.close()

    def _pump(self, source: socket.socket, sink: socket.socket, count: bool) -> None:
        buffer = memoryview(bytearray(CHUNK))
        try:
            while True:
                size = source.recv_into(buffer)
                if not size:
                    break
                sink.sendall(buffer[:size])
                if count:
                    with self._guard:
                        self.bytes += size
        except OSError:
            pass
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        if count:
            # the head is done: the client side may keep its half open for ever (keep-alive), so end that too
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the listener and every connection."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the waiting accept()
        self._listener.close()
        with self._guard:
            left = list(self._open)
        for sock in left:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc_info: t.Any) -> None:
        self.close()
