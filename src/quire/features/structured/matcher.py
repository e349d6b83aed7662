"""Makes matchers: the grammar of one constraint, compiled for one vocabulary.

Knows constraints, both grammar libraries and their errors. Does not know rows. A compile may take much time and
memory, so this module runs only in processes that can be killed (`grammar_server.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher

from quire.features.structured.errors import UnsupportedConstraint, is_panic
from quire.features.structured.grammar import explained, given_text, grammar_of, limits
from quire.features.structured.vocabulary import Vocabulary
from quire.protocol.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from quire.features.structured.xgrammar_backend import XCompiler, XMatcher

    Matcher = LLMatcher | XMatcher


def make_matcher(
    constraint: StructuredOutputsParams, vocabulary: Vocabulary, other: XCompiler | None = None
) -> Matcher:
    """A matcher in its initial state. `other`: xgrammar's compiler, for constraints of that engine.

    Raises:
        UnsupportedConstraint, ConfigError: the constraint cannot be enforced, or not with this vocabulary.
    """
    if other is not None:
        return other.compile(constraint)
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
