"""Methods of vLLM's API that Quire does not support yet: each raises Unsupported with an alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from quire.config.vllm_flags import LORA
from quire.errors import Unsupported

POOLING = "load a model that generates and use generate; vectors and scores come with pooling"
WEIGHTS = "make a new LLM from the new checkpoint"

LATER: dict[str, tuple[str, str]] = {
    **{name: ("pooling", POOLING) for name in ("encode", "embed", "classify", "score", "reward")},
    **{name: ("media input", "send text") for name in ("reset_mm_cache", "reset_encoder_cache")},
    **{
        name: ("profiling", "run the program under py-spy or torch.profiler")
        for name in ("start_profile", "stop_profile")
    },
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), LORA),
    **{
        name: ("replacing weights while running", WEIGHTS)
        for name in (
            "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
            "start_draft_weight_update", "update_weight_version", "get_weight_version",
            "shutdown_weight_transfer_engine",
        )
    },
    "scale_elastic_ep": ("expert parallelism", "start one server a device"),
}  # fmt: skip
"""Method -> its feature, and what to do without it."""


class Later:
    """Base class of `LLM` and `AsyncLLM`: each name in LATER is a method that raises Unsupported."""

    def __getattr__(self, name: str) -> Any:
        if name not in LATER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        feature, remedy = LATER[name]

        def refuse(*args: Any, **keywords: Any) -> NoReturn:
            raise Unsupported(f"{type(self).__name__}.{name} ({feature})", remedy)

        return refuse
