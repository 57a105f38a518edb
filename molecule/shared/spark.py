# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the scenarios have in common: run the playbook as a person does, look at the nodes from outside, ask the API."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "inventory" / "lab"
SITE = ROOT / "playbooks" / "site.yml"
HEAD, WORKER = "spark-1", "spark-2"
# As lab/sparklab.py gives addresses: the scenarios run on any lab, also one beside the usual one.
FABRIC = ipaddress.ip_network(os.environ.get("SPARKLAB_FABRIC") or "192.168.200.0/24")
NODES = {HEAD: str(FABRIC[12]), WORKER: str(FABRIC[13])}
GATEWAY = str(ipaddress.ip_network(os.environ.get("SPARKLAB_MGMT") or "10.1.230.0/24")[2])
OLD = "glm-sglang"
OURS = ("spark-ray", "spark-vllm")
NAME = os.environ.get("SPARKLAB_NAME") or "sparklab"
STATE = "/var/lib/dgxspark-serving"


def settings() -> dict[str, t.Any]:
    """The lab's inputs."""
    return yaml.safe_load((LAB / "group_vars" / "sparks.yml").read_text(encoding="utf-8"))


# --- the playbook -----------------------------------------------------------------------------------------------------------


class Run:
    """The outcome of one run of the playbook."""

    def __init__(self, rc: int, output: str, times: t.Sequence[tuple[float, str]] = ()) -> None:
        self.rc = rc
        self.output = output
        self.times = times  # when each line came (time.monotonic), and the line
        # Continued lines of a YAML string are joined, so that a message can be searched as it was meant.
        self.text = re.sub(r"\s+", " ", output)
        self.recap = {
            found["host"]: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", found["counts"])}
            for found in re.finditer(r"^(?P<host>\S+)\s+: (?P<counts>ok=\d+.*)$", output, re.MULTILINE)
        }

    @property
    def failures(self) -> list[str]:
        """The hosts for which a task failed for good, in order. What a rescue took over counts as well."""
        return re.findall(r"^fatal: \[([^\]]+)\]", self.output, re.MULTILINE)

    def failed_at(self) -> float:
        """When the first failure was shown."""
        return next(at for at, line in self.times if line.startswith("fatal: ["))

    @property
    def bundle(self) -> dict[str, str]:
        """The files of the diagnostics bundle that the last message names, without the name of its folder."""
        found = re.search(r"is in (\S+\.tar\.gz) on this machine", self.message(self.failures[-1], last=True))
        assert found, "no bundle is named"
        path = Path(found[1])
        assert path.stat().st_mode & 0o777 == 0o600
        with tarfile.open(path) as tar:
            files = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar.getmembers()}
            return {name: handle.read().decode() for name, handle in files.items() if handle}

    def message(self, node: str, last: bool = False) -> str:
        """What the first (or the last) task that failed on this node said."""
        begin = (self.output.rindex if last else self.output.index)(f"fatal: [{node}]")
        found = re.search(r"^    msg: (.*(?:\n {5,}.*|\n)*)", self.output[begin:], re.MULTILINE)
        assert found, self.output[begin:]
        return str(yaml.safe_load("msg: " + found[1].replace("\n        ", "\n  "))["msg"])

    @property
    def changed(self) -> int:
        return sum(counts["changed"] for counts in self.recap.values())


def given(variables: dict[str, t.Any]) -> list[str]:
    return ["-e", json.dumps(variables)] if variables else []


def shell_of_a_person() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "MOLECULE_"))}
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_STDOUT_CALLBACK": "default"}
    return {**environ, **settings, "PYTHONDONTWRITEBYTECODE": "1"}


def site(
    *arguments: str,
    inventory: t.Sequence[Path | str] = (LAB,),
    timeout: float = 900,
    new_connections: bool = False,
    playbook: str = "site.yml",
    **variables: t.Any,
) -> Run:
    """Runs playbooks/site.yml (or another ``playbook`` beside it) with these extra variables, as from a person's shell.

    ``new_connections``: not over those of an earlier run.
    """
    where = [word for path in inventory for word in ("-i", str(path))]
    environ = shell_of_a_person()
    sockets = tempfile.mkdtemp(prefix="cp-") if new_connections else ""
    if sockets:  # as a variable: the inventory of a lab names a folder, too
        variables["ansible_control_path_dir"] = sockets
    if sockets:
        environ.update(ANSIBLE_SSH_ARGS="-o ControlMaster=auto -o ControlPersist=5s -o ConnectTimeout=10")
    command = ["ansible-playbook", str(SITE.parent / playbook), *where, *given(variables), *arguments]
    times: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        bound = threading.Timer(timeout, process.kill)
        bound.start()
        try:
            times.extend((time.monotonic(), line) for line in process.stdout or ())
        finally:
            bound.cancel()
    output = "".join(line for dummy, line in times)
    print(output)  # pytest shows it when the test fails
    assert process.returncode != -signal.SIGKILL, f"not done within {timeout:.0f} s"
    return Run(process.returncode, output, times)


