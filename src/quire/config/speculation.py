"""SpeculationConfig: which drafter proposes tokens, and how many.

Knows the keys of `speculative_config`. Does not know how drafts are made (`features/speculation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config.ranges import in_words
from quire.errors import ConfigError, Unsupported

METHODS = ("ngram",)
LATER = (
    "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "custom_class", "ngram_gpu",
    "dflash", "dspark", "extract_hidden_states",
)  # fmt: skip
NO_EFFECT = ("draft_sample_method", "disable_padded_drafter_batch", "enforce_eager")
MOST = 128
KEY = "speculative_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Speculative decoding."""

    speculative_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with method (ngram), num_speculative_tokens (the most draft tokens of a request in a step),
    prompt_lookup_max, prompt_lookup_min, and adaptive (false: always propose as many as possible)."""


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `speculative_config`."""

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_min: int
    prompt_lookup_max: int
    adaptive: bool = True


def speculative_options(config: Mapping[str, Any]) -> SpeculativeOptions | None:
    """Parse `speculative_config`; None: it is empty, so nothing is speculated.

    Raises:
        ConfigError: an unknown key, or an invalid value.
        Unsupported: a method that is not supported yet.
    """
    given = {key.replace("-", "_"): value for key, value in config.items() if value is not None}
    if not given:
        return None
    _settle_method(given)
    for name in NO_EFFECT:
        given.pop(name, None)
    lookup = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    default = next((size for size in reversed(lookup) if size is not None), 5)
    given |= {
        "prompt_lookup_min": default if lookup[0] is None else lookup[0],
        "prompt_lookup_max": default if lookup[1] is None else lookup[1],
    }
    keys = SpeculativeOptions.__struct_fields__
    if unknown := [key for key in given if key not in keys]:
        raise ConfigError(f"{KEY}.{unknown[0]}: unknown key; choose from {', '.join(keys)}")
    if "num_speculative_tokens" not in given:
        raise ConfigError(f"{KEY}: num_speculative_tokens is missing; set it to 1 to {MOST}")
    try:
        options = msgspec.convert(given, SpeculativeOptions, strict=False)
    except msgspec.ValidationError as why:
        raise ConfigError(f"{KEY}: {in_words(why)}") from None
    if not 1 <= options.num_speculative_tokens <= MOST:
        raise ConfigError(
            f"{KEY}.num_speculative_tokens={options.num_speculative_tokens}: must be 1 to {MOST}"
        )
    if not 1 <= options.prompt_lookup_min <= options.prompt_lookup_max:
        raise ConfigError(
            f"{KEY}: prompt_lookup_min={options.prompt_lookup_min} and prompt_lookup_max="
            f"{options.prompt_lookup_max} must be at least 1, and min at most max"
        )
    return options


def _settle_method(options: dict[str, Any]) -> None:
    """`method`, from it or from the model's name "ngram" or "[ngram]"."""
    model = str(options.get("model") or "")
    if model.strip("[]") == "ngram":
        options.setdefault("method", "ngram")
        del options["model"]
    method = options.setdefault("method", "draft_model" if model else "ngram")
    if method in LATER:
        raise Unsupported(
            f"{KEY} with method {method!r}", f"use one of {', '.join(METHODS)}, or leave it out; the text is the same"
        )  # fmt: skip
    if method not in METHODS:
        raise ConfigError(f"{KEY}.method={method!r}: choose from {', '.join(METHODS)}")
