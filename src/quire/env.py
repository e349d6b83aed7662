"""The only file that reads os.environ: one table of variables. Each is read when its value is needed.

Each variable has two names, QUIRE_NAME and VLLM_NAME (the first wins), so that existing deployments keep working.
Knows names, kinds, defaults, and the configuration field that a variable fills. Imports nothing of Quire.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table. `name` has no prefix."""

    name: str
    kind: type
    default: Any
    help: str
    field: str | None = None
    """The configuration field that it fills when neither a flag nor a keyword sets that field."""
    no_effect: str = ""
    """Why no code reads it: the warning for any value but the default."""


VARIABLES: dict[str, Variable] = {
    row.name: row
    for row in (
        # Read before a configuration exists
        Variable("LOGGING_LEVEL", str, "INFO", "Log level of all processes."),
        Variable("CONFIGURE_LOGGING", bool, True, "0: do not configure Python's logging."),
        Variable("LOGGING_CONFIG_PATH", str, None, "JSON file for logging.config.dictConfig."),
        Variable("LOGGING_PREFIX", str, "", "Prefix of each log line."),
        Variable("LOGGING_STREAM", str, "stderr", "Stream for log lines: stderr or stdout."),
        Variable("LOGGING_FORMAT", str, "text", "text, or json (one JSON object per line)."),
        Variable("LOGGING_COLOR", str, "auto", "Colored log lines: auto, 1 or 0 (NO_COLOR is honored)."),
        Variable("CACHE_ROOT", str, "~/.cache/quire", "Cache directory for compiled kernels and downloads."),
        Variable("HOST_IP", str, "", "This machine's address for other machines of an engine; unset: that from which it reaches the head."),
        Variable("CLUSTER_KEY_FILE", str, None, "File with the key that the machines of an engine share, at least 16 bytes."),
        Variable("NODES_TIMEOUT_S", int, 50, "Seconds that the machines of an engine wait for each other at the start."),
        Variable("PLUGINS", str, None, "Comma-separated names of the plugins to load; unset: all that are installed for Quire."),
        Variable("DEVICE", str, None, "cpu, cuda, or the name of a platform plugin; unset: detected."),
        Variable("WORKER_MULTIPROC_METHOD", str, "spawn", "How workers start.", no_effect="workers are new processes, never forks"),
        Variable("ENABLE_V1_MULTIPROCESSING", bool, True, "0: the engine runs in the program's process."),
        # Limits and switches of the server and the engine
        Variable("MAX_N_SEQUENCES", int, 128, "Maximum n of a request."),
        Variable("MAX_STOP_STRINGS", int, 16, "Maximum stop strings of a request."),
        Variable("MAX_COMPLETION_PROMPTS", int, 1024, "Maximum prompts of a request to /v1/completions."),
        Variable("MAX_LIST_ENTRIES", int, 128, "Maximum stop_token_ids, bad_words (as words and as token sequences) and logprob_token_ids of a request."),
        Variable("MAX_LOGIT_BIASES", int, 65536, "Maximum entries of a request's logit_bias."),
        Variable("MAX_TOOLS", int, 1024, "Maximum tools of a request."),
        Variable("MAX_SCHEMA_NESTING", int, 64, "Maximum nesting depth of a JSON schema."),
        Variable("SERVER_DEV_MODE", bool, False, "1: serve development routes such as /reset_prefix_cache."),
        Variable("ALLOW_RUNTIME_LORA_UPDATING", bool, False, "1: allow loading and unloading LoRA adapters over HTTP, and ask resolvers for unknown names."),
        Variable("LORA_RESOLVER_CACHE_DIR", str, None, "Directory whose subdirectories are LoRA adapters that requests may name."),
        Variable("LORA_RESOLVER_HF_REPO_LIST", str, None, "Hub repositories of LoRA adapters.", no_effect="load an adapter of the hub by its id, with --lora-modules or /v1/load_lora_adapter"),
        Variable("ALLOW_LONG_MAX_MODEL_LEN", bool, False, "1: allow max_model_len above the model's context length."),
        Variable("SKIP_MODEL_NAME_VALIDATION", bool, False, "1: accept any model name in requests."),
        Variable("IMAGE_FETCH_TIMEOUT", float, 5.0, "Seconds in which all pictures of a request must be fetched."),
        Variable("VIDEO_FETCH_TIMEOUT", float, 30.0, "The same for requests with videos."),
        Variable("AUDIO_FETCH_TIMEOUT", float, 10.0, "The same for requests with sound."),
        Variable("MAX_MEDIA_DOWNLOAD_SIZE_MB", int, 256, "Maximum MiB of all pictures, videos and sounds of a request, as files."),
        Variable("MAX_IMAGE_PIXELS", int, 178_956_970, "Maximum pixels of a picture; its header is read first."),
        Variable("MAX_AUDIO_CLIP_FILESIZE_MB", int, 25, "Maximum MiB of a sound file."),
        Variable("MAX_AUDIO_DECODE_DURATION_S", int, 600, "Maximum seconds of a sound file."),
        Variable("MAX_AUDIO_DECODE_BYTES", int, 1 << 28, "Maximum bytes of a sound file when it is decoded, at its own rate, with all channels."),
        Variable("MAX_AUDIO_PREPROCESS_WORKERS", int, 2, "Processes of an HTTP process that decode sound."),
        Variable("MEDIA_LOADING_THREAD_COUNT", int, 8, "Pictures that an HTTP process fetches at once."),
        Variable("MEDIA_FETCH_MAX_RETRIES", int, 3, "Attempts to fetch a picture.", no_effect="a URL is fetched once, within the deadline of all pictures of the request"),
        Variable("MEDIA_CONNECTOR", str, "http", "How pictures are fetched.", no_effect="data:, http, https and file URLs are always read in one way"),
        Variable("MEDIA_CACHE", str, None, "Directory of fetched pictures.", no_effect="pictures are kept in memory after they are processed (--mm-processor-cache-gb)"),
        Variable("VIDEO_LOADER_BACKEND", str, None, "Decoder of videos.", no_effect="PyAV decodes videos"),
        Variable("MAX_EMBED_DECODE_BYTES", int, 2 << 30, "Maximum bytes of embeddings.", no_effect="embeddings in the place of a picture have the tokens of the largest picture at most"),
        Variable("MEDIA_URL_ALLOW_REDIRECTS", bool, True, "0: refuse URLs of pictures that redirect; 1: follow three at most, with the same checks for each."),
        Variable("PP_LAYER_PARTITION", str, None, "Number of layers of each pipeline stage, such as 10,22; unset: as equal as possible."),
        Variable("ENGINE_READY_TIMEOUT_S", int, 600, "Seconds that an engine process may take to start, or to run a function."),
        Variable("EXECUTE_MODEL_TIMEOUT_SECONDS", int, 300, "Seconds that a step may take before its worker counts as hung."),
        Variable("CPU_ISA", str, "auto", "Native CPU kernels: auto, amx, avx512bf16, avx512vnni, avx512, avx2, portable, or none (plain torch)."),
        Variable("HEARTBEAT_TIMEOUT_S", float, 8.0, "Seconds without a heartbeat after which an engine process is restarted; 0: never."),
        Variable("MAX_ENGINE_RESTARTS", int, 3, "Restarts of a dead or hung process within ten minutes without delay; after that one every 30 seconds. 0: no restart, the server exits."),
        Variable("FLIGHT_RECORDER", bool, True, "0: the engine process does not record its last steps."),
        Variable("KEEP_ALIVE_ON_ENGINE_DEATH", bool, False, "1: the HTTP server keeps running after the engine has died."),
        Variable("CHECK", bool, False, "1: integrity checks after every step (tests, debugging)."),
        # Variables that fill a configuration field, and a few others
        Variable("API_KEY", str, None, "API key of the server.", "api_key"),
        Variable("ATTENTION_BACKEND", str, None, "Attention backend.", "attention_backend"),
        Variable("KV_KEY_FILE", str, None, "File with the key of the names of KV blocks.", "kv_key_file"),
        Variable("KV_REMOTE_URL", str, None, "Server that keeps KV blocks; may have a password.", "kv_remote_url"),
        Variable("CPU_KVCACHE_SPACE", float, None, "Size of the KV cache in GiB.", "kv_cache_memory_bytes"),
        Variable("LOG_STATS_INTERVAL", float, None, "Seconds between statistics lines.", "log_stats_interval"),
        Variable("USE_V1", bool, True, "vLLM's choice between two engines.", no_effect="Quire has one engine"),
        Variable("CPU_OMP_THREADS_BIND", str, "auto", "Cores to compute on: auto (one NUMA node), nobind, or a list such as 0-3,8."),
        Variable("CPU_NUM_OF_RESERVED_CPU", int, 0, "Number of cores that do not compute."),
        Variable("DP_RANK", int, None, "Data parallel rank of this program, if a script of yours starts one program for each engine."),
        Variable("DP_SIZE", int, None, "Number of these programs."),
        Variable("DP_MASTER_IP", str, "", "Address of the first of them; unset or loopback: all are on this machine, and divide its cores and memory."),
    )
}  # fmt: skip

