# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of a node's network that takes itself back: netplan applied, proven or reverted by the node alone.

PRIVATE to the collection. This file is also the program that runs on the node (``python3 change.py apply|revert|undo``, as transient systemd units): it uses
the standard library and imports nothing of the collection, and it needs no connection to anyone.

Until a change is confirmed its file lives in /run/netplan, where it takes the place of the file of that name in /etc/netplan: a reboot is a revert too.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import subprocess
import sys
import time
import typing as t

RUN_DIR = "/run/dgxspark-fabric"  # not below /run/dgxspark-serving: teardown.yml removes that
UNIT = "dgxspark-fabric"
NETPLAN_RUN = "/run/netplan"
NETPLAN_ETC = "/etc/netplan"
APPLY_SECONDS = 60
SETTLE_ROUNDS = 32  # looks at the ports, half a second apart, at most
QUIET_ROUNDS = 4  # in which nothing had to be done: netplan's renderer is done as well
EMPTY = "network:\n  version: 2\n"

Run = t.Callable[[t.Sequence[str], float], "tuple[int, str, str]"]
Links = dict[str, dict[str, t.Any]]


def command(argv: t.Sequence[str], seconds: float) -> tuple[int, str, str]:
    """A bounded command; 124 when the time was over, 127 when there is no such program."""
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no end within {seconds:g} s"
    except OSError as exc:
        return 127, "", str(exc)
    return done.returncode, done.stdout, done.stderr


# --- links ---------------------------------------------------------------------------------------------------------------------------------


def links_of(addr: str, routes: t.Mapping[str, str], names: t.Iterable[str]) -> Links:
    """State of interfaces out of ``ip -j addr`` and, by interface, ``ip -j -4 route show dev``: IPv4 addresses that are not leased, MTU, up, routes that
    are not the kernel's own.
    """
    found: Links = {}
    wanted = set(names)
    for row in json.loads(addr or "[]"):
        name = row.get("ifname", "")
        if name not in wanted:
            continue
        kept = [item for item in json.loads(routes.get(name) or "[]") if item.get("protocol") not in ("kernel", "dhcp", "ra")]
        found[name] = {
            "addresses": [
                f"{item['local']}/{item['prefixlen']}"
                for item in row.get("addr_info") or []
                if item.get("family") == "inet" and item.get("local") and not item.get("dynamic")
            ],
            "mtu": int(row.get("mtu") or 0),
            "up": "UP" in (row.get("flags") or []),
            "routes": [{key: item[key] for key in ("dst", "gateway", "metric") if key in item} for item in kept],
        }
    return found


def read_links(names: t.Iterable[str], run: Run) -> Links:
    """The same of this node, now."""
    names = sorted(names)
    rc, out, dummy = run(["ip", "-j", "addr"], 10)
    routes = {name: run(["ip", "-j", "-4", "route", "show", "dev", name], 10)[1] for name in names}
    try:
        return links_of(out if rc == 0 else "[]", routes, names)
    except ValueError:
        return {}


def steps_to(now: t.Mapping[str, t.Any], target: t.Mapping[str, t.Any], name: str) -> list[list[str]]:
    """Commands that bring one interface to a state. What is missing is added before anything is taken away: an address in use never goes."""
    steps = []
    if target["mtu"] and now["mtu"] != target["mtu"]:
        steps.append(["ip", "link", "set", name, "mtu", str(target["mtu"])])
    if target["up"] and not now["up"]:
        steps.append(["ip", "link", "set", name, "up"])
    for address in target["addresses"]:
        if address not in now["addresses"]:
            broadcast = str(ipaddress.ip_interface(address).network.broadcast_address)
            steps.append(
                ["ip", "addr", "add", address, *(["broadcast", broadcast] if not address.endswith(("/31", "/32")) else []), "dev", name]
            )
    steps += [["ip", "addr", "del", address, "dev", name] for address in now["addresses"] if address not in target["addresses"]]
    for route in target["routes"]:
        if route not in now["routes"]:
            gateway = ["via", route["gateway"]] if "gateway" in route else []
            metric = ["metric", str(route["metric"])] if "metric" in route else []
            steps.append(["ip", "route", "replace", route["dst"], *gateway, "dev", name, *metric])
    if now["up"] and not target["up"]:
        steps.append(["ip", "link", "set", name, "down"])
    return steps


