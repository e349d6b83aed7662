"""From EngineConfig to Resolved: replaces every "auto", refuses every conflict, logs each decision.

Knows the configuration, the checkpoint's config.json and the facts of the device. Does not know torch, weights,
or the amount of memory (`worker/memory_plan.py` uses that afterwards).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from quire import env
from quire.config.checkpoint_dtype import stored_dtype
from quire.config.context_length import learned_positions, model_length
from quire.config.engine import EngineConfig, Resolved
from quire.config.engine_experts import check_engine_experts
from quire.config.parallel.data_parallel import check_device
from quire.config.parallel.experts import check_experts
from quire.config.parallel.nodes import check_nodes
from quire.config.parallel.ranks import check_ranks
from quire.config.pooling import PoolingModel
from quire.config.quantization import ONLINE, fitting, quantization_method
from quire.config.quantization_config import stored_quantization
from quire.config.validate import check_options, warn_of_ignored
from quire.errors import ConfigError
from quire.logging import get_logger

logger = get_logger(__name__)

DEVICES = {"": "auto", "gpu": "cuda"}
"""Other spellings of a device."""

DTYPES = {"half": "float16", "float": "float32"}

NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "plamo2", "glm4")
"""Model types whose activations exceed the range of float16; a text model inside a wrapper has `_text` after the name."""


class PlatformDefaults(Protocol):
    """The part of `platforms/detect.py` that is used here; that module is in a higher layer."""

    @property
    def device(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def preferred_dtype(self, checkpoint: str) -> str: ...


def resolve(
    config: EngineConfig,
    path: str,
    hf_config: Mapping[str, Any],
    facts: PlatformDefaults,
    *,
    per_request_cache: bool = False,
    pooling: PoolingModel | None = None,
    architecture: str = "",
) -> Resolved:
    """Replace every open choice by a value.

    Args:
        config: the user's configuration.
        path: local directory of the checkpoint.
        hf_config: its config.json as `models/hf_config.read_config` returns it: with hf_overrides, and only the text
            model's part if that is nested.
        facts: about the device.
        per_request_cache: the model keeps its own cache for each request, so prefixes cannot be shared.
        pooling: what the model computes in place of tokens.
        architecture: the name in the registry, if not config.json's.

    Raises:
        ConfigError: two settings contradict each other, or one contradicts the model; names the flag to change.
        Unsupported: a known feature that is not implemented yet.
    """
    _check_device(config.model.device, facts.device)
    check_options(config)
    warn_of_ignored(config, facts.device, path, hf_config)
    stored = stored_quantization(hf_config)
    causal = pooling is None or pooling.causal
    length, auto = _length(config, hf_config, 0 if pooling is None else pooling.max_length)
    chunked = config.scheduler.enable_chunked_prefill is not False and causal
    if config.scheduler.enable_chunked_prefill and not causal:
        logger.warning("enable_chunked_prefill has no effect: tokens of this model attend to later ones, so a prompt is one step")  # fmt: skip
    rows, tokens = _step(config, facts, length, chunked)
    in_flight = "bitsandbytes" if config.load.load_format == "bitsandbytes" else None
    requested = config.model.quantization or in_flight
    resolved = Resolved(
        config=config,
        path=path,
        hf_config=dict(hf_config),
        architecture=architecture or _architecture(hf_config, path),
        dtype=_dtype(config, path, hf_config, facts, stored is not None),
        device=facts.device,
        max_model_len=length,
        auto_max_model_len=auto,
        block_size=config.cache.block_size or facts.block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        chunked_prefill=chunked,
        prefix_caching=causal and _prefix_caching(config, per_request_cache),
        depth=_depth(config, facts),
        executor=_executor(config),
        attention_backend=_attention(config, facts),
        quantization=fitting(requested, stored),
        stored=stored,
        pooling=pooling,
    )
    _check_checkpoints(resolved)
    check_ranks(resolved)
    check_nodes(resolved)
    check_device(config.parallel, facts.device)
    check_experts(config.parallel, hf_config)
    check_engine_experts(resolved)
    _log(resolved, facts)
    return resolved


def _check_device(requested: str, detected: str) -> None:
    """`requested`: with or without a number, such as cuda:0. Raises ConfigError: it is not the detected device."""
    name = requested.strip().lower().partition(":")[0]
    if DEVICES.get(name, name) not in ("auto", detected):
        raise ConfigError(
            f"device={requested!r}: the device of this process is {detected}; leave `device` out to use it, or force another with"
            " QUIRE_DEVICE, whose error says why it cannot be used"
        )


def _executor(config: EngineConfig) -> str:
    """Several ranks need a process each, unless torchrun has started them."""
    if config.parallel.data_parallel_backend == "ray":
        return "ray"
    chosen = config.parallel.distributed_executor_backend or "uni"
    return "mp" if config.parallel.world_size > 1 and chosen == "uni" else chosen


def _check_checkpoints(resolved: Resolved) -> None:
    """Raises ConfigError: mamba_block_size does not fit the blocks, or prefix caching is off."""
    if (chosen := resolved.config.cache.mamba_block_size) is None:
        return
    if chosen % resolved.block_size:
        raise ConfigError(
            f"mamba_block_size={chosen} is not a multiple of block_size={resolved.block_size}: set it to"
            f" {-(-chosen // resolved.block_size) * resolved.block_size}, or leave it out"
        )
    if not resolved.caches_states:
        raise ConfigError(
            f"mamba_block_size={chosen} says where prefix caching copies recurrent states, and that is off: enable"
            " prefix caching and chunked prefill, or leave mamba_block_size out"
        )


def overridden(hf_config: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """config.json with hf_overrides applied: nested dicts are merged, a function is called with a copy.

    Raises:
        ConfigError: the function returned something that is not a dict.
    """
    base = copy.deepcopy(dict(hf_config))
    if callable(overrides):
        result = overrides(base)
        result = base if result is None else result
        if not isinstance(result, dict):
            raise ConfigError(
                f"hf_overrides returned a {type(result).__name__}; the function must return a dict"
            )
        return result
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = overridden(base[key], value) if both else value
    return base


def _architecture(hf_config: Mapping[str, Any], path: str) -> str:
    names = hf_config.get("architectures") or []
    if not names:
        raise ConfigError(
            f"{path}/config.json has no `architectures`; name one with"
            ' --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\''
        )
    return str(names[0])


def _dtype(
    config: EngineConfig,
    path: str,
    hf_config: Mapping[str, Any],
    facts: PlatformDefaults,
    is_quantized: bool,
) -> str:
    stored = stored_dtype(path, hf_config)
    fragile = str(hf_config.get("model_type")).removesuffix("_text") in NOT_IN_FLOAT16
    requested = config.model.dtype
    dtype = DTYPES.get(requested, requested)
    if dtype == "auto":
        small = is_quantized or quantization_method(config.model.quantization) in ONLINE
        kept = "bfloat16" if small and facts.device == "cpu" else stored  # the CPU kernels need it
        dtype = facts.preferred_dtype(kept)
        if dtype == "float16" and fragile:
            dtype = "bfloat16"
        if dtype != stored:
            logger.info(
                "dtype: %s (the checkpoint stores %s; --dtype %s keeps that)", dtype, stored, stored
            )
    elif dtype == "float16" and fragile:
        raise ConfigError(
            f"dtype=float16: {hf_config['model_type']} models overflow in float16; use --dtype bfloat16 or float32"
        )
    return dtype


def _length(config: EngineConfig, hf_config: Mapping[str, Any], texts: int = 0) -> tuple[int, bool]:
    """(the most tokens of a request, whether the memory plan may lower it). `texts`: the default of a pooling model; 0: none."""
    own, where = model_length(hf_config)
    requested = config.model.max_model_len
    if requested is None or requested in ("auto", -1):
        if texts:
            return min(texts, own) if where else texts, requested is not None
        if where == "":
            logger.warning(
                "config.json has no maximum length: using %d; set it with --max-model-len", own
            )
        return own, requested is not None
    length = int(requested)
    if length < 1:
        raise ConfigError(
            f"max_model_len={length}: must be at least 1; auto (or -1) selects the most that fits in memory"
        )
    if where and length > own:
        _allow_long(length, own, where, hf_config)
    return length, False


def _allow_long(length: int, own: int, where: str, hf_config: Mapping[str, Any]) -> None:
    message = f"max_model_len={length} is more than the {own} tokens that the model's config.json allows ({where})"
    if learned_positions(hf_config):
        raise ConfigError(
            f"{message}, and the model has no positions beyond that. Use --max-model-len {own} or less."
        )
    if not env.get("ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(
            f"{message}. Use --max-model-len {own} or less, extend its rotary positions with --hf-overrides,"
            " or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 to allow it: output beyond may be nonsense."
        )
    logger.warning(
        "%s: output beyond may be nonsense (allowed by QUIRE_ALLOW_LONG_MAX_MODEL_LEN)", message
    )


def _step(
    config: EngineConfig, facts: PlatformDefaults, length: int, chunked: bool
) -> tuple[int, int]:
    """(the most requests at once, tokens a step)"""
    scheduler = config.scheduler
    rows = facts.max_num_seqs if scheduler.max_num_seqs is None else scheduler.max_num_seqs
    tokens = scheduler.max_num_batched_tokens
    if tokens is None:
        tokens = max(facts.num_batched_tokens, rows, 0 if chunked else length)
    else:
        if not chunked and tokens < length:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_model_len={length}, and enable_chunked_prefill is"
                f" off: a prompt of {length} tokens could never run. Use --max-num-batched-tokens {length},"
                f" --max-model-len {tokens}, or (not for a model whose tokens attend to later ones) --enable-chunked-prefill."
            )
        if tokens < rows:
            if scheduler.max_num_seqs is not None:
                raise ConfigError(
                    f"max_num_batched_tokens={tokens} is less than max_num_seqs={rows}, but a step computes a"
                    f" token of each running request. Use --max-num-seqs {tokens} or --max-num-batched-tokens {rows}."
                )
            rows = tokens
    return rows, min(tokens, rows * length)


def _prefix_caching(config: EngineConfig, per_request_cache: bool) -> bool:
    requested = config.cache.enable_prefix_caching
    if per_request_cache:
        if requested:
            logger.warning(
                "prefix caching stays off: this model keeps a separate cache for each request"
            )
        return False
    return requested is not False


def _depth(config: EngineConfig, facts: PlatformDefaults) -> int:
    """A plan for each stage, and what the host plans ahead."""
    scheduler = config.scheduler
    if scheduler.num_scheduler_steps > 1 and scheduler.async_scheduling is None:
        logger.warning(
            "num_scheduler_steps=%d is an old name: the host plans one step ahead (async_scheduling, depth 2)",
            scheduler.num_scheduler_steps,
        )
        own = 2
    elif scheduler.async_scheduling is None:
        own = facts.depth
    else:
        own = 1 + scheduler.async_scheduling
    return config.parallel.pipeline_parallel_size - 1 + own


def _attention(config: EngineConfig, facts: PlatformDefaults) -> str | None:
    """The requested name without aliases. `attention/base.py` checks whether the platform has it."""
    requested = config.parallel.attention_backend
    name = None if requested is None else requested.upper()
    if name == "XFORMERS":
        logger.warning(
            "attention_backend=%s is an old name: using the platform's backend", requested
        )
        return None
    if (
        name not in (None, "AUTO", "TORCH_SDPA")
        and facts.device == "cpu"
        and requested == env.get("ATTENTION_BACKEND")
    ):
        # A variable is often set for many servers, so it is ignored here; a flag is for this server and refused later.
        logger.warning(
            "VLLM_ATTENTION_BACKEND=%s does not support %s: using the platform's backend; --attention-backend forces one",
            requested,
            facts.name,
        )
        return None
    return None if name == "AUTO" else name


def _log(resolved: Resolved, facts: PlatformDefaults) -> None:
    """Log one line with all decisions, each under the name of the flag that changes it."""
    logger.info(
        "%s on %s (%s): dtype=%s max_model_len=%d%s max_num_seqs=%d max_num_batched_tokens=%d block_size=%d"
        " enable_chunked_prefill=%s enable_prefix_caching=%s depth=%d executor=%s",
        resolved.architecture,
        facts.device,
        facts.name,
        resolved.dtype,
        resolved.max_model_len,
        " (or less: auto)" if resolved.auto_max_model_len else "",
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
        resolved.block_size,
        resolved.chunked_prefill,
        resolved.prefix_caching,
        resolved.depth,
        resolved.executor,
    )
