# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input and broken hosts: one message with node, found, expected and remedy for each, and the old service never notices."""

from __future__ import annotations

import contextlib
import json
import re
import typing as t
from pathlib import Path

import pytest
import spark
import yaml

FABRIC = "enp1s0f1np1"
TWIN = "enP2p1s0f1np1"


def hosts(folder: Path, **variables: dict[str, t.Any]) -> list[Path]:
    """The lab's inventory and one more source with other host variables (``spark_1={...}``)."""
    path = folder / "hosts.yml"
    path.write_text(
        yaml.safe_dump({"sparks": {"hosts": {name.replace("_", "-"): values for name, values in variables.items()}}}), encoding="utf-8"
    )
    return [spark.LAB, path]


@contextlib.contextmanager
def hub_answers(**fault: t.Any) -> t.Iterator[None]:
    """The lab's hub misbehaves like this meanwhile."""
    spark.services(f"cat > /run/hub-faults.json <<'EOF'\n{json.dumps([fault])}\nEOF")
    try:
        yield
    finally:
        spark.services("rm -f /run/hub-faults.json")


class TestFabric:
    def test_no_interface_has_the_subnet(self, tmp_path: Path) -> None:
        inventory = hosts(tmp_path, spark_1={"spark_fabric_address": "192.168.77.12"}, spark_2={"spark_fabric_address": "192.168.77.13"})
        run = spark.site(inventory=inventory, spark_fabric_subnet="192.168.77.0/24")
        spark.refused(
            run,
            ["spark-1", "spark-2"],
            "192.168.77.0/24",
            f"{FABRIC}: IPv4 in another subnet: {spark.FABRIC[1].exploded[:-1]}",
            "spark_fabric_subnet",
        )

    def test_two_interfaces_have_the_subnet(self) -> None:
        with spark.undone("spark-2", f"ip addr add {spark.FABRIC[113]}/24 dev {TWIN}", f"ip addr del {spark.FABRIC[113]}/24 dev {TWIN}"):
            run = spark.site()
        spark.refused(run, "spark-2", str(spark.FABRIC), FABRIC, TWIN)

    def test_the_worker_cannot_be_reached(self) -> None:
        with spark.undone("spark-2", f"ip link set {FABRIC} down", f"ip link set {FABRIC} up"):
            run = spark.site(new_connections=True)
        spark.refused(run, "spark-2", spark.NODES[spark.WORKER], "through spark-1", "cable")

    def test_an_address_that_is_another_nodes(self, tmp_path: Path) -> None:
        run = spark.site(inventory=hosts(tmp_path, spark_2={"spark_fabric_address": spark.NODES[spark.HEAD]}))
        spark.refused(run, "spark-2", spark.NODES[spark.HEAD], "spark_fabric_address")


class TestDocker:
    def test_the_user_may_not_talk_to_docker(self, tmp_path: Path) -> None:
        """On spark-1 the user is in the group docker, on spark-2 not."""
        run = spark.site(inventory=hosts(tmp_path, spark_2={"spark_become": False}))
        spark.refused(run, "spark-2", "/var/run/docker.sock", "user spark", "spark_become", "group docker")

    def test_the_user_may_not_see_who_holds_the_port(self, tmp_path: Path) -> None:
        run = spark.site(inventory=hosts(tmp_path, spark_1={"spark_become": False}))
        spark.refused(run, "spark-1", "127.0.0.1:30000", "user spark", "spark_become: true")

    def test_the_daemon_does_not_answer(self) -> None:
        with spark.undone("spark-2", "mv /run/docker.sock /run/docker.away", "mv /run/docker.away /run/docker.sock"):
            run = spark.site()
        spark.refused(run, "spark-2", "docker.sock", "start Docker")

    def test_no_docker(self) -> None:
        with spark.undone("spark-1", "mv /usr/bin/docker /usr/bin/docker.away", "mv /usr/bin/docker.away /usr/bin/docker"):
            run = spark.site()
        spark.refused(run, "spark-1", "docker command", "install Docker")

    def test_no_gpu_runtime(self) -> None:
        hook = "/usr/bin/nvidia-container-runtime-hook"
        with spark.undone("spark-2", f"mv {hook} {hook}.away", f"mv {hook}.away {hook}"):
            run = spark.site()
        spark.refused(run, "spark-2", "GPU", "nvidia-container-toolkit", "nvidia-ctk runtime configure")


