"""Beam search, in steps of one token per beam.

    beams (width) --one token each, 2 x width log-probabilities--> candidates --the best--> beams
                                                                      `-- an end of text --> done

Knows sequences and their scores. Does not know how a step is computed: `api/beam.py` and
`server/openai/beam_search.py` do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from quire.frontend.logprobs import Position
from quire.frontend.outputs import BeamSearchSequence
from quire.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


def step_params(params: BeamSearchParams) -> SamplingParams:
    """Sampling parameters of one step of one beam."""
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt. `ends`: end-of-text tokens. `keep_logprobs`: beams keep their log-probabilities.

    A step has `width` x 2 x `width` candidates, so a candidate is only a score, a beam index and a token. Token lists
    are built only for the `width` beams that continue and for ended ones among the `width` best so far.
    """

    params: BeamSearchParams
    prompt: list[int]
    ends: Collection[int]
    max_model_len: int
    keep_logprobs: bool = True
    beams: list[BeamSearchSequence] = field(init=False)
    done: list[BeamSearchSequence] = field(default_factory=list)
    """The best ended sequences, best first."""

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(self.prompt)]

    def advance(self, answers: Sequence[Position]) -> None:
        """Advance one step. `answers`: for each beam the log-probabilities of its next token."""
        params = self.params
        ends = () if params.ignore_eos else self.ends
        grown: list[tuple[float, int, int]] = []
        for at, (beam, entries) in enumerate(zip(self.beams, answers, strict=True)):
            for token, logprob in candidates(entries, 2 * params.beam_width):
                total = beam.cum_logprob + logprob
                if token in ends:
                    self._end(beam, entries, token, total)
                else:
                    grown.append((total, at, token))
        best = heapq.nlargest(params.beam_width, grown, key=itemgetter(0))  # ties: the first
        self.beams = [
            BeamSearchSequence(
                [*self.beams[at].tokens, token], self._history(self.beams[at], answers[at]), total
            )
            for total, at, token in best
        ]
        if self.beams and len(self.beams[0].tokens) >= self.max_model_len:
            self.stop()

    def _history(self, beam: BeamSearchSequence, entries: Position) -> list[Position]:
        return [*beam.logprobs, entries] if self.keep_logprobs else []

    def _end(self, beam: BeamSearchSequence, entries: Position, token: int, total: float) -> None:
        """End a sequence with `token`, which does not count in its length for the score."""
        params = self.params
        score = self._score(total, len(beam.tokens))
        if len(self.done) == params.beam_width and score <= self.done[-1].score:
            return
        kept = [*beam.tokens, token] if params.include_stop_str_in_output else beam.tokens
        ended = BeamSearchSequence(
            kept, self._history(beam, entries), total, finish_reason="stop", stop_reason=token
        )
        ended.score = score
        self._keep([ended])

    def _keep(self, ended: list[BeamSearchSequence]) -> None:
        self.done = sorted(self.done + ended, key=lambda beam: -beam.score)
        del self.done[self.params.beam_width :]

    def _score(self, total: float, length: int) -> float:
        try:
            return total / math.pow(length, self.params.length_penalty)
        except OverflowError:  # the divisor overflows a float
            return -0.0
        except ZeroDivisionError:  # the divisor underflows to 0
            return -math.inf

    def stop(self, reason: str = "length") -> None:
        """End the remaining beams."""
        for beam in self.beams:
            beam.finish_reason = reason
            beam.score = self._score(beam.cum_logprob, len(beam.tokens))
        self._keep(self.beams)
        self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The `beam_width` best sequences, best first."""
        self.stop()
        return self.done


def candidates(entries: Position, count: int) -> list[tuple[int, float]]:
    """The `count` most likely next tokens: id, log-probability."""
    return [
        (token, entry.logprob)
        for token, entry in entries.items()
        if entry.rank is None or entry.rank <= count  # the sampled token may rank lower
    ]


def entries_of(output: Any) -> Position:
    """The log-probabilities in a step's output: the sampled token and the most likely ones."""
    found: Position = (output.outputs[0].logprobs or [{}])[0]
    return found
