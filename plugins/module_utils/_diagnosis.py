# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known failure texts of vLLM, Ray and NCCL as data: pattern, cause, remedy; and the first cause over the logs of several nodes.

PRIVATE to the collection. Rows grow with each report; ``id`` is the row of docs/failure-modes.md where there is one.

A row: ``pattern`` (its named groups become ``fields``), ``stage`` (where it shows up; "" = anywhere), ``cause`` and ``remedy`` (may
use the fields in braces), ``primary`` (it is a cause; otherwise it only follows from one), ``fatal`` (seeing it ends a wait at once; a
row that is not fatal explains a death but may be survived).
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._containers import split_stamp


class Row(t.NamedTuple):
    id: str
    pattern: str
    stage: str
    cause: str
    remedy: str
    primary: bool = True
    fatal: bool = True


TABLE: tuple[Row, ...] = (
    # --- memory
    Row(
        "MEM-01",
        r"Free memory on device\s*(?P<device>\S*) \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup is less than desired GPU "
        r"memory "
        r"utilization \((?P<utilization>[\d.]+), (?P<needed_gib>[\d.]+) GiB\)",
        "placement",
        "only {free_gib} of {total_gib} GiB are free and the server asks for {needed_gib} GiB (utilization {utilization}); page cache "
        "counts as used on unified memory",
        "drop the page cache (sync; echo 3 > /proc/sys/vm/drop_caches), stop what else holds memory on that node, or lower "
        "gpu_memory_utilization",
    ),
    Row(
        "MEM-03",
        r"To serve at least one request with the model(?:s's|'s|s)? max seq len \(?(?P<max_model_len>\d+)\)?,? "
        r"?\(?(?P<needed_gib>[\d.]+) ?GiB KV cache is needed"
        r".*?available KV cache memory \((?P<available_gib>[\d.]+) ?GiB\)(?:.*?estimated maximum model length is "
        r"(?P<estimated_max_len>\d+))?",
        "kv_cache",
        "the KV cache of one request of {max_model_len} tokens needs {needed_gib} GiB and {available_gib} GiB are left (estimated "
        "maximum length: {estimated_max_len})",
        "lower max_model_len (to the estimated length or less), raise gpu_memory_utilization, or use more nodes",
    ),
    Row(
        "MEM-03",
        r"To serve at least one request with the model",
        "kv_cache",
        "the KV cache of one request of the maximum length does not fit",
        "lower max_model_len, raise gpu_memory_utilization, or use more nodes",
    ),
    Row(
        "MEM-03",
        r"No available memory for the cache blocks",
        "kv_cache",
        "after the weights nothing is left for the KV cache",
        "raise gpu_memory_utilization, lower max_model_len or max_num_batched_tokens, or use more nodes",
    ),
    Row(
        "MEM-02",
        r"(?:ray\.exceptions\.OutOfMemoryError|worker\(s\) were killed due to the node running low on memory)"
        r"(?:.*?\(IP: (?P<address>[\d.]+)\) was (?P<used>[\d.]+ ?GB) ?/ ?(?P<total>[\d.]+ ?GB))?",
        "weights",
        "Ray's memory monitor killed a rank on {address} ({used} of {total} in use): it counts model memory and page cache of the same "
        "pool",
        "set RAY_memory_monitor_refresh_ms=0 in the environment of `ray start` on every node",
    ),
    Row(
        "MEM-05",
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory(?:\. Tried to allocate (?P<tried>[\d.]+ [GM]iB))?|CUDA error: out of "
        r"memory",
        "weights",
        "the GPU memory is full (tried to allocate {tried})",
        "lower gpu_memory_utilization, max_model_len or max_num_seqs, and stop what else holds memory on that node",
        fatal=False,
    ),
    Row(
        "MEM-04",
        r"NV_ERR_NO_MEMORY|Cannot allocate memory.*(?:mmap|fork)|std::bad_alloc",
        "",
        "the host itself ran out of memory",
        "lower gpu_memory_utilization; on unified memory the system needs some GiB for itself",
        fatal=False,
    ),
    # --- Ray and placement
    Row(
        "RAY-12",
        r"Current node has no (?P<device>GPU|\w+) available\.?(?: current_node_resource=(?P<resources>\{.*?\}))?",
        "placement",
        "Ray has no free {device} on this node: it was started without one, or a server that ended uncleanly still holds it",
        "recreate the Ray containers of all nodes (--tags ray)",
    ),
    Row(
        "RAY-01",
        r"Waiting for creating a placement group of specs for (?P<waited_s>3\d|[4-9]\d|\d{3,}) seconds",
        "placement",
        "Ray cannot place the ranks (waited {waited_s} s): VLLM_HOST_IP is not an address that Ray knows the node by, or its GPUs are "
        "reserved",
        "let VLLM_HOST_IP and --node-ip-address of every node be its fabric address; recreate the Ray containers if a GPU is still "
        "reserved",
    ),
    Row(
        "RAY-01",
        r"Cannot provide a placement group (?:requiring (?P<gpus>\d+) GPUs|of)",
        "placement",
        "Ray cannot place the ranks: not enough free GPUs, or addresses that differ from Ray's",
        "compare `ray status` with tensor parallel x pipeline parallel, and VLLM_HOST_IP with Ray's node addresses",
    ),
    Row(
        "RAY-10",
        r"Every node should have a unique IP address\. Got (?P<nodes>\d+) nodes .*? and (?P<addresses>\d+) unique IP addresses",
        "placement",
        "{nodes} nodes announce {addresses} addresses: VLLM_HOST_IP is missing or the same on some node",
        "give every container its own node's fabric address as VLLM_HOST_IP",
    ),
    Row(
        "RAY-12",
        r"Ray does not allocate any GPUs on the driver node|driver node .*?is not included in a placement group",
        "placement",
        "the server was started on a node without a GPU in Ray, or under another address than Ray's",
        "start it on the Ray head and give the head its GPU (--num-gpus=1)",
    ),
    Row(
        "RAY-02",
        r"Using Ray backend requires installation of ray|Ray is not installed|No module named 'ray'|exec: \"ray\": executable file not "
        r"found|ray: command not found",
        "container",
        "the image has no Ray",
        "choose an image with Ray, or spark_executor: mp",
    ),
    Row(
        "RAY-04",
        r"Version mismatch: The cluster was started with:(?P<cluster>.*)",
        "ray",
        "Ray or Python differ between the nodes",
        "run the same image on every node (--tags sync, then --tags ray)",
    ),
    Row(
        "RAY-07",
        r"session name .*? does not match|Ray is trying to start at (?P<address>\S+), but is already running",
        "ray",
        "a Ray of an earlier start is still there",
        "stop the Ray containers of all nodes, then start them again (--tags ray)",
    ),
    Row(
        "RAY-16",
        r"Failed to connect to GCS(?: at address (?P<address>\S+?)(?: within| |$))?|Could not find any running Ray instance|Unable to "
        r"connect to GCS",
        "ray",
        "no Ray head answers (at {address})",
        "see whether the Ray container of the head runs and which address it was given",
    ),
    Row(
        "RAY-06",
        r"(?P<component>\w+) is trying to use a port number (?P<port>\d+) that is used|Failed to find a valid port for dashboard",
        "ray",
        "a port that Ray wants ({port}) is taken",
        "free the port, or give all ports of Ray another place with spark_port_offset (a multiple of 100)",
    ),
    Row(
        "RAY-20",
        r"(?:The node with node id.*has been marked dead|A raylet (?:with|died)|raylet\b.*(?:exited|died|crashed) unexpectedly"
        r"|ActorDiedError.*node (?:was|has) (?:terminated|died)"
        r"|The actor's node was terminated|[Nn]ode (?P<address>[\d.]+)? ?(?:is dead|died))",
        "",
        "a Ray node {address} died",
        "look at the log of the Ray container on that node (killed, out of memory, network)",
        fatal=False,
    ),
    Row(
        "RAY-20",
        r"Some Ray subprocesses exited unexpectedly",
        "ray",
        "a part of Ray ended by itself",
        "look at the lines above it and at the files in /tmp/ray/session_latest/logs of that container",
    ),
    # --- tensor parallel, arguments, model
    Row(
        "VLL-04",
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<tensor_parallel>\d+)\)",
        "container",
        "{heads} attention heads cannot be divided over {tensor_parallel} GPUs",
        "choose a tensor parallel size that divides {heads}, or pipeline parallel",
    ),
    Row(
        "pp-model",
        r"Pipeline parallelism is not supported for this model",
        "container",
        "vLLM cannot deal this model's layers out to a pipeline",
        "set spark_pipeline_parallel: 1, with spark_tensor_parallel or spark_data_parallel for the rest",
    ),
    Row(
        "RAY-03",
        r"World size \((?P<world_size>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\) in this node",
        "container",
        "the server wants {world_size} GPUs on one node that has {gpus}: the executor does not span nodes",
        "pass --distributed-executor-backend ray and RAY_ADDRESS (spark_executor: ray), or mp with --nnodes",
    ),
    Row(
        "VLL-03",
        r"model type [`'\"]?(?P<model_type>[\w.-]+)[`'\"]? but Transformers does not recognize|does not recognize (?:this )?model[_ ]type"
        r"|Model architectures \[(?P<architecture>[^\]]*)\] are not supported",
        "container",
        "the image is too old for this model ({model_type}{architecture})",
        "choose an image whose vLLM and transformers know the model",
    ),
    Row(
        "VLL-22",
        r"User-specified max_model_len \((?P<max_model_len>\d+)\) is greater than the derived max_model_len "
        r"\((?P<limit_name>\w+)=(?P<limit>\d+)",
        "container",
        "max_model_len {max_model_len} is more than the model's {limit_name} {limit}",
        "lower spark_max_model_len to what the model supports, or leave it 0",
    ),
    Row(
        "VLL-22",
        # pydantic: the line with the exception's name says nothing, the reason stands on the next one.
        r"^\s*Value error, (?P<message>[^\[]+?)(?: \[type=|$)",
        "container",
        "vLLM refuses its configuration: {message}",
        "correct spark_vllm_args or the spark_ variable behind the value",
    ),
    Row(
        "VLL-03",
        r"(?:vllm|api_server)[^:]*: error: (?P<message>.*(?:unrecognized arguments|invalid choice|expected|required|argument ).*)",
        "container",
        "this vLLM does not accept its command line: {message}",
        "correct spark_vllm_args, or choose the image they were written for",
    ),
    Row(
        "MOD-01",
        r"(?:LocalEntryNotFoundError|OSError: Can't load the configuration|Cannot find any model weights with|No such file or directory: "
        r"'(?P<path>[^']*\.(?:safetensors|json|bin|model))'"
        r"|does not appear to have (?:a file|files) named (?P<file>[^\s.]+\.[\w]+)|FileNotFoundError(?!.*No such file or directory: "
        r"').*safetensors|safetensors.*(?:incomplete metadata|header too (?:large|small)))",
        "weights",
        "a file of the model is missing or damaged on this node ({path}{file})",
        "run --tags model,sync: it verifies every file on every node",
    ),
    Row(
        "MOD-02",
        r"(?:GatedRepoError|401 Client Error.*huggingface|RepositoryNotFoundError)",
        "container",
        "the server tries to download the model and may not",
        "serve from the synced cache: HF_HUB_OFFLINE=1 and the revision that was synced",
    ),
    # --- image and toolchain
    Row(
        "VLL-01",
        r"ptxas fatal\s*: Value '(?P<arch>sm_\w+)' is not defined|no kernel image is available for execution",
        "compile",
        "the image is not built for this GPU ({arch})",
        "choose an image built for sm_121, or point TRITON_PTXAS_PATH at a ptxas of CUDA 13",
    ),
    Row(
        "VLL-02",
        r"Failed to open .*?(?P<file>[\w./-]*sm\d+\w*[\w./-]*\.cuh?)",
        "compile",
        "the image lacks the kernel source {file} for this GPU",
        "choose an image built for sm_121",
    ),
    Row(
        "VLL-01",
        r"(?:InvalidCxxCompiler|RuntimeError: Failed to find C compiler|No working C\+\+ compiler found|g\+\+.*not found|gcc: (?:fatal "
        r"error|not found))",
        "compile",
        "the image has no compiler and compilation is on",
        "add --enforce-eager (or TORCHDYNAMO_DISABLE=1), or use an image with a compiler",
    ),
    Row(
        "VLL-22",
        r"aot_compile is not supported by the current configuration",
        "compile",
        "vLLM shall compile, and torch.compile is switched off (TORCHDYNAMO_DISABLE) or not supported by this PyTorch",
        "add --enforce-eager to spark_vllm_args, or take TORCHDYNAMO_DISABLE out of the environment (the image may set it: give it the value 0)",
    ),
    Row(
        "DOC-11",
        r"exec format error|exec user process caused",
        "container",
        "the image is built for another processor architecture",
        "use an arm64 image on a Spark",
    ),
    Row(
        "DOC-01",
        r"could not select device driver .*?capabilities: \[\[gpu\]\]|nvidia-container-cli: .*|Failed to infer device type",
        "container",
        "the container has no GPU",
        "see that the NVIDIA container toolkit is configured (nvidia-ctk runtime configure) and that `docker run --gpus all` works",
    ),
    Row(
        "HST-03",
        r"Driver/library version mismatch",
        "container",
        "the NVIDIA driver was upgraded without a reboot",
        "reboot the node",
    ),
    Row(
        "RAY-15",
        r"No space left on device|Object creation will fail",
        "",
        "a disk or /dev/shm of this node is full",
        "free space (docker system df, /tmp, the model cache), or raise the shm size",
        fatal=False,
    ),
    # --- network
    Row(
        "NET-02",
        r"Gloo connectFullMesh failed(?:.*?remote=\[(?P<remote>[^\]]*)\])?",
        "placement",
        "the ranks cannot reach each other over Gloo (remote {remote})",
        "GLOO_SOCKET_IFNAME must be the fabric interface in the environment of every container",
    ),
    Row(
        "NET-02",
        r"Unable to find address for: ?(?P<interface>\S*)",
        "placement",
        "GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME names an interface that this node does not have ({interface})",
        "let the environment of each node name its own fabric interface",
    ),
    Row(
        "NET-01",
        r"Bootstrap : no socket interface found|no socket interface found",
        "placement",
        "NCCL finds no interface of the name in NCCL_SOCKET_IFNAME",
        "let NCCL_SOCKET_IFNAME of each node be '=' and its own fabric interface",
    ),
    Row(
        "NCL-01",
        r"ibv_modify_qp failed(?: with (?:error )?(?P<error>\d+ ?[\w ]*))?(?:.*?on dev (?P<device>\S+?)[,:])?|vendor err 129",
        "placement",
        "RDMA cannot connect the ranks ({error} on {device}): GID index, MTU or rails differ",
        "leave NCCL_IB_GID_INDEX unset, list only the fabric's HCAs in NCCL_IB_HCA, give both ends the same MTU",
        fatal=False,
    ),
    Row(
        "NCL-04",
        r"ibv_(?:reg_mr\w*|create_cq|create_qp).*?(?:Cannot allocate memory|failed)",
        "placement",
        "RDMA cannot pin memory: the memlock limit of the container is too low (or a kernel with the CMA fault)",
        "give the containers ulimit memlock -1",
        fatal=False,
    ),
    Row(
        "VLL-07",
        r"\[Errno 98\].*(?:address already in use)|Address already in use|EADDRINUSE",
        "api",
        "the API port (or one of the internal ports) is taken",
        "see who listens (ss -ltnp); a port in TIME_WAIT is free after a minute",
        fatal=False,
    ),
    Row(
        "RDY-01",
        r"Timed out waiting for engine(?:s| core processes)? to (?:send initial message|start)",
        "weights",
        "the engine was not ready within VLLM_ENGINE_READY_TIMEOUT_S",
        "raise VLLM_ENGINE_READY_TIMEOUT_S above spark_ready_timeout; keep the kernel caches between starts",
    ),
    Row(
        "RDY-08",
        r"RPC call to (?P<call>\w+) timed out",
        "completion",
        "a rank did not answer {call}: the ranks lost step or one hangs",
        "look at the logs of all ranks; try --enforce-eager",
    ),
    # --- what only follows from a cause
    Row(
        "VLL-21",
        r"DistBackendError|NCCL error|ncclCommInitRank.*(?:failed|invalid usage)|ncclUnhandledCudaError|ncclSystemError",
        "placement",
        "NCCL could not connect the ranks",
        "see NCCL_SOCKET_IFNAME, NCCL_IB_HCA and the fabric check of both nodes",
        primary=False,
        fatal=False,
    ),
    Row(
        "VLL-20",
        r"RayWorkerProc rank=\[?(?P<rank>\d[\d, ]*)\]? died unexpectedly|Worker proc (?P<proc>\S+) died unexpectedly(?: \(exit "
        r"code: (?P<exit_code>-?\d+)\))?|Ray workers have not started successfully",
        "",
        "rank {rank}{proc} died",
        "look at the log of that rank's node",
        primary=False,
    ),
    Row(
        "VLL-20",
        r"EngineCore failed to start|Engine core initialization failed|EngineCore encountered a fatal error|[Ee]ngine core "
        r"proc(?:ess)?.* died unexpectedly|EngineDeadError",
        "",
        "the engine ended",
        "look at the lines before it",
        primary=False,
    ),
    Row(
        "VLL-20",
        r"WorkerProc (?:initialization failed|failed to start)|RayWorkerProc failed|Executor failed",
        "",
        "a rank could not start",
        "look at the lines before it",
        primary=False,
    ),
)