def cut_off(ready: t.Callable[[], bool], seconds: float = 300, **variables: t.Any) -> None:
    """A run of site.yml whose controller dies, with everything that it started, as soon as ``ready`` is true."""
    command = ["ansible-playbook", str(SITE), "-i", str(LAB), *given(variables)]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=shell_of_a_person(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + seconds
            while not ready():
                if run.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    raise AssertionError(f"it did not come so far: {output.read()}")
                time.sleep(0.3)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@contextlib.contextmanager
def meanwhile(look: t.Callable[[], bool], seconds: float = 600) -> t.Iterator[list[float]]:
    """Calls ``look`` again and again beside the block until it returns True; the list then holds the moment."""
    done = threading.Event()
    when: list[float] = []

    def watch() -> None:
        end = time.monotonic() + seconds
        while not done.is_set() and time.monotonic() < end:
            if look():
                when.append(time.monotonic())
                return
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield when
    finally:
        done.set()
        watcher.join()


# --- the nodes --------------------------------------------------------------------------------------------------------------


def on(node: str, *argv: str, check: bool = True, timeout: float = 120) -> str:
    """Runs a command as root on a node, not over its network, so that it also works when that is broken."""
    done = subprocess.run(
        ["docker", "exec", f"{NAME}-{node}", *argv],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if check:
        assert done.returncode == 0, f"{node}: {' '.join(argv)}: {done.stderr}"
    return done.stdout


def shell(node: str, script: str, check: bool = True, timeout: float = 120) -> str:
    return on(node, "sh", "-c", script, check=check, timeout=timeout)


def services(script: str) -> None:
    """Runs a script where the lab's registry and hub are."""
    subprocess.run(["docker", "exec", f"{NAME}-services", "sh", "-c", script], check=True, timeout=60, stdin=subprocess.DEVNULL)


def inspect(node: str, *names: str) -> list[dict[str, t.Any]]:
    """``docker inspect`` of those containers that are there."""
    return json.loads(on(node, "docker", "container", "inspect", *names, check=False) or "[]")


def running(node: str) -> list[str]:
    return sorted(on(node, "docker", "ps", "--format", "{{.Names}}").split())


def containers(node: str) -> list[str]:
    return sorted(on(node, "docker", "ps", "-a", "--format", "{{.Names}}").split())


def identities() -> dict[str, str]:
    """Id and start of every container of both nodes, running or not."""
    form = "{{.Name}} {{.Id}} {{.State.StartedAt}} {{.State.Status}} {{.RestartCount}}"
    return {node: shell(node, f"docker ps -aq | xargs -r docker inspect -f '{form}' | sort") for node in NODES}


def births() -> dict[str, str]:
    """Id and start of every container, whatever its state: a server that lost a rank ends by itself, and nobody has touched it."""
    return {
        node: shell(node, "docker ps -aq | xargs -r docker inspect -f '{{.Name}} {{.Id}} {{.State.StartedAt}}' | sort") for node in NODES
    }


def ours() -> dict[str, str]:
    """The same of the containers of the collection only."""
    form = "{{.Name}} {{.Id}} {{.State.StartedAt}} {{.RestartCount}}"
    return {
        node: shell(node, f"docker ps -q --filter label=dgxspark.serving=1 | xargs -r docker inspect -f '{form}' | sort") for node in NODES
    }


def everything() -> dict[str, str]:
    """What a check-mode run must leave as it is: containers, images, volumes, networks, model cache, our state, units, listeners."""
    script = r"""
    docker ps -aq --no-trunc | xargs -r docker inspect -f '{{.Name}} {{.Id}} {{.State.StartedAt}} {{.State.Status}}' | sort
    docker images --no-trunc --digests --format '{{.Repository}} {{.Tag}} {{.Digest}} {{.ID}}' | sort
    docker volume ls -q | sort; docker network ls --no-trunc -q | sort
    find /var/lib/dgxspark-serving /home/spark/.cache -printf '%p %y %s %T@\n' 2>/dev/null | sort
    find /run/dgxspark-serving -type f -printf '%p\n' 2>/dev/null | sort
    systemctl list-units --all --plain --no-legend 'dgxspark*'
    ss -Htln | awk '{print $4}' | sort
    """
    return {node: shell(node, script) for node in NODES}


def nothing_of_a_copy() -> None:
    """No server, relay, unit, temporary name, token or staged file of a copy on any node."""
    for node in NODES:
        units = shell(node, "systemctl list-units --all --plain --no-legend 'dgxspark*'").splitlines()
        assert [unit for unit in units if not unit.startswith("dgxspark-serving.service")] == []  # that one belongs to what is served
        left = shell(node, "find /run/dgxspark-serving /var/lib/dgxspark-serving/images -not -type d 2>/dev/null || true").split()
        assert [path for path in left if not path.endswith(".lock")] == []
        parts = shell(
            node,
            r"find /home/spark \( -name '*.incomplete' -o -path '*/.dgxspark-sync/*' -type f -o -path '*/.dgxspark-sync/*/*' \) 2>/dev/null || true",
        )
        assert parts == ""
        names = shell(node, "docker images --digests --format '{{.Repository}}'")
        assert not re.search(r"127\.0\.0\.1:\d+/[0-9a-f]{32}/app", names)
        processes = shell(
            node,
            "ps -eo args | grep -e 'docker pull' -e 'docker save' -e 'docker load' -e '/sync-[a-z0-9-]*/server.py' | grep -v grep || true",
        )
        assert processes == ""


# --- the old service --------------------------------------------------------------------------------------------------------


def old_service_answers(seconds: float = 0) -> None:
    """The old service of both nodes runs and answers as it always did; fails when not, after ``seconds`` at most."""
    for node in NODES:
        end = time.monotonic() + seconds
        while True:
            answer = on(node, "curl", "-s", "-m", "5", "http://127.0.0.1:30000/v1/models", check=False)
            if "zai-org/GLM-4.7-FP8" in answer or time.monotonic() >= end:
                break
            time.sleep(1)
        assert "zai-org/GLM-4.7-FP8" in answer, f"{node}: the old service answers {answer!r}; running: {running(node)}"
        (found,) = inspect(node, OLD)
        assert found["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"


def nothing_of_ours() -> None:
    """No container of the collection on any node."""
    for node in NODES:
        assert [name for name in containers(node) if name.startswith("spark-")] == [], node


def refused(run: Run, nodes: str | list[str], *words: str) -> None:
    """The run ended with one message, told by this node (or by each of these, which have the same fault), that has these words, found, expected
    and remedy; the old service never noticed.
    """
    assert run.rc != 0
    assert "Traceback" not in run.output
    nodes = [nodes] if isinstance(nodes, str) else nodes
    assert sorted(run.failures) == nodes
    for node in nodes:
        message = run.message(node)
        assert re.search(rf"^{node}(, [\w-]+)*: ", message), message  # what several nodes have in common is one line
        for word in ("found ", "expected ", "Remedy: ", *words):
            assert word in message, f"{word!r} is not in: {message}"
    old_service_answers()
    nothing_of_ours()


def refused_text(run: Run) -> str:
    """The message of a run that failed on the head."""
    assert run.rc != 0
    return run.message(HEAD)


# --- the new one ------------------------------------------------------------------------------------------------------------


def call(path: str, body: dict[str, t.Any] | None = None, timeout: float = 60) -> t.Any:
    """One request to the API, from outside: the port that the head publishes on this machine."""
    request = urllib.request.Request(f"http://127.0.0.1:{os.environ.get('SPARKLAB_API_PORT') or 30000}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as answer:
        return json.loads(answer.read() or "null")


def completion() -> dict[str, t.Any]:
    """A chat completion of the served model; its first choice."""
    body = {"model": settings()["spark_model"], "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    return call("/v1/chat/completions", body)["choices"][0]


def answers() -> None:
    """The API gives a real answer."""
    choice = completion()
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("length", "stop")


RAY_NODES = """
import json, ray
ray.init(address='auto', logging_level='ERROR', log_to_driver=False)
print(json.dumps([[n['NodeManagerAddress'], n['Resources'].get('GPU', 0)] for n in ray.nodes() if n['Alive']]))
"""


def ray_nodes() -> list[list[t.Any]]:
    """[address, GPUs] of the nodes that Ray on the head has alive."""
    text = on(HEAD, "docker", "exec", "spark-ray", "python3", "-c", RAY_NODES)
    return sorted(json.loads(text.strip().splitlines()[-1]))


@contextlib.contextmanager
def undone(node: str, broken: str, restore: str, seconds: int = 180) -> t.Iterator[None]:
    """A broken state of a node for the time of a test; restored also when this process is killed (that much later, by the node itself)."""
    shell(node, f"systemd-run --quiet --collect --unit=sparklab-undo --on-active={seconds} sh -c {json.dumps(restore)}; {broken}")
    try:
        yield
    finally:
        shell(node, f"systemctl stop sparklab-undo.timer; {restore}")
