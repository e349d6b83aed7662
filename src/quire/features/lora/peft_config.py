"""adapter_config.json of PEFT: ranks and scales by module, or why an adapter cannot be served.

Knows every field of PEFT's LoraConfig. Does not know tensors. Source: huggingface/peft, tuners/lora/config.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.name_patterns import NamePatterns
from quire.errors import ConfigError, ValidationError

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MATCH_SECONDS = 5.0
"""Processor time for all patterns of an adapter and all modules."""
PATTERN_FORM = r"(?:.*\.)?(?:{})$"
"""As PEFT: a key must match the whole path of a module, or its end after a dot."""

MERGE = "merge the adapter into its base model (PEFT: merge_and_unload) and serve the result"
REFUSED = {
    "layer_replication": f"it repeats layers of the base model; {MERGE}",
    "alora_invocation_tokens": "activated LoRA applies only after certain tokens; train with alora_invocation_tokens=null",
    "use_qalora": "QALoRA pools the inputs; train with use_qalora=false",
    "use_bdlora": "block-diagonal factors are not supported; train with use_bdlora=null",
    "target_parameters": "adapters of parameters without a module (experts in 3 dimensions) are not supported;"
    f" use target_modules, or {MERGE}",
    "trainable_token_indices": f"new embeddings of single tokens are not supported; {MERGE}",
    "arrow_config": "a router between adapters is not supported; serve each adapter under its own name",
    "monteclora_config": f"its samples are not supported; {MERGE}",
    "kasa_config": f"KaSA changes the weights of the base model; {MERGE}",
}
"""Field -> remedy, for fields that must be empty."""

CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
BIASES = ("none", "all", "lora_only")
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "velora_config",
}  # fmt: skip
"""They matter for training, or the tensors in the file show what they say."""

READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias",
    "init_lora_weights",
}  # fmt: skip


@dataclass(frozen=True)
class PeftConfig:
    """What the configuration says about the computation.

    Raises ConfigError: a pattern is refused when it is read, or takes too long (`config/name_patterns.py`).
    """

    rank: int
    alpha: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    bias: str = "none"
    unknown: tuple[str, ...] = ()
    """Fields that PEFT's LoraConfig does not have."""
    _patterns: NamePatterns = field(
        default_factory=lambda: NamePatterns("rank_pattern, alpha_pattern", MATCH_SECONDS, PATTERN_FORM),
        init=False, repr=False, compare=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._patterns.add((*self.rank_pattern, *self.alpha_pattern))

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its path in the model."""
        return int(self._first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of both factors is multiplied by."""
        rank = self.rank_of(module)
        alpha = self._first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _first_match(self, values: dict[str, Any], module: str, default: float) -> float:
        return next((values[key] for key in values if self._patterns.match(key, module)), default)


def read_config(text: bytes, file: Path) -> PeftConfig:
    """The configuration in the bytes of `file`.

    Raises:
        ValidationError: a field that cannot be served, with its value and the remedy; or the file is damaged.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{file} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise ValidationError(f"{file} must contain a JSON object")
    try:
        return _checked(values)
    except (ConfigError, ValidationError) as error:
        raise ValidationError(f"{file}: {error}") from None


def _checked(values: dict[str, Any]) -> PeftConfig:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _refusal("peft_type", kind, "only adapters of type LORA can be served")
    for name, remedy in REFUSED.items():
        if values.get(name) not in (None, False, [], {}):
            raise _refusal(name, values[name], remedy)
    _check_init(values.get("init_lora_weights"))
    bias = values.get("bias", "none")
    if bias not in BIASES:
        raise _refusal("bias", bias, f"use one of {', '.join(BIASES)}")
    if missing := [name for name in ("r", "lora_alpha") if values.get(name) is None]:
        raise ValidationError(
            f"{' and '.join(missing)} missing: the scale of the adapter is unknown; add what it was trained with"
        )
    ranks = _pattern(values, "rank_pattern")
    return PeftConfig(
        rank=_rank("r", values["r"]),
        alpha=_number("lora_alpha", values["lora_alpha"]),
        rank_pattern={key: _rank(f"rank_pattern[{key!r:.80}]", each) for key, each in ranks.items()},
        alpha_pattern={
            key: _number(f"alpha_pattern[{key!r:.80}]", each)
            for key, each in _pattern(values, "alpha_pattern").items()
        },
        rslora=_switch(values, "use_rslora"),
        dora=_switch(values, "use_dora"),
        bias=bias,
        unknown=tuple(name for name in values if name not in IGNORED | READ | REFUSED.keys()),
    )  # fmt: skip


def _check_init(value: Any) -> None:
    name = value.lower() if isinstance(value, str) else value
    if isinstance(name, str) and name.startswith(CHANGE_BASE):
        raise _refusal(
            "init_lora_weights",
            value,
            "this start changes the weights of the base model; convert the adapter while saving it"
            " (PEFT: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    if not (isinstance(name, bool | str | None) and name in KEEP_BASE):
        raise _refusal("init_lora_weights", value, "it is unknown whether it changes the base")


def _pattern(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise _refusal(name, found, "it must be an object of patterns")
    return found


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _refusal(name, value, "a rank is a whole number of at least 1")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not -1e30 <= value <= 1e30:
        raise _refusal(name, value, "it must be a finite number")
    return float(value)


def _switch(values: dict[str, Any], name: str) -> bool:
    value = values.get(name) or False
    if not isinstance(value, bool):
        raise _refusal(name, value, "it must be true or false")
    return value


def _refusal(name: str, value: Any, remedy: str) -> ValidationError:
    return ValidationError(f"{name}={value!r:.200} cannot be served: {remedy}")
