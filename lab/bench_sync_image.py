# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases of bench_sync: the image. On the nodes of the lab (spark-1 with the containerd store, spark-2 with the classic one), which is made when it is not
there. ``IMAGE=1250M``: bytes of the image, in five layers that cannot be compressed.

Both sides begin with a command on the nodes and end when the worker has the image under its name: here the start of the head's server, then the
module; there ``docker save | ssh docker load`` on the head. Wire bytes are what leaves the head's fabric interface, CPU seconds those of the whole node.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import typing as t
from pathlib import Path

from bench_sync import ROOT, Report, Sample, case, run, say, settle, size_of

SIZE = size_of(os.environ.get("IMAGE") or "1250M")
LAYERS = 5
NAME = os.environ.get("SPARKLAB_NAME") or "sparklab"
HEAD, WORKER = "spark-1", "spark-2"
INTERFACE = "enp1s0f1np1"
FOLDER = "/var/lib/sparklab-bench"
TAG = "bench/app"
# Modules as Ansible would run them: their arguments come on stdin.
RUNNER = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
module = importlib.import_module("ansible_collections.dgxspark.serving.plugins.modules." + sys.argv[1])
if hasattr(module, "STATE_DIR"):
    module.STATE_DIR = "/var/lib/sparklab-bench/state"  # the node's own list of images stays as it is
with patch_module_args(json.load(sys.stdin)):
    module.main()
