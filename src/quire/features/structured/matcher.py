"""Makes matchers: the grammar of one constraint, compiled for one vocabulary.

Knows constraints, llguidance and its errors. Does not know rows. A compile may take much time and
memory, so this module runs only in processes that can be killed (`grammar_server.py`).
"""

from __future__ import annotations

from llguidance import LLMatcher

from quire.features.structured.errors import UnsupportedConstraint, is_panic
from quire.features.structured.grammar import explained, given_text, grammar_of, limits
from quire.features.structured.vocabulary import Vocabulary
from quire.protocol.structured_outputs import StructuredOutputsParams


def make_matcher(constraint: StructuredOutputsParams, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher in its initial state.

    Raises:
        UnsupportedConstraint, ConfigError: the constraint cannot be enforced, or not with this vocabulary.
    """
    try:
        text = grammar_of(constraint, vocabulary.specials)
        made = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits())
    except BaseException as error:
        if is_panic(error):
            raise UnsupportedConstraint(PANIC) from error
        raise
    if made.is_error():
        raise UnsupportedConstraint(explained(made.get_error(), given_text(constraint)))
    return made


PANIC = "the grammar library llguidance failed; express the constraint in another way"
