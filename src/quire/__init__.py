"""Quire: an engine that serves large language models.

The public names are loaded when they are first used, so that `import quire` costs milliseconds and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) for part in __version__.split("."))

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM as AsyncLLM
    from quire.api.llm import LLM as LLM
    from quire.api.outputs import CompletionOutput as CompletionOutput
    from quire.api.outputs import RequestOutput as RequestOutput
    from quire.config.arguments import AsyncEngineArgs as AsyncEngineArgs
    from quire.config.arguments import EngineArgs as EngineArgs
    from quire.protocol.params import SamplingParams as SamplingParams
    from quire.registry import ModelRegistry as ModelRegistry

PUBLIC = {
    "LLM": "quire.api.llm:LLM",
    "AsyncLLM": "quire.api.async_llm:AsyncLLM",
    "AsyncLLMEngine": "quire.api.async_llm:AsyncLLM",
    "SamplingParams": "quire.protocol.params:SamplingParams",
    "BeamSearchParams": "quire.api.beam:BeamSearchParams",
    "RequestOutput": "quire.api.outputs:RequestOutput",
    "CompletionOutput": "quire.api.outputs:CompletionOutput",
    "EngineArgs": "quire.config.arguments:EngineArgs",
    "AsyncEngineArgs": "quire.config.arguments:AsyncEngineArgs",
    "ModelRegistry": "quire.registry:ModelRegistry",
    "install_as_vllm": "quire.compat.as_vllm:install_as_vllm",
    "TextPrompt": "quire.api.prompts:TextPrompt",
    "TokensPrompt": "quire.api.prompts:TokensPrompt",
    "PromptType": "quire.api.prompts:PromptType",
}
"""Public name -> where it is."""

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
