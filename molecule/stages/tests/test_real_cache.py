# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cache that the real ``hf download`` of the serving image wrote on the head, in both layouts of huggingface_hub, is taken over as it is; on the worker the
real ``hf cache verify`` finds nothing wrong with the copy, and the real vLLM serves from it without any network.

A hub with the lab's model runs on each node's loopback: a worker has no way to the other one. The Xet protocol is not spoken by it; for the layout that
needs it the library's one call that fetches is replaced by a plain request.
"""

from __future__ import annotations

import subprocess
import typing as t

import pytest
import spark

FOLDER = "/var/lib/sparklab-hub"
ENDPOINT = "http://127.0.0.1:8099"
XET = """
import sys, urllib.request
from huggingface_hub import file_download

def xet_get(*, incomplete_path, xet_file_data, **rest):
    with urllib.request.urlopen(xet_file_data.refresh_route) as answer:
        incomplete_path.write_bytes(answer.read())

file_download.xet_get = xet_get
from huggingface_hub.cli.hf import main
sys.argv[0] = "hf"
main()
"""
VLLM = """
import sys
from vllm import LLM, SamplingParams

model = LLM(sys.argv[1], enforce_eager=True, max_model_len=256)
(answer,) = model.generate(["Two nodes, one cable"], SamplingParams(max_tokens=1, temperature=0))
print("tokens:", len(answer.outputs[0].token_ids))
"""


def cache_of(layout: str) -> str:
    return f"/home/spark/real-{layout}"


def in_image(node: str, layout: str, *argv: str, network: str, writable: bool = False, **env: str) -> str:
    """A program of the serving image with the cache as HF_HOME."""
    image = spark.inspect(node, "spark-ray")[0]["Config"]["Image"]
    mode = "" if writable else ":ro"
    given = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
    user = ["--user", "1000:1000"] if writable else []
    return spark.on(
        node, "docker", "run", "--rm", "--network", network, *user, "--shm-size", "512m", "--volume", f"{cache_of(layout)}:/hf{mode}", "--env", "HF_HOME=/hf",
        "--env", "HOME=/tmp", *given, "--entrypoint", argv[0], image, *argv[1:], timeout=400,
    )  # fmt: skip


def files_of(node: str, layout: str) -> str:
    """Every file of a cache with its inode and time."""
    return spark.shell(node, f"find {cache_of(layout)}/hub -type f ! -path '*/.locks/*' -printf '%P %i %s %T@\\n' | sort")


@pytest.fixture(scope="module", autouse=True)
def hubs() -> t.Iterator[None]:
    tree = subprocess.run(
        ["docker", "exec", f"{spark.NAME}-services", "tar", "-c", "-C", "/srv/hub/sparklab/tiny-qwen3", "files"],
        check=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    program = (spark.ROOT / "lab" / "hub.py").read_bytes()
    for node in spark.NODES:
        for script, data in (
            (f"mkdir -p {FOLDER}/models/org/plain {FOLDER}/models/org/shared; cat > {FOLDER}/hub.py", program),
            (f"tar -x -C {FOLDER}/models/org/plain", tree),
        ):
            subprocess.run(["docker", "exec", "-i", f"{spark.NAME}-{node}", "sh", "-c", script], input=data, check=True, timeout=60)
        spark.shell(
            node,
            f"cp -r {FOLDER}/models/org/plain/files {FOLDER}/models/org/shared/; echo '{{\"xet\": true}}' > {FOLDER}/models/org/shared/access.json; "
            "systemctl stop sparklab-hub 2>/dev/null; systemd-run --quiet --collect --unit=sparklab-hub "
            f"python3 {FOLDER}/hub.py --root {FOLDER}/models --bind 127.0.0.1 --port 8099; "
            f"until curl -sf {ENDPOINT}/api/models/org/plain/revision/main >/dev/null; do sleep 0.2; done",
            timeout=30,
        )
    yield
    for node in spark.NODES:
        spark.shell(
            node, f"systemctl stop sparklab-hub; rm -rf {FOLDER} /home/spark/real-* /var/lib/dgxspark-serving/snapshots/models--org--*"
        )


@pytest.mark.parametrize("layout", ["plain", "shared"])
def test_a_cache_of_hf_download_arrives(layout: str) -> None:
    repo = f"org/{layout}"
    for node in spark.NODES:
        spark.shell(node, f"rm -rf {cache_of(layout)}; install -d -o spark -g spark {cache_of(layout)}")
    hf = ["hf"] if layout == "plain" else ["python3", "-c", XET]
    in_image("spark-1", layout, *hf, "download", repo, network="host", writable=True, HF_ENDPOINT=ENDPOINT)
    shared = spark.shell("spark-1", f"find {cache_of(layout)}/hub/blobs -type f -size +1k 2>/dev/null || true").split()
    assert bool(shared) is (layout == "shared")  # else the second layout is not what is tested
    before = files_of("spark-1", layout)

    run = spark.site("--tags", "model", "-v", spark_model=repo, spark_model_cache=cache_of(layout), spark_hf_endpoint=ENDPOINT)
    assert run.rc == 0
    assert files_of("spark-1", layout) == before  # taken over, nothing downloaded and nothing moved
    spark.nothing_of_a_copy()

    strict = ["--fail-on-missing-files", "--fail-on-extra-files"]
    in_image("spark-2", layout, "hf", "cache", "verify", repo, *strict, network="host", HF_ENDPOINT=ENDPOINT)
    said = in_image(
        "spark-2", layout, "python3", "-c", VLLM, repo, network="none", HF_HUB_OFFLINE="1", HF_MODULES_CACHE="/tmp/modules", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", **spark.settings()["spark_env"],
    )  # fmt: skip
    assert "tokens: 1" in said


def test_a_damaged_copy_would_be_found() -> None:
    """The check of the test above is one: with one flipped byte it fails."""
    victim = spark.shell("spark-2", f"find {cache_of('plain')}/hub -path '*blobs*' -type f -size +100k | head -1").strip()
    spark.shell("spark-2", f"printf X | dd of={victim} bs=1 seek=5000 conv=notrunc 2>/dev/null")
    with pytest.raises(AssertionError):
        in_image("spark-2", "plain", "hf", "cache", "verify", "org/plain", network="host", HF_ENDPOINT=ENDPOINT)
    run = spark.site(
        "--tags",
        "model",
        spark_model="org/plain",
        spark_model_cache=cache_of("plain"),
        spark_hf_endpoint=ENDPOINT,
        spark_model_verify="full",
    )
    assert run.rc == 0
    in_image("spark-2", "plain", "hf", "cache", "verify", "org/plain", network="host", HF_ENDPOINT=ENDPOINT)
    spark.nothing_of_a_copy()


# --- the port of the fabric is blocked ---

# A firewall that drops everything is found by the proof of the fabric already (scenario fabric_faults). This one lets the ports through that are tried there.
RULE = "-i enp1s0f1np1 -p tcp --syn -m multiport --dports 32768:44999,45001:60999 -j DROP"


@pytest.fixture
def blocked() -> t.Iterator[None]:
    """The head's firewall drops new connections over the fabric to the ports that the system gives; the worker has nothing of the model."""
    spark.shell("spark-2", f"rm -rf {cache_of('plain')}/hub")
    with spark.undone("spark-1", f"iptables -I INPUT {RULE}", f"iptables -D INPUT {RULE} 2>/dev/null || true"):
        yield


