"""StructuredFeature: a request's output follows a grammar: JSON, a schema, a regular expression, choices."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.config.structured import structured_options
from quire.engine.feature import EngineParts, Feature

if TYPE_CHECKING:
    from quire.features.structured.compiler import GrammarCompiler
    from quire.worker.build import WorkerParts


class StructuredFeature(Feature):
    """The gate lets a request wait for its grammar; a logits processor masks tokens; its hook advances the grammars."""

    name = "structured"
    order = 60

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.pooling is None

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """One for each process that compiles, so a gate and a worker in one process share it."""
        from quire.features.structured.compiler import GrammarCompiler
        from quire.features.structured.vocabulary import Vocabulary, tokenizer_json

        size = int(self.resolved.hf_config.get("vocab_size") or 0)
        return GrammarCompiler(Vocabulary(tokenizer_json(self.resolved.tokenizer_folder), size))

    def begin(self) -> None:
        """Read the vocabulary while weights load; later it would delay running requests."""
        resolved = self.resolved
        if resolved.config.model.skip_tokenizer_init:
            return
        if (Path(resolved.tokenizer_folder) / "tokenizer.json").is_file():
            self.compiler.warm()

    def plug_into_engine(self, engine: EngineParts) -> None:
        from quire.features.structured.gate import GrammarGate

        executor = self.resolved.executor
        elsewhere, waits = executor in ("mp", "ray"), executor == "external_launcher"
        engine.gates.append(GrammarGate(self.compiler, engine.wake, elsewhere, waits))

    def plug_into_worker(self, parts: WorkerParts) -> None:
        if not parts.draws:
            return
        from quire.features.structured.masks import GrammarMasks

        resolved = self.resolved
        options = structured_options(resolved.config.structured.structured_outputs_config)
        # Where steps are queued ahead, a hook may not add tokens: there forced tokens can only be draft tokens.
        jumps = options.jumps and resolved.depth == 1
        masks = GrammarMasks(self.compiler, parts.rows, jumps and not parts.has_user_processors)
        parts.processors.append(masks)
        parts.hooks.append(masks.hook)
