# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that image_probe runs inside the serving image. It reaches the image's own python3 as text on stdin.

PRIVATE to the collection. Standard library only, Python 3.9 or newer: it runs in whatever Python the image has. vLLM, Ray, torch and
transformers are imported late, one after the other, and what goes wrong in one part is told without stopping the others. Nothing here
needs a GPU, a network or an engine.

The first process stays small: it forks the one that imports, ends it when the time is over and tells how it ended, also when a native
library of the image kills it. As it is the container's first process, nothing survives it.
"""

from __future__ import annotations

import ast
import ctypes
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import signal
import sys
import time
import typing as t

MARK = "@dgxspark-probe "
PACKAGES = ("vllm", "ray", "torch", "transformers", "huggingface_hub")
PARSER_PLACES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
FLEXIBLE_PLACES = ("vllm.utils.argparse_utils", "vllm.utils")
# What only a GPU or its driver would have made right; then the answer is unknown, not wrong.
NO_GPU = re.compile(r"cuda|nvml|nvidia|\bgpu|driver|device type|no platform|libtpu|rocm", re.IGNORECASE)
INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf)$")
NOT_WEIGHTS = re.compile(r"^(training_args|optimizer|scheduler|rng_state)")
TOKENIZER = re.compile(r"token|vocab|tekken|spiece|sentencepiece|merges|\.tiktoken$", re.IGNORECASE)
NOT_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
PARSERS = (
    (
        "tool_call_parser",
        "--tool-call-parser",
        "tool_parser_plugin",
        "ToolParserManager",
        ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
    ),
    ("reasoning_parser", "--reasoning-parser", "reasoning_parser_plugin", "ReasoningParserManager", ("vllm.reasoning",)),
)

Emit = t.Callable[[str, "dict[str, t.Any]"], None]


class Refused(Exception):
    """argparse refused; the text is its reason."""


def sentence(exc: BaseException, limit: int = 400) -> str:
    """``ValueError: first lines of the reason`` on one line."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}"[:limit] if text else type(exc).__name__


def without_gpu(exc: BaseException) -> bool:
    """Whether this error may only be there because the probe has no GPU."""
    return not isinstance(exc, ModuleNotFoundError) and bool(NO_GPU.search(str(exc)))


# --- versions ------------------------------------------------------------------------------------------------------------


def nccl_version() -> str | None:
    """Version of the NCCL that would be loaded (no GPU is needed to ask it); None when there is none to find."""
    names = [os.environ.get("VLLM_NCCL_SO_PATH", "")]
    for item in importlib.metadata.distributions():
        if str(item.metadata["Name"] or "").startswith("nvidia-nccl"):
            names += [str(item.locate_file("nvidia/nccl/lib/libnccl.so.2"))]
    for name in [*names, "libnccl.so.2"]:
        if not name:
            continue
        number = ctypes.c_int(0)
        try:
            if ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number)) != 0:
                continue
        except (OSError, AttributeError):
            continue
        return nccl_text(number.value)
    return None


