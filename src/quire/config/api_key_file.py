"""API keys: from --api-key, and from the key file, which gives each key a name, a weight and limits.

    - name: team-a
      key: sk-...
      weight: 2                    # twice the share of a key of weight 1 (the default)
      requests_per_minute: 60      # a request counts its prompts times n. Default of all three limits: no limit
      tokens_per_minute: 100000
      max_concurrency: 8
      may_load_adapters: true      # load and unload LoRA adapters, which all keys share (default: false)

The file is JSON or YAML. This module reads and checks keys. Does not know requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.config.number_types import AtLeast1, in_words
from quire.errors import ConfigError

KEY_FLAG = "--api-key"
"""Tenant names of --api-key keys begin with this text; names in a key file must not."""


class TenantKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    name: Annotated[str, Meta(min_length=1)]
    key: str
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    requests_per_minute: AtLeast1 | None = None
    """Completions a minute: a request counts its prompts times n, and one that only tokenizes counts 1."""
    tokens_per_minute: AtLeast1 | None = None
    """Tokens of prompts and outputs together."""
    max_concurrency: AtLeast1 | None = None
    """Completions at once, counted in the same way."""
    may_load_adapters: bool = False
    """Load and unload LoRA adapters by /v1/load_lora_adapter, if the server allows that at all."""

    def __repr__(self) -> str:
        return f"TenantKey(name={self.name!r})"


def plain_keys(value: Sequence[str] | str | None, source: str = KEY_FLAG) -> list[str]:
    """The keys of --api-key, or of the environment variable that replaces it.

    Raises:
        ConfigError: a key is empty, or an HTTP header cannot contain it; the message never contains the key.
    """
    if value is None:
        return []
    keys = [value] if isinstance(value, str) else [str(key) for key in value]  # YAML has numbers
    if not keys:
        raise ConfigError(f"{source}: the key is missing; give one, or leave {source} out")
    for key in keys:
        check_key(source, key)
    return keys


def check_key(source: str, key: str) -> None:
    """Refuse a key that cannot protect a server.

    A request without a key has an empty key, so an empty key would let every request in.

    Raises:
        ConfigError: the key is empty, has surrounding white space, or contains control characters.
    """
    if not key.strip():
        raise ConfigError(
            f"{source}: the key is empty, which would let every request in; give a key, or leave {source} out"
        )
    if key != key.strip():
        raise ConfigError(f"{source}: the key begins or ends with white space; remove it")
    if not key.isprintable():
        raise ConfigError(
            f"{source}: the key contains control characters, which a header cannot contain; choose another key"
        )


def read_keys(path: str) -> list[TenantKey]:
    """The entries of a key file.

    Raises:
        ConfigError: the file is missing or invalid, or an entry is wrong; the message never contains a key.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"--api-key-file {path}: {why}") from None
    try:
        entries = _parsed(path, text)
    except ValueError:
        raise ConfigError(f"--api-key-file {path}: the file is neither JSON nor YAML") from None
    if not entries:
        raise ConfigError(f"--api-key-file {path}: the file must be a list of entries with `name` and `key`")  # fmt: skip
    try:
        keys = msgspec.convert(entries, list[TenantKey])
    except msgspec.ValidationError as why:
        raise ConfigError(f"--api-key-file {path}: {in_words(why)}") from None
    for index, one in enumerate(keys):
        check_key(f"--api-key-file {path}, $[{index}].key", one.key)
        if one.name.startswith(KEY_FLAG):
            raise ConfigError(
                f"--api-key-file {path}, $[{index}].name: must not begin with {KEY_FLAG}"
            )
    for what in ("name", "key"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError(f"--api-key-file {path}: two entries have the same `{what}`")
    return keys


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json"):
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as why:
        raise ValueError from why
