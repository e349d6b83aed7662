"""xgrammar with the interface of llguidance's matchers. Optional: the extra `xgrammar`.

Knows xgrammar's grammars and matchers. `xgrammar_subset.py` decides beforehand which constraints it gets. Only grammar
processes import this module, because xgrammar imports torch.

One extra special token means that the output may end, as in `vocabulary.py`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.json_schema import MAX_BYTES
from quire.features.structured.vocabulary import Vocabulary
from quire.features.structured.xgrammar_subset import anchored_regex, schema_of
from quire.protocol.structured_outputs import StructuredOutputsParams

SPACES = 80  # as json_schema.SPACES


def installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


XGRAMMAR_FAILED = (
    "the grammar library xgrammar cannot compile it; write the constraint in another way"
)


class XMatcher:
    """The state of one output in a grammar."""

    def __init__(self, compiled: Any):
        from xgrammar import GrammarMatcher

        self.compiled, self.matcher = compiled, GrammarMatcher(compiled)
        self.stuck: int | None = None

    def deep_copy(self) -> XMatcher:
        return XMatcher(self.compiled)

    def consume_token(self, token: int) -> bool:
        if self.stuck is None and not self.matcher.accept_token(token):
            self.stuck = token
        return self.stuck is None

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may follow; the state remains."""
        count = 0
        while (
            self.stuck is None and count < len(tokens) and self.matcher.accept_token(tokens[count])
        ):
            count += 1
        self.matcher.rollback(count)
        return count

    def rollback(self, num_tokens: int) -> bool:
        self.matcher.rollback(num_tokens)
        return True

    def compute_ff_tokens(self) -> list[int]:
        return []  # xgrammar knows forced text, but not its tokenization

    def is_accepting(self) -> bool:
        return self.stuck is None and bool(self.matcher.is_completed())

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return self.stuck is not None

    def get_error(self) -> str:
        return f"token {self.stuck} does not fit"

    def fill(self, masks_RW: np.ndarray, row: int) -> None:
        if not self.matcher.fill_next_token_bitmask(masks_RW, row):
            masks_RW[row] = -1


class XCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        if not installed():
            raise ConfigError(
                "structured_outputs_config.backend=xgrammar needs its package: pip install xgrammar"
            )
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        tokenizer = vocabulary.tokenizer
        size, special = tokenizer.vocab_size, tokenizer.is_special_token
        # Special tokens get no bytes, so that no text matches them.
        tokens = [b"" if special(id) else tokenizer.decode_bytes([id]) for id in range(size)]
        about = TokenizerInfo(
            tokens, VocabType.RAW, vocab_size=size, stop_token_ids=[vocabulary.accepts]
        )
        self.compiler = GrammarCompiler(about, max_threads=1, cache_enabled=False)

    def compile(self, constraint: StructuredOutputsParams) -> XMatcher:
        """Raises UnsupportedConstraint: xgrammar cannot compile it."""
        try:
            return XMatcher(self._compile(constraint))
        except Exception as error:  # its C++ errors have several types
            raise UnsupportedConstraint(XGRAMMAR_FAILED) from error

    def _compile(self, constraint: StructuredOutputsParams) -> Any:
        kind, compiler = constraint.kind, self.compiler
        value: Any = getattr(constraint, kind)
        if kind in ("json", "json_object"):
            spaced = not constraint.disable_any_whitespace
            schema = json.dumps(schema_of(constraint)) if kind == "json" else '{"type": "object"}'
            return compiler.compile_json_schema(
                schema, any_whitespace=spaced, strict_mode=False,
                max_whitespace_cnt=SPACES if spaced else None,
                separators=None if spaced else (",", ":"),
            )  # fmt: skip
        if kind == "regex":
            return compiler.compile_regex(anchored_regex(value))
        text = value
        if kind == "choice":
            quoted = (json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(value))
            text = "root ::= " + " | ".join(quoted)
        if len(text) > MAX_BYTES:
            raise UnsupportedConstraint(f"it has {len(text)} characters")
        return compiler.compile_grammar(text)
