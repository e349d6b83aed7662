"""Public names of the field whose feature comes later: they can be imported, and say so when they are used.

A program often imports more than it uses, so the import itself must not fail. Knows names and remedies only.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, NoReturn

from quire.config.vllm_flags import LORA, SPECULATION
from quire.errors import Unsupported

POOLING = ("pooling", "serve a model that generates text; embedding and scoring come with pooling")
TRANSFER = ("KV transfer between servers", "let each server prefill its own requests")
OUTPUTS = (
    "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
    "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip
LATER: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("PoolingParams", "PoolerConfig", *OUTPUTS), POOLING),
    "LoRARequest": LORA,
    "KVTransferConfig": TRANSFER,
    "KVEventsConfig": TRANSFER,
    "SpeculativeConfig": SPECULATION,
    "VllmConfig": ("a configuration object of vLLM", "use EngineArgs(...).create_engine_config()"),
    "LogitsProcessor": (
        "vLLM's interface of logits processors",
        "see `quire.worker.sampling.logits_processors` for ours",
    ),
}
"""Name -> (feature, what to do until then). Making an object of it is refused."""

IGNORED = ("CompilationConfig", "StructuredOutputsConfig", "AttentionConfig", "CUDAGraphMode")
"""Objects that hold settings which this engine takes with a warning, or in part: they keep what they are given."""


class _Later(type):
    """So that class methods are refused with the same words as the class."""

    def __getattr__(cls, name: str) -> NoReturn:
        feature, remedy = LATER[cls.__name__]
        raise AttributeError(
            f"{cls.__name__}.{name}: {cls.__name__} ({feature}) is not supported yet: {remedy}"
        )

    def __call__(cls, *values: Any, **keywords: Any) -> NoReturn:
        feature, remedy = LATER[cls.__name__]
        raise Unsupported(f"{cls.__name__} ({feature})", remedy)


class Settings(SimpleNamespace):
    """Keeps its keywords, for a field that decides what they mean."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """What programs call after `del llm`: there are no process groups here, so only garbage is collected."""
    gc.collect()


def initialize_ray_cluster(*values: Any, **keywords: Any) -> NoReturn:
    """Refused: one device serves a model now."""
    raise Unsupported("initialize_ray_cluster (Ray)", "start one server a device")


def __getattr__(name: str) -> Any:
    """Classes are made once, when they are asked for."""
    if name in LATER:
        feature, _ = LATER[name]
        made: Any = _Later(name, (), {"__doc__": f"Comes with {feature}.", "__module__": __name__})
    elif name in IGNORED:
        made = type(name, (Settings,), {"__doc__": Settings.__doc__, "__module__": __name__})
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made
