"""Thinking markers: the token ids that start and end reasoning, for the thinking budget, which the worker enforces.

Knows the table of reasoning formats and a tokenizer. Does not know how the
worker enforces the budget (`features/thinking/budget.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config.reasoning import ReasoningMarks
from quire.errors import ValidationError
from quire.frontend.parsers.format_table import ReasoningFormat
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.sampling_params import ThinkingMarkers

FIELD = "thinking_token_budget"
TAIL = 32  # last prompt tokens, which show whether the prompt ends inside reasoning


def with_marks(reasoning: ReasoningFormat | None, marks: ReasoningMarks) -> ReasoningFormat | None:
    """The format with the operator's marks (`reasoning_config`); None: the marks are unknown."""
    if reasoning is None:
        known = marks.start and marks.end
        return ReasoningFormat(starts=(marks.start,), ends=(marks.end,)) if known else None
    starts = (marks.start, *reasoning.starts) if marks.start else reasoning.starts
    return replace(reasoning, starts=tuple(dict.fromkeys(starts)), forced_end=marks.end)


def thinking_markers(
    budget: int,
    reasoning: ReasoningFormat | None,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
) -> ThinkingMarkers:
    """The data that the worker needs to enforce a budget.

    Raises:
        ValidationError: the model's reasoning markers are unknown, or they are not tokens of their own.
    """
    if reasoning is None or tokenizer is None or not reasoning.ends:
        raise ValidationError(
            f"{FIELD} needs a model whose reasoning markers are known; start the engine with reasoning_parser=NAME",
            parameter=FIELD,
            value=budget,
        )
    starts = [_tokens(mark, tokenizer, budget) for mark in reasoning.starts]
    ends = [_tokens(mark, tokenizer, budget) for mark in reasoning.ends]
    if reasoning.forced_end:  # token by token, so it may be plain text
        if not reasoning.forced_end.endswith(reasoning.ends):
            raise ValidationError(
                f"{FIELD}: reasoning_config.reasoning_end_str of this server must end with {' or '.join(reasoning.ends)};"
                " leave the field out",
                parameter=FIELD,
                value=budget,
            )
        ends.insert(0, tokenizer.encode(reasoning.forced_end, add_special_tokens=False))
    tail = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    opened = tail.endswith(reasoning.openings)
    closed = tail.endswith(reasoning.ends)
    within = opened or (reasoning.starts_in_reasoning and not closed)
    return ThinkingMarkers(
        budget, starts, ends, within, reasoning.may_repeat or bool(reasoning.tool_format)
    )


def _tokens(mark: str, tokenizer: Tokenizer, budget: int) -> list[int]:
    """Token ids of a marker. Refuses plain text: it may merge with its neighbors, in several ways."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    if not ids or not tokenizer.is_added(ids[0]):
        raise ValidationError(
            f"{FIELD}: the reasoning marker {mark!r} of this model is not a single token; limit the whole output with"
            " max_tokens",
            parameter=FIELD,
            value=budget,
        )
    return ids