def nccl_text(number: int) -> str:
    """22809 -> 2.28.9; up to 2.8 the code had one digit less (2708 -> 2.7.8)."""
    if number < 10000:
        return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def versions() -> dict[str, t.Any]:
    """Versions by the metadata of the packages; nothing is imported. None: not installed."""
    found: dict[str, t.Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["nccl"] = nccl_version()
    return found


# --- files ---------------------------------------------------------------------------------------------------------------


def unreadable(path: str) -> str | None:
    """Why a file cannot be read to its end; None when it can. Its first and last bytes are read."""
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            if size > 8:
                handle.seek(-1, os.SEEK_END)
                handle.read(1)
            if not path.endswith(".safetensors"):
                return None
            return unlike_safetensors(handle, head, size)
    except FileNotFoundError:
        return "a link whose target is not there" if os.path.islink(path) else "not there"
    except OSError as exc:
        return str(exc.strerror or exc).lower()


def unlike_safetensors(handle: t.Any, head: bytes, size: int) -> str | None:
    """Why a file is not a whole safetensors file: its header says how long it must be."""
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(size - 8, 100 << 20):
        return "not a safetensors file"
    handle.seek(8)
    try:
        header = json.loads(handle.read(length))
        ends = [int(item["data_offsets"][1]) for name, item in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return "a safetensors file with a broken header"
    wanted = 8 + length + max(ends, default=0)
    return None if wanted == size else f"{size} bytes instead of the {wanted} that its header says"


def files(path: str) -> dict[str, t.Any]:
    """Whether everything that an engine opens is readable at this path: config, tokenizer, every shard of the index."""
    if os.path.isfile(path):
        reason = unreadable(path)
        return {"path": path, "checked": 1, "missing": [{"path": path, "reason": reason}] if reason else []}
    try:
        present = sorted(os.listdir(path))
    except OSError as exc:
        return {"path": path, "checked": 0, "missing": [{"path": path, "reason": str(exc.strerror or exc).lower()}]}
    wanted = ["params.json" if "params.json" in present and "config.json" not in present else "config.json"]
    missing = []
    shards: set[str] = set()
    for name in [name for name in INDEXES if name in present]:
        wanted.append(name)
        try:
            with open(os.path.join(path, name), encoding="utf-8") as handle:
                shards |= set(json.load(handle)["weight_map"].values())
        except OSError:
            pass  # told below, as for every other file
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            missing.append({"path": os.path.join(path, name), "reason": f"an index that cannot be read ({sentence(exc, 120)})"})
        break  # the first one is the one that an engine takes
    weights = [name for name in present if WEIGHTS.search(name) and not NOT_WEIGHTS.search(name)]
    tokenizer = [name for name in present if TOKENIZER.search(name) and name not in NOT_TOKENIZER]
    others = [name for name in present if not os.path.isdir(os.path.join(path, name))]
    checked = list(dict.fromkeys([*wanted, *tokenizer, *sorted(shards), *weights, *others]))
    for name in checked:
        reason = unreadable(os.path.join(path, name))
        if reason:
            missing.append({"path": os.path.join(path, name), "reason": reason})
    if not shards and not weights and not missing:
        missing.append({"path": os.path.join(path, "*.safetensors"), "reason": "no weights at all"})
    return {"path": path, "checked": len(checked), "missing": missing, "tokenizer": bool(tokenizer)}


# --- vLLM ----------------------------------------------------------------------------------------------------------------


def import_one(name: str) -> dict[str, t.Any]:
    """Import a package as a server would. ``imported`` is None when only the missing GPU may be the reason."""
    try:
        module = importlib.import_module(name)
    except BaseException as exc:  # pylint: disable=broad-exception-caught
        return {"imported": None if without_gpu(exc) else False, "error": sentence(exc), "version": None}
    return {"imported": True, "error": "", "version": str(getattr(module, "__version__", "") or "") or None}


def prepare_platform() -> str:
    """Name of vLLM's platform. Without a GPU it has no device type, and then not even the parser can be built; it gets one."""
    current = importlib.import_module("vllm.platforms").current_platform
    if not getattr(current, "device_type", ""):
        current.device_type = "cuda"
    return type(current).__name__


def imports_of(path: str) -> dict[str, str]:
    """Where a source file takes its names from, also inside functions: {name: module}. It is read, not run."""
    try:
        with open(path, encoding="utf-8") as handle:
            tree = ast.parse(handle.read())
    except (OSError, ValueError, SyntaxError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({alias.name: node.module for alias in node.names})
    return found


def find(name: str, places: t.Iterable[str]) -> t.Any:
    """The first of the modules that has this name. Raises ImportError with what each of them said."""
    told = []
    for place in dict.fromkeys(places):
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError) as exc:
            told.append(sentence(exc, 160))
    raise ImportError(f"{name} is in none of the known places: {'; '.join(told)}")


def build_parser() -> tuple[t.Any, t.Any, dict[str, str]]:
    """(parser of ``vllm``, that of ``vllm serve``, where serve.py takes its names from): built as the command itself builds them."""
    root = os.path.dirname(str(importlib.import_module("vllm").__file__))
    told = imports_of(os.path.join(root, "entrypoints", "cli", "serve.py"))
    flexible = find("FlexibleArgumentParser", [*([told[n] for n in ("FlexibleArgumentParser",) if n in told]), *FLEXIBLE_PLACES])
    top = flexible(prog="vllm")
    commands = top.add_subparsers(dest="subparser")
    try:
        make = find("make_arg_parser", [*([told["make_arg_parser"]] if "make_arg_parser" in told else []), *PARSER_PLACES])
    except ImportError:
        serve = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand().subparser_init(commands)
    else:
        serve = make(commands.add_parser("serve", usage="vllm serve [model_tag] [options]"))
    return top, serve, told


def same_flag(argument: str, flag: str) -> bool:
    """``--a_b=1`` and ``--a-b.c`` are the flag ``--a-b``."""
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-") == flag.split(".", 1)[0].replace("_", "-")


def read_refusal(message: str, arguments: t.Sequence[str], known: t.Sequence[str]) -> list[dict[str, str]]:
    """What argparse refused: [{flag, reason, close}]. ``close`` is the nearest flag or value that exists, or ""."""
    unknown = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unknown:
        flags = [word.split("=", 1)[0] for word in unknown.group(1).split() if re.match(r"--?[A-Za-z]", word)]
        result = []
        for flag in dict.fromkeys(flags):
            close = difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=0.6)
            result.append({"flag": flag, "reason": "this vLLM has no such argument", "close": close[0] if close else ""})
        return result or [{"flag": "", "reason": f"a value without a flag: {unknown.group(1)[:120]}", "close": ""}]
    named = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
    if not named:
        return [{"flag": "", "reason": " ".join(message.split())[:300], "close": ""}]
    names = named.group(1).split("/")
    flag = next((name for name in names if any(same_flag(argument, name) for argument in arguments)), names[0])
    reason = re.sub(
        r"<function (\w+) at 0x[0-9a-f]+>", lambda found: "JSON" if found[1] == "loads" else found[1], " ".join(named.group(2).split())
    )
    choice = re.match(r"invalid choice: '([^']*)' \(choose from (.*)\)", reason)
    close = difflib.get_close_matches(choice.group(1), re.findall(r"[\w.-]+", choice.group(2)), n=1, cutoff=0.5) if choice else []
    return [{"flag": flag, "reason": reason[:300], "close": close[0] if close else ""}]


def without_flag(arguments: t.Sequence[str], flag: str) -> list[str]:
    """The arguments without this flag and its values."""
    kept = []
    skip = False
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):
            skip = same_flag(argument, flag)
        if not skip:
            kept.append(argument)
    return kept


