"""TranscriptionFeature: sound for the encoder of a model that writes down speech, and the rules of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.features.transcription.gate import SoundGate
from quire.models.sound import has_parts, transcriber
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_plan import MemoryLine

if TYPE_CHECKING:
    from quire.parallel.layout import RankLayout
    from quire.worker.build import WorkerParts


MOST_KEPT = 16
"""Windows whose states are kept for another attempt: of large-v3, 61 MiB in bfloat16."""


class TranscriptionFeature(Feature):
    """The frontend reads the sound (`frontend/media/sound_inputs.py`), and sends a window with each request."""

    name = "transcription"
    prompt_reader = "quire.frontend.transcription.prompt_reader:TranscriptionReader"

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.model = transcriber(resolved)

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return transcriber(resolved) is not None

    @property
    def budget(self) -> int:
        """Windows that a step encodes."""
        states = 1 if self.model is None else self.model.states
        return max(1, self.resolved.max_num_batched_tokens // states)

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        """The kept states, and a step's states. The encoder's weights are counted with the checkpoint."""
        if self.model is None:
            return ()
        states, size = self.model.states, ITEMSIZE[self.resolved.dtype]
        windows = MOST_KEPT + self.budget
        lower = "max_num_batched_tokens"
        return (
            MemoryLine("encoded sound", windows * states * self.model.width * size, f"for {windows} windows", lower),
            MemoryLine("activations of the sound encoder", states * self.model.tower_width * size, "for a window"),
        )  # fmt: skip

    def plug_into_engine(self, engine: EngineParts) -> None:
        core = engine.core
        engine.gates.append(SoundGate(self.budget, core.counts))
        engine.counters += ["mm_cache_queries", "mm_cache_hits", "encoder_passes", "encoder_rows"]
        engine.calls["reset_encoder_cache"] = lambda: all(core.executor.call("reset_encoder_cache"))

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.transcription.hook import SoundHook
        from quire.features.transcription.rules import RulesProcessor

        states = 1 if self.model is None else self.model.states
        generation = {} if self.model is None else self.model.generation
        hook = SoundHook(parts.rows, MOST_KEPT * states, generation, has_parts(self.resolved))
        parts.hooks.append(hook)
        parts.functions["reset_encoder_cache"] = hook.clear_cache
        if parts.draws:
            parts.processors.append(RulesProcessor(parts.models[0].vocab_size))

    def answer(self, details: Sequence[Any]) -> Any:
        """The attention of all steps: (place of the token, weights)."""
        return [record for records in details for record in records]
