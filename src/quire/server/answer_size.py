"""Bounds the size of an answer, by arithmetic before any work begins.

An entry is a token, or one log-probability of a token: about 200 bytes in this process until the answer is sent.
Knows prompts and sampling parameters. Does not know endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.api.async_engine import AsyncEngine
from quire.frontend.prompts import Prompt
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams
from quire.server.errors import invalid


def check_answer_size(
    prompts: Sequence[Prompt], params: SamplingParams, beams: BeamSearchParams | None,
    engine: AsyncEngine, most: int, copies: int = 1,
) -> None:  # fmt: skip
    """`most`: entries; one completion without log-probabilities is never refused.

    `copies`: number of choices that repeat their prompt's entries.

    Raises:
        ApiError: 400 with the sum.
    """
    completions = max(params.n, params.best_of or 1)
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    room = (max(1, engine.inputs.max_model_len - len(prompt.tokens)) for prompt in prompts)
    max_tokens = params.max_tokens
    output_tokens = completions * sum(
        one if max_tokens is None else min(max_tokens, one) for one in room
    )
    of_prompt = entries_per_token(params.prompt_logprobs, engine.inputs.vocab_size)
    of_output = entries_per_token(params.logprobs, engine.inputs.vocab_size)
    if params.logprob_token_ids is not None and beams is None:
        of_output = 2 + len(params.logprob_token_ids)
    if beams is not None:
        # Each step submits every beam and its prompt anew; for logprobs, the alternatives of all steps are kept.
        prompt_tokens, of_prompt = completions * prompt_tokens, 1
        of_output = 1 if params.logprobs is None else 2 + 2 * beams.beam_width
    else:
        prompt_tokens *= copies
        if params.prompt_logprobs is None:
            of_prompt = 1 if copies > 1 else 0
    sums = {
        "n" if of_prompt == 1 else "prompt_logprobs": prompt_tokens * of_prompt,
        "max_tokens" if of_output == 1 else "logprobs": output_tokens * of_output,
    }
    if (total := sum(sums.values())) <= max(most, engine.inputs.max_model_len):
        return
    parts = []
    if of_prompt:
        parts.append(f"{prompt_tokens} prompt tokens with {of_prompt} each")
    parts.append(f"up to {output_tokens} output tokens with {of_output} each")
    raise invalid(
        f"the response could have {total} tokens and log-probabilities ({' and '.join(parts)}); the limit"
        f" for one request is {most} (--max-answer-entries). Send fewer prompts, or lower"
        " `n`, `max_tokens`, `logprobs`, `prompt_logprobs`",
        max(sums, key=lambda name: sums[name]),
    )


def entries_per_token(logprobs: int | None, vocab_size: int) -> int:
    """Entries of a token: itself, and its log-probability with its alternatives' log-probabilities. -1: the whole vocabulary."""
    if logprobs is None:
        return 1
    return 1 + (vocab_size if logprobs == -1 else 1 + logprobs)
