"""Whether a text keeps to a constraint, asked of the compiled grammar itself; no model draws anything here."""

from __future__ import annotations

from llguidance import LLMatcher

from quire.features.structured.check import checked
from quire.features.structured.compile import Compiler
from quire.features.structured.vocabulary import Vocabulary, tokenizer_json
from quire.protocol.constraint import StructuredOutputsParams


class Reader:
    def __init__(self, checkpoint: str, size: int = 259):
        self.compiler = Compiler(Vocabulary(tokenizer_json(checkpoint), size))

    def matcher(self, constraint: StructuredOutputsParams) -> LLMatcher:
        return self.compiler.ask(constraint.plain()).result().deep_copy()

    def admits(self, constraint: StructuredOutputsParams, *pieces: str | int) -> bool:
        """Is this a whole output? Pieces are text, or tokens by their ids."""
        tokenizer = self.compiler.vocabulary.tokenizer
        matcher = self.matcher(checked(constraint))
        tokens: list[int] = []
        for piece in pieces:
            tokens += [piece] if isinstance(piece, int) else tokenizer.tokenize_str(piece)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
