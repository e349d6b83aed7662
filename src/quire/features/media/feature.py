"""MediaFeature: pictures, videos and sound in prompts, encoded by the towers of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.errors import ConfigError
from quire.features.media.gate import MediaGate
from quire.models.media import media_model, most_rows
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_plan import MemoryLine

if TYPE_CHECKING:
    from quire.parallel.layout import RankLayout
    from quire.worker.build import WorkerParts


class MediaFeature(Feature):
    """The frontend reads the items (`frontend/media`), and sends them with the request."""

    name = "media"
    prompt_reader = "quire.frontend.media.prompt_reader:MediaReader"

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.model = media_model(resolved)

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return media_model(resolved) is not None

    @property
    def most_rows(self) -> int:
        return 0 if self.model is None else most_rows(self.resolved, self.model)

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        """The cache, and the rows of a step. The weights of the towers are counted with the checkpoint."""
        if self.model is None:
            return ()
        rows = 2 * self.most_rows
        vision, audio, dtype = self.model.vision, self.model.audio, self.resolved.dtype
        size = rows * self.model.width * (1 + self.model.inner_layers) * ITEMSIZE[dtype]
        lower = "max_num_batched_tokens"
        what = "pictures" if audio is None else "sound" if vision is None else "pictures and sound"
        lines = [MemoryLine(f"encoded {what}", size, f"for {rows} tokens of {what}", lower)]
        if vision is not None:
            lines.append(MemoryLine("activations of the vision tower", vision.activation_bytes(dtype), "for the largest picture"))  # fmt: skip
        if audio is not None:
            lines.append(MemoryLine("activations of the audio tower", audio.activation_bytes(dtype), "for the longest sound"))  # fmt: skip
        return lines

    def plug_into_engine(self, engine: EngineParts) -> None:
        core = engine.core
        whole = self._longest_whole()
        prompts = self.model is not None and self.model.both_ways == "prompt"
        window = int(self.resolved.hf_config.get("sliding_window") or 0)
        engine.gates.append(MediaGate(self.most_rows, whole, core.counts, prompts, window))
        engine.counters += ["mm_cache_queries", "mm_cache_hits"]
        engine.counters += [f"encoder_{what}" for what in ("passes", "rows", "seconds", "cache_bytes", "cache_bytes_max")]  # fmt: skip

        def reset() -> bool:
            core.counts["encoder_cache_bytes"] = 0
            return all(core.executor.call("reset_encoder_cache"))

        engine.calls["reset_encoder_cache"] = reset

    def _longest_whole(self) -> int:
        """The most tokens of an item, or of a prompt with items, if a step computes all of them or none; 0: it may compute a part.

        Raises:
            ConfigError: a step may have fewer tokens than an item.
        """
        resolved = self.resolved
        both_ways = self.model is not None and bool(self.model.both_ways)
        if not (both_ways or resolved.config.media.disable_chunked_mm_input):
            return 0
        why = (
            "the tokens of a picture attend to each other, so a step computes all of them"
            if both_ways
            else "disable_chunked_mm_input"
        )
        limits = {"max_num_batched_tokens": resolved.max_num_batched_tokens}
        if chunk := resolved.config.scheduler.long_prefill_token_threshold:
            limits["long_prefill_token_threshold"] = chunk
        most = 0 if self.model is None else self.model.max_rows
        vision = None if self.model is None else self.model.vision
        what = "picture" if vision is not None and vision.max_rows == most else "sound"
        for name, limit in limits.items():
            if most > limit:
                raise ConfigError(
                    f"{why}; the largest {what} has {most} tokens, and {name}={limit}: raise it to {most}"
                )
        return min(limits.values())

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from dataclasses import replace

        from quire.features.media.hook import MediaHook
        from quire.features.media.item_encoder import ItemEncoder
        from quire.features.media.load_tower import tower_loader

        if self.model is None:
            return
        load, model = None, self.model
        if not self.resolved.config.media.max_pictures:  # requests bring rows that are encoded
            model = replace(model, vision=None)
        if model.towers:
            load = tower_loader(self.resolved, model, parts.platform, parts.ranks.tensor)
        width = self.model.width * (1 + self.model.inner_layers)
        sizes = self.most_rows, self.model.max_rows, width
        encoder = ItemEncoder(load, *sizes, parts.platform.device, self.resolved.dtype)
        hook = MediaHook(parts.rows, encoder, self.model)
        parts.hooks.append(hook)
        parts.functions["reset_encoder_cache"] = hook.clear_cache
