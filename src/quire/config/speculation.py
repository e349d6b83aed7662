"""SpeculationConfig: which drafter proposes tokens, and how many.

Knows the keys of `speculative_config`. Does not know how drafts are made (`features/speculation`), nor the checkpoint of a
drafter (`models/draft_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.nearest_name import choose_from
from quire.config.number_types import in_words
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger

log = get_logger(__name__)

KEY = "speculative_config"
METHODS = (
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "custom_class",
)  # fmt: skip
REFUSED = ("dflash", "dspark", "extract_hidden_states")
WITHOUT_MODEL = ("ngram", "suffix")
SAME = {"ngram_gpu": "ngram", "peagle": "eagle3", "dflash2": "dflash"}
DETECTED = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))
"""Part of a draft model's name -> its method."""
MAX_DRAFT_TOKENS = 128
DEFAULT_LOOKUP = 5
RANGES: dict[str, tuple[float, float | None]] = {
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
    "max_model_len": (1, None),
    "draft_tensor_parallel_size": (1, None),
    "suffix_decoding_max_tree_depth": (1, None),
    "suffix_decoding_max_cached_requests": (0, None),
    "suffix_decoding_max_spec_factor": (0, MAX_DRAFT_TOKENS),
    "suffix_decoding_min_token_prob": (0, 1),
}
OLD_KEYS = {
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_model": "model",
}
ALWAYS_EXACT = (
    "a draft token is kept exactly if the request draws it, so there is no rule of acceptance"
)
NO_EFFECT = {
    "draft_sample_method": "drafters draw with the noise of the request",
    "rejection_sample_method": ALWAYS_EXACT,
    **dict.fromkeys(("acceptance_method", "posterior_threshold", "posterior_alpha"), ALWAYS_EXACT),
    "kv_cache_dtype": "a drafter's keys and values are stored as the model's",
    **dict.fromkeys(("attention_backend", "moe_backend"), "drafters have the model's backends"),
    "draft_load_config": "a drafter is loaded as the model",
    "code_revision": "no code of a checkpoint is run",
    **dict.fromkeys(
        (
            "enforce_eager", "disable_eagle_block_drop", "disable_padded_drafter_batch", "use_local_argmax_reduction",
            "index_share_for_mtp_iteration", "enable_adaptive_verification", "dspark_draft_topk", "disable_mqa_scorer",
            "disable_logprobs", "disable_log_stats", "token_tree", "speculative_token_tree",
        ),
        "Quire has no such choice",
    ),
}  # fmt: skip
"""Key -> why it is accepted without effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Speculative decoding."""

    speculative_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with method (ngram, suffix, draft_model, eagle, eagle3, mtp, medusa, mlp_speculator or custom_class; or
    several with commas between them), model, num_speculative_tokens (the most draft tokens of a request in a step), and
    further keys: docs/speculative-decoding.md."""


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `speculative_config`.

    `method`: one, or several with commas between them; "": the draft model's config.json names it.
    `num_speculative_tokens` 0: what the draft model's config.json says. `disable_by_batch_size` 0: at no size.
    `draft_tensor_parallel_size` 1: each rank has the whole drafter; None: ranks split it as the model.
    """

    method: str
    num_speculative_tokens: int = 0
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] = []
    disable_by_batch_size: int = 0
    parallel_drafting: bool = False
    use_heterogeneous_vocab: bool = False
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    adaptive: bool = True

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.method.split(","))

    @property
    def drafts_with_model(self) -> str | None:
        """The one of the methods that needs a checkpoint."""
        own = (*WITHOUT_MODEL, "custom_class")
        return next((method for method in self.methods if method not in own), None)

    @property
    def shares_texts(self) -> bool:
        """Whether a drafter may use the text of a request for others."""
        return not {"suffix", "custom_class"}.isdisjoint(self.methods)

    @property
    def lookup(self) -> tuple[int, int]:
        """The least and the most tokens that an n-gram compares."""
        found = self.prompt_lookup_min, self.prompt_lookup_max
        default = next((size for size in reversed(found) if size is not None), DEFAULT_LOOKUP)
        return tuple(default if size is None else size for size in found)  # type: ignore[return-value]

    def most_at(self, num_rows: int) -> int:
        """The limit of draft tokens of a request in a step in which `num_rows` requests draw."""
        if 0 < self.disable_by_batch_size <= num_rows:
            return 0
        most = self.num_speculative_tokens
        for first, _, count in self.num_speculative_tokens_per_batch_size:
            if first > num_rows:
                break
            most = min(count, self.num_speculative_tokens)
        return most


def speculative_options(config: Mapping[str, Any]) -> SpeculativeOptions | None:
    """Parse `speculative_config`; None: it is empty, so nothing is speculated.

    Raises:
        ConfigError: an unknown key, or an invalid value.
        Unsupported: a method that is not supported.
    """
    keys = {key.replace("-", "_"): value for key, value in config.items() if value is not None}
    if not keys:
        return None
    for old, key in OLD_KEYS.items():
        if old in keys:
            keys.setdefault(key, keys.pop(old))
    if keys.get("method") == "peagle":
        keys.setdefault("parallel_drafting", True)
    keys["method"] = ",".join(_methods(keys))
    _check_keys(keys)
    _drop_without_effect(keys)
    try:
        options = msgspec.convert(keys, SpeculativeOptions, strict=False)
    except msgspec.ValidationError as why:
        raise ConfigError(f"{KEY}: {in_words(why).replace('$.', '')}") from None
    if not options.num_speculative_tokens and options.methods == ("suffix",):
        options = msgspec.structs.replace(
            options,
            num_speculative_tokens=min(options.suffix_decoding_max_tree_depth, MAX_DRAFT_TOKENS),
        )
    _check(options, keys)
    return options


