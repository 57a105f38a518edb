# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pathlib
import re

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _diagnosis

LIFE = pathlib.Path(__file__).parents[2] / "fixtures/life"

# Texts of vLLM 0.16 to 0.33, Ray, NCCL and Docker as they were reported or as they are in the source.
LINES = [
    (
        "(EngineCore_DP0 pid=9) ERROR 03-01 10:00:00 [core.py:1] ValueError: Free memory on device cuda:0 (60.5/121.69 GiB) on startup is "
        "less than desired GPU memory utilization (0.8, 97.35 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.",
        "MEM-01",
        {"free_gib": "60.5", "needed_gib": "97.35", "utilization": "0.8"},
    ),
    (
        "ValueError: To serve at least one request with the models's max seq len (262144), (24.00 GiB KV cache is needed, which is larger "
        "than the available KV cache memory (10.52 GiB). Based on the available memory, the estimated maximum model length is 114688. Try "
        "increasing",
        "MEM-03",
        {"max_model_len": "262144", "needed_gib": "24.00", "available_gib": "10.52", "estimated_max_len": "114688"},
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (1024), (3.0 GiB KV cache is needed, which is larger than "
        "the available KV cache memory (1.0 GiB). Try increasing",
        "MEM-03",
        {"available_gib": "1.0"},
    ),
    ("ValueError: No available memory for the cache blocks. Try increasing", "MEM-03", {}),
    (
        "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.99.0.2) "
        "was 113.76GB / 119.70GB (0.950345), which exceeds",
        "MEM-02",
        {"address": "10.99.0.2", "used": "113.76GB"},
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", "MEM-05", {}),
    (
        "ValueError: Current node has no GPU available. current_node_resource={'node:192.168.200.12': 1.0}. vLLM engine",
        "RAY-12",
        {"device": "GPU"},
    ),
    (
        "INFO 11-30 09:04:37 [ray_utils.py:467] Waiting for creating a placement group of specs for 30 seconds. specs=[{'GPU': 1.0}].",
        "RAY-01",
        {"waited_s": "30"},
    ),
    (
        "ValueError: Cannot provide a placement group requiring 2 GPUs (placement_group_specs=[{'GPU': 1.0}]) within 1800 seconds.",
        "RAY-01",
        {"gpus": "2"},
    ),
    (
        "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids ['a', 'b'] and 3 unique IP addresses {'x'}. "
        "Please check",
        "RAY-10",
        {"nodes": "2", "addresses": "3"},
    ),
    ("ImportError: Using Ray backend requires installation of ray.", "RAY-02", {}),
    ('exec: "ray": executable file not found in $PATH', "RAY-02", {}),
    ("RuntimeError: Version mismatch: The cluster was started with: Ray: 2.48.0 Python: 3.12.3", "RAY-04", {}),
    ("AssertionError: session name session_a does not match persisted value session_b", "RAY-07", {}),
    (
        "ValueError: Ray component worker_ports is trying to use a port number 16379 that is used by other components.",
        "RAY-06",
        {"port": "16379"},
    ),
    (
        "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3).",
        "VLL-04",
        {"heads": "64", "tensor_parallel": "3"},
    ),
    ("NotImplementedError: Pipeline parallelism is not supported for this model. Supported models implement", "pp-model", {}),
    (
        "ValueError: World size (2) is larger than the number of available GPUs (1) in this node. If this is intentional",
        "RAY-03",
        {"world_size": "2", "gpus": "1"},
    ),
    (
        "ValueError: The checkpoint you are trying to load has model type `qwen3_5_moe` but Transformers does not recognize this "
        "architecture.",
        "VLL-03",
        {"model_type": "qwen3_5_moe"},
    ),
    ("vllm: error: unrecognized arguments: --no-such-flag", "VLL-03", {"message": "unrecognized arguments: --no-such-flag"}),
    (
        "FileNotFoundError: [Errno 2] No such file or directory: '/m/model-00002-of-00005.safetensors'",
        "MOD-01",
        {"path": "/m/model-00002-of-00005.safetensors"},
    ),
    (
        "RuntimeError: Worker failed with error 'aot_compile is not supported by the current configuration. Please make sure torch.compile is "
        "enabled with the latest version of PyTorch (current using torch: 2.13.0+cpu)', please check the stack trace above for the root cause",
        "VLL-22",
        {},
    ),
    ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "VLL-01", {"arch": "sm_121a"}),
    (
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, "
        "'g++')",
        "VLL-01",
        {},
    ),
    ("exec /usr/bin/python3: exec format error", "DOC-11", {}),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] Gloo connectFullMesh failed with [..] no error, "
        "remote=[127.0.1.1]:4711",
        "NET-02",
        {"remote": "127.0.1.1"},
    ),
    ("RuntimeError: Unable to find address for: enp1s0f0np0", "NET-02", {"interface": "enp1s0f0np0"}),
    (
        "spark-1:99:99 [0] misc/ibvwrap.cc:308 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev rocep1s0f0:1, "
        "curr state INIT",
        "NCL-01",
        {"error": "110 Connection timed out"},
    ),
    (
        "  Value error, User-specified max_model_len (200000) is greater than the derived max_model_len (max_position_embeddings=2048.0 or "
        "model_max_length=None in model's config.json). To allow overriding this maximum, set the env var",
        "VLL-22",
        {"max_model_len": "200000", "limit": "2048"},
    ),
    (
        "  Value error, Total number of attention heads (6) must be divisible by tensor parallel size (4). [type=value_error, input_value=ArgsKwargs(()",
        "VLL-04",
        {},
    ),
    (
        "  Value error, max_num_batched_tokens (16) is smaller than max_num_seqs (128). [type=value_error, input_value=ArgsKwargs(()",
        "VLL-22",
        {"message": "max_num_batched_tokens (16) is smaller than max_num_seqs (128)."},
    ),
    ("OSError: [Errno 98] Address already in use", "VLL-07", {}),
    ("TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading", "RDY-01", {}),
    ("TimeoutError: RPC call to sample_tokens timed out.", "RDY-08", {"call": "sample_tokens"}),
    # Wordings of the upstream sources and of public reports.
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory", "MEM-02", {}),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "MEM-04", {}),
    ("NVRM: GPU0 _memdescAllocInternal: NV_ERR_NO_MEMORY", "MEM-04", {}),
    ("ValueError: To serve at least one request with the model, more memory is needed", "MEM-03", {}),
    ("ValueError: Ray does not allocate any GPUs on the driver node. Consider adjusting the Ray placement group", "RAY-12", {}),
    (
        "ConnectionError: Failed to connect to GCS at address 192.168.200.12:6379 within 30 seconds",
        "RAY-16",
        {"address": "192.168.200.12:6379"},
    ),
    ("(raylet) The node with node id: 4f2 and address: 192.168.200.13 has been marked dead because the detector", "RAY-20", {}),
    ("2026-11-30 09:01:02,345 ERR scripts.py -- Some Ray subprocesses exited unexpectedly:", "RAY-20", {}),
    (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url https://huggingface.co/m",
        "MOD-02",
        {},
    ),
    (
        "tvm.error.InternalError: Failed to open /opt/flashinfer/data/csrc/fmha_sm121.cuh",
        "VLL-02",
        {"file": "/opt/flashinfer/data/csrc/fmha_sm121.cuh"},
    ),
    (
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        "DOC-01",
        {},
    ),
    ("RuntimeError: Failed to infer device type, please set the environment variable", "DOC-01", {}),
    ("Failed to initialize NVML: Driver/library version mismatch", "HST-03", {}),
    ("OSError: [Errno 28] No space left on device: '/tmp/ray/session_x'", "RAY-15", {}),
    ("spark-1:71:71 [0] NCCL WARN Bootstrap : no socket interface found", "NET-01", {}),
    ("misc/ibvwrap.cc:139 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "NCL-04", {}),
]