# Neither failure nor progress: a heartbeat, a warning that is normal on two Sparks, an access-log line.
NOISE: tuple[tuple[str, str], ...] = (
    ("RDY-03", r"No available shared memory broadcast block found"),
    ("ray-autoscaler", r"No available node types can fulfill resource request|\(autoscaler"),
    ("placement-wait", r"Waiting for creating a placement group of specs for"),
    ("placement-removal", r"Waiting for removing a placement group"),
    ("tp-over-local", r"[Tt]ensor[ _]parallel[ _]size.*(?:exceeds available GPUs|is bigger than a reserved number of GPUs)"),
    ("access-log", r'"(?:GET|POST|HEAD) /\S* HTTP/1\.[01]" \d{3}|\b(?:GET|POST) /\S* HTTP/1\.[01]'),
    ("deprecation", r"\b(?:FutureWarning|DeprecationWarning|UserWarning)\b"),
    ("engine-stats", r"Avg prompt throughput"),
)

_ROWS = tuple((row, re.compile(row.pattern)) for row in TABLE)
_NOISE = tuple((name, re.compile(pattern)) for name, pattern in NOISE)
# One alternation that most lines fail quickly, before the rows are tried one by one.
_ANY = re.compile("|".join(f"(?:{re.sub(r'[(][?]P<[^>]+>', '(?:', row.pattern)})" for row in TABLE))

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:\s*\((?:[\w. -]+ )?pid=\d+[^)]*\) ?)+")
_LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: \[(?P<source>[^\]]*)\])?\s?")
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit))(?:: (?P<text>.*))?$")
_WEAK_TYPES = (
    "KeyboardInterrupt",
    "SystemExit",
    "EngineDeadError",
    "CancelledError",
    "StopIteration",
    "BrokenPipeError",
    "ConnectionResetError",
)