def copy(*arguments: str) -> spark.Run:
    return spark.site(
        "--tags", "model", *arguments, spark_model="org/plain", spark_model_cache=cache_of("plain"), spark_hf_endpoint=ENDPOINT
    )


def test_a_blocked_port_is_explained(blocked: None) -> None:
    """No key of the worker's user on the head, so rsync over SSH is no way either; nothing half is visible."""
    run = copy()
    assert run.rc != 0 and "Traceback" not in run.output
    message = run.message("spark-2")
    for words in (
        "spark-2: model_sync: found ",
        "no byte from",
        "expected ",
        "Remedy: ",
        "firewall",
        "rsync over SSH, tried next, does not work either",
    ):
        assert words in message, message
    assert spark.shell("spark-2", f"find {cache_of('plain')}/hub -path '*/snapshots/*' -o -path '*/refs/*'") == ""


def test_a_blocked_port_and_rsync_over_ssh(blocked: None) -> None:
    """With a key: the copy comes the second way, and a warning names it."""
    key = spark.shell(
        "spark-2", "su spark -c 'mkdir -p -m 700 ~/.ssh; ssh-keygen -q -t ed25519 -N \"\" -f ~/.ssh/id_ed25519; cat ~/.ssh/id_ed25519.pub'"
    )
    host = spark.shell("spark-1", "cat /etc/ssh/ssh_host_ed25519_key.pub").strip()
    spark.shell("spark-2", f"su spark -c 'echo {spark.NODES['spark-1']} {host} > ~/.ssh/known_hosts'")
    spark.shell(
        "spark-1", f"cp /etc/ssh/authorized_keys_spark /etc/ssh/keys.before; echo '{key.strip()}' >> /etc/ssh/authorized_keys_spark"
    )
    try:
        run = copy("-v")
    finally:
        spark.shell("spark-1", "mv /etc/ssh/keys.before /etc/ssh/authorized_keys_spark")
        spark.shell("spark-2", "rm -rf /home/spark/.ssh")
    assert run.rc == 0
    assert "was not reached" in run.text and "method: rsync" in run.text
    in_image("spark-2", "plain", "hf", "cache", "verify", "org/plain", "--fail-on-missing-files", network="host", HF_ENDPOINT=ENDPOINT)
    spark.nothing_of_a_copy()


def test_after_a_block_the_copy_finishes() -> None:
    """The run that the firewall stopped left nothing that is in the way."""
    spark.shell("spark-2", f"rm -rf {cache_of('plain')}/hub")
    assert copy().rc == 0
    in_image("spark-2", "plain", "hf", "cache", "verify", "org/plain", "--fail-on-missing-files", network="host", HF_ENDPOINT=ENDPOINT)
    spark.nothing_of_a_copy()