_OF_PYTHON = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ",
)  # fmt: skip

_QUIET = """
BATCH_INVARIANT NO_USAGE_STATS DO_NOT_TRACK USAGE_SOURCE USAGE_STATS_SERVER TARGET_DEVICE
CONFIG_ROOT ASSETS_CACHE RPC_TIMEOUT RPC_BASE_PATH PORT DP_RANK_LOCAL
DP_MASTER_PORT TRACE_FUNCTION ALLOW_INSECURE_SERIALIZATION XGRAMMAR_CACHE_MB USE_MODELSCOPE
USE_TRITON_FLASH_ATTN FLASH_ATTN_VERSION
USE_FLASHINFER_SAMPLER TORCH_PROFILER_DIR DISABLE_COMPILE_CACHE USE_PRECOMPILED
DEBUG_LOG_API_SERVER_RESPONSE NCCL_SO_PATH TORCH_COMPILE_LEVEL WORKER_MULTIPROC CPU_SGL_KERNEL
CPU_MOE_PREPACK KV_CACHE_LAYOUT SLEEP_WHEN_IDLE HTTP_TIMEOUT_KEEP_ALIVE DISABLED_KERNELS
RAY_EXTRA_ENV_VARS_TO_COPY RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_DP_PACK_STRATEGY RAY_PER_WORKER_GPUS
RAY_BUNDLE_INDICES RAY_DP_PLACEMENT_NODE_IPS USE_AOT_COMPILE LOOPBACK_IP MODEL_REDIRECT_PATH SERVER_PORT IMAGE VERSION
DISABLE_REQUEST_ID_RANDOMIZATION USE_DEEP_GEMM MOE_DP_CHUNK_SIZE ENABLE_COHERE_API
"""
QUIET = frozenset(_QUIET.split())
"""vLLM's variables that tune what this engine does not have: accepted without a warning."""