"""


def node(name: str, script: str, stdin: str = "") -> str:
    """A script as root on a node, not over its network."""
    return run("docker", "exec", "-i", f"{NAME}-{name}", "sh", "-c", script, input=stdin, timeout=1800)


def cpu(name: str) -> float:
    """CPU seconds of everything on a node since it was started."""
    ident = run("docker", "inspect", "-f", "{{.Id}}", f"{NAME}-{name}").strip()
    for path, factor in (
        (f"/sys/fs/cgroup/cpuacct/docker/{ident}/cpuacct.usage", 1e9),
        (f"/sys/fs/cgroup/docker/{ident}/cpu.stat", 1e6),
        (f"/sys/fs/cgroup/system.slice/docker-{ident}.scope/cpu.stat", 1e6),
    ):
        if Path(path).exists():
            return int(Path(path).read_text().replace("usage_usec", "").split()[0]) / factor
    return 0.0


class Pair:
    """Two nodes of the lab with what the cases need on them."""

    def __init__(self) -> None:
        run(str(ROOT / "lab" / "lab"), "up", timeout=1800)
        inventory = json.loads((ROOT / "inventory" / "lab" / "hosts.yml").read_text(encoding="utf-8").split("\n", 1)[1])
        groups = inventory["sparks"]["children"]
        self.changed = 0
        self.addresses = {name: host["spark_fabric_address"] for group in groups.values() for name, host in group["hosts"].items()}

    def __enter__(self) -> Pair:
        for name, store in ((HEAD, True), (WORKER, False)):
            if ("io.containerd.snapshotter" in node(name, "docker info -f '{{json .DriverStatus}}'")) != store:
                sys.exit(f"bench-sync: the store of {name} is not the one of a fresh lab; 'make lab-down' first")
            self._program(name)
        self._key()
        registry = (ROOT / "lab" / "registry.py").read_text(encoding="utf-8")
        node(HEAD, f"cat > {FOLDER}/registry.py", registry)
        for version, last in (("1", "e1"), ("2", "e2")):
            self._make(
                version, [[f"opt/{index}", SIZE // LAYERS, last if index == LAYERS else f"s{index}"] for index in range(1, LAYERS + 1)]
            )
        node(HEAD, f"rm -rf {FOLDER}/oci {FOLDER}/app.tar")
        return self

    @staticmethod
    def _make(version: str, layers: list[t.Any]) -> None:
        """An image on the head, from a registry-like index with attestations; not again when it is there already (its content is always the same)."""
        size = f"docker image inspect -f '{{{{.Size}}}}' {TAG}:{version} 2>/dev/null || echo 0"
        if int(node(HEAD, size)) >= SIZE:
            return
        say(f"making image {version} ({SIZE / 1e9:.2f} GB)")
        text = json.dumps({"layers": layers, "attest": True})
        node(HEAD, f"python3 {FOLDER}/registry.py make {FOLDER}/oci {TAG}:{version} '{text}'")
        node(HEAD, f"python3 {FOLDER}/registry.py tar {FOLDER}/oci {TAG}:{version} {FOLDER}/app.tar && docker load -q -i {FOLDER}/app.tar")

    def __exit__(self, *exc_info: t.Any) -> None:
        for name in (HEAD, WORKER):
            self.wipe(name)
            node(name, f"rm -rf {FOLDER} /root/.ssh")
        node(WORKER, "rm -f /etc/ssh/sshd_config.d/00-bench.conf; systemctl reload ssh")

    @staticmethod
    def _program(name: str) -> None:
        import ansible  # pylint: disable=import-outside-toplevel

        base = Path(ansible.__file__).parent
        tar = ["tar", "-c", "--exclude=__pycache__", "-C", str(base.parent), "ansible/release.py", "ansible/module_utils"]
        parts = ["plugins/modules", "plugins/module_utils"]
        tar += ["--transform", "s,^plugins,ansible_collections/dgxspark/serving/plugins,", "-C", str(ROOT), *parts]
        packed = subprocess.run(tar, check=True, stdout=subprocess.PIPE).stdout
        argv = [
            "docker",
            "exec",
            "-i",
            f"{NAME}-{name}",
            "sh",
            "-c",
            f"rm -rf {FOLDER}; mkdir -p {FOLDER}; tar -x -C {FOLDER}; touch {FOLDER}/ansible/__init__.py",
        ]
        subprocess.run(argv, check=True, input=packed)
        node(name, f"cat > {FOLDER}/run.py", RUNNER)

    def _key(self) -> None:
        """The other side needs a way from the head to the worker; this side does not."""
        node(HEAD, "mkdir -p -m 700 /root/.ssh; test -e /root/.ssh/id_ed25519 || ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")
        public = node(HEAD, "cat /root/.ssh/id_ed25519.pub")
        node(WORKER, "mkdir -p -m 700 /root/.ssh; cat > /root/.ssh/authorized_keys", public)
        node(WORKER, "printf 'AuthorizedKeysFile /etc/ssh/authorized_keys_%%u .ssh/authorized_keys\\nPermitRootLogin prohibit-password\\n' "
             "> /etc/ssh/sshd_config.d/00-bench.conf; systemctl reload ssh")  # fmt: skip
        host = node(WORKER, "cat /etc/ssh/ssh_host_ed25519_key.pub")
        node(HEAD, "cat > /root/.ssh/known_hosts", f"{self.addresses[WORKER]} {host}")

    @staticmethod
    def wipe(name: str = WORKER) -> None:
        """A node that never saw the image."""
        node(name, f"docker images --format '{{{{.Repository}}}}:{{{{.Tag}}}}' | grep -e '^{TAG}:' -e '/app:' | xargs -r docker rmi -f >/dev/null;"
             f"docker image prune -f >/dev/null; rm -rf {FOLDER}/state")  # fmt: skip

    def warm(self, version: str) -> None:
        """The head's blobs are in the page cache, nothing waits to be written."""
        node(HEAD, f"docker save {TAG}:{version} > /dev/null")
        settle()

    def module(self, place: str, module: str, **args: t.Any) -> dict[str, t.Any]:
        text = json.dumps({"node": place, **args})
        done = subprocess.run(
            ["docker", "exec", "-i", "-e", f"PYTHONPATH={FOLDER}", f"{NAME}-{place}", "python3", f"{FOLDER}/run.py", module],
            input=text, capture_output=True, text=True, check=False, timeout=1800,
        )  # fmt: skip
        result: dict[str, t.Any] = json.loads(done.stdout)
        if result.get("failed"):
            sys.exit(f"bench-sync: {result['msg']}")
        return result

    def measured(self, work: t.Callable[[], t.Any]) -> tuple[Sample, t.Any]:
        count = f"cat /sys/class/net/{INTERFACE}/statistics/tx_bytes"
        sent, spent = int(node(HEAD, count)), [cpu(name) for name in (HEAD, WORKER)]
        begin = time.monotonic()
        answer = work()
        seconds = time.monotonic() - begin
        used = [cpu(name) - before for name, before in zip((HEAD, WORKER), spent, strict=True)]
        return Sample(seconds, used[0], used[1], int(node(HEAD, count)) - sent), answer

    def head(self, version: str) -> dict[str, t.Any]:
        """What the plan knows of the head's image before a copy."""
        image: dict[str, t.Any] = self.module(HEAD, "image_sync", reference=f"{TAG}:{version}", source="present")["image"]
        return image

    def ours(self, version: str) -> Sample:
        image = self.head(version)

        def work() -> dict[str, t.Any]:
            server = self.module(
                HEAD,
                "sync_server",
                name="bench",
                what="image",
                image=f"{TAG}:{version}",
                address=self.addresses[HEAD],
                peers=[self.addresses[WORKER]],
            )["server"]
            self.changed = server["layers"][-1]["bytes"]
            return self.pull(version, image, server)

        sample, result = self.measured(work)
        self.module(HEAD, "sync_server", name="bench", state="absent")
        if result["method"] != "relay":
            sys.exit(f"bench-sync: the image came by {result['method']}")
        return sample

    def pull(self, version: str, image: dict[str, t.Any], server: dict[str, t.Any] | None) -> dict[str, t.Any]:
        more = {"server": server} if server else {}
        return self.module(
            WORKER,
            "image_sync",
            reference=f"{TAG}:{version}",
            source="peer",
            fingerprint=image["fingerprint"],
            size=image["size"],
            keep=9,
            **more,
        )

    def theirs(self, version: str) -> Sample:
        argv = f"docker save {TAG}:{version} | ssh {self.addresses[WORKER]} docker load -q"
        sample, dummy = self.measured(lambda: node(HEAD, argv))
        return sample


