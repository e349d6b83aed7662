"""SpeculationFeature: draft tokens, which a step verifies beside the next token (`speculative_config`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.config.engine import ModelSpec, Resolved
from quire.engine.feature import EngineParts, Feature
from quire.errors import ConfigError
from quire.features.speculation.gate import SpeculationGate
from quire.features.speculation.request_metrics import spec_decode_metrics
from quire.scheduler.limits import SchedulerLimits

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class SpeculationFeature(Feature):
    """The gate plans the draft tokens that the hook's drafter puts into the rows."""

    name = "speculation"
    order = 70  # its hook reads the logits processors of others

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.speculation is not None

    def models(self) -> Sequence[ModelSpec]:
        """The drafter's model, if it has one. Raises ConfigError: a speculator does not fit the main model."""
        spec, options = self.resolved.draft_spec, self.resolved.speculation
        if spec is None or options is None:
            return ()
        if (method := options.drafts_with_model) is None or method == "draft_model":
            return (spec,)
        from quire.models.speculators.spec import speculator_spec

        main, count = self.resolved.spec, options.num_speculative_tokens
        return (speculator_spec(method, spec, main, count),)

    def limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        drafts = self.resolved.num_drafts
        return replace(limits, drafts=drafts, lookahead=drafts if self.resolved.draft else 0)

    def plug_into_engine(self, engine: EngineParts) -> None:
        if (options := self.resolved.speculation) is None:
            return
        counts = engine.core.counts
        gate = SpeculationGate(self.resolved.num_drafts, options.shares_texts, counts)
        engine.gates.append(gate)
        engine.counters += gate.counters

    def plug_into_worker(self, parts: WorkerParts) -> None:
        """Raises ConfigError: the model cannot take tokens back."""
        resolved = self.resolved
        if (options := resolved.speculation) is None or not parts.draws:
            return
        from quire.features.speculation.controller import SpeculationController
        from quire.features.speculation.hook import SpeculationHook
        from quire.features.speculation.methods import build_drafter

        if parts.models[0].per_request:
            raise ConfigError(
                f"speculative_config: {resolved.architecture} runs on Transformers with a cache of its own, which cannot take"
                " tokens back; leave the option out, the text is the same"
            )
        drafter = build_drafter(parts, resolved, options)
        controller = SpeculationController(
            options.num_speculative_tokens, fixed=not options.adaptive
        )
        named = resolved.config.observe.per_request_spec_decode_metrics != "none"
        hook = SpeculationHook(
            parts.rows, drafter, controller, options.most_at, named, processors=parts.processors,
            ranks=parts.ranks.tensor, waits=resolved.depth == 1, models=parts.places[self.name],
        )  # fmt: skip
        parts.hooks.append(hook)

    def answer(self, details: Sequence[Any]) -> dict[str, Any]:
        return spec_decode_metrics(details)

    def usage(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        """`speculative_decoding`, without the counts of each step where only a summary is asked for."""
        mode = self.resolved.config.observe.per_request_spec_decode_metrics
        if mode == "none":
            return {}
        answer = spec_decode_metrics(()) if answer is None else answer
        if mode == "summary":
            answer = {key: n for key, n in answer.items() if not key.startswith("per_step_")}
        return {"speculative_decoding": answer}