# Kubernetes sets these in every pod when a service is called "vllm": VLLM_PORT=tcp://10.0.0.1:80 and so on.
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")


def raw(name: str) -> str | None:
    """The text of QUIRE_name, or else of VLLM_name; None if neither is set."""
    value = os.environ.get(f"QUIRE_{name}")
    return os.environ.get(f"VLLM_{name}") if value is None else value


def spelt(name: str) -> str:
    """The full name of the variable that `raw` reads."""
    return f"QUIRE_{name}" if f"QUIRE_{name}" in os.environ else f"VLLM_{name}"


def get(name: str) -> Any:
    """The value of a variable of the table, or its default.

    Raises:
        KeyError: the variable is not in the table.
        ValueError: the text cannot be converted to the variable's kind.
    """
    row = VARIABLES[name]
    text = raw(name)
    return row.default if text is None else parse(row, text)


def parse(row: Variable, text: str) -> Any:
    if row.kind is bool:
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
    elif row.kind is str:
        return text
    else:
        try:
            return row.kind(text)
        except ValueError:
            pass
    wanted = {bool: "0 or 1", int: "a whole number", float: "a number"}[row.kind]
    raise ValueError(
        f"the environment variable QUIRE_{row.name} (or VLLM_{row.name}) is {text!r}: it must be {wanted}"
    )


