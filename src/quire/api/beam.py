"""Beam search over an engine that knows nothing of it: each step asks for one token of every beam, with its rivals.

    beams (width) --one token each, 2 x width log-probabilities--> candidates --the best--> beams
                                                                      `-- an end of text --> done

Prefix caching makes a step cost about one token a beam. Knows `LLM`. Does not know how tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.api.progress import Progress, progress
from quire.frontend.inputs import Accepted
from quire.frontend.logprobs import Position
from quire.frontend.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, error_of
from quire.frontend.prompts import Prompt
from quire.protocol.params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.api.llm import LLM

__all__ = ["BeamSearchParams", "search"]


@dataclass(slots=True)
class Search:
    """One prompt's beams."""

    num_prompt: int
    beams: list[BeamSearchSequence]
    done: list[BeamSearchSequence] = field(default_factory=list)


def search(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: Progress = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """For each prompt the `beam_width` best sequences, best first. `LLM.beam_search` has the errors."""
    step = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
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
    began = time.monotonic()
    inputs, salts = llm.front.inputs, [prompt.salt for prompt in prompts]
    searches = []
    for prompt in prompts:
        tokens = inputs.accept(prompt, step, id="beam", limited=False).tokens
        searches.append(Search(len(tokens), [BeamSearchSequence(tokens)]))
    for _ in range(params.max_tokens):
        asked: list[Accepted] = []
        for one, salt in zip(searches, salts, strict=True):
            for beam in one.beams:
                prompt = Prompt(tokens=beam.tokens, salt=salt)
                id = f"beam-{next(llm.request_counter)}"
                asked.append(inputs.accept(prompt, step, id=id, limited=False))
                asked[-1].inner = True
        answers = iter(llm.run_accepted(asked))
        for one in searches:
            _advance(one, [next(answers) for _ in one.beams], params, llm)
        if not any(one.beams for one in searches):
            break
    results = [_result(llm, one, params) for one in searches]
    for one, result in zip(searches, results, strict=True):
        llm.watch.searched(began, one.num_prompt, result, params.max_tokens)
    return results


def _advance(one: Search, answers: list[RequestOutput], params: BeamSearchParams, llm: LLM) -> None:
    inputs = llm.front.inputs
    ends = frozenset() if params.ignore_eos else frozenset(inputs.eos_token_ids)
    grown: list[BeamSearchSequence] = []
    for beam, answer in zip(one.beams, answers, strict=True):
        for token, logprob, entries in candidates(answer, 2 * params.beam_width):
            tokens = [*beam.tokens, token]
            total, history = beam.cum_logprob + logprob, [*beam.logprobs, entries]
            if token in ends:
                kept = tokens if params.include_stop_str_in_output else beam.tokens
                one.done.append(
                    BeamSearchSequence(
                        kept, history, total, finish_reason="stop", stop_reason=token
                    )
                )
            else:
                grown.append(BeamSearchSequence(tokens, history, total))
    grown.sort(key=lambda beam: -beam.cum_logprob)
    one.beams = grown[: params.beam_width]
    if one.beams and len(one.beams[0].tokens) >= inputs.max_model_len:
        one.done += [_cut(beam) for beam in one.beams]
        one.beams = []


def candidates(answer: RequestOutput, count: int) -> list[tuple[int, float, Position]]:
    """The `count` likeliest next tokens: id, log-probability, all that were reported."""
    if (error := error_of(answer)) is not None:
        raise error
    entries: Any = (answer.outputs[0].logprobs or [{}])[0]
    return [
        (token, entry.logprob, entries)
        for token, entry in entries.items()
        if entry.rank is None or entry.rank <= count  # a drawn token may be none of the likeliest
    ]


def _cut(beam: BeamSearchSequence) -> BeamSearchSequence:
    beam.finish_reason = "length"
    return beam


def _result(llm: LLM, one: Search, params: BeamSearchParams) -> BeamSearchOutput:
    found = one.done + [_cut(beam) for beam in one.beams]
    ends = llm.front.inputs.eos_token_ids
    for beam in found:
        length = len(beam.tokens)
        if params.include_stop_str_in_output and beam.finish_reason == "stop":
            length -= beam.tokens[-1] in ends
        beam.score = beam.cum_logprob / length**params.length_penalty
    found.sort(key=lambda beam: -beam.score)
    chosen = found[: params.beam_width]
    if llm.tokenizer is not None:
        for beam in chosen:
            beam.text = llm.tokenizer.decode(beam.tokens, params.skip_special_tokens)
    return BeamSearchOutput(chosen)
