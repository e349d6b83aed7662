"""Whether a text keeps to a constraint, asked of the compiled grammar itself; no model draws anything here."""

from __future__ import annotations

from llguidance import LLMatcher

from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.matcher import make_matcher
from quire.features.structured.validate import check_constraint
from quire.features.structured.vocabulary import Vocabulary, tokenizer_json
from quire.protocol.structured_outputs import StructuredOutputsParams


class Reader:
    def __init__(self, checkpoint: str, size: int = 259):
        self.compiler = GrammarCompiler(Vocabulary(tokenizer_json(checkpoint), size))

    def matcher(self, constraint: StructuredOutputsParams) -> LLMatcher:
        """Compiled in this process, so that a test can ask it anything."""
        return make_matcher(constraint.plain(), self.compiler.vocabulary)

    def admits(self, constraint: StructuredOutputsParams, *pieces: str | int) -> bool:
        """Is this a whole output? Pieces are text, or tokens by their ids."""
        tokenizer = self.compiler.vocabulary.tokenizer
        matcher = self.matcher(check_constraint(constraint))
        tokens: list[int] = []
        for piece in pieces:
            tokens += [piece] if isinstance(piece, int) else tokenizer.tokenize_str(piece)
        return matcher.consume_tokens(tokens) and matcher.is_accepting()
