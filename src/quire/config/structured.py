"""StructuredConfig: the grammar backend, and defaults for every constrained request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.errors import ConfigError, Unsupported

BACKENDS = ("auto", "guidance", "xgrammar")
ELSEWHERE = {
    "outlines": "it takes seconds to compile a schema and supports few keywords",
    "lm-format-enforcer": "it checks the whole vocabulary in Python for each token",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredConfig:
    """Constrained output."""

    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with any of backend (auto, guidance or xgrammar), disable_any_whitespace,
    disable_additional_properties, enable_in_reasoning, jumps (append forced tokens without sampling them; default true)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsOptions:
    """The keys of `structured_outputs_config`."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    jumps: bool = True


def structured_options(given: Mapping[str, Any]) -> StructuredOutputsOptions:
    """Parse `structured_outputs_config`.

    Raises:
        ConfigError: an unknown key, or an invalid value.
        Unsupported: a known backend that Quire does not have.
    """
    known = {one.name: one.type for one in fields(StructuredOutputsOptions)}
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("reasoning_parser", "reasoning_parser_plugin"):
            if value:
                raise ConfigError(
                    f"structured_outputs_config.{name}: use the flag --{name.replace('_', '-')} instead"
                )
        elif name not in known:
            raise ConfigError(
                f"structured_outputs_config: unknown key {name!r}; the keys are {', '.join(known)}"
            )
        elif name == "backend":
            made[name] = backend(value)
        elif not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config.{name}={value!r}: must be true or false")
        else:
            made[name] = value
    return StructuredOutputsOptions(**made)


def backend(value: Any) -> str:
    """The name of a backend; in old forms such as `xgrammar:no-fallback`, options follow a colon."""
    name = str(value).partition(":")[0]
    name = {"llguidance": "guidance"}.get(name, name)
    if name in ELSEWHERE:
        raise Unsupported(
            f"structured_outputs_config.backend={name}", f"use auto: {ELSEWHERE[name]}"
        )
    if name not in BACKENDS:
        raise ConfigError(
            f"structured_outputs_config.backend={value!r}: choose from {', '.join(BACKENDS)}"
        )
    return name