def clean(line: str) -> tuple[str, str]:
    """(level or "", text) of a log line without colours, process prefixes and time."""
    text = ANSI.sub("", line).rstrip()
    text = _PREFIX.sub("", text)
    found = _LEVEL.match(text)
    if found:
        return found.group("level"), text[found.end() :]
    return "", text


_FIELD = re.compile(r"\{(\w+)\}")


def fill(template: str, fields: t.Mapping[str, t.Any]) -> str:
    """The sentence with its figures; one that the line did not carry is left out, together with brackets that hold nothing else."""

    def drop(found: re.Match[str]) -> str:
        names = _FIELD.findall(found.group(0))
        return "" if names and not any(fields.get(name) for name in names) else found.group(0)

    text = re.sub(r" ?\([^()]*\)", drop, template)
    text = re.sub(r"(?: (?:on|at))? ?\{(\w+)\}", lambda m: m.group(0) if fields.get(m.group(1)) else "", text)
    return _FIELD.sub(lambda m: str(fields[m.group(1)]), text).replace("( ", "(")


def noise(text: str) -> str | None:
    """The name of the noise that this line is, or None."""
    for name, pattern in _NOISE:
        if pattern.search(text):
            return name
    return None


def match(line: str) -> dict[str, t.Any] | None:
    """What the table knows about one line: {id, stage, cause, remedy, primary, fatal, fields, line}, or None."""
    level, text = clean(line)
    if not _ANY.search(text):
        return None
    for row, pattern in _ROWS:
        found = pattern.search(text)
        if found:
            fields = {key: value.strip() for key, value in found.groupdict().items() if value}
            return {
                "id": row.id,
                "stage": row.stage,
                "cause": fill(row.cause, fields),
                "remedy": fill(row.remedy, fields),
                "primary": row.primary,
                "fatal": row.fatal and level not in ("DEBUG",),
                "fields": fields,
                "line": text[:500],
            }
    return None