class TestPort:
    def test_held_by_a_container_that_may_not_be_stopped(self) -> None:
        run = spark.site(spark_stop={})
        spark.refused(
            run,
            "spark-1",
            "container glm-sglang",
            "127.0.0.1:30000",
            "spark_stop",
            "containers: [glm-sglang]",
            "(rule port_held)",
            "\nspark-2: ",
        )

    def test_held_by_a_process(self) -> None:
        begin = "python3 -m http.server 30555 --bind 127.0.0.1 >/dev/null 2>&1 & echo $! >/run/listener.pid"
        with spark.undone("spark-1", begin, "kill $(cat /run/listener.pid)"):
            run = spark.site(spark_api_port=30555)
        spark.refused(run, "spark-1", "process python3", "user root", "127.0.0.1:30555", "sudo kill")


class TestGate:
    """Rules of the host gate that a node of the lab can really break; ``/proc/meminfo`` of a Spark is what one printed, put over the node's own."""

    MEMINFO = spark.ROOT / "tests" / "unit" / "fixtures" / "node" / "meminfo"

    @contextlib.contextmanager
    def memory(self, node: str, **gib: int) -> t.Iterator[None]:
        """The node's kernel says what that of a Spark said after a download: 18 GiB free, 112 available, 16 of swap; some figures changed."""
        text = self.MEMINFO.read_text(encoding="utf-8")
        for name, size in gib.items():
            text, count = re.subn(rf"^{name}: .*$", f"{name}: {size << 20} kB", text, flags=re.MULTILINE)
            assert count == 1, name
        begin = f"cat >/run/meminfo <<'EOF'\n{text}EOF\nmount --bind /run/meminfo /proc/meminfo"
        with spark.undone(node, begin, "umount /proc/meminfo || true"):
            yield

    @contextlib.contextmanager
    def container(self, node: str, *arguments: str) -> t.Iterator[None]:
        """A container of somebody, of the image of the old service."""
        image = spark.inspect(node, spark.OLD)[0]["Config"]["Image"]
        command = " ".join(["docker", "run", "-d", "--name", "comfyui", "--network", "host", *arguments, image, "/bin/sleep", "900"])
        with spark.undone(node, command, "docker rm -f comfyui || true"):
            yield

    def test_an_unknown_rule(self) -> None:
        run = spark.site(spark_gate={"swop": "ignore"})
        spark.refused(run, "spark-1", "unknown rule swop in spark_gate", "swap", "memory_available", "did you mean swap?")

    def test_a_level_that_is_none(self) -> None:
        run = spark.site(spark_gate={"swap": "no"})
        spark.refused(run, "spark-1", "spark_gate swap: 'no'", "one of error, warn, ignore")

    def test_a_tenant_on_the_gpu_of_the_worker(self) -> None:
        with self.container("spark-2", "--gpus", "all"):
            run = spark.site()
            spark.refused(run, "spark-2", "container comfyui", "was given the GPU", "containers: [comfyui]", "(rule gpu_held)")
            accepted = spark.site("--tags", "preflight", spark_gate={"gpu_held": "warn", **self.LAB})
            silent = spark.site("--tags", "preflight", spark_gate={"gpu_held": "ignore", **self.LAB})
        assert accepted.rc == 0 and "spark-2: preflight: found container comfyui" in accepted.text
        assert silent.rc == 0 and "comfyui" not in silent.text

    LAB: t.ClassVar[dict[str, str]] = {"memory_available": "ignore", "page_cache": "ignore"}  # as the lab's inventory says

    def test_everything_of_both_nodes_is_one_message(self) -> None:
        with self.container("spark-2", "--gpus", "all"), self.memory("spark-1"):
            run = spark.site(spark_ulimits=["nofile:2147483647"])
        spark.refused(
            run,
            "spark-2",
            "nofile:2147483647",
            "(rule memlock)",
            "(rule gpu_held)",
            "Beside that, as warnings:",
            "- spark-1: ",
            "16.0 GiB of swap",
        )
        message = run.message("spark-2")
        assert message.index("gpu_held") < message.index("rule memlock") < message.index("Beside that") < message.index("rule swap")

    def test_a_limit_that_the_host_does_not_allow(self) -> None:
        """No kernel allows more files than fs.nr_open, and that is smaller."""
        run = spark.site(spark_ulimits=["nofile:2147483647"])
        spark.refused(run, "spark-1", "spark-1", "spark_ulimits nofile:2147483647", "LimitNOFILE", "(rule memlock)")

    def test_shared_memory_that_is_too_small(self) -> None:
        with spark.undone("spark-2", "mount -o remount,size=64m /dev/shm", "mount -o remount,size=4g /dev/shm"):
            run = spark.site()
        spark.refused(run, "spark-2", "/dev/shm of 64 MiB", "160 MiB", "(rule shm)")

    def test_memory_that_is_missing(self) -> None:
        """Judged where nothing of the node's memory will come back: the old service is no part of this run."""
        gate = {"port_held": "ignore", "memory_available": "error"}
        with self.memory("spark-2", MemAvailable=60), self.memory("spark-1"):
            run = spark.site(spark_stop={}, spark_gate=gate)
        spark.refused(
            run,
            "spark-2",
            "60.0 GiB of memory available of 121.6 GiB",
            "97.3 GiB",
            "(rule memory_available)",
            "- spark-1: ",
            "(rule page_cache)",
        )

    def test_an_image_whose_shared_memory_would_be_removed(self) -> None:
        """logind does that in Debian as it is installed. A drop-in ends it."""
        image = "sparklab/of-a-user:1"
        drop_in = "/etc/systemd/logind.conf.d/50-ipc.conf"
        make = f"docker commit --change 'USER 1000' {spark.OLD} {image} >/dev/null"
        with spark.undone("spark-1", make, f"docker rmi -f {image} >/dev/null; rm -rf {drop_in}"):
            run = spark.site(spark_image=image)
            spark.refused(run, "spark-1", "runs as user 1000", "RemoveIPC", "when spark logs out", drop_in, "(rule remove_ipc)")
            spark.shell("spark-1", f"mkdir -p $(dirname {drop_in}); printf '[Login]\\nRemoveIPC=no\\n' >{drop_in}")
            mended = spark.site("--tags", "preflight", spark_image=image)
        assert mended.rc == 0 and "remove_ipc" not in mended.text

    def test_warnings_do_not_fail(self) -> None:
        """What would take the GPU back at the next boot."""
        unit = "/etc/systemd/system/llama.service"
        text = "[Service]\nExecStart=/usr/local/bin/llama-server --port 8081\n[Install]\nWantedBy=multi-user.target\n"
        begin = f"printf {json.dumps(text)} >{unit}; systemctl enable -q llama.service; "
        begin += f"docker create --name comfyui --gpus all --restart always $(docker inspect -f '{{{{.Config.Image}}}}' {spark.OLD}) /bin/sleep 900 >/dev/null"
        with spark.undone("spark-2", begin, f"systemctl disable -q llama.service; rm -f {unit}; docker rm -f comfyui"):
            run = spark.site("--tags", "preflight")
            refused = spark.site(spark_gate={"autostart": "error", "restart_policy": "ignore"})
        assert run.rc == 0
        assert "unit llama.service, enabled for the boot, with llama-server in its commands" in run.text and "(rule autostart)" in run.text
        assert "docker update --restart=no comfyui, or name it in spark_stop (rule restart_policy)" in run.text
        spark.refused(refused, "spark-2", "sudo systemctl disable llama.service", "(rule autostart)")
        assert "comfyui" not in refused.text

    def test_check_mode_tells_that_the_page_cache_will_be_dropped(self) -> None:
        gate = {"memory_available": "ignore", "page_cache": "warn", "swap": "ignore"}
        with self.memory("spark-2"):
            run = spark.site("--check", spark_gate=gate)
        assert run.rc == 0
        assert "spark-2: would drop the page cache: 18.1 GiB are free and the server asks for 97.3 GiB" in run.text
        assert "rule swap" not in run.text
        spark.old_service_answers()


