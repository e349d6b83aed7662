"""`LLM.beam_search`: runs `frontend/beam_search.py`; each step computes the beams of many prompts together.

With prefix caching a step costs about one token per beam. Knows `LLM`. Does not know how tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.api.progress import Progress, progress
from quire.frontend.beam_search import BeamSearch, entries_of, step_params
from quire.frontend.input_processor import AcceptedRequest
from quire.frontend.logprobs import Position
from quire.frontend.outputs import BeamSearchOutput, RequestOutput, error_of
from quire.frontend.prompts import Prompt
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from quire.api.llm import LLM

__all__ = ["BeamSearchParams", "search"]


def search(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: Progress = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """For each prompt the `beam_width` best sequences, best first. Raises as `LLM.beam_search`."""
    step = step_params(params)
    at_once = concurrency_limit or len(prompts) or 1
    found: list[BeamSearchOutput] = []
    with progress(use_tqdm, len(prompts), "Beam search") as bar:
        for start in range(0, len(prompts), at_once):
            found += _together(llm, prompts[start : start + at_once], params, step)
            bar.update(len(found) - start)
    return found


def _together(
    llm: LLM, prompts: Sequence[Prompt], params: BeamSearchParams, step: SamplingParams
) -> list[BeamSearchOutput]:
    began, arrived = time.monotonic(), time.time()
    inputs, salts = llm.front.inputs, [prompt.salt for prompt in prompts]
    searches = []
    for prompt in prompts:
        tokens = inputs.accept(prompt, step, id="beam", inner=True).tokens
        searches.append(BeamSearch(params, tokens, inputs.eos_token_ids, inputs.max_model_len))
    for _ in range(params.max_tokens):
        asked: list[AcceptedRequest] = []
        for one, salt in zip(searches, salts, strict=True):
            for beam in one.beams:
                prompt = Prompt(tokens=beam.tokens, salt=salt)
                id = f"beam-{next(llm.request_counter)}"
                asked.append(inputs.accept(prompt, step, id=id, inner=True, arrived=arrived))
        answers = map(_entries, llm.run_accepted(asked))
        for one in searches:
            one.advance([next(answers) for _ in one.beams])
        if not any(one.beams for one in searches):
            break
    results = [_result(llm, one, params) for one in searches]
    for one, result in zip(searches, results, strict=True):
        llm.watch.searched(began, len(one.prompt), result, params.max_tokens)
    return results


def _entries(answer: RequestOutput) -> Position:
    if (error := error_of(answer)) is not None:
        raise error
    return entries_of(answer)


def _result(llm: LLM, one: BeamSearch, params: BeamSearchParams) -> BeamSearchOutput:
    chosen = one.best()
    if llm.tokenizer is not None:
        for beam in chosen:
            beam.text = llm.tokenizer.decode(beam.tokens, params.skip_special_tokens)
    return BeamSearchOutput(chosen)