def test_every_row_has_a_line_that_it_explains():
    """A row that no line of a log reaches (a wrong pattern, or one above it that takes everything) explains nothing."""
    lines = [_diagnosis.clean(line)[1] for line in [*[row[0] for row in LINES], *CONSEQUENCES]]
    reached = {next(row for row in _diagnosis.TABLE if re.search(row.pattern, line)) for line in lines}
    assert [(row.id, row.cause) for row in _diagnosis.TABLE if row not in reached] == []


@pytest.mark.parametrize(("line", "ident", "fields"), LINES, ids=[f"{n}-{row[1]}" for n, row in enumerate(LINES)])
def test_known_causes(line, ident, fields):
    found = _diagnosis.match(line)
    assert found and found["id"] == ident and found["primary"]
    assert {key: found["fields"].get(key) for key in fields} == fields
    assert not re.search(r"[{}]|\(\)|\?| ,|  ", found["cause"]), found["cause"]


CONSEQUENCES = [
    "(EngineCore pid=5) ERROR 11-30 09:00:00 [core.py:1510] EngineCore failed to start.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "(EngineCore pid=5) ERROR 11-30 09:00:00 [ray_executor_v2.py:522] RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
    "RayWorkerProc rank=1 died unexpectedly, shutting down executor.",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
    "(Worker pid=3) ERROR 11-30 09:00:00 [multiproc_executor.py:700] WorkerProc failed to start.",
]


