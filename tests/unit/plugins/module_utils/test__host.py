# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _host

FIXTURES = pathlib.Path(_host.__file__).resolve().parents[2] / "tests" / "unit" / "fixtures" / "node"
TOTAL = 24684084 * 1024


def text(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


class Files:
    """A file system of texts."""

    def __init__(self, **files):
        self.files = {"/" + name.replace("__", "/"): content for name, content in files.items()}

    def add(self, path, content):
        self.files[path] = content
        return self

    def read(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def listdir(self, path):
        names = {name[len(path) + 1 :].split("/")[0] for name in self.files if name.startswith(path + "/")}
        if not names:
            raise FileNotFoundError(path)
        return list(names)


def test_memory_that_nothing_accounts_for():
    whole = text("meminfo_full")
    healthy = _host.unaccounted(whole)
    assert 0 < healthy < 1 << 30
    # 20 GiB of page cache that a driver has taken instead: neither free nor anybody's.
    gone = whole.replace("MemFree:", "MemFreed:")
    free = next(int(line.split()[1]) for line in whole.splitlines() if line.startswith("MemFree:"))
    assert _host.unaccounted(gone) == healthy + free * 1024


def test_a_kernel_that_does_not_tell_enough():
    assert _host.unaccounted(text("meminfo")) == 0 and _host.unaccounted("") == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/usr/bin/earlyoom", "-m", "2", "-s", "80", "-r", "60", "--dryrun", ""], 0.02 * TOTAL),  # recorded
        (["/usr/bin/earlyoom", "-r", "3600", ""], 0.10 * TOTAL),  # as Debian installs it
        (["earlyoom", "-m", "4,2"], 0.04 * TOTAL),
        (["earlyoom", "-m3.5"], 0.035 * TOTAL),
        (["earlyoom", "-M", "524288,102400", "-s", "100", "-r", "60"], 512 << 20),
        (["earlyoom", "-m"], 0.10 * TOTAL),
        ([], 0.10 * TOTAL),
    ],
)
def test_limit_of_earlyoom(arguments, expected):
    assert _host.earlyoom_limit(arguments, TOTAL) == int(expected)


def test_daemons_that_kill():
    files = Files().add("/proc/812/cmdline", "/usr/bin/earlyoom\0-m\0" + "2\0")
    found = _host.oom_daemons({"dockerd": 1, "earlyoom": 812, "systemd-oomd": 700}, files.read, 100 << 30)
    assert found == [
        {"name": "earlyoom", "pid": 812, "limit": 2 << 30},
        {"name": "systemd-oomd", "pid": 700, "limit": None},
    ]
    assert _host.oom_daemons({"earlyoom": 9}, files.read, 100 << 30)[0]["limit"] == 10 << 30  # it ended in between
    assert _host.oom_daemons({"dockerd": 1}, files.read, 100 << 30) == []


INIT = {"proc__1__comm": "systemd\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/etc/systemd/logind.conf": text("logind.conf")}, True),  # only comments: the default
        ({}, True),
        ({"/etc/systemd/logind.conf": text("logind.conf").replace("#RemoveIPC=yes", "RemoveIPC=no")}, False),
        (
            {"/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n", "/etc/systemd/logind.conf.d/90-x.conf": "[Login]\nRemoveIPC = yes\n"},
            True,
        ),
        ({"/etc/systemd/logind.conf.d/50-ipc.conf": "[Login]\nRemoveIPC=no\n"}, False),
        # A drop-in of /etc replaces the one of the same name, the last name wins.
        (
            {
                "/usr/lib/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=yes\n",
                "/etc/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=no\n",
            },
            False,
        ),
        (
            {
                "/etc/systemd/logind.conf.d/10-a.conf": "[Login]\nRemoveIPC=yes\n",
                "/usr/lib/systemd/logind.conf.d/20-b.conf": "[Login]\nRemoveIPC=0\n",
            },
            False,
        ),
        ({"/etc/systemd/logind.conf.d/50-ipc.conf.bak": "[Login]\nRemoveIPC=no\n"}, True),
    ],
)
def test_remove_ipc(files, expected):
    system = Files(**INIT)
    system.files.update(files)
    assert _host.remove_ipc(system.read, system.listdir) == {"active": expected, "linger": []}


def test_remove_ipc_without_logind_and_of_users_that_linger():
    plain = Files(proc__1__comm="sh\n")
    assert _host.remove_ipc(plain.read, plain.listdir)["active"] is False
    lingers = Files(**INIT).add("/var/lib/systemd/linger/spark", "")
    assert _host.remove_ipc(lingers.read, lingers.listdir) == {"active": True, "linger": ["spark"]}


@pytest.mark.parametrize(
    ("unit", "word"),
    [
        (text("ollama.service"), "ollama"),
        (text("earlyoom.service"), ""),
        ("[Unit]\nDescription=Backup of vllm\n[Service]\nExecStart=/usr/bin/rsync -a /data /backup\n", ""),
        ("[Service]\nExecStart=/usr/bin/docker run --rm \\\n  --gpus all nvcr.io/nim/x\n", "--gpus"),
        ("[Service]\nExecStart=/opt/vllm/venv/bin/ray start --address 169.254.102.149:6379 --block\n", "vllm"),
        ("[Service]\nExecStart=/usr/local/bin/ray start --head --block\n", "ray start"),
        ("[Container]\nImage=docker.io/x/y:1\nAddDevice=nvidia.com/gpu=all\n", "nvidia.com/gpu"),
        ("[Service]\nExecStart=/usr/bin/docker compose up web\n", ""),
    ],
)
def test_what_starts_a_model(unit, word):
    assert _host.served_by(unit) == word


def test_autostart_lists_what_is_enabled():
    served, other = text("ollama.service"), text("earlyoom.service")
    files = Files()
    files.add("/etc/systemd/system/default.target.wants/ollama.service", served)
    files.add("/etc/systemd/system/multi-user.target.wants/earlyoom.service", other)
    files.add("/etc/systemd/system/multi-user.target.wants/dgxspark-serving.service", "[Service]\nExecStart=x vllm\n")  # ours
    files.add("/etc/systemd/system/vllm.service", served)  # there, and not enabled
    files.add(
        "/home/spark/.config/systemd/user/default.target.wants/sglang.service", "[Service]\nExecStart=python3 -m sglang.launch_server\n"
    )
    files.add("/etc/containers/systemd/nim.container", "[Container]\nAddDevice=nvidia.com/gpu=all\n")
    assert _host.autostart(files.read, files.listdir, "/home/spark", "spark") == [
        {"unit": "ollama.service", "word": "ollama"},
        {"unit": "spark/sglang.service", "word": "sglang"},
        {"unit": "nim.service", "word": "nvidia.com/gpu"},
    ]
    empty = Files()
    assert _host.autostart(empty.read, empty.listdir, "", "root") == []
