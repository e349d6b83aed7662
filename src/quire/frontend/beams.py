"""Beam search by steps, each of one token for every beam, with its rivals.

    beams (width) --one token each, 2 x width log-probabilities--> candidates --the best--> beams
                                                                      `-- an end of text --> done

Knows sequences and their scores. Does not know who computes a step, or how: `api/beam.py` and `server/beams.py` do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.logprobs import Position
from quire.frontend.outputs import BeamSearchSequence
from quire.protocol.params import BeamSearchParams, RequestOutputKind, SamplingParams


def step_params(params: BeamSearchParams) -> SamplingParams:
    """What is asked for each beam at each step."""
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@dataclass(slots=True)
class Search:
    """One prompt's beams. `ends`: tokens that end a text."""

    params: BeamSearchParams
    prompt: list[int]
    ends: Collection[int]
    max_model_len: int
    beams: list[BeamSearchSequence] = field(init=False)
    done: list[BeamSearchSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(self.prompt)]

    def advance(self, answers: Sequence[Position]) -> None:
        """A step: for each beam the log-probabilities of its next token."""
        params = self.params
        ends = () if params.ignore_eos else self.ends
        grown: list[BeamSearchSequence] = []
        for beam, entries in zip(self.beams, answers, strict=True):
            for token, logprob in candidates(entries, 2 * params.beam_width):
                tokens = [*beam.tokens, token]
                total, history = beam.cum_logprob + logprob, [*beam.logprobs, entries]
                if token in ends:
                    kept = tokens if params.include_stop_str_in_output else beam.tokens
                    self.done.append(
                        BeamSearchSequence(
                            kept, history, total, finish_reason="stop", stop_reason=token
                        )
                    )
                else:
                    grown.append(BeamSearchSequence(tokens, history, total))
        grown.sort(key=lambda beam: -beam.cum_logprob)
        self.beams = grown[: params.beam_width]
        if self.beams and len(self.beams[0].tokens) >= self.max_model_len:
            self.stop()

    def stop(self, reason: str = "length") -> None:
        """The beams that are left are done."""
        for beam in self.beams:
            beam.finish_reason = reason
        self.done += self.beams
        self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The `beam_width` best sequences, best first."""
        params = self.params
        self.stop()
        for beam in self.done:
            length = len(beam.tokens)
            if params.include_stop_str_in_output and beam.finish_reason == "stop":
                length -= beam.tokens[-1] in self.ends
            beam.score = beam.cum_logprob / length**params.length_penalty
        self.done.sort(key=lambda beam: -beam.score)
        return self.done[: params.beam_width]


def candidates(entries: Position, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest next tokens: id, log-probability."""
    return [
        (token, entry.logprob)
        for token, entry in entries.items()
        if entry.rank is None or entry.rank <= count  # a drawn token may be none of the likeliest
    ]


def entries_of(output: Any) -> Position:
    """What a step's answer says of its token and the token's rivals."""
    found: Position = (output.outputs[0].logprobs or [{}])[0]
    return found