def exception(line: str) -> dict[str, t.Any] | None:
    """The last line of a Python traceback, as a cause of its own when the table has none."""
    level, text = clean(line)
    found = _EXCEPTION.match(text.strip())
    if not found or found.group("type").rsplit(".", 1)[-1] in _WEAK_TYPES:
        return None
    return {
        "id": "VLL-00",
        "stage": "",
        "cause": text.strip()[:500],
        "remedy": "read the log around this line",
        "primary": True,
        "fatal": False,
        "fields": {"type": found.group("type")},
        "logged": level in ("ERROR", "CRITICAL"),
        "line": text.strip()[:500],
    }


def rank(cause: t.Mapping[str, t.Any]) -> int:
    """0 a known cause, 1 an unknown exception logged as an error, 2 one that was only printed, 3 what follows from a cause."""
    if not cause["primary"]:
        return 3
    if cause["id"] != "VLL-00":
        return 0
    return 1 if cause.get("logged") else 2


# A traceback that was only printed is a cause when the log ends with it; one further up was survived.
NEAR_END = 15


def ended_with(cause: t.Mapping[str, t.Any], number: int, count: int) -> bool:
    """Whether a finding on line ``number`` of ``count`` may be why the process ended."""
    return rank(cause) != 2 or count - number <= NEAR_END


