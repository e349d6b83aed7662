"""The vocabulary in llguidance's form: the bytes of each token.

Knows where a checkpoint keeps its tokenizer. Does not know grammars.

It adds one special token at its end, `accepts`, which llguidance gets as the end-of-text token. So its bit in a mask
means "the output may end here", whichever tokens end the model's outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer

from quire.errors import ConfigError

MARK = "<|quire: the output may end here|>"


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = []


class _File(msgspec.Struct):
    """The fields read from a tokenizer.json."""

    model: _Model
    added_tokens: list[dict[str, Any]] = []


class Vocabulary:
    """Built on first use (0.6 s for 130,000 tokens); thread-safe.

    Args:
        source: returns the text of tokenizer.json.
        size: number of logits of the model.
    """

    def __init__(self, source: Callable[[], str], size: int):
        self._source, self.size = source, size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._specials: dict[str, int] = {}

    def text(self) -> str:
        """The text of the tokenizer.json, for another process.

        Raises ConfigError: there is none.
        """
        try:
            return self._source()
        except OSError as error:
            raise ConfigError(f"constrained output cannot read this tokenizer: {error}") from error

    @property
    def accepts(self) -> int:
        """The token whose bit in a mask means that the output may end."""
        return int(self.tokenizer.eos_token)

    @property
    def specials(self) -> dict[str, int]:
        """Special tokens, text -> id: grammars refer to them by id."""
        return self._specials if self.tokenizer else {}

    @property
    def tokenizer(self) -> LLTokenizer:
        """The llguidance tokenizer. Raises ConfigError: llguidance cannot read the model's tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._make(self._source())
                except ConfigError:
                    raise
                except Exception as error:  # llguidance raises many types
                    raise ConfigError(
                        f"constrained output cannot read this tokenizer: {error}"
                    ) from error
            return self._tokenizer

    def _make(self, text: str) -> LLTokenizer:
        found = msgspec.json.decode(text, type=_File)
        added = found.added_tokens
        free = max([len(found.model.vocab), *(int(token["id"]) + 1 for token in added)])
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        mark = {"id": free, "content": MARK, "special": True, **plain}
        whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        whole["added_tokens"] = msgspec.Raw(msgspec.json.encode([*added, mark]))
        made = LLTokenizer(
            msgspec.json.encode(whole).decode(),
            n_vocab=max(free + 1, self.size),
            eos_token=free,
        )
        if not made.is_special_token(free):
            raise ConfigError(
                f"constrained output cannot read this tokenizer: its ids have gaps below {free}"
            )
        # Use llguidance's notion of special: it treats `<tool_call>` as special even if the tokenizer does not.
        ids = {str(token["content"]): int(token["id"]) for token in added}
        self._specials = {text: id for text, id in ids.items() if made.is_special_token(id)}
        return made


def tokenizer_json(folder: str) -> Callable[[], str]:
    """Returns a function that reads a checkpoint's tokenizer.json; transformers converts one if there is none."""

    def read() -> str:
        path = Path(folder) / "tokenizer.json"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        from transformers import AutoTokenizer

        try:
            fast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            return str(fast.backend_tokenizer.to_str())
        except Exception as error:
            raise ConfigError(
                f"constrained output needs a tokenizer, but {folder} has no readable one: {error}"
            ) from error

    return read
