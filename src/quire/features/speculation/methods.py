"""Which drafter each method of `speculative_config` builds.

Knows every drafter. Does not know how they guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.config.engine import Resolved
from quire.config.serialize import by_name
from quire.config.speculation import SpeculativeOptions
from quire.errors import ConfigError
from quire.features.speculation.draft_model_runner import DraftModelRunner, TargetLogits
from quire.features.speculation.draft_rows import DraftRows
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.drafters import Drafters
from quire.features.speculation.eagle_drafter import EagleDrafter
from quire.features.speculation.gate import NAME
from quire.features.speculation.lookup_drafter import LookupDrafter
from quire.features.speculation.model_drafter import ModelDrafter
from quire.features.speculation.past_answers import PastAnswers
from quire.features.speculation.vocab_mapping import vocab_mapping
from quire.models.base import LanguageModel
from quire.models.json_files import token_ids
from quire.worker.build import WorkerParts, build_sampler_ops

Builder = Callable[[WorkerParts, Resolved, SpeculativeOptions], Drafter]


def build_drafter(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """The drafters of `method`, which has commas between several."""
    drafters = [BUILDERS[method](parts, resolved, options) for method in options.methods]
    return Drafters(drafters, parts.rows)


def _ngram(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    return LookupDrafter(*options.lookup)


def _suffix(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    return LookupDrafter(
        1,
        options.suffix_decoding_max_tree_depth,
        PastAnswers(options.suffix_decoding_max_cached_requests),
        options.suffix_decoding_max_spec_factor,
        options.suffix_decoding_min_token_prob,
    )


def _custom(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """Raises ConfigError: the class cannot be imported, or is no class of drafters."""
    drafter = by_name(str(options.model), "speculative_config.model")(options)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"speculative_config.model={options.model}: custom_class needs a class derived from"
            " quire.features.speculation.drafter.Drafter"
        )
    return drafter


MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
"""The keys of a draft model's config.json with the token that stands for tokens to come."""


def _draft_model(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """Raises ConfigError: the draft model keeps no keys, cannot take tokens back, or has no mask."""
    model, spec, target = _own_model(parts), resolved.draft_spec, parts.models[0].vocab_size
    layers = model.attention_layers()
    if spec is None or model.per_request or model.state_layers() or not layers:
        raise ConfigError(
            f"speculative_config.model={options.model}: a draft model needs a KV cache in blocks, so that it can take"
            " tokens back; choose one that generates text, without recurrent states"
        )
    own_ids_V = target_ids_W = None
    if options.use_heterogeneous_vocab:
        folders, device = (resolved.tokenizer_folder, spec.path), parts.platform.device
        texts, own_texts = (token_ids(Path(folder, "tokenizer.json")) for folder in folders)
        tables = vocab_mapping(texts, own_texts, target, model.vocab_size)
        own_ids_V, target_ids_W = (torch.from_numpy(table).to(device) for table in tables)
    rows = DraftRows(parts.rows, own_ids_V=own_ids_V)
    logits, native = TargetLogits(target, target_ids_W), own_ids_V is None
    passes = _runner(parts, rows, logits, native=native)
    return ModelDrafter(
        passes,
        layers[0].kv_group,
        spec.max_model_len,
        spec.max_step_tokens,
        has_windows=any(layer.spec.window is not None for layer in layers),
        vocab_size=model.vocab_size if own_ids_V is None and model.vocab_size < target else None,
        mask_token=_mask_token(spec.hf_config, options) if options.parallel_drafting else None,
    )


def _own_model(parts: WorkerParts) -> LanguageModel:
    (model,) = parts.models[parts.places[NAME]]
    return model


def _runner(
    parts: WorkerParts,
    rows: DraftRows,
    logits: TargetLogits,
    *,
    native: bool = True,
    is_speculator: bool = False,
) -> DraftModelRunner:
    ops, native = build_sampler_ops(parts.platform), native and "native" in parts.platform.kernels
    parts.runners.append(runner := DraftModelRunner(rows, logits, ops, native, is_speculator))
    return runner


def _mask_token(config: Mapping[str, Any], options: SpeculativeOptions) -> int:
    found = [config[key] for key in MASK_KEYS if isinstance(config.get(key), int)]
    if (
        not found
        or not 0 <= found[0] < config.get("vocab_size", 0)
        or options.use_heterogeneous_vocab
    ):
        raise ConfigError(
            f"speculative_config.parallel_drafting: config.json of {options.model} needs one of {', '.join(MASK_KEYS)}, a token"
            " of its vocabulary, and the vocabulary must be the model's; leave parallel_drafting out"
        )
    return int(found[0])


def _heads(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """Raises ConfigError: parallel drafting is requested, and the speculator has no mask."""
    speculator: Any = _own_model(parts)
    if options.parallel_drafting and speculator.mask is None:
        raise ConfigError(
            f"speculative_config.parallel_drafting: {options.model} has no mask_hidden; leave parallel_drafting out"
        )
    rows, target = DraftRows(parts.rows, shift=1), parts.models[0].vocab_size
    logits = TargetLogits(target, speculator.target_ids_V)
    passes = _runner(parts, rows, logits, is_speculator=True)
    last = int(resolved.hf_config["num_hidden_layers"]) + 1
    return EagleDrafter(
        passes,
        speculator.after or (last,),
        resolved.max_model_len,
        has_layers=bool(speculator.attention_layers()),
        most=speculator.most,
        mask=speculator.mask,
    )


BUILDERS: dict[str, Builder] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "custom_class": _custom,
    "draft_model": _draft_model,
    **dict.fromkeys(("eagle", "eagle3", "mtp", "medusa", "mlp_speculator"), _heads),
}