@contextlib.contextmanager
def pair() -> t.Iterator[Pair]:
    """One pair for all cases of one run: the images are made once."""
    with Pair() as made:
        yield made


OURS, THEIRS = "image_sync", "docker save to ssh docker load"


def disk(name: str) -> float:
    """Seconds to write as many bytes as the image has to the disk of Docker, plainly."""
    begin = time.monotonic()
    node(name, f"dd if=/dev/zero of=/var/lib/docker/bench bs=1M count={SIZE // (1 << 20)} conv=fsync 2>/dev/null; rm /var/lib/docker/bench")
    return time.monotonic() - begin


@case("image", "an image in 5 layers to a worker: first copy, one layer changed, nothing changed")
def image(report: Report) -> None:
    """One case, because the second copy needs the first."""
    with pair() as lab:
        first, second = f"{OURS}, worker empty", f"{OURS}, one of 5 layers changed"
        other, again = f"{THEIRS}, worker empty", f"{THEIRS}, one of 5 layers changed"
        nothing = f"{OURS}, nothing changed"
        for dummy in report.rounds():
            for label, version, copy in (
                (first, "1", lab.ours),
                (second, "2", lab.ours),
                (other, "1", lab.theirs),
                (again, "2", lab.theirs),
            ):
                if version == "1":
                    lab.wipe()
                lab.warm(version)
                report.add(label, copy(version))
                if label == second:
                    known = lab.head("2")
                    report.add(nothing, lab.measured(lambda known=known: lab.pull("2", known, None))[0])
        report.goal("first copy / save and load", report.seconds(first) / report.seconds(other), 0.65)
        report.goal("one layer changed / save and load", report.seconds(second) / report.seconds(again), 0.2)
        report.goal("bytes on the wire / bytes of the changed layer", report.wire(second) / lab.changed, 1.1)
        report.goal("nothing changed, seconds", report.seconds(nothing), 1.0)
        report.goal("nothing changed, bytes", report.wire(nothing), 0)
        report.note(
            f"Writing as many bytes plainly to the worker's disk takes {disk(WORKER):.2f} s; hashing and unpacking them, once each, is the rest."
        )
