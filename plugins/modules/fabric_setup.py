#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_setup
short_description: Gives the fabric ports of a node their addresses, with a timed automatic revert
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Writes one netplan file, F(/etc/netplan/99-spark-fabric.yaml) (mode 0600), and no other one. The port is the one that has O(address), or the only fast
    one with a cable; its other half (the twin in the other PCI domain) gets the same host number in O(rail_subnet).
  - A change has three steps. O(step=change) arms a timer on the node (a transient systemd unit) that takes the change back after O(timeout) seconds, puts
    the file into F(/run/netplan), where it takes the place of the one in F(/etc/netplan), and has the node apply it. O(step=prove) opens a B(new) connection,
    looks at addresses and MTU and proves the path to every peer with M(dgxspark.serving.fabric_check), again and again until it works or the time is nearly
    over. O(step=confirm) makes the file the one in F(/etc/netplan) and stops the timer. Without it, or after a reboot, the node has what it had before.
  - What is restored is the file that was there before, and the addresses, MTU, static routes and up or down of the ports, also where they were set by hand.
  - Refused before anything is changed - another netplan file or NetworkManager profile that says something else about a port, a subnet that another
    interface has, and a change that would take away the address by which Ansible reaches the node.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: O(step=change) runs every check and changes nothing; the other steps do nothing.
  diff_mode:
    support: full
  idempotent:
    support: full
    details: O(step=change) reports no change when the file is as wanted and all of it is so on the ports at this moment.
options:
  step:
    description: What to do, see above. V(revert) takes the change of this run back now and waits until the node has answered over a new connection.
    type: str
    choices: [change, prove, confirm, revert]
    default: change
  state:
    description: Whether the fabric ports are set up by this module. For O(step=change).
    type: str
    choices: [present, absent]
    default: present
  address:
    description: This node's address on the fabric. Required for O(state=present).
    type: str
    default: ""
  subnet:
    description: Subnet of the fabric, in CIDR form. Required for O(state=present).
    type: str
    default: ""
  rail_subnet:
    description:
      - Subnet of the second rail (the other half of the port), of the same size. Empty is the one that follows O(subnet), V(none) leaves the other half alone.
    type: str
    default: ""
  interface:
    description: The fabric port of this node. Empty finds it.
    type: str
    default: ""
  mtu:
    description: MTU of the ports, in bytes.
    type: int
    default: 9000
  gang:
    description: All nodes with C(node) and C(address) as M(dgxspark.serving.serving_settings) returns them. For O(step=prove).
    type: list
    elements: dict
    default: []
  change_id:
    description:
      - RV(setup.change_id) of the change that O(step=revert) takes back, also when it was confirmed already. Without it only one that waits for its
        confirmation is taken back.
    type: str
    default: ""
  timeout:
    description: Seconds after which the node takes an unconfirmed change back by itself. For O(step=change).
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Change the ports
  dgxspark.serving.fabric_setup:
    node: "{{ inventory_hostname }}"
    address: 192.168.200.12
    subnet: 192.168.200.0/24
  register: change

- name: Prove it over a new connection
  dgxspark.serving.fabric_setup:
    node: "{{ inventory_hostname }}"
    step: prove
    gang:
      - {node: spark-1, address: 192.168.200.12}
      - {node: spark-2, address: 192.168.200.13}
  when: change is changed

- name: Keep it
  dgxspark.serving.fabric_setup:
    node: "{{ inventory_hostname }}"
    step: confirm
  when: change is changed
"""

RETURN = r"""
setup:
  description: The change and the ports.
  returned: success
  type: dict
  contains:
    phase:
      description:
        - V(none), V(pending) (not applied yet), V(applied) (waits for the confirmation), V(confirmed) or V(reverted).
      type: str
    why:
      description: Why it was reverted, or what is not as wanted yet.
      type: str
    ready:
      description: Whether the change is applied and the ports are as wanted.
      type: bool
    change_id:
      description: Name of the change.
      type: str
    left:
      description: Seconds until the node takes the change back.
      type: float
    ports:
      description: Ports of the file, with C(name), C(address), C(addresses) and C(mtu).
      type: list
      elements: dict
    path:
      description: The file.
      type: str
    summary:
      description: The ports in a few words.
      type: str
    notes:
      description: What should be known, such as other files that have a port too.
      type: list
      elements: str
problem:
  description: The failure as data, with C(id), C(node), C(stage), C(found), C(expected), C(remedy) and C(details).
  returned: failure
  type: dict
