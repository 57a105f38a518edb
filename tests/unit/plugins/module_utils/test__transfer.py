# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pool, puller, relay, watched commands: for real on loopback against the real server."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _sync_server, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

TOKEN = "f" * 32


def bounded(kind: str, seconds: float) -> Problem:
    return Problem("stalled", found=f"{kind} {seconds:.0f}", expected="x", remedy="x")


# --- pool ---


def test_pool_keeps_order_and_counts() -> None:
    def work(task: int, report: t.Callable[[int], None]) -> int:
        report(task)
        return task * 2

    pool = _transfer.Pool(work, 3, timeout=30, stall=30, on_stall=bounded)
    assert pool.run(list(range(20))) == [task * 2 for task in range(20)]
    assert pool.bytes == sum(range(20))
    assert pool.run([]) == []


def test_pool_gives_problems_and_faults_back() -> None:
    def refuse(task: int, report: t.Callable[[int], None]) -> int:
        raise Problem("disk-model", node="n", stage="s", found="f", expected="e", remedy="r", path="/x")

    def fault(task: int, report: t.Callable[[int], None]) -> int:
        raise ValueError("bad")

    with pytest.raises(Problem) as info:
        _transfer.Pool(refuse, 2, timeout=30, stall=30, on_stall=bounded).run([1, 2])
    assert (info.value.id, info.value.node, info.value.details) == ("disk-model", "n", {"path": "/x"})
    with pytest.raises(RuntimeError, match="ValueError: bad"):
        _transfer.Pool(fault, 2, timeout=30, stall=30, on_stall=bounded).run([1])


def test_pool_notices_a_killed_child() -> None:
    def die(task: int, report: t.Callable[[int], None]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="died"):
        _transfer.Pool(die, 2, timeout=30, stall=30, on_stall=bounded).run([1, 2, 3])


@pytest.mark.parametrize(("timeout", "stall", "kind"), [(30.0, 0.3, "stall"), (0.3, 30.0, "timeout")])
def test_pool_is_bounded_and_leaves_no_child(timeout: float, stall: float, kind: str) -> None:
    def hang(task: int, report: t.Callable[[int], None]) -> None:
        time.sleep(60)

    pool = _transfer.Pool(hang, 2, timeout=timeout, stall=stall, on_stall=bounded)
    with pytest.raises(Problem) as info:
        pool.run([1, 2])
    assert kind in info.value.found
    assert not any(child.is_alive() for child in pool._children)


def test_progress_is_a_small_file_for_everyone(tmp_path: Path) -> None:
    path, called = tmp_path / "progress-x", []
    progress = _transfer.Progress(str(path), also=lambda: called.append(1))
    progress("copies", 7, 5)
    assert path.stat().st_mode & 0o777 == 0o644
    told = json.loads(path.read_text())
    assert (told["what"], told["done"], told["total"]) == ("copies", 5, 5)
    progress("copies", 5, 5)
    assert called == [1]  # not at each call
    progress.close()
    assert list(tmp_path.iterdir()) == []
    _transfer.Progress("/nonexistent/x")("copies", 1, 2)  # shows nothing and ends nothing
    _transfer.Progress("")("copies", 1, 2)


# --- hashing ---