def check_count(options: SpeculativeOptions) -> None:
    """Raises ConfigError: nothing says how many draft tokens a request gets."""
    if not options.num_speculative_tokens:
        raise ConfigError(
            f"{KEY}: num_speculative_tokens is missing; set it to 1 to {MAX_DRAFT_TOKENS}"
        )


def _methods(keys: dict[str, Any]) -> list[str]:
    """`method`, from it or from the model's name; [""]: config.json of the model decides."""
    model = str(keys.get("model") or "")
    if (alone := model.strip("[]")) in ("ngram", "ngram_gpu", "suffix"):
        keys.setdefault("method", alone)
        del keys["model"]
    if "method" not in keys:
        if not model or "model" not in keys:
            return ["ngram"]
        named = (method for part, method in DETECTED if part in model.lower())
        return [checked_method(next(named, ""))]
    names = keys["method"]
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{KEY}.method={names!r}: choose from {', '.join(METHODS)}")
    methods = [checked_method(str(name).strip()) for name in names]
    if sum(method not in WITHOUT_MODEL for method in methods) > 1:
        raise ConfigError(
            f"{KEY}.method={keys['method']!r}: `model` belongs to one method; leave all but one of"
            f" {', '.join(method for method in methods if method not in WITHOUT_MODEL)} out"
        )
    return methods


def checked_method(name: str) -> str:
    """The method that a name means; "" stays.

    Raises:
        ConfigError: there is no such method.
        Unsupported: it is not supported.
    """
    method = SAME.get(name, name)
    if name.endswith("_mtp"):
        method = "mtp"
    if method != name:
        log.warning("%s.method=%s means %s here", KEY, name, method)
    if method in REFUSED:
        raise Unsupported(
            f"{KEY} with method {name!r}",
            f"use one of {', '.join(METHODS)}, or leave it out; the text is the same",
        )
    if method and method not in METHODS:
        raise ConfigError(f"{KEY}.method={name!r}: {choose_from(name, METHODS)}")
    return method


def _check_keys(keys: Mapping[str, Any]) -> None:
    if "tensor_parallel_size" in keys:
        raise ConfigError(f"{KEY} has no key tensor_parallel_size; use draft_tensor_parallel_size")
    if keys.get("rejection_sample_method") == "synthetic" or any(
        key.startswith("synthetic_") for key in keys
    ):
        raise Unsupported(
            f"{KEY} with synthetic acceptance",
            "it changes the text; measure with real drafts, and leave it out",
        )
    known = (*SpeculativeOptions.__struct_fields__, *NO_EFFECT)
    if unknown := [key for key in keys if key not in known]:
        raise ConfigError(f"{KEY}.{unknown[0]}: unknown key; choose from {', '.join(dict.fromkeys(known))}")  # fmt: skip


def _drop_without_effect(keys: dict[str, Any]) -> None:
    for key in [key for key in keys if key in NO_EFFECT]:
        log.info("%s.%s=%s has no effect: %s", KEY, key, keys[key], NO_EFFECT[key])
        if key not in SpeculativeOptions.__struct_fields__:
            del keys[key]


def _check(options: SpeculativeOptions, keys: Mapping[str, Any]) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(options, name)
        if name in keys and value is not None and not (low <= value <= (value if high is None else high)):  # fmt: skip
            span = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{KEY}.{name}={value}: must be {span}")
    low, high = options.lookup
    if not 1 <= low <= high:
        raise ConfigError(
            f"{KEY}: prompt_lookup_min={low} and prompt_lookup_max={high} must be at least 1, and min at most max"
        )
    if "custom_class" in options.methods and "." not in (options.model or "").replace(":", "."):
        raise ConfigError(f"{KEY}.model={options.model}: method custom_class needs the name of a class, package.module.Class")  # fmt: skip
    if options.drafts_with_model is None:
        check_count(options)
    _check_schedule(options.num_speculative_tokens_per_batch_size)


def _check_schedule(schedule: list[tuple[int, int, int]]) -> None:
    """Raises ConfigError: the ranges of num_speculative_tokens_per_batch_size are not in order."""
    before = 0
    for number, (first, last, count) in enumerate(schedule):
        if first <= before or last < first or count < 0 or (number == 0 and first != 1):
            raise ConfigError(
                f"{KEY}.num_speculative_tokens_per_batch_size: [{first}, {last}, {count}] must be [from, to, tokens]; the"
                " first range starts at 1, and each starts after the end of the one before"
            )
        before = last


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint of a drafter, with every "auto" resolved. Of `mtp` without a `model` it is the main model's checkpoint."""

    path: str
    hf_config: dict[str, Any]
    """config.json, as the main model has one."""
    architecture: str
    dtype: str
    max_model_len: int
    """A longer request gets no draft tokens of it."""
    quantization: str | None
    stored: CheckpointQuantization | None = None
    """How the checkpoint's weights are quantized; None: they are not."""
