"""Quire: an engine that serves large language models.

A public name is imported when it is first used, so `import quire` takes milliseconds and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.version import __version__

__version_tuple__ = tuple(int(part) for part in __version__.split("."))

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM as AsyncLLM
    from quire.api.llm import LLM as LLM
    from quire.api.llm_engine import LLMEngine as LLMEngine
    from quire.compat.vllm_shim import install_as_vllm as install_as_vllm
    from quire.config.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from quire.config.engine_args import EngineArgs as EngineArgs
    from quire.frontend.logprobs import Logprob as Logprob
    from quire.frontend.outputs import CompletionOutput as CompletionOutput
    from quire.frontend.outputs import RequestOutput as RequestOutput
    from quire.frontend.pooling.outputs import ClassificationOutput as ClassificationOutput
    from quire.frontend.pooling.outputs import (
        ClassificationRequestOutput as ClassificationRequestOutput,
    )
    from quire.frontend.pooling.outputs import EmbeddingOutput as EmbeddingOutput
    from quire.frontend.pooling.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.frontend.pooling.outputs import PoolingOutput as PoolingOutput
    from quire.frontend.pooling.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.frontend.pooling.outputs import ScoringOutput as ScoringOutput
    from quire.frontend.pooling.outputs import ScoringRequestOutput as ScoringRequestOutput
    from quire.frontend.prompts import PromptType as PromptType
    from quire.frontend.prompts import TextPrompt as TextPrompt
    from quire.frontend.prompts import TokensPrompt as TokensPrompt
    from quire.plugins import ModelRegistry as ModelRegistry
    from quire.protocol.lora_request import LoRARequest as LoRARequest
    from quire.protocol.pooling_params import PoolingParams as PoolingParams
    from quire.protocol.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.protocol.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.protocol.sampling_params import SamplingParams as SamplingParams
    from quire.protocol.sampling_params import StructuredOutputsParams as StructuredOutputsParams

LATER = "quire.compat.vllm_unsupported"
"""The module with names of planned features. They can be imported; using one raises an error."""

PUBLIC = {
    "LLM": "quire.api.llm:LLM",
    "AsyncLLM": "quire.api.async_llm:AsyncLLM",
    "LLMEngine": "quire.api.llm_engine:LLMEngine",
    "AsyncLLMEngine": "quire.api.async_llm:AsyncLLM",
    "PoolingParams": "quire.protocol.pooling_params:PoolingParams",
    **{
        name: f"quire.frontend.pooling.outputs:{name}"
        for name in (
            "PoolingOutput",
            "PoolingRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        )
    },
    "SamplingParams": "quire.protocol.sampling_params:SamplingParams",
    "BeamSearchParams": "quire.protocol.sampling_params:BeamSearchParams",
    "StructuredOutputsParams": "quire.protocol.sampling_params:StructuredOutputsParams",
    "RequestOutputKind": "quire.protocol.sampling_params:RequestOutputKind",
    "RequestOutput": "quire.frontend.outputs:RequestOutput",
    "CompletionOutput": "quire.frontend.outputs:CompletionOutput",
    "BeamSearchOutput": "quire.frontend.outputs:BeamSearchOutput",
    "BeamSearchSequence": "quire.frontend.outputs:BeamSearchSequence",
    "Logprob": "quire.frontend.logprobs:Logprob",
    "EngineArgs": "quire.config.engine_args:EngineArgs",
    "AsyncEngineArgs": "quire.config.engine_args:AsyncEngineArgs",
    "LoRARequest": "quire.protocol.lora_request:LoRARequest",
    "ModelRegistry": "quire.plugins:ModelRegistry",
    "install_as_vllm": "quire.compat.vllm_shim:install_as_vllm",
    "TextPrompt": "quire.frontend.prompts:TextPrompt",
    "TokensPrompt": "quire.frontend.prompts:TokensPrompt",
    "EmbedsPrompt": "quire.frontend.prompts:EmbedsPrompt",
    "PromptType": "quire.frontend.prompts:PromptType",
    **{name: f"{LATER}:{name}" for name in ("initialize_ray_cluster",)},
}
"""Public name -> "module:attribute"."""

__all__ = ["__version__", "__version_tuple__", *PUBLIC]


def __getattr__(name: str) -> Any:
    where = PUBLIC.get(name)
    if where is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    module, _, attribute = where.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