def outer(name: str) -> str | None:
    """A variable without Quire's prefixes: HF_TOKEN, NO_COLOR, CUDA_VISIBLE_DEVICES, PROMETHEUS_MULTIPROC_DIR."""
    return os.environ.get(name)


def outer_names(prefix: str) -> list[str]:
    """The names of all variables that begin so."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def set_outer(name: str, value: str) -> None:
    """Set a variable that a library reads when it is imported, such as PROMETHEUS_MULTIPROC_DIR."""
    os.environ[name] = value


def limit_spins() -> None:
    """Torch's threads shall sleep soon, if this process loads torch later."""
    os.environ.update(_short_spins())


def _short_spins() -> dict[str, str]:
    """What libgomp, which runs torch's own operations, reads once when it is loaded.

    By default its threads spin for milliseconds after each operation. They keep a core from the kernels' threads, and beside
    a busy process of another scheduling group they use up this group's share of the cores. 1000 turns take 20 to 50 us.
    """
    set_by_user = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    return {} if set_by_user else {"GOMP_SPINCOUNT": "1000"}


def for_a_child(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a child process.

    Python reads an empty entry of PYTHONPATH, as in `$PYTHONPATH:/x`, as the working directory. Such entries are
    always accidents, so they are removed.
    """
    return {**_importable(dict(os.environ)), **_short_spins(), **changes}


def adopt(environment: Mapping[str, str], not_ending: Sequence[str]) -> None:
    """Set the variables of another machine's process that this one does not set, but those whose names end so.

    Without OMP_NUM_THREADS, which Ray sets to 1, unless the other process has it.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    for name, value in environment.items():
        if not name.endswith(tuple(not_ending)):
            os.environ.setdefault(name, value)


def bare_for_a_child() -> dict[str, str]:
    """The few variables that Python itself needs, for a process that must not see keys and tokens."""
    return _importable({name: os.environ[name] for name in _OF_PYTHON if name in os.environ})


def _importable(found: dict[str, str]) -> dict[str, str]:
    if "PYTHONPATH" in found:
        entries = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if entry)
    return found


def fields() -> dict[str, Any]:
    """The configuration fields that the environment sets: field -> value."""
    found: dict[str, Any] = {}
    for row in VARIABLES.values():
        if row.field is not None and (value := get(row.name)) is not None:
            found[row.field] = value
    if "kv_cache_memory_bytes" in found:  # the variable is in GiB
        found["kv_cache_memory_bytes"] = int(found["kv_cache_memory_bytes"] * (1 << 30)) or None
    return {name: value for name, value in found.items() if value is not None}


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables with Quire's prefixes that no table has: most likely typing errors."""
    found = []
    for name in environ if environ is not None else os.environ:
        prefix, _, rest = name.partition("_")
        if prefix not in ("QUIRE", "VLLM") or rest in VARIABLES or rest in QUIET:
            continue
        if not _KUBERNETES.fullmatch(rest):
            found.append(name)
    return sorted(found)


def own_variables() -> dict[str, str]:
    """All variables with Quire's prefixes, for the bug report; secret values are masked."""
    secret = ("KEY", "TOKEN", "PASSWORD", "KV_REMOTE_URL")
    return {
        name: "***" if any(word in name for word in secret) else value
        for name, value in sorted(os.environ.items())
        if name.partition("_")[0] in ("QUIRE", "VLLM")
    }