class TestParallel:
    def test_ranks_differ_from_the_gpus(self) -> None:
        run = spark.site(spark_tensor_parallel=3)
        spark.refused(run, "spark-1", "spark_tensor_parallel 3", "2 ranks", "2 nodes x spark_gpus_per_node 1")

    def test_more_gpus_than_there_are(self) -> None:
        run = spark.site(spark_gpus_per_node=2, spark_tensor_parallel=4)
        spark.refused(run, "spark-1", "spark-1, spark-2: ", "1 GPU", "spark_gpus_per_node 2")


class TestVariables:
    def test_unknown(self) -> None:
        run = spark.site(spark_api_prot=30001)
        spark.refused(run, "spark-1", "spark_api_prot", "did you mean spark_api_port?")

    def test_wrong_type(self) -> None:
        run = spark.site(spark_api_port="many")
        spark.refused(run, "spark-1", "spark_api_port", "many")

    def test_wrong_choice(self) -> None:
        run = spark.site(spark_executor="horovod")
        spark.refused(run, "spark-1", "spark_executor", "horovod", "ray")

    def test_missing(self) -> None:
        run = spark.site(spark_model=None)
        spark.refused(run, "spark-1", "spark_model")

    def test_missing_on_one_host(self, tmp_path: Path) -> None:
        run = spark.site(inventory=hosts(tmp_path, spark_2={"spark_fabric_address": None}))
        spark.refused(run, "spark-2", "spark_fabric_address")

    def test_an_argument_that_has_a_variable(self) -> None:
        run = spark.site(spark_vllm_args=["--port", "8000"])
        spark.refused(run, "spark-1", "--port in spark_vllm_args", "spark_api_port")

    def test_a_secret_in_the_environment(self) -> None:
        run = spark.site(spark_env={"HF_TOKEN": "hf_not_a_real_one"})
        spark.refused(run, "spark-1", "HF_TOKEN in spark_env", "spark_hf_token_file")
        assert "hf_not_a_real_one" not in run.output


