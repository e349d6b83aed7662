"""Validation: refuses values out of range, and known features that are not implemented yet."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from quire.config import unsupported
from quire.config.cache import KV_DTYPES
from quire.config.engine import EngineConfig
from quire.config.options import coerce, options
from quire.config.quantization import scheme_asked, stored_quantization
from quire.config.structured import structured_options
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger

logger = get_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "dummy", "hf")


def check(asked: EngineConfig, config: Mapping[str, Any]) -> None:
    """Refuse invalid settings before anything is loaded, and warn about settings without effect.

    Raises:
        ConfigError: a value is out of its range.
        Unsupported: a feature that is planned for later.
    """
    check_wishes(asked)
    stored_quantization(config)
    _ignored(asked)


def check_wishes(asked: EngineConfig) -> None:
    """The checks that need no checkpoint: they run before one is downloaded, which can take an hour.

    Raises: as `check`.
    """
    _choices(asked)
    _ranges(asked)
    _features(asked)
    _formats(asked)
    scheme_asked(asked.model.quantization)
    _structured(asked)


def _structured(asked: EngineConfig) -> None:
    name = structured_options(asked.structured.structured_outputs_config).backend
    if name == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "structured_outputs_config.backend=xgrammar: xgrammar is not installed; pip install quire[xgrammar]"
        )


def _choices(asked: EngineConfig) -> None:
    for option in options().values():
        if option.choices:
            coerce(option, getattr(getattr(asked, option.section), option.name))


def _ranges(asked: EngineConfig) -> None:
    share = asked.cache.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization={share}: must be above 0 and at most 1")
    watched = asked.observe.kv_cache_metrics_sample
    if not 0 < watched <= 1:
        raise ConfigError(f"kv_cache_metrics_sample={watched}: must be above 0 and at most 1")
    for size in asked.parallel.cudagraph_capture_sizes:
        if not str(size).isdigit() or int(size) < 1:
            raise ConfigError(
                f"cudagraph_capture_sizes has {size!r}: must be whole numbers of at least 1"
            )
    at_least: dict[str, tuple[int | float | None, float]] = {
        "kv_cache_memory_bytes": (asked.cache.kv_cache_memory_bytes, 1),
        "num_gpu_blocks_override": (asked.cache.num_gpu_blocks_override, 1),
        "swap_space": (asked.cache.swap_space, 0),
        "cpu_offload_gb": (asked.cache.cpu_offload_gb, 0),
        "max_num_queued_reqs": (asked.scheduler.max_num_queued_reqs, 0),
        "max_num_queued_tokens": (asked.scheduler.max_num_queued_tokens, 0),
        "long_prefill_token_threshold": (asked.scheduler.long_prefill_token_threshold, 0),
        "num_scheduler_steps": (asked.scheduler.num_scheduler_steps, 1),
        "max_logprobs": (asked.model.max_logprobs, -1),
        "api_server_count": (asked.server.api_server_count, 1),
        "shutdown_timeout": (asked.server.shutdown_timeout, 0),
        "max_body_bytes": (asked.server.max_body_bytes, 1),
        "max_answer_entries": (asked.server.max_answer_entries, 1),
        "max_completions": (asked.server.max_completions, 1),
        "stream_interval": (asked.server.stream_interval, 1),
        "receive_timeout": (asked.server.receive_timeout, 0),
        "send_timeout": (asked.server.send_timeout, 0),
        "sse_keep_alive_interval": (asked.server.sse_keep_alive_interval, 0),
    }
    for name, (value, least) in at_least.items():
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least:g}")
    if not 0 <= asked.server.port <= 65535:
        raise ConfigError(f"port={asked.server.port}: must be from 0 (any free port) to 65535")


def _features(asked: EngineConfig) -> None:
    parallel = asked.parallel
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(parallel, name)
        if size < 1:
            raise ConfigError(f"{name}={size}: must be at least 1")
        if size > 1:
            raise Unsupported(
                f"{name}={size}", "a server uses one device; start one server for each device"
            )
    for (section, name, unsupported_value), remedy in unsupported.SETTINGS.items():
        if getattr(getattr(asked, section), name) == unsupported_value:
            value = "" if unsupported_value is True else f"={unsupported_value}"
            raise Unsupported(f"{name}{value}", remedy)


def _formats(asked: EngineConfig) -> None:
    name = asked.load.load_format
    if name in unsupported.LOAD_FORMATS:
        raise Unsupported(f"load_format={name}", f"choose from {', '.join(LOAD_FORMATS)}")
    if name not in LOAD_FORMATS:
        raise ConfigError(f"load_format={name!r}: choose from {', '.join(LOAD_FORMATS)}")
    kv = asked.cache.kv_cache_dtype
    if kv not in ("auto", *KV_DTYPES):
        raise Unsupported(f"kv_cache_dtype={kv}", f"choose from auto, {', '.join(KV_DTYPES)}")


def _ignored(asked: EngineConfig) -> None:
    """Warn about settings that are accepted but have no effect."""
    cache = asked.cache
    says = {
        f"swap_space={cache.swap_space:g}": (
            cache.swap_space not in (0, 4),
            "preempted requests are recomputed",
        ),
        "preemption_mode=swap": (
            asked.scheduler.preemption_mode == "swap",
            "preempted requests are recomputed",
        ),
        "model_loader_extra_config": (
            bool(asked.load.model_loader_extra_config),
            f"load_format={asked.load.load_format} has no options",
        ),
    }
    for name, (given, why) in says.items():
        if given:
            logger.warning("%s has no effect: %s", name, why)
