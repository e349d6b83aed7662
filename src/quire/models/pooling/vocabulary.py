"""The tokens of tokenizer.json by name, without loading a tokenizer."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError
from quire.models.pooling.sentence_transformers import read_json


def vocabulary(folder: str) -> dict[str, int]:
    """Token -> id, from tokenizer.json. Raises ConfigError: there is none."""
    found = read_json(Path(folder) / "tokenizer.json") if folder else None
    if not isinstance(found, dict):
        raise ConfigError(
            f"classifier_from_token: {folder} has no tokenizer.json; give the ids of the tokens"
        )
    words = (found.get("model") or {}).get("vocab") or {}
    if isinstance(words, list):
        words = {str(pair[0]): index for index, pair in enumerate(words)}
    return {
        **words,
        **{str(one["content"]): int(one["id"]) for one in found.get("added_tokens") or ()},
    }
