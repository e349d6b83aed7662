"""The executor and its workers from a configuration: ranks, processes, and the features' parts of each worker.

Loads torch only where it builds a worker (`worker/build.py`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.config.engine import ModelSpec, Resolved
from quire.config.serialize import resolved_from_bytes
from quire.config.structured import structured_options
from quire.errors import ConfigError
from quire.executor.inline import InlineExecutor
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.vocabulary import Vocabulary, tokenizer_json
from quire.parallel.address import RankAddress
from quire.startup_timer import Report, no_report
from quire.worker.build import PlugIn, WorkerParts, build_worker

if TYPE_CHECKING:
    from quire.executor.base import Executor
    from quire.worker.worker import Worker


def build_compiler(resolved: Resolved) -> GrammarCompiler:
    """The grammar compiler: one for each process that compiles, so the gate and an inline worker share it."""
    options = resolved.config.model
    folder = resolved.tokenizer_folder
    size = int(resolved.hf_config.get("vocab_size") or 0)
    compiler = GrammarCompiler(Vocabulary(tokenizer_json(folder), size))
    generates = resolved.pooling is None and not options.skip_tokenizer_init
    if generates and (Path(folder) / "tokenizer.json").is_file():
        other = (
            structured_options(resolved.config.structured.structured_outputs_config).backend
            == "xgrammar"
        )
        compiler.warm(other)  # while weights load; later it would delay running requests
    return compiler


def build_executor(
    resolved: Resolved, compiler: GrammarCompiler, report: Report = no_report
) -> Executor:
    if resolved.executor in ("mp", "ray"):
        from quire.engine.rank_processes import start_ranks

        return start_ranks("quire.engine.worker_parts:worker_from_wire", resolved, report)
    features = worker_features(resolved, compiler)
    make = partial(build_worker, resolved, features, draft_specs(resolved), report)
    if resolved.executor == "uni":
        return InlineExecutor(make())
    from quire.engine.external_launcher import external_executor

    return external_executor(resolved, make)


def worker_from_wire(payload: bytes, report: Report) -> Worker:
    encoded, address = msgspec.msgpack.decode(payload, type=tuple[bytes, RankAddress])
    resolved = resolved_from_bytes(encoded)
    features = worker_features(resolved, build_compiler(resolved))
    return build_worker(resolved, features, draft_specs(resolved), report, address)


def draft_specs(resolved: Resolved) -> list[ModelSpec]:
    """The drafter's model, if it has one.

    Raises:
        ConfigError: a speculator does not fit the main model.
    """
    spec, options = resolved.draft_spec, resolved.speculation
    if spec is None or options is None:
        return []
    if (method := options.drafts_with_model) is None or method == "draft_model":
        return [spec]
    from quire.models.speculators.spec import speculator_spec

    return [speculator_spec(method, spec, resolved.spec, options.num_speculative_tokens)]


def worker_features(resolved: Resolved, compiler: GrammarCompiler) -> PlugIn:
    """The features' parts of a worker, in the order in which they run."""

    def plug_in(parts: WorkerParts) -> None:
        from quire.features.expert_balance.hook import add_expert_balance
        from quire.features.structured.masks import GrammarMasks
        from quire.features.thinking.budget import ThinkingBudget

        options = structured_options(resolved.config.structured.structured_outputs_config)
        if parts.draws:
            # Behind draft tokens in flight, forced tokens would cost the row: where steps are queued ahead, they are draft tokens.
            jumps = options.jumps and (resolved.depth == 1 or resolved.speculation is None)
            masks = GrammarMasks(compiler, parts.rows, jumps and not parts.processors)
            parts.processors += [ThinkingBudget(), masks]
            parts.hooks.append(masks.hook)
        if resolved.config.lora.enable_lora:
            from quire.features.lora.hook import LoraHook

            adapters = LoraHook(parts.rows, resolved.config.lora, adapter_targets(resolved))
            parts.hooks.append(adapters)
            parts.functions |= adapters.functions
        add_expert_balance(parts, resolved)
        add_drafter(parts, resolved)

    return plug_in


def adapter_targets(resolved: Resolved) -> dict[str, tuple[int, int]] | None:
    """What adapters of the whole model may change (`lora_targets`), where the worker's model is a stage of it; else None."""
    if resolved.config.parallel.pipeline_parallel_size == 1:
        return None
    from quire.layers.lora import lora_targets
    from quire.worker.rank_memory import construct_part

    return lora_targets(construct_part(resolved.spec))


def add_drafter(parts: WorkerParts, resolved: Resolved) -> None:
    """What proposes draft tokens, if `speculative_config` says so.

    Raises:
        ConfigError: the model cannot take tokens back.
    """
    if (options := resolved.speculation) is None or not parts.draws:
        return
    from quire.features.speculation.draft_length import DraftLength
    from quire.features.speculation.hook import SpeculationHook
    from quire.features.speculation.methods import build_drafter

    model = parts.models[0]
    if model.per_request:
        raise ConfigError(
            f"speculative_config: {resolved.architecture} runs on Transformers with a cache of its own, which cannot take"
            " tokens back; leave the option out, the text is the same"
        )
    drafter = build_drafter(parts, resolved, options)
    length = DraftLength(
        options.num_speculative_tokens, fixed=not options.adaptive, looks_up=not drafter.has_model
    )
    named = resolved.config.observe.per_request_spec_decode_metrics != "none"
    parts.hooks.append(
        SpeculationHook(
            parts.rows, drafter, length, options.most_at, named, processors=parts.processors,
            ranks=parts.ranks.tensor, waits=resolved.depth == 1,
        )
    )  # fmt: skip
