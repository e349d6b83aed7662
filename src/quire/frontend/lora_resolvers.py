"""Resolvers of LoRA adapters: they find the adapter of a name that a request has and the engine does not know yet.

A plugin registers its own; the built-in one looks into the directory QUIRE_LORA_RESOLVER_CACHE_DIR. Knows names and
directories. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from quire import env
from quire.config.lora import check_name
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.models.checkpoint_locator import ADAPTER_CONFIG
from quire.models.json_files import read_json
from quire.protocol.lora_request import LoRARequest

log = get_logger(__name__)

MAX_CONFIG_BYTES = 1 << 20


class LoRAResolver(ABC):
    """Base class, as vLLM has it."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of this name for this model; None: this resolver has none."""


class FilesystemResolver(LoRAResolver):
    """The subdirectory of this name, if its adapter_config.json is of a LoRA adapter for this model."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return await asyncio.to_thread(self._found, base_model_name, lora_name)

    def _found(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        try:
            check_name(lora_name)
            if os.path.isabs(lora_name) or os.path.normpath(lora_name) != lora_name:
                return None  # "./x", "x/" and "x" would be several adapters
            root, folder = self.folder.resolve(), (self.folder / lora_name).resolve()
            if folder == root or not folder.is_relative_to(root):
                return None  # the name leads out of the directory
            config = read_json(folder / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
        except (OSError, ValueError, ConfigError):
            return None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            return None
        if config.get("base_model_name_or_path") != base_model_name:
            return None
        return LoRARequest(lora_name, number_of(lora_name), str(folder))


def number_of(name: str) -> int:
    """A `lora_int_id` of a name."""
    return 1 + int.from_bytes(sha256(name.encode()).digest()[:4])


class _LoRAResolverRegistry:
    """`LoRAResolverRegistry.register_resolver("mine", MyResolver())`, in a plugin."""

    def __init__(self) -> None:
        self.resolvers: dict[str, LoRAResolver] = {}

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Ask this resolver too; one of the same name is replaced."""
        self.resolvers[resolver_name] = resolver

    def get_supported_resolvers(self) -> set[str]:
        return set(self.resolvers)

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """Raises KeyError: there is none of this name."""
        if resolver_name not in self.resolvers:
            known = ", ".join(self.resolvers) or "none"
            raise KeyError(f"no LoRA resolver is called {resolver_name!r}; there are: {known}")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _LoRAResolverRegistry()


def _each() -> Iterator[tuple[str, LoRAResolver]]:
    if folder := env.get("LORA_RESOLVER_CACHE_DIR"):
        yield "filesystem", FilesystemResolver(folder)
    yield from list(LoRAResolverRegistry.resolvers.items())


async def resolve(name: str, models: Sequence[str]) -> LoRARequest | None:
    """The first adapter that a resolver has for one of the model's names. A resolver that fails is logged."""
    for kind, resolver in _each():
        for model in models:
            try:
                request: Any = await resolver.resolve_lora(model, name)
            except Exception:
                log.exception("the LoRA resolver %r failed on the name %r", kind, name)
                break
            if isinstance(request, LoRARequest):
                return request
    return None
