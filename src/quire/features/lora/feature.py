"""LoraFeature: requests name LoRA adapters, which are loaded, evicted and replaced while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature

if TYPE_CHECKING:
    from quire.features.lora.registry import LoraRegistry
    from quire.parallel.layout import RankLayout
    from quire.worker.build import WorkerParts
    from quire.worker.memory_plan import MemoryLine


class LoraFeature(Feature):
    """`enable_lora`. A request names its adapter in `EngineRequest.adapter`, which the prefix cache needs, too."""

    name = "lora"

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.registry: LoraRegistry | None = None

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.config.lora.enable_lora

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        from quire.features.lora.memory import forecast_adapters

        return (forecast_adapters(self.resolved, layout, stage),)

    def plug_into_engine(self, engine: EngineParts) -> None:
        """Raises ConfigError: an adapter of the configuration cannot be served."""
        from quire.features.lora import control
        from quire.features.lora.gate import LoraGate
        from quire.features.lora.registry import FILE

        options = self.resolved.config.lora
        self.registry = registry = control.registry_of(engine, options.capacity)
        gate = LoraGate(registry, options.max_loras, options.default_mm_loras)
        engine.gates.append(gate)
        engine.labels |= gate.labels()
        engine.calls |= control.control_calls(engine.core, registry)
        engine.state_files[FILE] = registry.persist
        control.load_configured(registry, self.resolved.config)

    def on_sleep(self, level: int) -> None:
        """The adapters' memory is freed too, and requests read them again."""
        if level and self.registry is not None:
            self.registry.evict_all()

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.lora.hook import LoraHook
        from quire.features.lora.memory import adapter_targets

        hook = LoraHook(parts.rows, self.resolved.config.lora, adapter_targets(self.resolved))
        parts.hooks.append(hook)
        parts.functions |= hook.functions
