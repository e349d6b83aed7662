"""Reads the JSON files of a checkpoint. Distrusts their size and depth. Does not know what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

MAX_BYTES = 256 << 20


def read_json(file: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The file's JSON; None: there is no such file. Raises ConfigError: it cannot be read."""
    try:
        if (size := file.stat().st_size) > max_bytes:
            raise ConfigError(f"{file} has {size} bytes; the limit is {max_bytes}")
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """The file's JSON object; {}: there is no such file. Raises ConfigError: it cannot be read, or has no object."""
    found = read_json(file)
    if found is None and not file.exists():
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} contains a {type(found).__name__}, not an object")
    return found


def token_ids(file: Path) -> dict[str, int]:
    """Text of a token -> its id. Raises ConfigError: it is not a tokenizer.json."""
    says = read_json(file)
    try:
        vocabulary = says["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        return vocabulary | {one["content"]: one["id"] for one in says.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {error!r}") from None
