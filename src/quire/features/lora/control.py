"""The functions of an engine that serves LoRA adapters, for `EngineClient.call`.

Knows the core and the registry of adapters. Arguments and results are builtins. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.config.lora import check_name
from quire.engine.core import PENDING, EngineCore
from quire.engine.feature import EngineParts
from quire.errors import ConfigError, ValidationError
from quire.features.lora.registry import LoraRegistry, merged
from quire.models.checkpoint_locator import find_adapter
from quire.observe.metric_table import STATES
from quire.protocol.request import Call

if TYPE_CHECKING:
    from quire.executor.base import Executor

LOOK_AGAIN_S = 0.005


def registry_of(engine: EngineParts, slots: int) -> LoraRegistry:
    """The registry of this engine; `slots`: how many adapters may be in memory."""
    core = engine.core
    return LoraRegistry(
        core.executor.call, slots, wake=engine.wake, awake=lambda: core.state == STATES[0]
    )


def load_configured(registry: LoraRegistry, config: EngineConfig) -> None:
    """Load the adapters of the configuration, before any request comes. Raises ConfigError: one cannot be served."""
    for one in config.lora.adapters:
        name, path = one["name"], find_adapter(one["path"], config.load, config.model.hf_token)
        try:
            while registry.load(name, name, path, False, one["base_model_name"]) is None:
                time.sleep(LOOK_AGAIN_S)
                registry.poll()
        except ValidationError as error:
            raise ConfigError(f"the adapter {name!r} in {path} cannot be loaded: {error}") from None


def control_calls(core: EngineCore, registry: LoraRegistry) -> dict[str, Callable[..., Any]]:
    """The functions by name."""

    def load_lora(
        name: str,
        path: str,
        load_inplace: bool = False,
        base_model_name: str | None = None,
        if_absent: bool = False,
        resolved_for: str | None = None,
    ) -> Any:
        """Register the adapter in the directory `path`; answered with its version when it can be used."""
        try:
            check_name(name)
        except ValueError as error:
            raise ValidationError(str(error), parameter="lora_name", value=name) from None
        call = core.current_call.client, core.current_call.id
        version = registry.load(
            call, name, path, load_inplace, base_model_name, if_absent, resolved_for
        )
        return PENDING if version is None else version

    def unload_lora(name: str) -> bool:
        """Forget the name; requests with it go on. False: there is none."""
        return registry.unload(name)

    def pin_lora(name: str) -> bool:
        """Keep the adapter in memory as long as it has its name. False: there is none."""
        return registry.pin(name)

    def list_loras() -> list[dict[str, Any]]:
        """Name, path, version, base_model_name, rank, bytes, state ("loading", "ready", "evicted") and is_resolved of each
        adapter."""
        return registry.cards()

    def find_lora(name: str) -> dict[str, Any] | None:
        """The same of the adapter that a request names; None: there is none."""
        return registry.find(name)

    def poll_loras() -> Any:
        """Pending for ever, so that the loop calls it in each turn."""
        registry.poll()
        for version in registry.failed():
            for id in list(version.waiting.values()):
                if (output := core.scheduler.abort(id, "error", version.error)) is not None:
                    output.error_kind = "invalid"
                    core.outbox.append(output)
        return PENDING

    core.pending_calls.append(Call(0, poll_loras.__name__))
    named = (load_lora, unload_lora, pin_lora, list_loras, find_lora, poll_loras)
    return {function.__name__: function for function in named}


def load_adapters(executor: Executor, paths: Sequence[str], versions: set[str]) -> None:
    """Load the adapters in these directories, for a recording that needs these versions.

    Raises:
        ConfigError: an adapter cannot be served, or a version is not among them.
    """
    for ticket, path in enumerate(paths):
        executor.call("read_adapter", ticket, path, "")
        while not (reports := merged(executor.call("adapters_read", [ticket]))):
            time.sleep(LOOK_AGAIN_S)
        if (error := reports[ticket].get("error")) is not None:
            raise ConfigError(f"the adapter in {path} cannot be loaded: {error}")
        version = reports[ticket]["version"]
        executor.call("add_adapter", ticket, ticket, version)
        versions = versions - {version}
    if versions:
        raise ConfigError(
            f"the recording has requests with adapters whose files have the digests {', '.join(sorted(versions))}: name"
            " their directories with --lora-path"
        )
