"""What a user asks of one generation: how tokens are chosen, when to stop, what to report.

Knows the rules that a value must keep by itself. Rules that need a model (vocabulary size, limits of a
server) are checked where the model is known, in `frontend/inputs.py`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class SamplingParams(Struct, omit_defaults=True, kw_only=True, dict=False):
    """See docs; defaults are the field's. The last block is filled by `frontend/inputs.py`, not by users."""

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: int = 0  # RequestOutputKind: 0 cumulative, 1 delta, 2 final only
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    # filled by frontend/inputs.py
    eos_token_ids: list[int] = []
    """The model's own ends of text: they stop unless ignore_eos, and are masked before min_tokens."""
    bad_word_ids: list[list[int]] = []
    """Token sequences whose last token must not complete them."""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5