def parse(top: t.Any, serve: t.Any, arguments: t.Sequence[str]) -> tuple[t.Any, list[dict[str, str]]]:
    """(namespace or None, refusals). All wrong flags are found: each refused one is left out and the rest is parsed again."""

    def refuse(message: str) -> None:
        raise Refused(message)

    top.error = serve.error = refuse
    known = [name for name in getattr(serve, "_option_string_actions", {}) if name.startswith("--")]
    refused: list[dict[str, str]] = []
    rest = list(arguments)
    for dummy in range(len(rest) + 1):
        try:
            return top.parse_args(["serve", *rest]), refused
        except Refused as exc:
            found = read_refusal(str(exc), rest, known)
        except SystemExit:
            found = [{"flag": "", "reason": "an argument that only prints something and ends", "close": ""}]
        except Exception as exc:  # pylint: disable=broad-exception-caught
            found = [{"flag": "", "reason": sentence(exc, 300), "close": ""}]
        refused += found
        shorter = rest
        for item in found:
            shorter = without_flag(shorter, item["flag"]) if item["flag"] else shorter
        if len(shorter) == len(rest):
            break
        rest = shorter
    return None, refused


def late_refusals(parsed: t.Any, told: t.Mapping[str, str]) -> list[dict[str, str]]:
    """What ``vllm serve`` refuses right after parsing, such as combinations of flags."""
    try:
        name = "validate_parsed_serve_args"
        validate = find(name, [*([told[name]] if name in told else []), *PARSER_PLACES])
    except ImportError:
        return []
    try:
        validate(parsed)
    except (ValueError, TypeError) as exc:
        flag = re.search(r"--[a-z][a-z0-9-]+", str(exc))
        return [{"flag": flag.group(0) if flag else "", "reason": sentence(exc, 300), "close": ""}]
    except Exception:  # pylint: disable=broad-exception-caught
        return []  # not about the arguments
    return []


