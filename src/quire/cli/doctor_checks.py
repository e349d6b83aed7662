"""The checks of `quire doctor`: what would go wrong with a model on this machine. One small function for each.

Knows config.json, the files beside it, and the memory plan. The checks of every start are in `frontend/startup.py`.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.checkpoint_dtype import stored_dtype
from quire.config.engine import Resolved
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelNotFound, QuireError
from quire.frontend import startup
from quire.frontend.startup import load_tokenizer
from quire.models.checkpoint_files import TensorHeader, stored_tensors, weight_files
from quire.models.json_files import read_object
from quire.models.registry import choose_impl
from quire.models.supported import own_cache
from quire.platforms.detect import PlatformFacts
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_plan import MemoryPlan, size


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """error: it would not start. warning: it would start, but work badly. note: worth knowing."""

    level: Literal["error", "warning", "note"]
    text: str


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """Input of the checks below."""

    resolved: Resolved
    facts: PlatformFacts
    plan: MemoryPlan | None
    weights: int

    @property
    def path(self) -> Path:
        return Path(self.resolved.path)


def findings(
    resolved: Resolved, facts: PlatformFacts, plan: MemoryPlan | None, weights: int
) -> list[DoctorFinding]:
    """The findings of all checks, in the order of CHECKS."""
    context = DoctorContext(resolved, facts, plan, weights)
    found: list[DoctorFinding] = []
    for check in CHECKS:
        try:
            found += check(context)
        except QuireError as why:
            found.append(DoctorFinding("error", str(why)))
    return found


# Checks


def _startup(context: DoctorContext) -> Iterator[DoctorFinding]:
    """The checks of every start."""
    for check in startup.CHECKS:
        try:
            check(context.resolved)
        except QuireError as why:
            yield DoctorFinding("error", str(why))


def _code(context: DoctorContext) -> Iterator[DoctorFinding]:
    resolved = context.resolved
    config, options = resolved.hf_config, resolved.config.model
    impl, why = choose_impl(resolved.architecture, config, options.model_impl)
    if impl == "native":
        return
    yield DoctorFinding("note", f"{why}, so the model runs through Transformers, which is slower")
    if config.get("auto_map") and not options.trust_remote_code:
        yield DoctorFinding(
            "warning",
            "this checkpoint contains Python code (auto_map in config.json); if the model does not load,"
            " review that code and pass --trust-remote-code",
        )
    if reason := own_cache(resolved):
        yield DoctorFinding(
            "note",
            f"the model runs with one cache per request, because {reason}; prefix caching, paging and batched decoding"
            " are off",
        )


def _formats(context: DoctorContext) -> Iterator[DoctorFinding]:
    resolved, native = context.resolved, context.facts.dtypes
    if resolved.dtype not in native:
        yield DoctorFinding(
            "warning",
            f"{context.facts.name} has no instructions for {resolved.dtype}, so it is slow;"
            f" --dtype {native[0]} is native",
        )
    stored = stored_dtype(resolved.path, resolved.hf_config)
    if stored != resolved.dtype and context.weights:
        made = context.weights * ITEMSIZE[resolved.dtype] // ITEMSIZE.get(stored, 2)
        yield DoctorFinding(
            "note",
            f"the weights are stored as {stored} and used as {resolved.dtype}: loading converts them to a copy of {size(made)}"
            " instead of mapping the files",
        )


def _weights(context: DoctorContext) -> Iterator[DoctorFinding]:
    resolved = context.resolved
    load = resolved.config.load
    if load.load_format == "dummy":
        yield DoctorFinding(
            "note", "load_format=dummy: the weights are random, so the output is meaningless"
        )
        return
    try:
        kind, _ = weight_files(resolved.path, load.load_format)
    except ModelNotFound:
        if context.weights:
            yield from _room_to_fetch(context)
        return
    if kind == "pt":
        yield DoctorFinding(
            "note", "the weights are pickle files (*.bin, *.pt); safetensors files load faster"
        )
        return
    wanted = resolved.hf_config.get("num_hidden_layers")
    stored = stored_tensors(resolved.path, resolved.hf_config, load.load_format)
    names = [] if isinstance(stored, int) else [name for name, *_ in stored]
    if isinstance(wanted, int) and names:
        layers = _layers(names)
        if layers and max(layers) + 1 < wanted:
            yield DoctorFinding(
                "error",
                f"config.json has num_hidden_layers={wanted}, but the files have weights of {max(layers) + 1} layers;"
                " download the checkpoint again",
            )


def _layers(names: list[str]) -> set[int]:
    """Layer numbers in names such as model.layers.3.mlp.up_proj.weight."""
    found = set()
    for name in names:
        before, dot, after = name.partition("layers.")
        number = after.partition(".")[0]
        if dot and number.isdigit() and "vision" not in before and "visual" not in before:
            found.add(int(number))
    return found


def _room_to_fetch(context: DoctorContext) -> Iterator[DoctorFinding]:
    free = shutil.disk_usage(context.path).free
    if free < context.weights:
        yield DoctorFinding(
            "error",
            f"the weights take {size(context.weights)}, but the disk of {context.path} has {size(free)} free;"
            " free some space, or choose another disk with --download-dir",
        )
    else:
        yield DoctorFinding("note", f"starting downloads the weights: {size(context.weights)}")


SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def _tokenizer(context: DoctorContext) -> Iterator[DoctorFinding]:
    found = load_tokenizer(context.resolved)
    if found is None:
        yield DoctorFinding("note", "skip_tokenizer_init: prompts and outputs are token ids")
        return
    folder = Path(context.resolved.tokenizer_folder)
    kind = next((name for name in SLOW_FILES if (folder / name).is_file()), "a tokenizer")
    if found.is_slow:
        yield DoctorFinding(
            "note",
            f"the checkpoint has {kind} but no tokenizer.json: Transformers loads it at start, which takes seconds",
        )
    if found.template is None:
        yield DoctorFinding(
            "warning",
            "the tokenizer has no chat template, so /v1/chat/completions refuses requests; set one with --chat-template",
        )


def _end(context: DoctorContext) -> Iterator[DoctorFinding]:
    generation = _json(context.path / "generation_config.json")
    if (
        context.resolved.hf_config.get("eos_token_id") is None
        and generation.get("eos_token_id") is None
    ):
        yield DoctorFinding(
            "warning",
            "neither config.json nor generation_config.json has an eos_token_id: unless the tokenizer has one,"
            " outputs end only at max_tokens",
        )
    changed = {
        name: generation[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if generation.get(name) is not None
    }
    if context.resolved.config.model.generation_config != "auto":
        return
    if (cap := generation.get("max_new_tokens")) is not None:
        yield DoctorFinding(
            "warning",
            f"generation_config.json limits every output to {cap} tokens (max_new_tokens), even if a request sets a larger"
            " max_tokens; --generation-config vllm removes the limit",
        )
    if changed:
        shown = ", ".join(f"{name}={value}" for name, value in changed.items())
        yield DoctorFinding(
            "note",
            f"generation_config.json sets default sampling parameters: {shown}; --generation-config vllm ignores them",
        )


def _room(context: DoctorContext) -> Iterator[DoctorFinding]:
    plan = context.plan
    if plan is None:
        return
    if plan.max_model_len < context.resolved.max_model_len:
        yield DoctorFinding(
            "note",
            f"the tables above are for --max-model-len {plan.max_model_len}, which would fit",
        )
    given = context.resolved.config.cache.kv_cache_memory_bytes is not None
    limit = "--kv-cache-memory-bytes" if given else "--gpu-memory-utilization"
    if plan.max_requests < min(plan.max_num_seqs, 4):
        yield DoctorFinding(
            "warning",
            f"only {plan.max_requests} request{'s' * (plan.max_requests != 1)} of max_model_len={plan.max_model_len}"
            f" fit at once; others wait or are preempted; lower --max-model-len, or raise {limit}",
        )
    elif plan.max_requests < plan.max_num_seqs:
        yield DoctorFinding(
            "note",
            f"{plan.max_requests} of max_num_seqs={plan.max_num_seqs} requests fit at full length: with long contexts"
            " some are preempted and recomputed",
        )
    if plan.available < plan.total // 2:
        yield DoctorFinding(
            "note",
            f"other processes use more than half of the memory: {size(plan.available)} of {size(plan.total)} is available",
        )


def _address(context: DoctorContext) -> Iterator[DoctorFinding]:
    server = context.resolved.config.server
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        file = getattr(server, name)
        if file and not Path(file).is_file():
            yield DoctorFinding(
                "error", f"--{name.replace('_', '-')} {file}: the file does not exist"
            )
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        yield DoctorFinding("error", "TLS needs both --ssl-keyfile and --ssl-certfile")
    if server.uds or not server.port:
        return
    family = socket.AF_INET6 if ":" in (server.host or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host or "127.0.0.1", server.port))
        except OSError as why:
            yield DoctorFinding(
                "warning",
                f"port {server.port} of {server.host or '127.0.0.1'} cannot be bound ({why.strerror}); choose another with --port",
            )


CHECKS: tuple[Callable[[DoctorContext], Iterator[DoctorFinding]], ...] = (
    _startup,
    _code,
    _formats,
    _weights,
    _tokenizer,
    _end,
    _room,
    _address,
)


# Files


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except ConfigError:
        return {}


def remote_tensors(model: ModelConfig) -> list[TensorHeader] | None:
    """The weights of a hub model, from the headers on the hub; None if it is no hub id, or the hub does not answer."""
    if Path(model.model).expanduser().is_dir() or "/" not in model.model:
        return None
    import huggingface_hub as hub

    api = hub.HfApi(token=model.hf_token)
    try:
        found = api.get_safetensors_metadata(model.model, revision=model.revision)
    except Exception:  # not safetensors, or no hub: network errors have many classes
        return None
    return [
        (name, tensor.dtype, tensor.shape)
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]