@pytest.mark.parametrize("line", CONSEQUENCES)
def test_consequences_are_not_primary(line):
    assert _diagnosis.match(line)["primary"] is False


@pytest.mark.parametrize(
    "line",
    [
        "INFO No available shared memory broadcast block found in 60 seconds.",
        "Waiting for creating a placement group of specs for 10 seconds. specs=[{'GPU': 1.0}]",
        "Tensor parallel size (2) exceeds available GPUs (1). This may result in",
        'INFO:     172.17.0.1:58992 - "GET /health HTTP/1.1" 200 OK',
    ],
)
def test_noise_is_neither_cause_nor_progress(line):
    assert _diagnosis.noise(line) and not _diagnosis.match(line)


@pytest.mark.parametrize("name", ["vllm_0.32_ray_ok.log", "vllm_0.17_cuda_ok.log"])
def test_a_good_start_has_no_known_cause(name):
    causes = [hit for line in (LIFE / name).read_text().splitlines() if (hit := _diagnosis.match(_diagnosis.split_stamp(line)[1]))]
    assert causes == []


def test_prefixes_and_colours_are_taken_off():
    line = "\x1b[36m(RayWorkerProc pid=388)\x1b[0m (Worker pid=388) WARNING 11-30 09:02:15 [cpu_worker.py:114] text"
    assert _diagnosis.clean(line) == ("WARNING", "text")
    assert _diagnosis.clean("\x1b[36m(pid=388)\x1b[0m text") == ("", "text")
    assert _diagnosis.clean("(EngineCore_DP0 pid=9) (RayWorkerWrapper pid=1, ip=192.168.200.13) INFO 03-01 10:00:00 [a.py:1] x") == (
        "INFO",
        "x",
    )


def test_first_cause_over_nodes_is_the_earliest_not_the_loudest():
    head = (
        "2026-11-30T09:00:05.0Z (EngineCore pid=5) ERROR 11-30 09:00:05 [core.py:1510] EngineCore failed to start.\n"
        "2026-11-30T09:00:05.1Z (EngineCore pid=5) ERROR 11-30 09:00:05 [core.py:1510] RuntimeError: torch.distributed broke\n"
        "2026-11-30T09:00:06.0Z OSError: [Errno 98] Address already in use\n"
    )
    worker = "2026-11-30T09:00:04.99Z RuntimeError: Unable to find address for: enp1s0f0np0\n"
    found = _diagnosis.first_cause({"spark-1": head, "spark-2": worker})
    assert (found["id"], found["node"], found["fields"]) == ("NET-02", "spark-2", {"interface": "enp1s0f0np0"})
    assert found["others"] == ["VLL-00", "VLL-07", "VLL-20"]


def test_unknown_exception_logged_as_error_beats_its_consequence():
    log = "ERROR 11-30 09:00:01 [x.py:1] RuntimeError: strange\nERROR 11-30 09:00:02 [core.py:1] EngineCore failed to start.\n"
    found = _diagnosis.first_cause({"spark-1": log})
    assert found["id"] == "VLL-00" and found["cause"] == "RuntimeError: strange"


def test_a_survived_traceback_is_no_cause():
    """The recorded start prints a traceback of a plugin in its first lines and goes on for minutes."""
    log = (LIFE / "vllm_0.32_ray_ok.log").read_text()
    assert "AttributeError: partially initialized module" in log
    assert _diagnosis.first_cause({"spark-1": log}) is None
    assert _diagnosis.best(_diagnosis.scan(log.splitlines())) is None


@pytest.mark.parametrize(("name", "ident"), [("vllm_0.32_bad_flag.log", "VLL-03"), ("vllm_0.32_gpu_reserved.log", "RAY-01")])
def test_recorded_failures(name, ident):
    assert _diagnosis.first_cause({"spark-1": (LIFE / name).read_text()})["id"] == ident


def test_nothing_known():
    assert _diagnosis.first_cause({"spark-1": "", "spark-2": "all is well\n"}) is None


def test_last_lines_leave_noise_out():
    assert _diagnosis.last_lines('a\nINFO:  1.1.1.1:5 - "GET /health HTTP/1.1" 200 OK\nb\n', 2) == "a | b"


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("full (tried {x}) now", {}, "full now"),
        ("full (tried {x}) now", {"x": "1"}, "full (tried 1) now"),
        ("seen on {a} ({b} of {c})", {"b": "1"}, "seen (1 of)"),
        ("killed on {a} at once", {"a": "n"}, "killed on n at once"),
        ("old ({a}{b})", {"b": "y"}, "old (y)"),
    ],
)
def test_fill(template, fields, expected):
    assert _diagnosis.fill(template, fields).strip() == expected
