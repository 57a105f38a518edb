# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases of bench_sync: the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

from bench_sync import RATE, ROOT, SHAPED, SIZE, Node, Nodes, Report, Sample, case, cpu_of, daemon, measured, run, settle

COMMIT = "c" * 40
TOKEN = "0f" * 16
FILES = 8
SERVER = str(ROOT / "plugins" / "module_utils" / "_sync_server.py")

# The module as it is, with its state in the directory of the node instead of /run and /var/lib (all nodes are one machine here).
RUNNER = """
import json, sys
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dgxspark.serving.plugins.module_utils import _snapshot
from ansible_collections.dgxspark.serving.plugins.modules import model_sync
home = sys.argv[1]
model_sync.RUN_DIR, _snapshot.STAMP_DIR = home + "/run", home + "/state/snapshots"
with patch_module_args(json.load(open(sys.argv[2]))):
    model_sync.main()
"""


class Model:
    """A model of some big files on the head, as a Hugging Face cache, and the server of it."""

    def __init__(self, nodes: Nodes, size: int) -> None:
        self.nodes = nodes
        self.head = nodes.head
        self.size = size
        self.folder = self.head.home / "hub" / "models--org--m"
        self.top = self.folder / "snapshots" / COMMIT
        self.manifest: list[dict[str, t.Any]] = []
        self.top.mkdir(parents=True)
        (self.folder / "blobs").mkdir()
        for index in range(1, FILES + 1):
            self._file(f"model-{index:05d}-of-{FILES:05d}.safetensors", size // FILES)

    def _file(self, name: str, size: int) -> None:
        temp = self.folder / "blobs" / "new"
        digest = hashlib.sha256()
        with temp.open("wb") as handle:
            left = size
            while left:
                block = os.urandom(min(left, 1 << 20))
                digest.update(block)
                handle.write(block)
                left -= len(block)
        temp.rename(temp.with_name(digest.hexdigest()))
        (self.top / name).symlink_to(f"../../blobs/{digest.hexdigest()}")
        self.manifest.append({"path": name, "size": size, "blob": digest.hexdigest(), "algo": "sha256"})

    def warm(self) -> None:
        """The files are in the page cache, as they are after a download; nothing else waits to be written."""
        for row in self.manifest:
            with (self.folder / "blobs" / row["blob"]).open("rb") as handle:
                while handle.read(1 << 22):
                    pass
        settle()

    def blobs(self) -> dict[str, t.Any]:
        """What the server serves."""
        return {row["blob"]: {"path": str(self.folder / "blobs" / row["blob"]), "size": row["size"]} for row in self.manifest}

    def arriving(self, node: Node) -> dict[str, t.Any]:
        """What a worker serves while it receives it (as sync_server with a manifest does)."""
        cache = node.home / "cache"
        parts, blobs = cache / ".dgxspark-sync" / "models--org--m", cache / "hub" / "models--org--m" / "blobs"
        return {
            row["blob"]: {"path": str(blobs / row["blob"]), "size": row["size"], "part": str(parts / f"{row['blob']}.part")}
            for row in self.manifest
        }

    @contextlib.contextmanager
    def server(self, node: Node, blobs: dict[str, t.Any], name: str = "server") -> t.Iterator[tuple[int, dict[str, t.Any]]]:
        """The copy server on a node; (process id, what model_sync gets)."""
        state = node.home / f"{name}.state"
        state.unlink(missing_ok=True)
        config = {
            "what": "model", "bind": node.address, "port": 0, "token": TOKEN, "lifetime": 7200, "state": str(state), "manifest_digest": "",
            "peers": [worker.address for worker in self.nodes.workers], "blobs": blobs,
        }  # fmt: skip
        (node.home / f"{name}.json").write_text(json.dumps(config))
        with daemon(node, sys.executable, "-I", SERVER, str(node.home / f"{name}.json"), ready=state.exists) as pid:
            yield pid, {"address": node.address, "port": json.loads(state.read_text())["port"], "token": TOKEN}

    def argv(self, node: Node, server: dict[str, t.Any], **over: t.Any) -> list[str]:
        """model_sync on a worker."""
        args = {"repo_id": "org/m", "revision": COMMIT, "ref": "main", "cache_dir": str(node.home / "cache"), "manifest": self.manifest}
        args.update(server=server, node=node.name, min_free_bytes=0, **over)
        (node.home / "args.json").write_text(json.dumps(args))
        return [sys.executable, "-c", RUNNER, str(node.home), str(node.home / "args.json")]

    @staticmethod
    def answer(out: str) -> dict[str, t.Any]:
        """The result of the module; ends everything when it failed."""
        result: dict[str, t.Any] = json.loads(out)
        if result.get("failed"):
            sys.exit(f"bench-sync: {result['msg']}")
        return result

    def wipe(self, node: Node) -> None:
        """An empty worker."""
        for name in ("cache", "run", "state", "plain"):
            shutil.rmtree(node.home / name, ignore_errors=True)
        settle()


@contextlib.contextmanager
def ssh_daemon(head: Node) -> t.Iterator[tuple[int, list[str]]]:
    """sshd on the head with its default ciphers; (process id, ssh command of the workers)."""
    home = head.home / "ssh"
    home.mkdir()
    home.chmod(0o700)
    for name in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name))
    shutil.copy(home / "user.pub", home / "authorized")
    config = (
        f"Port 22\nListenAddress {head.address}\nHostKey {home}/host\nAuthorizedKeysFile {home}/authorized\nStrictModes no\nPidFile none\n"
    )
    config += "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n"
    (home / "config").write_text(config)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    ssh = ["ssh", "-i", str(home / "user"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]

    def up() -> bool:
        return subprocess.run(head.argv("sh", "-c", "ss -Hltn sport = :22 | grep -q ."), check=False).returncode == 0

    with daemon(head, "/usr/sbin/sshd", "-D", "-f", str(home / "config"), ready=up) as pid:
        yield pid, ssh


def shell(*commands: str) -> list[str]:
    """Commands of a worker, and everything on its disk at the end."""
    return ["sh", "-ec", "\n".join([*commands, 'sync -f "$HOME_DIR"'])]


@case("model-empty", "model, worker empty")
def model_empty(report: Report) -> None:
    with Nodes(1) as nodes:
        model = Model(nodes, SIZE)
        worker = nodes.workers[0]
        plain = worker.home / "plain"
        env = f"HOME_DIR={worker.home}"
        for dummy in report.rounds():
            model.wipe(worker)
            model.warm()
            with model.server(nodes.head, model.blobs()) as (pid, server):
                sample, out = measured(worker, nodes.head, pid, *model.argv(worker, server))
            if model.answer(out)["bytes_transferred"] != SIZE // FILES * FILES:
                sys.exit("bench-sync: model_sync did not copy everything")
            report.add("model_sync", sample)
            with ssh_daemon(nodes.head) as (pid, ssh):
                source = f"root@{nodes.head.address}:{model.folder}/blobs"
                for side, command in (
                    ("rsync -a over ssh", f"rsync -a -e '{' '.join(ssh)}' {source}/ {plain}/"),
                    ("scp", f"scp -q {' '.join(ssh[1:])} {source}/* {plain}/"),
                ):
                    model.wipe(worker)
                    plain.mkdir()
                    model.warm()
                    report.add(side, measured(worker, nodes.head, pid, "env", env, *shell(command))[0])
                model.wipe(worker)
                model.warm()
                report.add("model_sync with rsync", second_way(model, worker, pid, ssh))
            model.wipe(worker)
            model.warm()
            report.add("cp", measured(worker, nodes.head, 0, "env", env, *shell(f"cp -r {model.folder}/blobs {plain}"))[0])
            shutil.rmtree(nodes.head.home / "ssh")
        model.wipe(worker)
    ours = report.seconds("model_sync")
    report.goal("model_sync / rsync -a over ssh", ours / report.seconds("rsync -a over ssh"), 0.35)
    report.goal("model_sync / scp", ours / report.seconds("scp"), 0.35)
    report.goal("model_sync / cp on the same disk", ours / report.seconds("cp"), 2.0)
    report.note(f"{SIZE / 1e9:g} GB in {FILES} files, both nodes on the same cores; {hash_rate()}.")


def second_way(model: Model, worker: Node, pid: int, ssh: list[str]) -> Sample:
    """model_sync with rsync over SSH, as where only SSH is let through; its ssh gets the key of this bench."""
    tools = worker.home / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/{" ".join(ssh)} "$@"\n')
    (tools / "ssh").chmod(0o755)
    server = {"address": model.head.address, "port": 1, "token": TOKEN, "path": str(model.top)}
    argv = model.argv(worker, server, transport="rsync", ssh_user="root")
    sample, out = measured(worker, model.head, pid, "env", f"PATH={tools}:{os.environ['PATH']}", *argv)
    if model.answer(out)["method"] != "rsync":
        sys.exit("bench-sync: the second way was not taken")
    return sample


def hash_rate() -> str:
    """How fast one core hashes here: half of what two of them can ever receive."""
    block = bytes(1 << 20)
    begin = time.monotonic()
    digest = hashlib.sha256()
    for dummy in range(512):
        digest.update(block)
    return f"one core hashes {512 * (1 << 20) / 1e9 / (time.monotonic() - begin):.2f} GB/s (sha256)"


@case("model-again", "model, second run")
def model_again(report: Report) -> None:
    hashed = 0
    with Nodes(1) as nodes:
        model = Model(nodes, SIZE)
        worker = nodes.workers[0]
        model.wipe(worker)
        with model.server(nodes.head, model.blobs()) as (pid, server):
            model.answer(measured(worker, nodes.head, pid, *model.argv(worker, server))[1])
            for dummy in report.rounds():
                sample, out = measured(worker, nodes.head, pid, *model.argv(worker, server))
                result = model.answer(out)
                hashed += result["hashed"] + int(result["changed"])
                report.add("model_sync", sample)
    report.goal("seconds", report.seconds("model_sync"), 2.0)
    report.goal("files opened for hashing", hashed, 0)
    report.goal("bytes from the head", report.wire("model_sync"), 0)


@case("model-killed", "model, killed at 50 % and run again")
def model_killed(report: Report) -> None:
    total: list[float] = []
    with Nodes(1) as nodes:
        model = Model(nodes, SIZE)
        worker = nodes.workers[0]
        for dummy in report.rounds():
            model.wipe(worker)
            model.warm()
            with model.server(nodes.head, model.blobs()) as (pid, server):
                sent, cpu, begin = nodes.head.sent(), cpu_of(pid), time.monotonic()
                process = worker.start(*model.argv(worker, server), start_new_session=True)
                while nodes.head.sent() - sent < SIZE / 2:
                    if process.poll() is not None:
                        sys.exit("bench-sync: the copy ended before it could be killed")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                first = nodes.head.sent() - sent
                report.add("killed", Sample(time.monotonic() - begin, cpu_of(pid) - cpu, 0.0, first))
                sample, out = measured(worker, nodes.head, pid, *model.argv(worker, server))
                model.answer(out)
                report.add("run again", sample)
                total.append((first + sample.wire_bytes) / SIZE)
    report.goal("bytes of both runs / bytes of the model", sorted(total)[len(total) // 2], 1.1)


@case("model-8", "model, 8 workers, links shaped so that the link is the limit")
def model_many(report: Report) -> None:
    copies: list[float] = []
    with Nodes(8, RATE) as nodes:
        model = Model(nodes, SHAPED)
        for dummy in report.rounds():
            for count in (1, 8):
                for worker in nodes.workers:
                    model.wipe(worker)
                model.warm()
                sample = many(model, nodes.workers[:count])
                report.add(f"{count} worker{'s' if count > 1 else ''}", sample)
                if count == 8:
                    copies.append(sample.wire_bytes / SHAPED)
    report.goal("time of 8 workers / time of 1", report.seconds("8 workers") / report.seconds("1 worker"), 1.6)
    report.goal("copies that the head sends", sorted(copies)[len(copies) // 2], 2.0)
    report.note(f"{SHAPED / 1e6:g} MB in {FILES} files, every link {RATE} in both directions: one copy needs at least "
                f"{SHAPED * 8 / rate_of(RATE):.1f} s.")  # fmt: skip


def rate_of(text: str) -> float:
    """``200mbit`` -> 2e8."""
    return float(text.removesuffix("mbit")) * 1e6


def many(model: Model, workers: t.Sequence[Node]) -> Sample:
    """All workers at once, in a chain: each serves what it has; the time until the last one is done."""
    head = model.head
    with contextlib.ExitStack() as stack:
        pid, server = stack.enter_context(model.server(head, model.blobs()))
        chain: list[dict[str, t.Any]] = []
        for worker in workers[:-1]:
            chain.append(stack.enter_context(model.server(worker, model.arriving(worker)))[1])
        sent, cpu, begin = head.sent(), cpu_of(pid), time.monotonic()
        running = []
        for index, worker in enumerate(workers):
            running.append(worker.start(*model.argv(worker, server, peers=chain[:index][::-1], onward=worker != workers[-1])))
        used = 0.0
        for process in running:
            model.answer((process.stdout or sys.stdin).read())
            usage = os.wait4(process.pid, 0)[2]
            process.returncode = 0
            used += usage.ru_utime + usage.ru_stime
        return Sample(time.monotonic() - begin, cpu_of(pid) - cpu, used, head.sent() - sent)
