"""Finds the checkpoint of a drafter, and checks it against the main model before anything is loaded.

Knows config.json and tokenizer.json. Does not know how a drafter computes (`features/speculation`), nor the sizes of heads,
which `models/speculators` checks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.config.context_length import model_length
from quire.config.engine import EngineConfig, ModelSpec, Resolved
from quire.config.model_sizes import model_size
from quire.config.quantization import fitting
from quire.config.quantization_config import stored_quantization
from quire.config.resolve import DTYPES
from quire.config.speculation import (
    KEY,
    DraftModel,
    SpeculativeOptions,
    check_count,
    checked_method,
)
from quire.errors import ConfigError, ModelNotFound, Unsupported
from quire.models.checkpoint_files import stored_tensors
from quire.models.checkpoint_locator import EMBEDDED, Fetch, find
from quire.models.hf_config import read_config
from quire.models.json_files import token_ids
from quire.models.registry import choose_impl
from quire.models.transformers.modes import PER_REQUEST, choose_mode

BY_MODEL_TYPE = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle"}
"""model_type of a drafter's config.json -> its method; `mtp` in a model_type or an architecture: mtp."""
OF_EAGLE3 = ("draft_vocab_size", "eagle_config")
"""Keys of config.json that only EAGLE-3 has."""
COUNTS = {
    "mlp_speculator": ("n_predict",),
    "medusa": ("n_predict", "medusa_num_heads", "num_heads"),
    "mtp": ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
}
"""Method -> the keys of config.json that say how many tokens its heads predict."""
EMBEDDED_COUNT = 3
"""num_speculative_tokens of the embedded drafters."""
OF_ONE_STEP = ("medusa", "mlp_speculator")
"""Methods with a head for each token, and without attention."""


def with_verifier(config: EngineConfig, hf_config: Mapping[str, Any]) -> EngineConfig | None:
    """If the main model is a checkpoint of the speculators format: serve the model that it names, with it as drafter.

    Raises:
        ConfigError: it names no model, or one of that format again.
    """
    says = hf_config.get("speculators_config")
    if not isinstance(says, Mapping):
        return None
    chosen = {key.replace("-", "_"): value for key, value in config.speculation.speculative_config.items()}  # fmt: skip
    verifier = says.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or not name or "model" in chosen:
        raise ConfigError(
            f"{config.model.model} is a drafter, and its speculators_config names no model to serve; pass the model with"
            f" --model, and the drafter with --spec-model"
        )
    drafter = {
        "model": config.model.model,
        "revision": config.model.revision,
        "method": says.get("algorithm") or hf_config.get("speculators_model_type"),
        "num_speculative_tokens": _proposed_tokens(hf_config),
    }
    model = replace(
        config.model,
        model=name,
        revision=None,
        served_model_name=config.model.served_model_name or [config.model.model],
    )
    speculation = replace(config.speculation, speculative_config=drafter | chosen)
    return replace(config, model=model, speculation=speculation)


