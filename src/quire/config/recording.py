"""The part of the configuration that a flight recording contains, as JSON: what a replay needs, and no secret.

A recording outlives the server, and users attach it to reports. Only the fields below are written, so it contains no
key, token, certificate or address. A replay reads recordings of unknown origin. JSON cannot name anything to import,
and each value's type is checked. The model's path and the permission to run its code are never taken from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

from quire.config.cache import CacheConfig
from quire.config.engine import EngineConfig, Resolved
from quire.config.load import LoadConfig
from quire.config.lora import LoraConfig
from quire.config.model import ModelConfig
from quire.config.parallel.parallel_config import ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.structured import StructuredConfig
from quire.errors import ConfigError

MAX_BYTES = 16 << 20
"""The largest file that is read; a recorded configuration has a few thousand bytes."""


PARALLEL = (
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "enable_expert_parallel", "expert_placement_strategy", "enable_eplb", "eplb_config", "attention_backend", "enforce_eager",
    "cudagraph_capture_sizes",
)  # fmt: skip
"""The fields of `ParallelConfig` that affect what a step computes. The others name machines, and a class of the user's."""


class Settled(Struct):
    """Fields of `Resolved` that affect what a step computes."""

    dtype: str
    device: str
    max_model_len: int
    auto_max_model_len: bool
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    depth: int
    executor: Literal["uni", "mp"]
    attention_backend: str | None
    quantization: str | None


class RecordedModel(Struct):
    """Fields of `ModelConfig` that affect what a step computes."""

    model_impl: str
    dtype: str
    max_model_len: int | str | None
    quantization: str | None
    seed: int
    max_logprobs: int
    logprobs_mode: str
    skip_tokenizer_init: bool
    hf_overrides: dict[str, Any]
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict[str, Any] = {}


class RecordedConfig(Struct):
    """The content of the file."""

    path: str
    """Where the model was: shown to the user, never opened."""
    architecture: str
    left_out: list[str]
    """Names of functions and classes that the user gave: shown to the user, never imported."""
    load_format: str
    settled: Settled
    model: RecordedModel
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    structured: StructuredConfig
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    """Without names and paths of adapters: the user of a replay names their directories."""


def for_recording(payload: bytes) -> bytes:
    """The content of the file, from the result of `serialize.resolved_to_bytes`."""
    sent = msgspec.msgpack.decode(payload)
    resolved, config = sent["resolved"], sent["config"]
    model = dict(config["model"])
    overrides, processors = model["hf_overrides"], model["logits_processors"]
    names = [overrides] if isinstance(overrides, Ext) else []
    left_out = [_name(one) for one in [*names, *processors]]
    model["hf_overrides"] = {} if names else overrides
    settled = {name: resolved[name] for name in Settled.__struct_fields__}
    settled["executor"] = "uni" if resolved["executor"] == "uni" else "mp"  # one machine replays
    found = {
        "path": resolved["path"],
        "architecture": resolved["architecture"],
        "left_out": left_out,
        "load_format": config["load"]["load_format"],
        "settled": settled,
        "model": {name: model[name] for name in RecordedModel.__struct_fields__},
        **{name: config[name] for name in ("cache", "scheduler", "structured")},
        "parallel": {name: config["parallel"][name] for name in PARALLEL},
        "lora": {
            **config["lora"],
            "lora_modules": [],
            "default_mm_loras": {},
            "allowed_lora_paths": [],
        },
    }
    return msgspec.json.format(msgspec.json.encode(found))


def _name(thing: Any) -> str:
    return str(thing.data, "utf-8") if isinstance(thing, Ext) else str(thing)


def from_recording(data: bytes) -> RecordedConfig:
    """Raises ConfigError: not a file of `for_recording`; the message says what is wrong."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the recorded configuration has {len(data)} bytes; the limit is {MAX_BYTES}"
        )
    try:
        return msgspec.json.decode(data, type=RecordedConfig)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as why:
        raise ConfigError(f"not a recorded configuration: {why}") from None


def config_of(recorded: RecordedConfig, model: str, num_adapters: int = 0) -> EngineConfig:
    """The configuration to resolve for a replay with the checkpoint `model`, whose code is not run, and `num_adapters` adapters."""
    lora = replace(recorded.lora, max_cpu_loras=max(recorded.lora.capacity, num_adapters))
    fields = {name: getattr(recorded.model, name) for name in RecordedModel.__struct_fields__}
    return EngineConfig(
        model=ModelConfig(model=model, trust_remote_code=False, **fields),
        load=LoadConfig(load_format=recorded.load_format),
        cache=recorded.cache,
        scheduler=recorded.scheduler,
        parallel=ParallelConfig(**{name: getattr(recorded.parallel, name) for name in PARALLEL}),
        structured=recorded.structured,
        lora=lora,
    )


def as_recorded(resolved: Resolved, recorded: RecordedConfig) -> Resolved:
    """`resolved` with the choices of the recorded engine instead of those for this machine.

    Raises:
        ConfigError: the model's architecture differs from the recorded one.
    """
    if resolved.architecture != recorded.architecture:
        raise ConfigError(
            f"--model is a {resolved.architecture}, but the recorded engine had a {recorded.architecture}"
            f" (from {recorded.path}); name that model"
        )
    settled = recorded.settled
    return replace(resolved, **{name: getattr(settled, name) for name in Settled.__struct_fields__})
