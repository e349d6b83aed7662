"""The texts that `quire serve` prints when it is ready, and when it could not start.

Knows facts and their layout. Does not know where they come from.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import StartupError
from quire.logging import get_logger
from quire.models.checkpoint_locator import EMBEDDED
from quire.models.sound import TRANSCRIBERS
from quire.platforms.cpu_affinity import physical_cores
from quire.protocol.output import EngineReady
from quire.protocol.pooling_info import PoolingInfo
from quire.server.adapters import runtime_updates
from quire.server.process.sockets import LOOPBACKS, host_of
from quire.startup_timer import since_process_start, table
from quire.terminal import show

log = get_logger(__name__)

LONGEST = 0.005  # seconds; shorter stages get no line


def greet(
    config: EngineConfig, ready: EngineReady, url: str, chats: bool, processes: int = 1
) -> float:
    """Log where the start-up time went, print what is served, and a command that works. Returns seconds of the start."""
    total = since_process_start()
    if log.isEnabledFor(logging.INFO):
        show(f"start-up\n{stages_table(ready.startup, total)}")
    for text in warnings(config, physical_cores()):
        log.warning("%s", text)
    show(facts_table(config, ready, url, processes))
    name = config.model.served_names[0]
    hears = ready.architecture in TRANSCRIBERS
    line = curl_line(config, url, name, chats, ready.pooling, hears)
    show(f"\nReady. Try:\n\n{line}\n")
    return total


def facts_table(config: EngineConfig, ready: EngineReady, url: str, processes: int = 1) -> str:
    """What is served, where, and with which limits."""
    contexts = ready.num_tokens / max(1, ready.max_model_len)
    rows = [
        ("model", ", ".join(config.model.served_names)),
        ("architecture", f"{ready.architecture} ({ready.model_impl}), {ready.dtype} on {ready.device}"),
        ("context", f"{ready.max_model_len} tokens"),
        ("KV cache", f"{ready.num_blocks} blocks of {ready.block_size} tokens: {contexts:.1f} full contexts" if ready.num_tokens else "none"),
        *([("engines", f"{len(config.parallel.ranks)}, each with a KV cache of its own")] if len(config.parallel.ranks) > 1 else []),
        ("address", f"{url}{_listening(config)}"),
        ("API key", "needed" if config.server.needs_key else "none"),
        *([("HTTP", f"{processes} processes")] if processes > 1 else []),
    ]  # fmt: skip
    return table(rows)


def _listening(config: EngineConfig) -> str:
    """Where else than at `url` the server can be reached."""
    if config.server.uds is not None or (host := host_of(config.server)) not in ("0.0.0.0", "::"):
        return ""
    return f" (listening on {host}: on all addresses of this machine)"


def warnings(config: EngineConfig, cores: int) -> list[str]:
    """What the operator should change about a server that is ready. `cores`: physical cores of this machine."""
    server, warnings = config.server, []
    if not server.needs_key and server.uds is None and (host := host_of(server)) not in LOOPBACKS:
        warnings.append(
            f"listening on {host} without an API key: every host that reaches this machine can use the model; set"
            " --api-key, or listen on --host 127.0.0.1 only"
        )
    count, fronts = len(config.parallel.ranks), server.api_server_count or 1
    engines = 0 if server.disable_frontend_multiprocessing else count
    ranks = config.parallel.world_size
    workers = ranks if ranks > 1 or config.parallel.distributed_executor_backend == "mp" else 0
    workers *= count
    if cores < (needed := fronts + engines + workers):
        warnings.append(
            f"{cores} physical cores for {needed} processes ({fronts} HTTP, {engines} engine, {workers}"
            " worker): they delay one another; use more cores, or fewer processes (--api-server-count)"
        )
    if runtime_updates():
        lora, switch = config.lora, "QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1"
        if not lora.enable_lora:
            warnings.append(f"{switch} has no effect without --enable-lora")
        elif not lora.allowed_lora_paths:
            warnings.append(
                f"{switch}: clients may load adapters from every directory that this server may read; limit them with"
                " --allowed-lora-paths"
            )
    return warnings


def stages_table(stages: list[tuple[str, float]], total: float) -> str:
    """Where the start-up time went."""
    beside = "other: imports, processes, tokenizer"
    named = [*stages, (beside, total - sum(seconds for _, seconds in stages))]
    rows = [(name, f"{seconds:6.2f} s") for name, seconds in named if seconds >= LONGEST]
    return table([*rows, ("total since process start", f"{total:6.2f} s")])


def curl_line(
    config: EngineConfig, url: str, name: str, chats: bool, pooling: PoolingInfo | None = None, hears: bool = False
) -> str:  # fmt: skip
    """A command for this model and this server that works without changes. `pooling`: of a model that does not generate.
    `hears`: the model transcribes speech: the command sends sample.wav of the model's directory, or names speech.wav."""
    words = ["curl", "-s"]
    if url.startswith("unix:"):
        words += ["--unix-socket", url.removeprefix("unix:")]
        url = "http://localhost"
    text = "Once upon a time"
    path, body = "/v1/completions", dict[str, Any](prompt=text, max_tokens=32)
    if pooling is not None:
        routes = {"embed": "/v1/embeddings", "classify": "/classify"}
        path = routes.get(pooling.tasks[0], "/pooling")
        body = {"input": text}
    elif chats:
        messages = [{"role": "user", "content": "Hello!"}]
        path, body = "/v1/chat/completions", {"messages": messages, "max_tokens": 32}
    if hears:
        sample = EMBEDDED / config.model.model / "sample.wav"
        file = str(sample) if os.path.isfile(sample) else "speech.wav"
        words += [f"{url}/v1/audio/transcriptions", "-F", f"file=@{file}"]
    else:
        data = json.dumps({"model": name, **body})
        words += [f"{url}{path}", "-H", "Content-Type: application/json", "-d", data]
    line = shlex.join(words)
    if config.server.needs_key:
        line += ' -H "Authorization: Bearer $QUIRE_API_KEY"'
    return line


def failure(error: BaseException) -> str:
    """The report of a failed start: the error, and the engine's traceback if there is one."""
    lines = []
    if isinstance(error, StartupError) and error.detail:
        lines += ["traceback of the engine process:", *error.detail.rstrip().splitlines(), ""]
    return "\n".join([*lines, f"quire serve: error: {error}"])