def scan(lines: t.Iterable[str]) -> list[dict[str, t.Any]]:
    """Every known failure and every exception in these lines, in their order; printed exceptions only near the end."""
    found = []
    number = 0
    for number, line in enumerate(lines, 1):
        hit = match(line) or exception(line)
        if hit:
            found.append((number, hit))
    return [hit for at, hit in found if ended_with(hit, at, number)]


def best(causes: t.Iterable[t.Mapping[str, t.Any]]) -> dict[str, t.Any] | None:
    """The first primary cause; without one the first unknown exception that was logged as an error; without one the last that was only
    printed (earlier ones were survived: a plugin that could not be loaded); without one the first consequence."""
    chosen: t.Mapping[str, t.Any] | None = None
    for cause in causes:
        if chosen is None or rank(cause) < rank(chosen) or rank(cause) == rank(chosen) == 2:
            chosen = cause
    return dict(chosen) if chosen is not None else None


def first_cause(logs: t.Mapping[str, str]) -> dict[str, t.Any] | None:
    """The first cause over the logs of several nodes or containers (name -> text of ``docker logs --timestamps``).

    Lines are ordered by their time stamps; a line without one keeps its place behind the line before it. Returns what ``match`` returns and
    ``node``, ``time`` and ``others`` (ids of the further findings, for the record), or None when nothing is known.
    """
    entries: list[tuple[str, int, str, str]] = []
    for node, text in logs.items():
        stamp = ""
        lines = (text or "").splitlines()
        for number, line in enumerate(lines):
            found, rest = split_stamp(line)
            stamp = found or stamp
            entries.append((stamp, len(lines) - number, node, rest))
    entries.sort(key=lambda entry: entry[0])
    causes = []
    for stamp, from_end, node, line in entries:
        hit = match(line) or exception(line)
        if hit and ended_with(hit, 0, from_end):
            causes.append(dict(hit, node=node, time=stamp))
    chosen = best(causes)
    if chosen is not None:
        chosen["others"] = sorted({c["id"] for c in causes} - {chosen["id"]})
    return chosen


def sentence(cause: t.Mapping[str, t.Any] | None) -> str:
    """For a message: the cause and the line it was read from."""
    if not cause:
        return ""
    if cause["cause"] == cause["line"]:
        return str(cause["cause"])
    return f"{cause['cause']} [{str(cause['line']).strip()[:240]}]"


def last_lines(text: str, count: int = 5) -> str:
    """The last meaningful lines of a log, for a message about something nobody knows a cause for."""
    lines = []
    for line in (text or "").splitlines():
        dummy, body = clean(split_stamp(line)[1])
        if body.strip() and not noise(body):
            lines.append(body.strip()[:300])
    return " | ".join(lines[-count:])
