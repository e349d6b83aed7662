"""Constructs a native model on "meta": the shapes of its weights, and what its layers keep for a request, without memory.

Knows the registry. Does not know weights or files.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.config.engine import ModelSpec
from quire.errors import ConfigError
from quire.models import registry
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.parallel.expert_placement import ExpertOptions, sharing_experts


def construct(spec: ModelSpec) -> CausalLM:
    """The native model of `spec` on "meta", without weights."""
    experts = ExpertOptions.of(spec.parallel)
    with construction(getattr(torch, spec.dtype)), sharing_experts(experts):
        model: CausalLM = model_class(spec.architecture)(
            TextConfig(spec.hf_config), spec.max_model_len
        )
    if spec.pooling is not None and hasattr(model, "lm_head"):
        model.lm_head = None
    return model


def model_class(architecture: str) -> Any:
    """The class of a native model, by its architecture.

    Raises:
        ConfigError: it cannot be imported.
    """
    target = registry.class_path(architecture)
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model class {target} cannot be loaded: {error}") from error


_default_dtype = threading.RLock()
"""Torch's default dtype is the process's: of two threads that set it at once, the last to end restored the other's."""


@contextmanager
def construction(dtype: torch.dtype) -> Iterator[None]:
    """Inside, parameters are created in `dtype` on "meta": they have shapes, and no memory. One thread at a time."""
    with _default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                yield
        finally:
            torch.set_default_dtype(before)