def names_refused(parsed: t.Any) -> list[dict[str, str]]:
    """Names of parsers that this vLLM does not have. Its own argparse takes any; the server then ends while it starts."""
    refused: list[dict[str, str]] = []
    for dest, flag, plugin, manager, places in PARSERS:
        value = getattr(parsed, dest, None)
        if not value or not isinstance(value, str) or getattr(parsed, plugin, None):
            continue
        try:
            names = [str(item) for item in find(manager, places).list_registered()]
        except (ImportError, AttributeError, TypeError):
            continue
        if names and value not in names:
            close = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
            listed = f"is none of its {len(names)} parsers" if close else f"is not one of: {', '.join(sorted(names))}"
            refused.append({"flag": flag, "reason": f"{value!r} {listed}", "close": close[0] if close else ""})
    return refused


def arguments(given: t.Sequence[str]) -> tuple[dict[str, t.Any], t.Any]:
    """({accepted: True, False or None for unknown, refused, reason}, parsed arguments or None)."""
    try:
        top, serve, told = build_parser()
    except BaseException as exc:  # pylint: disable=broad-exception-caught
        return {"accepted": None, "refused": [], "reason": sentence(exc)}, None
    parsed, refused = parse(top, serve, given)
    if parsed is not None:
        # A combination is only judged as it was given: not after a wrong flag was left out.
        refused += names_refused(parsed) + ([] if refused else late_refusals(parsed, told))
    return {"accepted": not refused, "refused": refused, "reason": ""}, parsed


def load_config(path: str, parsed: t.Any) -> t.Any:
    """The config as vLLM loads it, with the overrides of the arguments."""
    get_config = importlib.import_module("vllm.transformers_utils.config").get_config
    wanted: dict[str, t.Any] = {"trust_remote_code": bool(getattr(parsed, "trust_remote_code", False))}
    config_format = getattr(parsed, "config_format", None)
    if config_format:
        wanted["config_format"] = config_format
    overrides = getattr(parsed, "hf_overrides", None)
    if isinstance(overrides, dict) and overrides:
        wanted["hf_overrides_kw"] = overrides
    accepted = inspect.signature(get_config).parameters
    return get_config(path, **{key: value for key, value in wanted.items() if key in accepted})


def model_known(path: str, parsed: t.Any) -> dict[str, t.Any]:
    """Whether this vLLM and its transformers know the model: {known: True, False or None, by, model_type, architectures, reason}."""
    raw: dict[str, t.Any] = {}
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as handle:
            raw = json.load(handle)
    except (OSError, ValueError) as exc:
        if not os.path.exists(os.path.join(path, "params.json")):
            return {"known": None, "by": "", "model_type": "", "architectures": [], "reason": sentence(exc)}
    result: dict[str, t.Any] = {
        "known": None,
        "by": "",
        "model_type": str(raw.get("model_type") or ""),
        "architectures": [str(item) for item in raw.get("architectures") or []],
        "reason": "",
    }
    try:
        importlib.import_module("vllm.plugins").load_general_plugins()  # they may bring models
        config = load_config(path, parsed)
    except (ImportError, AttributeError, NameError) as exc:
        return {**result, "reason": sentence(exc)}
    except Exception as exc:  # pylint: disable=broad-exception-caught
        return {**result, "known": None if without_gpu(exc) else False, "reason": sentence(exc)}
    result["model_type"] = result["model_type"] or str(getattr(config, "model_type", "") or "")
    result["architectures"] = [str(item) for item in getattr(config, "architectures", None) or result["architectures"]]
    return {**result, **architecture_known(result["architectures"], raw, parsed)}


def architecture_known(names: t.Sequence[str], raw: t.Mapping[str, t.Any], parsed: t.Any) -> dict[str, t.Any]:
    """{known, by, reason} of the architectures: vLLM's own list, else transformers' class, else code of the model itself."""
    if not names:
        return {"known": None, "reason": "config.json names no architecture"}
    try:
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        supported = set(registry.get_supported_archs())
    except Exception as exc:  # pylint: disable=broad-exception-caught
        return {"known": None, "reason": sentence(exc)}
    if any(name in supported for name in names):
        return {"known": True, "by": "vllm", "reason": ""}
    if getattr(parsed, "trust_remote_code", False) and raw.get("auto_map"):
        return {"known": True, "by": "code of the model", "reason": ""}
    transformers = importlib.import_module("transformers")
    if any(hasattr(transformers, name) for name in names):
        return {"known": True, "by": "transformers", "reason": ""}
    try:
        registry._raise_for_unsupported(list(names))  # pylint: disable=protected-access
    except ValueError as exc:  # it knows what used to be supported, and until when
        return {"known": False, "reason": sentence(exc, 2000).split(" Supported architectures", 1)[0][:400]}
    except Exception:  # pylint: disable=broad-exception-caught
        return {"known": False, "reason": f"{', '.join(names)} is not in vLLM's list of models"}
    return {"known": False, "reason": f"{', '.join(names)} is not in vLLM's list of models"}


