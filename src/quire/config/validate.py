"""Validation: refuses values out of range, and known features that are not implemented yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config import unsupported
from quire.config.cache import KV_DTYPES, SAME_HASHES
from quire.config.engine import EngineConfig
from quire.config.load import LOAD_FORMATS, SAME_LOAD_FORMATS
from quire.config.nearest_name import choose_from
from quire.config.options import coerce, options
from quire.config.parallel.data_parallel import check_data_parallel
from quire.config.parallel.experts import eplb_options
from quire.config.profiler import profiler_options
from quire.config.quantization import quantization_method
from quire.config.reasoning import reasoning_marks
from quire.config.structured import OTHER_LIBRARIES, structured_options
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger

logger = get_logger(__name__)

EXECUTORS = ("uni", "mp", "ray", "external_launcher")


def check_options(config: EngineConfig) -> None:
    """Refuse invalid settings. Needs no checkpoint: it runs before one is downloaded, which can take an hour.

    Raises:
        ConfigError: a value is out of its range.
        Unsupported: a feature that is planned for later.
    """
    for option in options().values():
        coerce(option, getattr(getattr(config, option.section), option.name))
    _check_supported(config)
    if (name := config.load.load_format) not in (*LOAD_FORMATS, *SAME_LOAD_FORMATS):
        raise ConfigError(f"load_format={name!r}: {choose_from(name, LOAD_FORMATS)}")
    if (executor := config.parallel.distributed_executor_backend) not in (None, *EXECUTORS):
        raise ConfigError(
            f"distributed_executor_backend={executor!r}: choose from {', '.join(EXECUTORS)}"
        )
    quantization_method(config.model.quantization)
    _check_structured(config.structured.structured_outputs_config)
    if config.server.journal_dir and (config.server.api_server_count or 1) > 1:
        raise ConfigError(
            "journal_dir needs one HTTP process, as stored responses do; leave --api-server-count out"
        )
    reasoning_marks(config.server.reasoning_config)
    profiler_options(config.observe.profiler_config)
    check_lora(config)
    check_data_parallel(config.parallel, config.server)
    eplb_options(config.parallel)


def check_lora(config: EngineConfig) -> None:
    """Raises ConfigError: settings of adapters that contradict each other."""
    lora, names = config.lora, config.model.served_names
    if lora.adapters and not lora.enable_lora:
        what = "lora_modules" if lora.lora_modules else "default_mm_loras"
        raise ConfigError(f"{what} names adapters, but enable_lora is off; add --enable-lora")
    if lora.capacity < lora.max_loras:
        raise ConfigError(
            f"max_cpu_loras={lora.max_cpu_loras} is less than max_loras={lora.max_loras}, but the adapters of a step are"
            f" all loaded; use --max-cpu-loras {lora.max_loras} or more"
        )
    kinds = set(lora.default_mm_loras)
    for one in lora.lora_modules:
        if one["name"] in kinds:
            raise ConfigError(
                f"lora_modules: {one['name']!r} is the name of an adapter of default_mm_loras; give this one another name"
            )
    for one in lora.adapters:
        if one["name"] in names:
            raise ConfigError(
                f"lora_modules: {one['name']!r} is a name of the model; give the adapter another name"
            )


def _check_structured(options: Mapping[str, Any]) -> None:
    """Log which library serves constrained requests, if the named one is another."""
    if (name := structured_options(options).backend) in OTHER_LIBRARIES:
        logger.warning(
            "structured_outputs_config.backend=%s: llguidance serves these requests", name
        )


def _check_supported(config: EngineConfig) -> None:
    if (name := config.load.load_format) in unsupported.LOAD_FORMATS:
        raise Unsupported(f"load_format={name}", unsupported.LOAD_FORMATS[name])
    if config.cache.kv_remote_url and not config.cache.kv_key_file:
        raise ConfigError(
            "kv_remote_url: blocks that engines share need a key that they share, and the server must not have:"
            " run `quire kv key FILE`, copy FILE to each machine, and add --kv-key-file FILE"
        )
    if (name := config.cache.kv_cache_dtype) not in ("auto", *KV_DTYPES):
        raise Unsupported(f"kv_cache_dtype={name}", f"choose from auto, {', '.join(KV_DTYPES)}")


def warn_of_ignored(
    config: EngineConfig, device: str, path: str, hf_config: Mapping[str, Any]
) -> None:
    """Name the settings that were given and have no effect, all in one line."""
    swap, form = config.cache.swap_space, config.load.load_format
    algorithm, mode = config.cache.prefix_caching_hash_algo, config.scheduler.preemption_mode
    has_code = hf_config.get("auto_map") or any(Path(path).glob("*.py"))
    ignored = {
        f"prefix_caching_hash_algo={algorithm} has no effect: blocks are found by {SAME_HASHES.get(algorithm)}, with a key of this server": algorithm in SAME_HASHES,
        f"swap_space={swap:g} has no effect: preemption_mode=recompute computes preempted requests again": swap != 0 and mode == "recompute",
        "swap_space has no effect: without enable_prefix_caching, blocks have no names": (mode == "swap" or (swap and not mode)) and config.cache.enable_prefix_caching is False,
        "fully_sharded_loras has no effect: each rank has all of A, and of B its own outputs": config.lora.fully_sharded_loras,
        f"model_loader_extra_config has no effect: load_format={form} maps the files, and has no options": config.load.model_loader_extra_config,
        "enforce_eager has no effect: on a CPU, no step is recorded as a graph": config.parallel.enforce_eager and device == "cpu",
        "trust_remote_code has no effect: the checkpoint contains no code": config.model.trust_remote_code and not has_code,
    }  # fmt: skip
    if given := [text for text, is_given in ignored.items() if is_given]:
        logger.warning("%s", "; ".join(given))
