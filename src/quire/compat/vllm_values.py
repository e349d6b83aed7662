"""Small values and functions of vLLM that programs import besides the engine. Knows nothing of Quire's engine."""

from __future__ import annotations

import gc
import random
import socket
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any


class Settings(SimpleNamespace):
    """Keeps its keyword arguments; the configuration field that gets the object interprets them."""


class AttentionConfig(Settings):
    """Quire uses its backend."""


class CompilationConfig(Settings):
    """Quire ignores it, with a warning."""


class KVTransferConfig(Settings):
    """The option kv_transfer_config."""


class ProfilerConfig(Settings):
    """Profiling is not supported yet."""


class SpeculativeConfig(Settings):
    """The option speculative_config."""


class StructuredOutputsConfig(Settings):
    """The option structured_outputs_config."""


CUDAGraphMode = IntEnum(
    "CUDAGraphMode", "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE", start=0
)
CompilationMode = IntEnum(
    "CompilationMode", "NONE STOCK_TORCH_COMPILE DYNAMO_TRACE_ONCE VLLM_COMPILE", start=0
)


class ShardedStateLoader:
    """Names of the files that `save_sharded_state` writes."""

    TP_ONLY_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


class UsageContext(StrEnum):
    """How a program uses the engine; Quire reports no usage."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Quire reports no usage."""
    return False


@dataclass(frozen=True)
class RequestError:
    """The error of one request, after which the engine continues."""

    code: str
    message: str
    retryable: bool = False


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first 4 numbers of a vector and its size."""
    start = ", ".join(str(number) for number in embeds[:4])
    rest = ", ..." if len(embeds) > 4 else ""
    print(f"{prefix}: [{start}{rest}] (size={len(embeds)})")


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A TCP port of this host that is free now; another program may take it before the caller does."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def set_random_seed(seed: int | None) -> None:
    """Seed Python's, NumPy's and torch's generators. Quire itself draws from the seeds of requests."""
    import numpy as np
    import torch

    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """A list, an array or a tensor of the host as a tensor on the device."""
    import torch

    tensor = torch.as_tensor(data)
    if out is not None:
        return out.copy_(tensor)
    return tensor.to(device=device, dtype=dtype, non_blocking=True)


def gpu_sync_allowed(first_only: bool = False) -> AbstractContextManager[None]:
    """vLLM checks that a step does not wait for its device; Quire has no such check."""
    return nullcontext()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Programs call this after `del llm`. Quire has no process groups, so it only collects garbage."""
    gc.collect()


def no_process_group() -> None:
    """Quire has no process groups: there is nothing to destroy."""


def world_size() -> int:
    """One worker computes each model."""
    return 1


def rank() -> int:
    """The rank of the only worker."""
    return 0
