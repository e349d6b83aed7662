"""The load format of a running worker: what vLLM's `update_config` changes.

Knows the fields of the configuration. Does not load anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config.engine import ModelSpec, Resolved
from quire.config.load import LOAD_FORMATS
from quire.errors import ValidationError

SECTION, FIELD = "load_config", "load_format"


def with_load_format(
    overrides: Mapping[str, Any], resolved: Resolved, others: Sequence[ModelSpec]
) -> tuple[Resolved, list[ModelSpec]]:
    """The same configuration and further models, with the load format of `overrides`.

    Raises:
        ValidationError: another field, or an unknown format.
    """
    load = replace(resolved.config.load, load_format=_load_format(overrides))
    config = replace(resolved.config, load=load)
    return replace(resolved, config=config), [replace(spec, load=load) for spec in others]


def _load_format(overrides: Any) -> str:
    section = overrides.get(SECTION) if isinstance(overrides, Mapping) else None
    fields = section if isinstance(section, Mapping) else {}
    others = [str(name) for name in (overrides if section is not None else ()) if name != SECTION]
    others += [f"{SECTION}.{name}" for name in fields if name != FIELD]
    if others or FIELD not in fields:
        what = f"cannot change {', '.join(others)}" if others else f"got {overrides!r:.200}"
        raise ValidationError(
            f'update_config {what} in a running engine: pass {{"{SECTION}": {{"{FIELD}": "auto"}}}},'
            " or start another engine",
            parameter="args",
        )
    if fields[FIELD] not in LOAD_FORMATS:
        raise ValidationError(
            f"update_config: {SECTION}.{FIELD}={fields[FIELD]!r:.200}: choose from {', '.join(LOAD_FORMATS)}",
            parameter="args",
        )
    return str(fields[FIELD])
