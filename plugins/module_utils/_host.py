# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of a host works against a server that holds nearly all of its memory: memory that nothing accounts for, daemons that kill, logind,
units that start models.

PRIVATE to the collection. Reads files only, no command is run. What cannot be read is no finding.
"""

from __future__ import annotations

import re
import typing as t

GIB = 1 << 30
# Lines of /proc/meminfo that together name who has the memory. What is left over belongs to a driver.
NAMED = (
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "Hugetlb",
)

OOM_DAEMONS = ("earlyoom", "systemd-oomd", "nohang", "oomd")
EARLYOOM_PERCENT = 10.0  # of the memory, without -m and -M

LOGIND = "logind.conf"
LOGIND_DIRS = ("/usr/lib/systemd", "/lib/systemd", "/usr/local/lib/systemd", "/run/systemd", "/etc/systemd")  # later ones win
LINGER = "/var/lib/systemd/linger"

UNIT_DIR = "/etc/systemd/system"
QUADLET_DIR = "/etc/containers/systemd"
USER_UNIT_DIR = ".config/systemd/user"
OWN_UNIT = "dgxspark-serving"
SERVES = re.compile(
    r"vllm|sglang|ollama|llama[-_.]?server|llama[-_.]cpp|\bray start\b|tritonserver|trtllm|text-generation-(?:launcher|inference)|lmdeploy|lmstudio"
    r"|comfyui|localai|--gpus\b|--runtime[= ]nvidia|nvidia\.com/gpu",
    re.IGNORECASE,
)

Read = t.Callable[[str], str]
ListDir = t.Callable[[str], list[str]]


def unaccounted(meminfo: str) -> int:
    """Bytes of the memory that no line of /proc/meminfo names; 0 where the kernel does not tell enough.

    A driver takes its pages past all of the kernel's counters. So what is left when nothing uses the GPU is what a dead process leaked
    (a GB10's GPU memory is this memory), or what a machine's firmware and drivers always have.
    """
    kib = {found.group(1): int(found.group(2)) for found in re.finditer(r"^(\w+):\s+(\d+)", meminfo, re.MULTILINE)}
    if not {"MemTotal", "Cached", "AnonPages", "Slab"} <= set(kib):
        return 0
    return max(0, kib["MemTotal"] - sum(kib.get(name, 0) for name in NAMED)) * 1024


def earlyoom_limit(arguments: t.Sequence[str], total: int) -> int:
    """Bytes of available memory below which earlyoom kills, from its command line (``-m PERCENT[,KILL]``, ``-M KIB[,KILL]``)."""
    limit = EARLYOOM_PERCENT / 100 * total
    words = list(arguments)
    for place, word in enumerate(words):
        value = (word[2:] or (words[place + 1] if place + 1 < len(words) else "")).partition(",")[0]
        if word.startswith("-m") and re.fullmatch(r"\d+(\.\d+)?", value):
            limit = float(value) / 100 * total
        elif word.startswith("-M") and value.isdigit():
            limit = int(value) * 1024
    return int(limit)


def oom_daemons(found: t.Mapping[str, int], read: Read, total: int) -> list[dict[str, t.Any]]:
    """Daemons that kill when memory is short: name, pid, and ``limit`` in bytes of available memory (None when it goes by other signs)."""
    result = []
    for name in OOM_DAEMONS:
        if name in found:
            limit = None
            if name == "earlyoom":
                try:
                    words = read(f"/proc/{found[name]}/cmdline").split("\0")
                except OSError:
                    words = []
                limit = earlyoom_limit(words, total)
            result.append({"name": name, "pid": found[name], "limit": limit})
    return result


def _text(read: Read, path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""


def _names(listdir: ListDir, path: str) -> list[str]:
    try:
        return sorted(listdir(path))
    except OSError:
        return []


def remove_ipc(read: Read, listdir: ListDir) -> dict[str, t.Any]:
    """Whether logind removes the shared memory of a user with the last session (``active``; it does when nobody says otherwise), and the
    users that ``linger``: they never fully log out. ``active`` is False where there is no logind."""
    if not _text(read, "/proc/1/comm").startswith(("systemd", "init")):
        return {"active": False, "linger": []}
    drop_ins: dict[str, str] = {}
    main = ""
    for folder in LOGIND_DIRS:
        main = _text(read, f"{folder}/{LOGIND}") or main
        drop_ins.update({name: f"{folder}/{LOGIND}.d/{name}" for name in _names(listdir, f"{folder}/{LOGIND}.d") if name.endswith(".conf")})
    value = "yes"
    for text in [main, *[_text(read, drop_ins[name]) for name in sorted(drop_ins)]]:
        for found in re.finditer(r"^\s*RemoveIPC\s*=\s*(\S*)", text, re.MULTILINE):
            value = found.group(1) or "yes"
    return {"active": value.lower() in ("yes", "true", "on", "1", "y", "t"), "linger": _names(listdir, LINGER)}


def served_by(text: str) -> str:
    """The word in a unit's commands (or in a quadlet) that says it starts a model or takes the GPU; "" when none does."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if re.match(r"(Exec\w*|Image|AddDevice|PodmanArgs)\s*=", line):
            found = SERVES.search(line)
            if found:
                return found.group(0)
    return ""


def autostart(read: Read, listdir: ListDir, home: str, user: str) -> list[dict[str, str]]:
    """Units that an administrator (or the login user) enabled for the boot and that start a model: ``unit`` (``user/name`` for one of a
    user's own) and the ``word`` that says so. Commands are not returned: they may hold secrets."""
    result = []
    for folder, prefix in ((UNIT_DIR, ""), (f"{home}/{USER_UNIT_DIR}", f"{user}/")):
        if prefix and not home:
            continue
        units: dict[str, str] = {}
        for wants in _names(listdir, folder):
            if wants.endswith((".wants", ".requires")):
                units.update(
                    {name: f"{folder}/{wants}/{name}" for name in _names(listdir, f"{folder}/{wants}") if name.endswith(".service")}
                )
        for name, path in sorted(units.items()):
            word = "" if name.startswith(OWN_UNIT) else served_by(_text(read, path))
            if word:
                result.append({"unit": prefix + name, "word": word})
    for name in _names(listdir, QUADLET_DIR):
        word = served_by(_text(read, f"{QUADLET_DIR}/{name}")) if name.endswith(".container") else ""
        if word:
            result.append({"unit": name.removesuffix(".container") + ".service", "word": word})
    return result