"""

import contextlib
import glob
import os
import secrets
import shutil
import sys
import tempfile
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric_change, _fabric_setup
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_change import UNIT
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_setup import NAME, STAGE, Wanted
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Interface, Sysfs, add_sysfs, parse_addr
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas

NETPLAN_DIRS = ("/lib/netplan", _fabric_change.NETPLAN_ETC, _fabric_change.NETPLAN_RUN)
KEYFILES = "/etc/NetworkManager/system-connections/*.nmconnection"


def read_file(path: str) -> str:
    """Text of a small file."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()


def text_or_nothing(path: str) -> str:
    """The same; "" when it is not there."""
    try:
        return read_file(path)
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Parent of a process; 0 when it has gone."""
    stat = text_or_nothing(f"/proc/{pid}/stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else 0


class Setup:
    """One run of the module."""

    def __init__(self, module: AnsibleModule, change: _fabric_change.Change, sysfs: Sysfs) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        self.change = change
        self.sysfs = sysfs
        self.run = change.run
        self.path = os.path.join(change.etc, NAME)
        self.notes: list[str] = []
        self.result: dict[str, t.Any] = {"changed": False}

    def problem(self, ident: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
        """A Problem of this node."""
        return Problem(ident, node=self.params["node"], stage=STAGE, found=found, expected=expected, remedy=remedy, **details)

    # -- looking

    def interfaces(self) -> list[Interface]:
        """What iproute2 and sysfs say."""
        rc, out, err = self.run(["ip", "-j", "-d", "addr"], 10)
        if rc != 0:
            raise self.problem(
                "iproute2",
                f"'ip -j -d addr' failed with code {rc}: {' '.join(err.split())}",
                "iproute2 that can print JSON",
                "install iproute2",
            )
        found = parse_addr(out)
        add_sysfs(found, self.sysfs)
        return found

    def yaml(self, path: str) -> t.Any:
        """A netplan file."""
        try:
            import yaml
        except ImportError:
            raise self.problem("fabric-netplan", "no Python module yaml", "netplan and what belongs to it", "install netplan.io") from None
        try:
            return yaml.safe_load(read_file(path))
        except (OSError, yaml.YAMLError) as exc:
            raise self.problem(
                "fabric-netplan", f"{path}: {' '.join(str(exc).split())[:300]}", "YAML that netplan can read", "correct it, or move it away"
            ) from None

    def others(self) -> list[str]:
        """Every netplan file but ours."""
        return [path for folder in NETPLAN_DIRS for path in sorted(glob.glob(f"{folder}/*.yaml")) if os.path.basename(path) != NAME]

    def need(self) -> None:
        """What every change needs."""
        if os.geteuid() != 0:
            raise self.problem("fabric-netplan", f"user {os.geteuid()}", "root, to change the network", "leave spark_become true")
        missing = [name for name in ("netplan", "systemd-run", "ip") if not shutil.which(name)]
        if missing:
            raise self.problem(
                "fabric-netplan",
                f"no command {', '.join(missing)}",
                "netplan and systemd, as on DGX OS and Ubuntu",
                "install netplan.io, or set the addresses with what this node has for it",
            )

    # -- the steps

    def step_change(self) -> None:
        """Find out what has to be changed; outside check mode start it."""
        self.need()
        current = text_or_nothing(self.path)
        if current and not current.startswith(_fabric_setup.HEADER.partition(",")[0]):
            raise self.problem(
                "fabric-conflict",
                f"a file {self.path} that was not written by dgxspark.serving",
                "no such file, or our own",
                f"sudo mv {self.path} {self.path}.off",
            )
        self.pending()
        had = _addresses(self.yaml(self.path)) if current else {}
        ports: list[dict[str, t.Any]] = []
        if self.params["state"] == "present":
            ports = self.wanted_ports(had)
        text = _fabric_setup.file_text(ports) if ports else ""
        names = sorted({*had, *(port["name"] for port in ports)})
        links = _fabric_change.read_links(names, self.run)
        changed = current != text
        if ports and not changed:
            mode_wrong = os.stat(self.path).st_mode & 0o777 != 0o600
            changed = mode_wrong or any(_fabric_setup.not_live(port, links) for port in ports)
        self.result.update(
            changed=changed,
            diff={"before_header": self.path, "before": current, "after_header": self.path if text else "(no file)", "after": text},
        )
        state = self.plan(current, had, ports, text, links)
        # netplan applies every edit that waits in its files: the interface by which Ansible comes has to come back, too
        login = self.login()
        way = [i.name for i in self.interfaces() if i.name not in names and any(a.address == login for a in i.addresses)]
        state["before"] = {**links, **_fabric_change.read_links(way, self.run)}
        after = {
            **{name: target["addresses"] for name, target in state["links"].items()},
            **{port["name"]: port["addresses"] for port in ports},
        }
        if changed:
            _fabric_setup.check_login(self.problem, login, links, after)
            self.validate(text)
            if not self.module.check_mode:
                self.start(state)
        self.answer(ports)

    def wanted_ports(self, had: dict[str, list[str]]) -> list[dict[str, t.Any]]:
        """The ports of the inventory on this node, with nothing in the way of them. Raises Problem."""
        wanted: Wanted = _fabric_setup.parse(self.params)
        interfaces = self.interfaces()
        rdma = {name for hca in read_hcas(self.sysfs) for name in hca.netdevs}
        ours = [name for name, addresses in had.items() if any(item.partition("/")[0] == wanted.address for item in addresses)]
        ports = _fabric_setup.choose_ports(wanted, interfaces, rdma, ours)
        if wanted.rail and len(ports) == 1:
            self.notes.append(f"{ports[0]['name']} has no other half here: one rail only")
        by_name = {item.name: item for item in interfaces}
        hardware = {
            port["name"]: (by_name[port["name"]].driver, self.sysfs.text("class", "net", port["name"], "address") or "") for port in ports
        }
        files = {path: self.yaml(path) for path in self.others()}
        conflicts, notes = _fabric_setup.netplan_conflicts(files, ports, hardware)
        conflicts += _fabric_setup.keyfile_conflicts({path: text_or_nothing(path) for path in glob.glob(KEYFILES)}, list(hardware))
        self.notes += notes
        if conflicts:
            beside = {path: _fabric_setup.beside(content, hardware) for path, content in files.items()}
            raise _fabric_setup.conflict_problem(wanted, conflicts, beside)
        return ports

    def plan(
        self, current: str, had: dict[str, list[str]], ports: list[dict[str, t.Any]], text: str, links: _fabric_change.Links
    ) -> dict[str, t.Any]:
        """The state of the change. ``original``: ports as they were before they became ours; ``links``: what ports that are given up go back to."""
        original = self.change.read("before.json") if current else {}
        names = [port["name"] for port in ports]
        original.update({name: links[name] for name in names if name not in original and name not in had and name in links})
        back = {}
        for name in had:
            if name not in names and name in links:
                theirs = [address for path in self.others() for address in _addresses(self.yaml(path)).get(name, [])]
                kept = [address for address in links[name]["addresses"] if address not in had[name] or address in theirs]
                back[name] = original.get(name) or {**links[name], "addresses": kept}
        return {
            "name": NAME,
            "text": text,
            "previous": current,
            "ports": ports,
            "before": links,
            "links": back,
            "original": {name: original[name] for name in names if name in original},
        }

    def login(self) -> str:
        """The own address of the connection that this runs under."""
        return _fabric_setup.login_address(lambda pid: text_or_nothing(f"/proc/{pid}/environ"), parent, os.getpid())

    def validate(self, text: str) -> None:
        """Have netplan read the whole configuration, away from the real one. Raises Problem."""
        with tempfile.TemporaryDirectory(prefix="fabric-") as root:
            for path in self.others():
                target = os.path.join(root, path.lstrip("/"))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                _fabric_change.put(target, read_file(path))
            os.makedirs(os.path.join(root, "etc/netplan"), exist_ok=True)
            _fabric_change.put(os.path.join(root, "etc/netplan", NAME), text or _fabric_change.EMPTY)
            rc, out, err = self.run(["netplan", "generate", "--root-dir", root], 30)
        if rc != 0:
            raise self.problem(
                "fabric-netplan",
                f"netplan refuses the configuration: {' '.join((err or out).replace(root, '').split())[:400]}",
                "a configuration that netplan takes",
                "correct the file that it names",
            )

    def start(self, state: dict[str, t.Any]) -> None:
        """Arm the timer, put the file in its place and have the node apply it."""
        timeout = self.params["timeout"]
        for unit in ("revert", "apply"):
            self.run(["systemctl", "stop", f"{UNIT}-{unit}.timer"], 10)
        self.change.write({**state, "id": secrets.token_hex(8), "phase": "pending", "why": "", "deadline": time.monotonic() + timeout})
        program = os.path.join(self.change.run_dir, "change.py")
        source = _fabric_change.__loader__.get_source(_fabric_change.__name__)  # type: ignore[union-attr]
        _fabric_change.put(program, source)
        self.unit("revert", timeout, program)
        os.makedirs(self.change.volatile, exist_ok=True)
        _fabric_change.put(os.path.join(self.change.volatile, NAME), state["text"] or _fabric_change.EMPTY)
        self.unit("apply", 1, program)

    def unit(self, action: str, seconds: int, program: str) -> None:
        """A timer on the node. Raises Problem, with nothing left behind."""
        argv = ["systemd-run", "--quiet", "--no-ask-password", "--collect", f"--unit={UNIT}-{action}", f"--on-active={seconds}s"]
        argv += ["--timer-property=AccuracySec=100ms", f"--description=dgxspark.serving: {action} a change of the fabric"]
        rc, out, err = self.run([*argv, sys.executable, "-I", program, action], 20)
        if rc != 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.change.volatile, NAME))
            self.change.write({})
            self.change.disarm()
            raise self.problem(
                "fabric-netplan",
                f"systemd-run: {' '.join((err or out).split())[:300]}",
                "a timer that can take the change back",
                "look at 'systemctl status'; without that timer nothing is changed",
            )

    def pending(self) -> None:
        """Another change must not be under way; one whose timer is gone is taken back first. Raises Problem."""
        state = self.change.read()
        if state.get("phase") not in ("pending", "applied"):
            return
        left = state["deadline"] - time.monotonic()
        if self.run(["systemctl", "is-active", "--quiet", f"{UNIT}-revert.timer"], 10)[0] == 0:
            raise self.problem(
                "fabric-pending",
                "a change of an earlier run that nobody has confirmed",
                "no other change under way",
                f"wait {max(1, int(left) + 1)} s: the node takes it back by itself; then run this again",
            )
        if not self.module.check_mode:
            self.change.revert("its timer was gone")

    def step_confirm(self) -> None:
        """Keep what is applied."""
        if self.module.check_mode:
            return self.answer([])
        why = self.change.confirm()
        if why:
            raise self.problem(
                "fabric-reverted", why, "a change that is applied and waits for the confirmation", "run playbooks/fabric.yml again"
            )
        state = self.change.read()
        self.result["changed"] = True
        self.change.disarm()
        if state["text"]:
            self.change.write(state["original"], "before.json")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.change.run_dir, "before.json"))
        return self.answer(state["ports"])

    def step_revert(self) -> None:
        """Have the node take the change of this run back now; it may cut this connection."""
        state = self.change.read()
        ours = bool(self.params["change_id"]) and self.params["change_id"] == state.get("id")
        if state.get("phase") in ("pending", "applied", *(["confirmed"] if ours else [])) and not self.module.check_mode:
            program = os.path.join(self.change.run_dir, "change.py")
            argv = ["systemd-run", "--quiet", "--no-ask-password", "--collect", "--no-block", f"--unit={UNIT}-now"]
            self.run([*argv, sys.executable, "-I", program, "undo", "a node of the gang failed"], 20)
        self.answer(state.get("ports", []))

    def step_prove(self) -> None:
        """Whether the change is applied and the ports are as wanted; the action plugin asks again and proves the path."""
        self.answer(self.change.read().get("ports", []))

    def answer(self, ports: list[dict[str, t.Any]]) -> None:
        """What is known now."""
        state = self.change.read()
        phase = state.get("phase", "none")
        why = str(state.get("why", ""))
        if phase == "applied":
            links = _fabric_change.read_links([port["name"] for port in ports], self.run)
            why = next(filter(None, (_fabric_setup.not_live(port, links) for port in ports)), "")
        elif phase == "pending":
            why = "netplan has not finished yet"
        self.result["setup"] = {
            "phase": phase,
            "change_id": state.get("id", ""),
            "why": why,
            "ready": phase == "applied" and not why,
            "left": round(max(0.0, state.get("deadline", 0.0) - time.monotonic()), 1),
            "ports": ports,
            "path": self.path,
            "summary": ", ".join(f"{port['name']} {port['addresses'][0]}" for port in ports) or "no fabric ports of ours",
            "notes": self.notes,
        }


def _addresses(content: t.Any) -> dict[str, list[str]]:
    """Addresses of each port in a netplan file."""
    network = content.get("network") if isinstance(content, dict) else None
    ethernets = (network if isinstance(network, dict) else {}).get("ethernets") or {}
    return {name: [str(item) for item in (port or {}).get("addresses") or []] for name, port in ethernets.items()}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "step": {"type": "str", "choices": ["change", "prove", "confirm", "revert"], "default": "change"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "address": {"type": "str", "default": ""},
            "subnet": {"type": "str", "default": ""},
            "rail_subnet": {"type": "str", "default": ""},
            "interface": {"type": "str", "default": ""},
            "mtu": {"type": "int", "default": 9000},
            "gang": {"type": "list", "elements": "dict", "default": []},
            "change_id": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    setup = Setup(module, _fabric_change.Change(), Sysfs("/sys", read_file, os.listdir, os.path.realpath))
    try:
        getattr(setup, f"step_{module.params['step']}")()
    except Problem as exc:
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **{**setup.result, "changed": False})
    module.exit_json(**setup.result)


if __name__ == "__main__":
    main()
