"""vLLM's flags that are no field of Quire: one row each, with how Quire handles it.

    A  accepted: `to` gives its meaning in Quire, or Quire always behaves that way
    W  accepted with a warning that says why it has no effect, or what replaces it
    E  refused, with the missing feature's name; its default value is accepted

The rows without a meaning here are in `flag_names.toml`. Read by `from_keywords.py`. A flag is in a dataclass or in
this table, never in both, never in neither.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.structured import BACKENDS

Treatment = Literal["A", "W", "E"]
Kind = Literal["flag", "value", "list", "maybe"]


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag."""

    name: str
    kind: Kind
    """Its form on a command line: --x, --x VALUE, --x A B, or --x as well as --x VALUE."""
    treatment: Treatment
    say: str
    """W: why it has no effect, or what replaces it. E: "feature: remedy"."""
    quiet: tuple[Any, ...] = ()
    """Values that are accepted without a warning, besides None and (for a flag) False."""
    to: Callable[[Any], dict[str, Any]] | None = None
    """Returns the fields that it sets."""

    @property
    def default(self) -> Any:
        """A value that requests nothing."""
        if self.to is not None:
            return None
        return False if self.kind == "flag" else next(iter(self.quiet), None)


TABLE = tomllib.loads(Path(__file__).with_name("flag_names.toml").read_text(encoding="utf-8"))
SHORT: dict[str, str] = TABLE["short"]
_KINDS: dict[str, Kind] = {"=": "value", "*": "list", "?": "maybe", "": "flag"}
_NAME = re.compile(r"(\w+)([=*?]?)(\S*)")


def _rows() -> Iterator[VllmFlag]:
    """The rows of the table."""
    treatments: dict[str, Treatment] = {"refused": "E", "warned": "W", "accepted": "A"}
    for section, treatment in treatments.items():
        for say, names in TABLE[section].items():
            for name, mark, defaults in _NAME.findall(names):
                quiet = tuple(_literal(text) for text in defaults.split(",")) if defaults else ()
                yield VllmFlag(name, _KINDS[mark], treatment, say, quiet)


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return "" if text == "''" else text


# Accepted under another name


def _key_of(field: str, key: str) -> Callable[[Any], dict[str, Any]]:
    """The value of an old name becomes the value of a key of a field's object."""
    return lambda value: {field: {key: value}}


def _guided_backend(value: Any) -> dict[str, Any]:
    name = str(value).partition(":")[0]
    name = name if name in BACKENDS else "auto"  # vLLM has had others
    return {"structured_outputs_config": {"backend": name}}


def _backend(value: Any) -> dict[str, Any]:
    backend = value.get("backend") if isinstance(value, dict) else getattr(value, "backend", None)
    return {"attention_backend": str(getattr(backend, "name", backend))} if backend else {}


def _ray(value: Any) -> dict[str, Any]:
    return {"distributed_executor_backend": "ray"} if value else {}


_WHITESPACE, _PROPERTIES = "disable_any_whitespace", "disable_additional_properties"
_SPECULATIVE = {"method": "method", "model": "model", "tokens": "num_speculative_tokens"}
_OLD_SPECULATIVE = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
}
_EPLB: dict[str, tuple[Kind, str]] = {
    "eplb_window_size": ("value", "window_size"),
    "eplb_step_interval": ("value", "step_interval"),
    "eplb_log_balancedness": ("flag", "log_balancedness"),
    "num_redundant_experts": ("value", "num_redundant_experts"),
}
TASKS: dict[str, dict[str, Any]] = {
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling", "convert": "classify"},
    **{name: {"runner": name} for name in ("generate", "auto")},
}
"""vLLM's old names of tasks -> the fields that mean the same."""
_MAPPED = (
    VllmFlag("disable_log_requests", "flag", "W", "use enable_log_requests (off by default)", (), lambda v: {"enable_log_requests": not v}),
    VllmFlag("task", "value", "W", "use runner and convert", ("generate", "auto"), lambda v: TASKS.get(v, {"runner": "pooling"})),
    VllmFlag("max_num_scheduled_tokens", "value", "W", "use max_num_batched_tokens", (), lambda v: {"max_num_batched_tokens": v}),
    VllmFlag("rope_scaling", "value", "W", "use hf_overrides={'rope_scaling': ...}", (), _key_of("hf_overrides", "rope_scaling")),
    VllmFlag("rope_theta", "value", "W", "use hf_overrides={'rope_theta': ...}", (), _key_of("hf_overrides", "rope_theta")),
    VllmFlag("attention_config", "value", "W", "use attention_backend; its other keys do nothing here", (), _backend),
    VllmFlag("guided_decoding_backend", "value", "W", "use structured_outputs_config={'backend': ...}", ("auto",), _guided_backend),
    VllmFlag("guided_decoding_disable_any_whitespace", "flag", "W", f"use structured_outputs_config={{'{_WHITESPACE}': true}}", (), _key_of("structured_outputs_config", _WHITESPACE)),
    VllmFlag("guided_decoding_disable_additional_properties", "flag", "W", f"use structured_outputs_config={{'{_PROPERTIES}': true}}", (), _key_of("structured_outputs_config", _PROPERTIES)),
    *(VllmFlag(f"spec_{key}", "value", "A", "", (), _key_of("speculative_config", name)) for key, name in _SPECULATIVE.items()),
    *(VllmFlag(name, "value", "W", f"use speculative_config={{'{key}': ...}}", (), _key_of("speculative_config", key)) for name, key in _OLD_SPECULATIVE.items()),
    *(VllmFlag(name, kind, "W", f"use eplb_config={{'{key}': ...}}", (), _key_of("eplb_config", key)) for name, (kind, key) in _EPLB.items()),
    VllmFlag("distributed_timeout_seconds", "value", "W", "use cpu_distributed_timeout_seconds", (), lambda v: {"cpu_distributed_timeout_seconds": v}),
    *(VllmFlag(name, "flag", "W", "use distributed_executor_backend=ray", (), _ray) for name in ("worker_use_ray", "engine_use_ray")),
    VllmFlag("model_tag", "value", "A", "", (), lambda v: {"model": v}),
)  # fmt: skip

OLD: dict[str, VllmFlag] = {row.name: row for row in (*_rows(), *_MAPPED)}