def test_a_disk_that_gives_no_data_any_more(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stuck")
    with pytest.raises(Problem) as raised:
        _transfer.hash_many([(str(tmp_path / "stuck"), "sha256")], 1, timeout=1.0, node="spark-2", stage="model_sync")
    assert raised.value.id == "disk-slow" and raised.value.node == "spark-2" and "look at dmesg" in raised.value.remedy


def test_hash_is_the_name_of_the_blob(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello\n")
    assert _transfer.hash_file(str(path), "sha256") == hashlib.sha256(b"hello\n").hexdigest()
    assert _transfer.hash_file(str(path), "git-sha1") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    with pytest.raises(ValueError, match="md5"):
        _transfer.hash_file(str(path), "md5")


def test_hash_many_keeps_order_and_survives_missing_files(tmp_path: Path) -> None:
    jobs = []
    for index in range(5):
        (tmp_path / str(index)).write_bytes(b"x" * index * 1000)
        jobs.append((str(tmp_path / str(index)), "sha256"))
    jobs.append((str(tmp_path / "nope"), "sha256"))
    digests = _transfer.hash_many(jobs, 3, timeout=60, node="n", stage="s")
    assert digests == [*(hashlib.sha256(b"x" * index * 1000).hexdigest() for index in range(5)), ""]


# --- puller ---


class Lab:
    """Files on a "head", a server, and the directories of a "worker"."""

    def __init__(self, root: Path, sizes: t.Sequence[int] = (3_000_000, 10, 0, 1_500_000)) -> None:
        self.head, self.staging, self.blobs = root / "head", root / "staging", root / "blobs"
        for path in (self.head, self.staging, self.blobs):
            path.mkdir()
        rng = random.Random(7)
        self.rows: list[dict[str, t.Any]] = []
        self.data: dict[str, bytes] = {}
        for index, size in enumerate(sizes):
            data = rng.randbytes(size)
            algo = "sha256" if index % 2 == 0 else "git-sha1"
            blob = (
                hashlib.sha256(data).hexdigest()
                if algo == "sha256"
                else hashlib.sha1(b"blob %d\0" % size + data, usedforsecurity=False).hexdigest()
            )
            (self.head / blob).write_bytes(data)
            self.rows.append({"path": f"file{index}", "size": size, "blob": blob, "algo": algo})
            self.data[blob] = data
        self.target = _transfer.Target(str(self.staging), str(self.blobs), os.getuid(), os.getgid())
        self.port = 0

    @contextlib.contextmanager
    def server(self, **over: t.Any) -> t.Iterator[_sync_server.Server]:
        blobs = {row["blob"]: {"path": str(self.head / row["blob"]), "size": row["size"]} for row in self.rows}
        config = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": ["127.0.0.1"], "blobs": blobs, **over}
        server = _sync_server.serve(config)
        self.port = server.server_port
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    def pull(
        self,
        *,
        port: int = 0,
        token: str = TOKEN,
        stall: float = 5.0,
        timeout: float = 60.0,
        processes: int = 3,
        peers: list[_transfer.Source] | None = None,
        direct: bool = False,
    ) -> dict[str, t.Any]:
        source = _transfer.Source("127.0.0.1", port or self.port, token)
        return _transfer.pull_blobs(
            self.rows, [*(peers or []), source], self.target, processes=processes, timeout=timeout, stall=stall, node="w"
        )

    def check(self) -> None:
        assert {path.name: path.read_bytes() for path in self.blobs.iterdir()} == self.data
        assert list(self.staging.iterdir()) == []


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_pull(lab: Lab) -> None:
    with lab.server() as server:
        stats = lab.pull()
        assert stats["bytes_transferred"] == sum(row["size"] for row in lab.rows) == server.stats()["bytes_sent"]
    lab.check()
    assert {path.stat().st_mode & 0o777 for path in lab.blobs.iterdir()} == {0o644}


def test_resume_moves_only_the_rest(lab: Lab) -> None:
    row = lab.rows[0]
    (lab.staging / (row["blob"] + ".part")).write_bytes(lab.data[row["blob"]][:2_000_000])
    with lab.server() as server:
        stats = lab.pull()
        assert stats["bytes_transferred"] == server.stats()["bytes_sent"] == sum(item["size"] for item in lab.rows) - 2_000_000
    lab.check()


@pytest.mark.parametrize("there", [0, 1 << 20, 1_000_001])
@pytest.mark.parametrize("refused", [False, True])
def test_writing_past_the_page_cache(lab: Lab, monkeypatch: pytest.MonkeyPatch, there: int, refused: bool) -> None:
    """Whole blocks go to the disk directly, the rest and whatever a file system refuses does not; the content is the same."""
    row = lab.rows[0]
    (lab.staging / (row["blob"] + ".part")).write_bytes(lab.data[row["blob"]][:there])
    directly: list[int] = []
    original = _transfer.Puller._write

    def spy(fd: int, view: memoryview, offset: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if refused:
                raise OSError(errno.EINVAL, "Invalid argument")
            directly.append(offset)
        original(fd, view, offset)

    monkeypatch.setattr(_transfer.Puller, "_write", staticmethod(spy))
    with lab.server():
        source = _transfer.Source("127.0.0.1", lab.port, TOKEN)
        puller = _transfer.Puller([source], lab.target, stall=5.0, node="w", direct=True)
        for item in lab.rows:
            puller.fetch(item, lambda count: None)
    lab.check()
    if not refused and there != 1_000_001 and puller._open_direct(str(lab.blobs / row["blob"])) >= 0:
        assert there in directly


@pytest.mark.parametrize("kind", ["flipped", "too long", "complete"])
def test_whatever_a_broken_run_left(lab: Lab, kind: str) -> None:
    row = lab.rows[0]
    data = bytearray(lab.data[row["blob"]])
    if kind == "flipped":
        data[1000] ^= 1
        data = data[:2_000_000]
    elif kind == "too long":
        data += b"x"
    (lab.staging / (row["blob"] + ".part")).write_bytes(data)
    with lab.server() as server:
        lab.pull()
        sent = server.stats()["bytes_sent"]
    lab.check()
    rest = sum(item["size"] for item in lab.rows[1:])
    assert sent == rest + {"flipped": 1_000_000 + 3_000_000, "too long": 3_000_000, "complete": 0}[kind]


def test_damaged_file_on_the_head_is_never_published(lab: Lab) -> None:
    row = lab.rows[0]
    data = bytearray(lab.data[row["blob"]])
    data[5] ^= 1
    (lab.head / row["blob"]).write_bytes(data)
    with lab.server(), pytest.raises(Problem) as info:
        lab.pull()
    assert info.value.id == "copy-hash" and "file0" in info.value.found and info.value.node == "w"
    assert not (lab.blobs / row["blob"]).exists()


@pytest.mark.parametrize(
    ("over", "token", "change", "ident", "text"),
    [
        ({}, "0" * 32, None, "sync-denied", "token"),
        ({"peers": ["127.0.0.9"], "bind": "127.0.0.2"}, TOKEN, None, "sync-denied", "peers"),
        ({"blobs": {}}, TOKEN, None, "sync-source", "does not have it"),
        ({}, TOKEN, lambda path: path.write_bytes(b"other"), "sync-source", "changed on the head"),
    ],
)
def test_refusals_are_told_apart(lab: Lab, over: dict[str, t.Any], token: str, change: t.Any, ident: str, text: str) -> None:
    if change:
        change(lab.head / lab.rows[0]["blob"])
    with lab.server(**over), pytest.raises(Problem) as info:
        source = _transfer.Source(over.get("bind", "127.0.0.1"), lab.port, token)
        puller = _transfer.Puller([source], lab.target, stall=5.0, node="w")
        if "bind" in over:
            puller._conns[source] = __import__("http.client").client.HTTPConnection(
                source.address, source.port, timeout=5, source_address=("127.0.0.1", 0)
            )
        puller.fetch(lab.rows[0], lambda count: None)
    assert info.value.id == ident and text in info.value.found
    assert list(lab.blobs.iterdir()) == []


class Flaky(socketserver.ThreadingTCPServer):
    """Passes connections on to the real server and cuts each after some bytes, flips one, slows it down, or holds everything back."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, *, cut: int = 0, flip: int = -1, pause: float = 0.0, hold: int = 0) -> None:
        self.real, self.cut, self.flip, self.pause, self.hold, self.count = port, cut, flip, pause, hold, 0
        self.passed = 0
        super().__init__(("127.0.0.1", 0), FlakyHandler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


class FlakyHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = t.cast(Flaky, self.server)
        server.count += 1
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.real)) as far:
            threading.Thread(target=self.up, args=(far,), daemon=True).start()
            total = 0
            while data := bytearray(far.recv(65536)):
                if 0 <= server.flip - total < len(data):
                    data[server.flip - total] ^= 4
                    server.flip = -1
                total += len(data)
                time.sleep(server.pause)
                server.passed += len(data)
                while server.hold and server.passed > server.hold:
                    time.sleep(0.05)
                with contextlib.suppress(OSError):
                    self.request.sendall(data)
                if server.cut and total > server.cut:
                    break
            for sock in (far, self.request):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def up(self, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                far.sendall(data)


def test_cut_connections_are_continued(lab: Lab) -> None:
    with lab.server(), Flaky(lab.port, cut=700_000) as flaky:
        stats = lab.pull(port=flaky.server_address[1], processes=1)
        flaky.shutdown()
        assert flaky.count > 3
        assert stats["bytes_transferred"] == sum(row["size"] for row in lab.rows)
    lab.check()


def test_a_flipped_byte_on_the_way_is_fetched_again(lab: Lab) -> None:
    lab.rows = lab.rows[:1]
    lab.data = {lab.rows[0]["blob"]: lab.data[lab.rows[0]["blob"]]}
    with lab.server(), Flaky(lab.port, flip=1_000_000) as flaky:
        stats = lab.pull(port=flaky.server_address[1], processes=1)
        flaky.shutdown()
    assert stats["bytes_transferred"] == 6_000_000
    lab.check()


def test_a_server_that_comes_back_is_waited_for(lab: Lab) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = threading.Event()

    def later() -> None:
        time.sleep(0.5)
        with lab.server(port=port):
            stop.wait(30)

    thread = threading.Thread(target=later, daemon=True)
    thread.start()
    lab.pull(port=port, stall=20.0)
    stop.set()
    thread.join(10)
    lab.check()


def test_no_server_is_an_error_in_time(lab: Lab) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(Problem) as info:
            lab.pull(port=port, stall=0.5)
    assert info.value.id == "sync-stalled" and "firewall" in info.value.remedy


def test_killed_run_is_continued(lab: Lab, tmp_path: Path) -> None:
    """SIGKILL of the whole run in the middle: nothing under a final name but whole files; the next run moves the rest."""
    with lab.server() as server, Flaky(lab.port) as slow:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            original = _transfer.Puller._write

            def slowly(fd: int, view: memoryview, offset: int) -> None:
                original(fd, view, offset)
                time.sleep(0.2)

            _transfer.Puller._write = staticmethod(slowly)  # type: ignore[method-assign]
            with contextlib.suppress(BaseException):
                lab.pull(port=slow.server_address[1], processes=1)
            os._exit(0)
        part = lab.staging / (lab.rows[0]["blob"] + ".part")
        deadline = time.monotonic() + 20
        while not (part.exists() and part.stat().st_size > 300_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        slow.shutdown()
        for path in lab.blobs.iterdir():
            assert path.read_bytes() == lab.data[path.name]
        have = part.stat().st_size
        assert 0 < have < 3_000_000
        before = server.stats()["bytes_sent"]
        stats = lab.pull()
        assert stats["bytes_transferred"] <= sum(row["size"] for row in lab.rows) - have
        assert server.stats()["bytes_sent"] - before == stats["bytes_transferred"]
    lab.check()


def test_full_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, view: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_transfer.Puller, "_write", staticmethod(full))
    with lab.server(), pytest.raises(Problem) as info:
        lab.pull()
    assert info.value.id == "disk-model" and "file" in info.value.found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_full_disk_for_real(lab: Lab, tmp_path: Path) -> None:
    """A disk of 4 MB: nothing half-written gets a final name, and with more room the next run moves only the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        target = _transfer.Target(str(disk / "staging"), str(disk / "blobs"), os.getuid(), os.getgid())
        lab.staging, lab.blobs, lab.target = disk / "staging", disk / "blobs", target
        lab.staging.mkdir()
        lab.blobs.mkdir()
        with lab.server() as server:
            with pytest.raises(Problem) as info:
                lab.pull(processes=2)
            assert (info.value.id, info.value.node) == ("disk-model", "w") and "No space left" in info.value.found
            for path in lab.blobs.iterdir():
                assert path.read_bytes() == lab.data[path.name]
            there = sum(path.stat().st_size for path in [*lab.blobs.iterdir(), *lab.staging.iterdir()])
            assert there > 2_000_000
            subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
            lab.rows = [row for row in lab.rows if not (lab.blobs / row["blob"]).exists()]
            before = server.stats()["bytes_sent"]
            lab.pull()
            assert server.stats()["bytes_sent"] - before <= 4_500_010 - there
        lab.check()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def program(lab: Lab, port: int) -> t.Iterator[subprocess.Popen[bytes]]:
    """The server as a process of its own, as the unit runs it."""
    state = lab.head.parent / f"state-{port}-{time.monotonic_ns()}"
    blobs = {row["blob"]: {"path": str(lab.head / row["blob"]), "size": row["size"]} for row in lab.rows}
    config = {"what": "model", "bind": "127.0.0.1", "port": port, "token": TOKEN, "peers": [], "blobs": blobs, "state": str(state)}
    file = lab.head.parent / "config.json"
    file.write_text(json.dumps(config))
    with subprocess.Popen([sys.executable, "-I", _sync_server.__file__, str(file)]) as process:
        try:
            wait_until(state.exists)
            yield process
        finally:
            process.kill()


def wait_until(condition: t.Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("again", [True, False])
def test_server_killed_in_the_middle(tmp_path: Path, again: bool) -> None:
    """SIGKILL of the server: when it comes back the copy goes on where it was, else it ends in time and names the node."""
    lab = Lab(tmp_path, sizes=(40_000_000, 10))  # more than the sockets on the way hold
    port = free_port()
    part = lab.staging / (lab.rows[0]["blob"] + ".part")
    outcome: list[t.Any] = []

    def copy() -> None:
        try:
            outcome.append(lab.pull(port=slow.server_address[1], stall=15.0 if again else 1.0, processes=1))
        except Problem as exc:
            outcome.append(exc)

    with program(lab, port) as server, Flaky(port, pause=0.01) as slow:
        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        server.kill()
        server.wait()
        slow.pause = 0.0
        assert not (lab.blobs / lab.rows[0]["blob"]).exists()
        if again:
            with program(lab, port):
                thread.join(40)
        thread.join(40)
        slow.shutdown()
    if again:
        assert outcome[0]["bytes_transferred"] == sum(row["size"] for row in lab.rows)
        lab.check()
    else:
        assert (outcome[0].id, outcome[0].node) == ("sync-stalled", "w")
        assert list(lab.blobs.iterdir()) == [] and 0 < part.stat().st_size < 40_000_000


@pytest.mark.parametrize("forever", [True, False])
def test_link_that_carries_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch, forever: bool) -> None:
    """The connection stays open and no byte comes, as when a cable is out: a break is survived, a long one ends the copy in time."""
    monkeypatch.setattr(_transfer, "CONNECT_SECONDS", 0.5)
    with lab.server(), Flaky(lab.port, hold=1_000_000) as flaky:
        if not forever:
            part = lab.staging / (lab.rows[0]["blob"] + ".part")

            def mend() -> None:
                wait_until(lambda: part.exists() and part.stat().st_size > 500_000)
                time.sleep(1.0)
                flaky.hold = 0

            thread = threading.Thread(target=mend, daemon=True)
            thread.start()
            lab.pull(port=flaky.server_address[1], stall=20.0, processes=1)
            thread.join(5)
            lab.check()
        else:
            with pytest.raises(Problem) as info:
                lab.pull(port=flaky.server_address[1], stall=1.0, processes=1)
            assert (info.value.id, info.value.node) == ("sync-stalled", "w") and list(lab.blobs.iterdir()) == []
        flaky.shutdown()


def test_port_that_answers_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops: here a listener whose queue is full, so that no connection is ever made. The patience for a copy that ran is not waited."""
    monkeypatch.setattr(_transfer, "CONNECT_SECONDS", 0.5)
    begin = time.monotonic()
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for dummy in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(deaf.getsockname())
        with pytest.raises(Problem) as info:
            lab.pull(port=deaf.getsockname()[1], stall=40.0)
    assert time.monotonic() - begin < 30
    assert info.value.id == "sync-stalled" and info.value.details["reached"] is False and "firewall" in info.value.remedy


def test_file_cut_short_on_the_head_during_the_copy(tmp_path: Path) -> None:
    # more than the sockets on the way hold, so that the server still reads when the file changes
    lab = Lab(tmp_path, sizes=(40_000_000,))
    row = lab.rows[0]
    part = lab.staging / (row["blob"] + ".part")
    caught: list[Problem] = []

    def copy() -> None:
        with pytest.raises(Problem) as info:
            lab.pull(port=slow.server_address[1], processes=1)
        caught.append(info.value)

    with lab.server(), Flaky(lab.port, pause=0.02) as slow:
        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        os.truncate(lab.head / row["blob"], 1000)
        slow.pause = 0.0
        thread.join(40)
        slow.shutdown()
    assert caught and caught[0].id == "sync-source" and "changed on the head" in caught[0].found
    assert list(lab.blobs.iterdir()) == []


# --- a chain of workers ---


class Peer:
    """A worker in front of us: what it has of each file, and its server."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab, self.staging, self.blobs = lab, root / "staging", root / "blobs"
        self.staging.mkdir(parents=True)
        self.blobs.mkdir()

    def part(self, row: dict[str, t.Any]) -> Path:
        return self.staging / (row["blob"] + ".part")

    @contextlib.contextmanager
    def server(self) -> t.Iterator[_transfer.Source]:
        blobs = {
            row["blob"]: {"path": str(self.blobs / row["blob"]), "size": row["size"], "part": str(self.part(row))} for row in self.lab.rows
        }
        config = {"what": "model", "bind": "127.0.0.1", "port": 0, "token": TOKEN, "peers": ["127.0.0.1"], "blobs": blobs}
        server = _sync_server.serve(config)
        try:
            yield _transfer.Source("127.0.0.1", server.server_port, TOKEN)
        finally:
            server.shutdown()
            server.server_close()


@pytest.fixture
def peer(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setattr(_sync_server, "APPEAR_SECONDS", 0.3)
    monkeypatch.setattr(_sync_server, "GROW_SECONDS", 3.0)
    return Peer(lab, tmp_path / "peer")


def test_chain_passes_on_what_arrives(lab: Lab, peer: Peer) -> None:
    """A file streams through the worker in front before that one has all of it; the head sends nothing to us."""
    row = lab.rows[0]
    lab.rows = [row]
    lab.data = {row["blob"]: lab.data[row["blob"]]}
    data = lab.data[row["blob"]]
    peer.part(row).write_bytes(data[: 1 << 20])
    mine = lab.staging / (row["blob"] + ".part")
    with lab.server() as head, peer.server() as source:
        thread = threading.Thread(target=lambda: lab.pull(peers=[source]), daemon=True)
        thread.start()
        wait_until(lambda: mine.exists() and mine.stat().st_size == 1 << 20)
        with peer.part(row).open("ab") as handle:
            handle.write(data[1 << 20 :])
        os.rename(peer.part(row), peer.blobs / row["blob"])
        thread.join(30)
        assert head.stats()["bytes_sent"] == 0
    lab.check()


@pytest.mark.parametrize("state", ["nothing yet", "stopped growing", "wrong byte", "unreachable", "other token"])
def test_chain_with_a_bad_worker_in_front(lab: Lab, peer: Peer, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Whatever the worker in front does, the copy is right, and the head sends what is missing once."""
    monkeypatch.setattr(_sync_server, "GROW_SECONDS", 0.3)
    row = lab.rows[0]
    lab.rows = [row]
    lab.data = {row["blob"]: lab.data[row["blob"]]}
    data = bytearray(lab.data[row["blob"]])
    sent = len(data)
    if state == "stopped growing":
        peer.part(row).write_bytes(data[:1_000_000])
        sent = 2_000_000
    elif state == "wrong byte":
        data[77] ^= 1
        (peer.blobs / row["blob"]).write_bytes(data)
    with lab.server() as head, peer.server() as source:
        if state == "unreachable":
            source = source._replace(port=free_port())
        elif state == "other token":
            source = source._replace(token="0" * 32)
        lab.pull(peers=[source])
        assert head.stats()["bytes_sent"] == sent
    lab.check()


def test_a_link_in_the_staging_is_not_followed(lab: Lab, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (lab.staging / (lab.rows[0]["blob"] + ".part")).symlink_to(victim)
    with lab.server(), pytest.raises(RuntimeError):
        lab.pull()
    assert victim.read_text() == "precious"


# --- disk, locks, commands ---


def test_space_is_checked_with_numbers(tmp_path: Path) -> None:
    path = str(tmp_path / "not" / "yet")
    _transfer.check_space(path, 0, 10**18, node="n", stage="s", problem="disk-model", what="x")
    _transfer.check_space(path, 1, 0, node="n", stage="s", problem="disk-model", what="x")
    with pytest.raises(Problem) as info:
        _transfer.check_space(path, 10**15, 10**9, node="n", stage="s", problem="disk-model", what="m/x (3 files)", factor=1.1)
    assert info.value.id == "disk-model" and "1100.0 TB" in info.value.expected and "m/x (3 files)" in info.value.expected
    assert info.value.details["needed_bytes"] == int(1.1 * 10**15) + 10**9
    assert info.value.details["free_bytes"] == _transfer.free_bytes(str(tmp_path))


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (127_000_000_000, "127.0 GB"), (2e12, "2.0 TB")])
def test_human(count: float, text: str) -> None:
    assert _transfer.human(count) == text


def test_lock_is_exclusive_and_freed(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "x.lock")
    with _transfer.exclusive(path, 0, node="n", stage="s", what="m"):
        with pytest.raises(Problem) as info, _transfer.exclusive(path, 0.3, node="n", stage="s", what="m"):
            pass
        assert info.value.id == "busy"
    with _transfer.exclusive(path, 0, node="n", stage="s", what="m"):
        pass


def run(code: str, **over: t.Any) -> _transfer.Watched:
    limits: dict[str, t.Any] = {"timeout": 30, "stall": 30, "interval": 0.05}
    return _transfer.watch([sys.executable, "-c", code], **{**limits, **over})


def test_watch_gives_code_and_output() -> None:
    done = run("import sys; print('out'); sys.stderr.write('err'); sys.exit(3)")
    assert (done.rc, done.out.strip(), done.err, done.ended) == (3, "out", "err", "")


def test_watch_ends_what_stands_still() -> None:
    assert run("import time; print('x', flush=True); time.sleep(60)", stall=0.5).ended == "stall"
    assert run("import time\nfor i in range(10**6): print(i, flush=True); time.sleep(.05)", timeout=0.7).ended == "timeout"
    assert run("import time; time.sleep(.8)", stall=0.5, progress=lambda child: time.monotonic()).ended == ""


def test_watch_repeating_the_same_line_is_no_progress() -> None:
    assert run("import time\nfor i in range(600): print('1 MB/9 MB', flush=True); time.sleep(.1)", stall=0.7).ended == "stall"


def test_watch_gives_a_terminal() -> None:
    assert run("import sys; print(sys.stdout.isatty(), sys.stderr.isatty())", terminal=True).out.strip() == "True False"


def test_watch_ends_the_whole_group_even_if_it_ignores_term() -> None:
    code = "import signal, time, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    done = run(code, stall=0.5, grace=0.5)
    assert done.ended == "stall" and done.rc == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.out), 0)


def test_watch_without_the_command() -> None:
    with pytest.raises(Problem) as info:
        _transfer.watch(["no-such-command-x"], timeout=1, stall=1)
    assert info.value.id == "command-missing"


# --- relay ---


def test_relay_passes_and_counts(lab: Lab) -> None:
    with lab.server(), _transfer.Relay("127.0.0.1", lab.port) as relay:
        lab.pull(port=relay.port)
        assert relay.bytes > sum(row["size"] for row in lab.rows)
        port = relay.port
    lab.check()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_relay_sends_tls_back_to_plain_http(lab: Lab) -> None:
    """The containerd store tries TLS first and falls back only when the answer begins with HTTP/ (seen with Docker 26.1)."""
    with (
        lab.server(),
        _transfer.Relay("127.0.0.1", lab.port) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=10) as sock,
    ):
        sock.sendall(b"\x16\x03\x01\x00\xf4\x01")
        assert sock.recv(5) == b"HTTP/"


def test_relay_remembers_why_the_head_is_not_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with (
            _transfer.Relay("127.0.0.1", probe.getsockname()[1]) as relay,
            socket.create_connection(("127.0.0.1", relay.port), timeout=10) as sock,
        ):
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(10) == b""
            assert "refused" in relay.error