class TestModel:
    """What the hub and the disk say; another cache directory than the lab's, so that nothing is there yet."""

    CACHE = "/var/tmp/cache"

    @pytest.fixture(autouse=True)
    def _clean(self) -> t.Iterator[None]:
        yield
        for node in spark.NODES:
            spark.on(node, "rm", "-rf", self.CACHE)

    def test_unknown_to_the_hub(self) -> None:
        run = spark.site(spark_model="sparklab/no-such-model")
        spark.refused(run, "spark-1", "sparklab/no-such-model", "spark_model")

    def test_revision_unknown_to_the_hub(self) -> None:
        run = spark.site(spark_model_revision="v99", spark_model_cache=self.CACHE)
        spark.refused(run, "spark-1", "v99", "spark_model_revision")

    def test_no_token(self) -> None:
        with hub_answers(on="resolve", status=401, code="GatedRepo"):
            run = spark.site(spark_model_cache=self.CACHE)
        spark.refused(run, "spark-1", "sparklab/tiny-qwen3", "token", "spark_hf_token_file")

    def test_no_permission(self) -> None:
        with hub_answers(on="resolve", status=403, code="GatedRepo"):
            run = spark.site(spark_model_cache=self.CACHE)
        spark.refused(run, "spark-1", "sparklab/tiny-qwen3", "access")

    def test_disk_of_the_head_is_too_small(self) -> None:
        make = f"mkdir -p {self.CACHE} && mount -t tmpfs -o size=1m,mode=777 none {self.CACHE}"
        with spark.undone("spark-1", make, f"umount {self.CACHE}"):
            run = spark.site(spark_model_cache=self.CACHE)
        spark.refused(run, "spark-1", f"free at {self.CACHE}", "at least", "sparklab/tiny-qwen3", "free space")


class TestImage:
    def test_unknown_to_the_registry(self) -> None:
        run = spark.site(spark_image=f"{spark.GATEWAY}:5000/sparklab/no-such-image:1")
        spark.refused(run, "spark-1", f"{spark.GATEWAY}:5000/sparklab/no-such-image:1", "registry", "spark_image")

    def test_registry_that_does_not_answer(self) -> None:
        run = spark.site(spark_image=f"{spark.GATEWAY}:5999/sparklab/vllm:1")
        spark.refused(run, "spark-1", f"{spark.GATEWAY}:5999/sparklab/vllm:1")


class TestAfterTheDownload:
    """From here on the head has to pull the image (the next scenarios need it, too)."""

    def test_tensor_parallel_does_not_divide_the_heads(self) -> None:
        run = spark.site(spark_model="sparklab/tiny-3-heads")
        spark.refused(run, "spark-1", "spark_tensor_parallel 2", "3 attention heads", "divides the heads: 1, 3")

    def test_disk_of_the_worker_is_too_small(self) -> None:
        cache = TestModel.CACHE
        make = f"mkdir -p {cache} && mount -t tmpfs -o size=1m,mode=777 none {cache}"
        with spark.undone("spark-2", make, f"umount {cache}; rmdir {cache}"):
            run = spark.site("--tags", "model", spark_model_cache=cache)
        spark.on("spark-1", "rm", "-rf", cache)
        # Found before the download on the head, for which the head asks the worker.
        assert run.rc != 0 and "Traceback" not in run.output
        for word in ("spark-2: ", "found 1.0 MB free at /var/tmp/cache", "expected at least", "sparklab/tiny-qwen3", "Remedy: free space"):
            assert word in run.text
        spark.old_service_answers()
        spark.nothing_of_ours()

    def test_an_argument_that_this_vllm_does_not_have(self) -> None:
        """Asked from inside the image, before the old service is stopped."""
        run = spark.site(spark_vllm_args=["--enforce-eagr", "--max-num-seqs", "many"])
        spark.refused(run, "spark-1", "--enforce-eagr", "--enforce-eager", "--max-num-seqs", "spark_vllm_args")