def restore_links(target: Links, run: Run, sleep: t.Callable[[float], None] = time.sleep) -> list[list[str]]:
    """Bring interfaces to a state and keep them there until what netplan's renderer still does is over. Returns the commands that were needed."""
    done: list[list[str]] = []
    quiet = 0
    for dummy in range(SETTLE_ROUNDS):
        now = read_links(target, run)
        steps = [step for name in target if name in now for step in steps_to(now[name], target[name], name)]
        for step in steps:
            run(step, 10)
        done += steps
        quiet = 0 if steps else quiet + 1
        if quiet > QUIET_ROUNDS:
            break
        sleep(0.5)
    return done


# --- the change ----------------------------------------------------------------------------------------------------------------------------


class Change:
    """The one change of a node that may be under way; its state is a file, so that every process on the node knows it."""

    def __init__(
        self,
        run_dir: str = RUN_DIR,
        etc: str = NETPLAN_ETC,
        volatile: str = NETPLAN_RUN,
        run: Run = command,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self.run_dir = run_dir
        self.etc = etc
        self.volatile = volatile
        self.run = run
        self.sleep = sleep

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)

    def read(self, name: str = "state.json") -> dict[str, t.Any]:
        """A file of the change; {} when it is not there."""
        try:
            with open(self._path(name), encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write(self, data: t.Mapping[str, t.Any], name: str = "state.json") -> None:
        """Replace a file of the change at once."""
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        put(self._path(name), json.dumps(data, sort_keys=True))

    @contextlib.contextmanager
    def locked(self) -> t.Iterator[dict[str, t.Any]]:
        """The state, while nobody else can decide about it."""
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        with open(self._path("lock"), "w", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield self.read()

    def apply(self) -> None:
        """Carry a pending change out; one that netplan refuses is taken back at once."""
        with self.locked() as state:
            if state.get("phase") != "pending":
                return
            rc, out, err = self.run(["netplan", "apply"], APPLY_SECONDS)
            if rc != 0:
                self._back(state, f"netplan apply ended with code {rc}: {' '.join((err or out).split())[-400:]}")
                return
            if state.get("links"):
                restore_links(state["links"], self.run, self.sleep)
            self.write({**state, "phase": "applied"})

    def revert(self, why: str, confirmed: bool = False) -> None:
        """Take a change back that was not confirmed; with ``confirmed`` also one that was."""
        with self.locked() as state:
            if state.get("phase") in ("pending", "applied", *(["confirmed"] if confirmed else [])):
                self._back(state, why)

    def _back(self, state: t.Mapping[str, t.Any], why: str) -> None:
        if state["phase"] == "confirmed":
            self._install(state["name"], state["previous"])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.volatile, state["name"]))
        rc, out, err = self.run(["netplan", "apply"], APPLY_SECONDS)
        if rc != 0:
            why += f"; netplan apply of the configuration from before ended with code {rc}: {' '.join((err or out).split())[-200:]}"
        restore_links(state["before"], self.run, self.sleep)
        self.write({**state, "phase": "reverted", "why": why})
        self.disarm()

    def disarm(self) -> None:
        """The timer is not needed any more."""
        self.run(["systemctl", "stop", f"{UNIT}-revert.timer"], 20)

    def _install(self, name: str, text: str) -> None:
        path = os.path.join(self.etc, name)
        if text:
            put(path, text)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def confirm(self) -> str:
        """Make a change that is applied the one that stays; "" or why not."""
        with self.locked() as state:
            if state.get("phase") != "applied":
                return str(state.get("why") or f"the change is {state.get('phase', 'unknown')}")
            self._install(state["name"], state["text"])
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.volatile, state["name"]))
            self.write({**state, "phase": "confirmed"})
            return ""


def put(path: str, text: str) -> None:
    """Write a file that only root can read, whole or not at all."""
    temporary = f"{path}.new"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(temporary, 0o600)
    os.replace(temporary, path)


def main(argv: t.Sequence[str]) -> int:
    """``change.py apply``, ``change.py revert`` (the timer) or ``change.py undo <why>``."""
    change = Change()
    if argv[1:2] == ["apply"]:
        change.apply()
    elif argv[1:2] == ["revert"]:
        change.revert("nobody confirmed the change in time")
    elif argv[1:2] == ["undo"]:
        change.revert(" ".join(argv[2:]), confirmed=True)
    else:
        return 64
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
