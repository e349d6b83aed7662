"""Short names of models (`qwen3:0.6b`): the hub id, and how the weights are quantized while loading. Knows names only."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.nearest_name import nearest
from quire.errors import ConfigError


class ShortName(NamedTuple):
    model: str
    """Hub id."""
    quantization: str


@cache
def short_names() -> dict[str, ShortName]:
    """Name -> model; a family alone is its first size."""
    text = Path(__file__).with_name("short_names.toml").read_text(encoding="utf-8")
    names: dict[str, ShortName] = {}
    for family, sizes in tomllib.loads(text).items():
        names[family] = ShortName(*next(iter(sizes.values())))
        names |= {f"{family}:{size}": ShortName(*model) for size, model in sizes.items()}
    return names


def expanded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with a short name replaced by its model; requests may use both names. A directory of that name wins, and a
    given `quantization`.

    Raises:
        ConfigError: the family is known, and has no such size.
    """
    name = fields.get("model")
    if not isinstance(name, str) or "/" in name or len(name) > 100 or os.path.exists(name):
        return dict(fields)
    known = short_names()
    found = known.get(name.lower().removesuffix(":latest"))
    if found is not None:
        more: dict[str, Any] = {"model": found.model}
        if fields.get("quantization") is None:
            more["quantization"] = found.quantization
        if fields.get("served_model_name") is None:
            more["served_model_name"] = [name, found.model]
        return dict(fields) | more
    family, colon, _ = name.lower().partition(":")
    if colon and family in known:
        sizes = [short for short in known if short.startswith(f"{family}:")]
        near = nearest(name, sizes)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"model={name!r}: {hint}{family} has {', '.join(sizes)}; or pass a name of the hub, such as {known[family].model}")  # fmt: skip
    return dict(fields)