def _proposed_tokens(hf_config: Mapping[str, Any]) -> int | None:
    says = hf_config.get("speculators_config")
    methods = says.get("proposal_methods") if isinstance(says, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if isinstance(count, int) else None


def with_drafter(resolved: Resolved, options: SpeculativeOptions | None) -> tuple[Resolved, Fetch]:
    """`resolved` with its drafter; the second value fetches the drafter's weights.

    Raises:
        ConfigError: the drafter does not fit the main model. ModelNotFound: it was not found.
        Unsupported: its method is not supported.
    """
    if options is None:
        if (mode := resolved.config.observe.per_request_spec_decode_metrics) != "none":
            raise ConfigError(f"per_request_spec_decode_metrics={mode}: nothing is speculated; set speculative_config, or leave it out")  # fmt: skip
        return resolved, _nothing
    if resolved.pooling is not None:
        raise ConfigError(f"{KEY}: {resolved.architecture} pools, and generates no tokens; leave it out")  # fmt: skip
    _check_cache(resolved.spec, f"{KEY}: {resolved.architecture}")
    ranks = resolved.config.parallel.tensor_parallel_size
    if (own_ranks := options.draft_tensor_parallel_size) not in (None, 1, ranks):
        fits = "1" if ranks == 1 else f"1 or {ranks}, which the model has"
        raise ConfigError(f"{KEY}.draft_tensor_parallel_size={own_ranks}: must be {fits}")
    if options.drafts_with_model is None:
        return replace(resolved, speculation=options), _nothing
    target = resolved.config.model
    name = options.model or _embedded(target.model, options)
    fetch: Fetch = _nothing
    if name is None and options.drafts_with_model != "mtp":
        raise ConfigError(f"{KEY}.model is missing: method {options.method} needs a checkpoint")
    path, hf_config = resolved.path, resolved.hf_config
    if name is not None:
        own = replace(target, model=name, revision=options.revision, hf_overrides={})
        path, fetch = find(own, replace(resolved.config.load, mmproj=None))
        hf_config = read_config(path)
    if options.parallel_drafting:
        hf_config = {**hf_config, "parallel_drafting": True}
    method = options.method or checked_method(
        _detected(hf_config, path, resolved.config.load.load_format)
    )
    options = msgspec.structs.replace(options, method=method)
    options = _with_count(options, hf_config, is_embedded=Path(path).parent == EMBEDDED)
    names = hf_config.get("architectures") or [""]
    stored = stored_quantization(hf_config)
    draft = DraftModel(
        path=path,
        hf_config=hf_config,
        architecture=str(names[0]),
        dtype=_dtype(resolved, options),
        max_model_len=_length(resolved, options, hf_config),
        quantization=fitting(options.quantization, stored),
        stored=stored,
    )
    stages = resolved.config.parallel.pipeline_parallel_size
    if (heads := options.drafts_with_model) != "draft_model" and stages > 1:
        raise Unsupported(f"{KEY}.method={heads} with pipeline_parallel_size={stages}", "use 1, or another method")  # fmt: skip
    if options.drafts_with_model == "draft_model":
        _check_cache(replace(resolved, draft=draft).draft_spec, f"{KEY}.model={name}")
    if options.drafts_with_model == "draft_model" and not options.use_heterogeneous_vocab:
        _check_vocabulary(resolved, options, draft)
    return replace(resolved, speculation=options, draft=draft), fetch


def _nothing() -> None:
    """No drafter with a checkpoint."""


def _check_cache(spec: ModelSpec | None, names: str) -> None:
    """Raises ConfigError: the model cannot take tokens back, as far as its config shows."""
    if spec is None or choose_impl(spec.architecture, spec.hf_config, spec.options.model_impl)[0] == "native":  # fmt: skip
        return
    mode, why = choose_mode(spec.hf_config, spec.max_model_len, spec.max_step_tokens)
    if mode == PER_REQUEST:
        raise ConfigError(
            f"{names} runs on Transformers with a cache of its own ({why}), which cannot take tokens back; leave the option"
            " out, the text is the same"
        )


def _embedded(target: str, options: SpeculativeOptions) -> str | None:
    """The drafter that is shipped beside an embedded model."""
    method = options.drafts_with_model
    name = f"{target}-{'draft' if method == 'draft_model' else method}"
    embedded = "/" not in target and (EMBEDDED / target).is_dir()
    return name if embedded and (EMBEDDED / name / "config.json").is_file() else None


def _detected(hf_config: Mapping[str, Any], path: str, load_format: str) -> str:
    """The method of a checkpoint, by its config.json, and the names of its tensors if they are there."""
    kind = str(hf_config.get("speculators_model_type") or hf_config.get("model_type"))
    names = " ".join(map(str, hf_config.get("architectures") or ()))
    if kind in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind]
    if "speculators_model_type" in hf_config:
        return kind
    if "mtp" in kind or "MTP" in names:
        return "mtp"
    if "Eagle3" in names or any(key in hf_config for key in OF_EAGLE3):
        return "eagle3"
    return "eagle" if "Eagle" in names else _detected_by_tensors(path, load_format)


