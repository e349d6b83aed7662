"""StructuredConfig: the grammar backend, and defaults for every constrained request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.errors import ConfigError

BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
"""vLLM's names, with its other one for guidance. All mean llguidance, the one grammar library."""
OTHER_LIBRARIES = ("xgrammar", "outlines", "lm-format-enforcer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredConfig:
    """Structured output."""

    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with any of backend (auto, guidance, xgrammar, outlines or lm-format-enforcer, which all mean llguidance), disable_any_whitespace,
    disable_additional_properties, enable_in_reasoning, jumps (append forced tokens without sampling them; default true)."""


class StructuredOutputsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `structured_outputs_config`."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    jumps: bool = True


def structured_options(json_object: Mapping[str, Any]) -> StructuredOutputsOptions:
    """Parse `structured_outputs_config`.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    own = dict(json_object)
    keys = StructuredOutputsOptions.__struct_fields__
    for key, value in own.items():
        if key not in keys:
            raise ConfigError(
                f"structured_outputs_config.{key}: unknown key; choose from {', '.join(keys)}"
            )
        if key != "backend" and not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config.{key}={value!r}: must be true or false")
    if "backend" in own:
        own["backend"] = backend(own["backend"])
    return StructuredOutputsOptions(**own)


def backend(value: Any) -> str:
    """The name of a backend; in old forms such as `xgrammar:no-fallback`, options follow a colon."""
    name = str(value).partition(":")[0]
    if name not in BACKENDS:
        raise ConfigError(
            f"structured_outputs_config.backend={value!r}: choose from {', '.join(BACKENDS)}"
        )
    return name
