# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an old service needs besides "start" to come back: commands that were run in its container by hand, and containers that remove themselves.

PRIVATE to the collection. Pure functions; the module service_stop looks and acts.
"""

from __future__ import annotations

import os
import typing as t

WRAPPERS = ("docker-init", "tini", "dumb-init", "catatonit")
IDLERS = ("sleep", "tail", "pause", "cat", "inotifywait")
SHELLS = ("sh", "bash", "dash", "ash", "zsh", "busybox")


def idle(command: t.Sequence[str]) -> bool:
    """Whether the container's own command only keeps it alive (``sleep infinity``, ``tail -f /dev/null``, a shell): what serves was started by hand."""
    words = [str(word) for word in command]
    while words and os.path.basename(words[0]) in WRAPPERS:
        words = words[1:]
        while words and words[0].startswith("-"):
            words = words[1:]
    if not words:
        return False
    name = os.path.basename(words[0].lstrip("-"))  # a login shell calls itself -bash
    if name in IDLERS:
        return True
    if name not in SHELLS:
        return False
    rest = [word for word in words[1:] if not (word.startswith("-") and word.lstrip("-") in ("l", "i", "login", "il", "li"))]
    if not rest:
        return True
    if rest[0].startswith("-") and rest[0].endswith("c") and len(rest) > 1:  # sh -c "exec sleep infinity"
        first = rest[1].replace("exec ", "").split()
        return bool(first) and os.path.basename(first[0]) in IDLERS and not any(sign in rest[1] for sign in "&;|")
    return False


def parse_top(text: str) -> dict[int, int]:
    """``docker top <container> -eo pid,ppid`` -> {pid: parent}, numbers of the host."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return {int(row[0]): int(row[1]) for row in rows if len(row) >= 2 and row[0].isdigit() and row[1].isdigit()}


def started_by_hand(parents: t.Mapping[int, int], main: int, command_is_idle: bool, argv: t.Callable[[int], t.Sequence[str]]) -> list[int]:
    """The processes of a container that its own command did not start: the topmost one of each.

    With ``docker exec`` the parent is outside the container; what was put into the background of a shell that is gone has become a child of
    the main process, which an idle command has none of. A shell somebody sits in is no service; what was started in it is.
    """

    def below(root: int) -> list[int]:
        words = [str(word) for word in argv(root)]
        if words and os.path.basename(words[0].lstrip("-")) in SHELLS and idle(words):
            return [pid for child in sorted(p for p, parent in parents.items() if parent == root) for pid in below(child)]
        return [root]

    roots = sorted(
        pid for pid, parent in parents.items() if pid != main and (parent not in parents or (parent == main and command_is_idle))
    )
    return [pid for root in roots for pid in below(root)]


def health_check(config: t.Mapping[str, t.Any]) -> list[str]:
    """The command line of a container's own health check; [] when it has none."""
    test = [str(word) for word in (config.get("Healthcheck") or {}).get("Test") or []]
    if test[:1] == ["CMD-SHELL"]:
        return [*(str(word) for word in config.get("Shell") or ["/bin/sh", "-c"]), *test[1:2]]
    return test[1:] if test[:1] == ["CMD"] else []


def age(stat: str, uptime: str, ticks: int = 100) -> float:
    """Seconds since a process was started, from /proc/<pid>/stat and /proc/uptime; endless when that is not known."""
    fields = stat.rpartition(")")[2].split()
    try:
        return float(uptime.split()[0]) - float(fields[19]) / ticks
    except (IndexError, ValueError):
        return float("inf")


def environment(text: str, own: t.Iterable[str]) -> dict[str, str]:
    """What a process has in /proc/<pid>/environ that the container does not have; values of several lines cannot be given again."""
    known = set(own)
    pairs = [entry for entry in text.split("\0") if "=" in entry and entry not in known and "\n" not in entry]
    skipped = ("HOSTNAME", "HOME", "TERM", "SHLVL", "_", "OLDPWD", "PWD")
    return {key: value for key, dummy, value in (entry.partition("=") for entry in pairs) if key not in skipped}


def exec_argv(container: str, entry: t.Mapping[str, t.Any], env_file: str) -> list[str]:
    """``docker exec -d`` as it must have been."""
    argv = ["docker", "exec", "-d", "--user", str(entry["user"]), "--workdir", str(entry["cwd"]), "--env-file", env_file]
    return [*argv, container, *entry["argv"]]


def definition(inspected: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The body of ``POST /containers/create`` that makes a container as this one is."""
    config = dict(inspected.get("Config") or {})
    host = dict(inspected.get("HostConfig") or {})
    if host.get("NetworkMode") == "host" or config.get("Hostname") == str(inspected.get("Id"))[:12]:
        config.pop("Hostname", None)
        config.pop("Domainname", None)
    networks = {}
    if str(host.get("NetworkMode") or "") not in ("host", "none", "default", "bridge") and not str(host.get("NetworkMode")).startswith(
        "container:"
    ):
        for name, network in ((inspected.get("NetworkSettings") or {}).get("Networks") or {}).items():
            networks[name] = {key: network.get(key) for key in ("Aliases", "IPAMConfig", "Links") if network.get(key)}
    return {**config, "HostConfig": host, **({"NetworkingConfig": {"EndpointsConfig": networks}} if networks else {})}


def nameless_volumes(inspected: t.Mapping[str, t.Any]) -> list[str]:
    """Where a container that removes itself has data that are removed with it."""
    mounts = inspected.get("Mounts") or []
    return sorted(str(m.get("Destination")) for m in mounts if m.get("Type") == "volume" and len(str(m.get("Name") or "")) == 64)


PRIVATE = ("by_hand", "definitions")  # of an entry: they hold environments, so they stay in the record, which only root reads


def public(entry: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """An entry of the record as it may be shown."""
    shown = {key: value for key, value in entry.items() if key not in PRIVATE}
    by_hand = entry.get("by_hand") or {}
    if by_hand:
        shown["commands"] = {name: [os.path.basename(str(e["argv"][0])) for e in entries] for name, entries in by_hand.items()}
    return shown


def public_record(record: t.Mapping[str, t.Any] | None) -> dict[str, t.Any] | None:
    """The record as it may be shown."""
    return {**record, "stopped": [public(entry) for entry in record.get("stopped", [])]} if record else None