# --- the whole -----------------------------------------------------------------------------------------------------------


def work(request: t.Mapping[str, t.Any], emit: Emit) -> None:
    """All parts in order; each is told when it is done."""
    commands = {name: shutil.which(name) for name in ("vllm", "ray")}
    emit("image", {"versions": versions(), "commands": commands, "machine": platform.machine(), "uid": os.getuid()})
    model = str(request.get("model") or "")
    if model:
        emit("files", files(model))
    if request.get("scope") == "versions":
        return
    found = import_one("vllm")
    if found["imported"]:
        try:
            found["platform"] = prepare_platform()
        except Exception as exc:  # pylint: disable=broad-exception-caught
            found["platform"] = ""
            found["error"] = sentence(exc)
    emit("vllm", found)
    emit("ray", import_one("ray"))
    if not found["imported"]:
        return
    answer, parsed = arguments([str(item) for item in request.get("arguments") or []])
    emit("arguments", answer)
    if model:
        emit("model", model_known(model, parsed))


def other_python(request: t.Mapping[str, t.Any]) -> str:
    """The Python of the ``vllm`` command, when it is another one and this one does not have vLLM (an environment of its own)."""
    if request.get("again") or importlib.util.find_spec("vllm"):
        return ""
    try:
        with open(shutil.which("vllm") or "", "rb") as handle:
            first = handle.readline(512).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    words = first[2:].split() if first.startswith("#!") else []
    python = words[-1] if words else ""
    return python if os.access(python, os.X_OK) and os.path.realpath(os.path.dirname(python)) != os.path.dirname(sys.executable) else ""


def start_again(python: str, boot: str, source: str, request: t.Mapping[str, t.Any]) -> None:
    """Become the same program in another Python."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as handle:
            handle.write(program(source, {**request, "again": True}))
        os._exit(0)
    os.close(writer)
    os.dup2(reader, 0)
    os.execv(python, [python, "-c", boot])


def program(source: str, request: t.Mapping[str, t.Any]) -> str:
    """The text that runs: this file and a last line that starts it."""
    return f"{source}\nrun(json.loads({json.dumps(json.dumps(request))}), SOURCE)\n"


BOOT = "import sys\nSOURCE = sys.stdin.read()\nexec(compile(SOURCE, 'image_probe', 'exec'))"


def watch(child: int, limit: float) -> dict[str, t.Any]:
    """Wait for the process that imports, at most ``limit`` seconds: how it ended."""
    started = time.monotonic()
    over = False
    while True:
        pid, status = os.waitpid(child, 0 if over else os.WNOHANG)
        if pid:
            break
        if time.monotonic() - started > limit:
            over = True
            os.kill(child, signal.SIGKILL)
        else:
            time.sleep(0.02)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"timeout": over, "signal": number, "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None}


def run(request: t.Mapping[str, t.Any], source: str) -> None:
    """Entry point inside the image. Results are lines on stdout; all that libraries print goes to stderr."""
    # The commands vllm and ray do not look for packages in the working directory either.
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    os.environ.update({str(key): str(value) for key, value in (request.get("env") or {}).items()})
    python = other_python(request)
    if python:
        start_again(python, BOOT, source.rsplit("\nrun(json.loads(", 1)[0], request)
    results = os.dup(1)
    os.dup2(2, 1)
    last = [time.monotonic()]

    def emit(part: str, data: dict[str, t.Any]) -> None:
        now = time.monotonic()
        line = MARK + json.dumps({"part": part, "seconds": round(now - last[0], 2), **data}) + "\n"
        last[0] = now
        os.write(results, line.encode())

    child = os.fork()
    if child == 0:
        code = 0
        try:
            work(request, emit)
        except BaseException as exc:  # pylint: disable=broad-exception-caught
            emit("error", {"error": sentence(exc)})
            code = 1
        os._exit(code)
    emit("end", watch(child, float(request.get("timeout") or 300)))
    os._exit(0)