def _detected_by_tensors(path: str, load_format: str) -> str:
    """SafeAILab's heads have the config.json of a Llama with one layer; what shows is that `fc` joins embeddings and states."""
    try:
        stored = stored_tensors(path, None, load_format)
    except ModelNotFound:  # not fetched yet
        return "draft_model"
    names = set() if isinstance(stored, int) else {name.removeprefix("model.") for name, *_ in stored}  # fmt: skip
    if "fc.weight" not in names:
        return "draft_model"
    norm = ("hidden_norm.weight", "d2t")
    return "eagle3" if any(name.endswith(norm) for name in names) else "eagle"


def _with_count(
    options: SpeculativeOptions, hf_config: Mapping[str, Any], is_embedded: bool
) -> SpeculativeOptions:
    """Raises ConfigError: num_speculative_tokens is missing, or does not fit the number of heads."""
    method = options.drafts_with_model or ""
    sizes = (model_size(hf_config, key) for key in COUNTS.get(method, ()))
    heads = next(filter(None, sizes), 0)
    count = options.num_speculative_tokens or _proposed_tokens(hf_config) or heads
    count = count or (EMBEDDED_COUNT if is_embedded else 0)
    if heads and count > heads and (method in OF_ONE_STEP or count % heads):
        fits = (
            f"at most {heads}" if method in OF_ONE_STEP else f"at most {heads}, or a multiple of it"
        )
        raise ConfigError(
            f"{KEY}.num_speculative_tokens={count}: the checkpoint predicts {heads} tokens; use {fits}"
        )
    options = msgspec.structs.replace(options, num_speculative_tokens=count)
    check_count(options)
    return options


def _dtype(resolved: Resolved, options: SpeculativeOptions) -> str:
    requested = options.dtype or "auto"
    dtype = resolved.dtype if requested == "auto" else DTYPES.get(requested, requested)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"{KEY}.dtype={requested}: choose from auto, float32, bfloat16, float16")
    return dtype


def _length(resolved: Resolved, options: SpeculativeOptions, hf_config: Mapping[str, Any]) -> int:
    """Raises ConfigError: the drafter's context is too short."""
    own, where = model_length(hf_config)
    length = options.max_model_len
    if not where or options.drafts_with_model != "draft_model":
        return min(length or resolved.max_model_len, resolved.max_model_len)
    if length is not None and length > own:
        raise ConfigError(
            f"{KEY}.max_model_len={length} is more than the {own} tokens that the drafter's config.json allows ({where})"
        )
    if length is None and own < resolved.max_model_len:
        raise ConfigError(
            f"{KEY}: the drafter's context is {own} tokens ({where}), and max_model_len is {resolved.max_model_len}; use"
            f" --max-model-len {own}, or accept that longer requests get no draft tokens with {KEY}.max_model_len={own}"
        )
    return min(length or own, resolved.max_model_len)


def _check_vocabulary(resolved: Resolved, options: SpeculativeOptions, draft: DraftModel) -> None:
    """Raises ConfigError: the draft model has another vocabulary."""
    if _same_vocabulary(resolved, draft):
        return
    own, target = (model_size(each.hf_config, "vocab_size") for each in (draft, resolved))
    raise ConfigError(
        f"{KEY}.model={options.model or draft.path}: its vocabulary ({own} tokens) differs from the model's ({target}"
        " tokens); use a draft model with the same tokenizer, or join them by their texts with use_heterogeneous_vocab"
    )


def _same_vocabulary(resolved: Resolved, draft: DraftModel) -> bool:
    """By tokenizer.json where both have one: the sizes of padded tables may differ."""
    own, other = (Path(folder) / "tokenizer.json" for folder in (draft.path, resolved.tokenizer_folder))  # fmt: skip
    sizes = (model_size(each, "vocab_size") for each in (draft.hf_config, resolved.hf_config))
    if not (own.is_file() and other.is_file()):
        return len(set(sizes)) == 1
    return own.read_bytes() == other.read_bytes() or token_ids(own) == token_ids(other)
