"""Beam search, in steps of one token per beam.

    beams (width) --one token each, 2 x width log-probabilities--> candidates --the best--> beams
                                                                      `-- an end of text --> done

`BeamSearch` is the search of one prompt. `search_together` runs many for a program that waits, `BeamStream` runs one
in an event loop. With prefix caching a step costs about one token per beam. Does not know how tokens are computed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol

from quire.errors import QuireError
from quire.frontend.input_processor import AcceptedRequest, InputProcessor
from quire.frontend.logprobs import Position
from quire.frontend.outputs import BeamSearchSequence, CompletionOutput, RequestOutput, error_of
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


def step_params(params: BeamSearchParams, number: int) -> SamplingParams:
    """Sampling parameters of one beam in step `number`: it has as many tokens after the prompt."""
    constraint = params.structured_outputs
    return SamplingParams(
        structured_outputs=constraint,
        num_searched_tokens=None if constraint is None else number,
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
        constrained = params.structured_outputs is not None
        for index, (beam, entries) in enumerate(zip(self.beams, answers, strict=True)):
            if constrained:
                entries = with_one_end(entries, ends)
            most = None if constrained else 2 * params.beam_width
            for token, logprob in candidates(entries, most):
                total = beam.cum_logprob + logprob
                if token in ends:
                    self._end(beam, entries, token, total)
                else:
                    grown.append((total, index, token))
        best = heapq.nlargest(params.beam_width, grown, key=itemgetter(0))  # ties: the first
        self.beams = [
            BeamSearchSequence(
                [*self.beams[index].tokens, token],
                self._history(self.beams[index], answers[index]),
                total,
            )
            for total, index, token in best
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
        tokens = [*beam.tokens, token] if params.include_stop_str_in_output else beam.tokens
        ended = BeamSearchSequence(
            tokens, self._history(beam, entries), total, finish_reason="stop", stop_reason=token
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

    def best(self, tokenizer: Tokenizer | None = None) -> list[BeamSearchSequence]:
        """The `beam_width` best sequences, best first; with their texts if there is a tokenizer."""
        self.stop()
        if tokenizer is not None:
            for beam in self.done:
                beam.text = tokenizer.decode(beam.tokens, self.params.skip_special_tokens)
        return self.done


def with_one_end(entries: Position, ends: Collection[int]) -> Position:
    """The entries without all end tokens but the likeliest: after a complete output a constraint allows each, and the texts are equal."""
    found = [token for token in entries if token in ends]
    best = max(found, key=lambda token: entries[token].logprob, default=None)
    return {token: one for token, one in entries.items() if token not in ends or token == best}


def candidates(entries: Position, count: int | None) -> list[tuple[int, float]]:
    """The `count` most likely next tokens: id, log-probability; None: all entries, which a constraint allows."""
    return [
        (token, entry.logprob)
        for token, entry in entries.items()
        # the sampled token may rank lower
        if count is None or entry.rank is None or entry.rank <= count
    ]


def entries_of(output: RequestOutput) -> Position:
    """The log-probabilities in a step's output: the sampled token and the most likely ones."""
    position: Position = (output.outputs[0].logprobs or [{}])[0] or {}
    return position


def search_together(
    inputs: InputProcessor, prompts: Sequence[Prompt], params: BeamSearchParams,
    run: Callable[[list[AcceptedRequest]], list[RequestOutput]], ids: Iterator[str],
    adapters: Sequence[str | None],
) -> list[BeamSearch]:  # fmt: skip
    """Search for all prompts, each with its adapter, to the end; `run` computes one step of all their beams.

    Raises:
        ValidationError: a prompt is invalid.
        QuireError: a step failed.
    """
    step, arrived, searches = step_params(params, 0), time.time(), []
    media = []
    for prompt in prompts:
        first = inputs.accept(prompt, step, id="beam", is_subrequest=True)
        searches.append(
            BeamSearch(params, first.tokens, inputs.eos_token_ids, inputs.max_model_len)
        )
        media.append(first.children[0].media)
    for number in range(params.max_tokens):
        step = step_params(params, number)
        requests = [
            inputs.accept(
                Prompt(None, beam.tokens, prompt.salt, media=items), step, id=f"beam-{next(ids)}", is_subrequest=True,
                arrived=arrived, adapter=adapter,
            )
            for one, prompt, items, adapter in zip(searches, prompts, media, adapters, strict=True)
            for beam in one.beams
        ]  # fmt: skip
        outputs = run(requests)
        if (error := next(filter(None, map(error_of, outputs)), None)) is not None:
            raise error
        entries = map(entries_of, outputs)
        for one in searches:
            one.advance([next(entries) for _ in one.beams])
        if not any(one.beams for one in searches):
            break
    return searches


class StepStream(Protocol):
    """The output stream of one step of one beam."""

    ended: bool

    def take(self) -> RequestOutput | None: ...

    def close(self) -> None: ...


OpenStep = Callable[..., Awaitable[StepStream]]
"""Start a request: of a prompt, its parameters, an id, and a callable for when there is output."""


class BeamStream:
    """The beam search of one prompt, as a stream with a single output at its end.

    Args:
        open_step: starts one step of one beam.
        count_ended: reports how many outputs ended for which reason to the engine's counters.
    """

    def __init__(
        self, inputs: InputProcessor, prompt: Prompt, params: BeamSearchParams, id: str,
        open_step: OpenStep, count_ended: Callable[[Mapping[Any, int]], Awaitable[Any]],
        on_output: Callable[[], None], *, logprobs: bool,
    ):  # fmt: skip
        self.inputs, self.prompt, self.params, self.id = inputs, prompt, params, id
        self.open_step, self.count_ended, self.logprobs = open_step, count_ended, logprobs
        self.ended, self.stopped, self._step_output = False, False, asyncio.Event()
        self._task = asyncio.ensure_future(self._counted())
        self._task.add_done_callback(lambda _: on_output())

    def take(self) -> RequestOutput | None:
        """The whole output once the search is done; None before. Raises the error if the search failed."""
        if self.ended or not self._task.done():
            return None
        self.ended = True
        return self._task.result()

    def stop(self) -> None:
        """End the search with the beams found so far; their finish reason is "abort"."""
        self.stopped = True
        self._step_output.set()

    def close(self) -> None:
        self._task.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # the error may not have been taken

    async def _counted(self) -> RequestOutput:
        """The search's output. Counts its finish reasons, also after an error."""
        ends: Mapping[Any, int] = {"error": self.params.beam_width}
        try:
            output = await self._searched()
            ends = dict(Counter(one.finish_reason for one in output.outputs))
            return output
        except asyncio.CancelledError:
            ends = {"abort": self.params.beam_width}
            raise
        finally:
            with suppress(QuireError):  # a dead engine counts nothing
                await self.count_ended(ends)

    async def _searched(self) -> RequestOutput:
        inputs, params, prompt = self.inputs, self.params, self.prompt
        ends, limit = frozenset(inputs.eos_token_ids), inputs.max_model_len
        search = BeamSearch(params, prompt.tokens, ends, limit, self.logprobs)
        for number in range(min(params.max_tokens, limit)):
            step = step_params(params, number)
            entries = await self._step(search, step, f"{self.id}.{number}")
            if entries is None:
                search.stop("abort")
            else:
                search.advance(entries)
            if not search.beams:
                break
        outputs = []
        for index, beam in enumerate(search.best()):
            tokens = beam.tokens[len(prompt.tokens) :]
            text = inputs.need_tokenizer().decode(tokens, params.skip_special_tokens)
            finish: Any = beam.finish_reason
            outputs.append(
                CompletionOutput(
                    index, text, tokens, beam.cum_logprob, beam.logprobs if self.logprobs else None,
                    finish, beam.stop_reason,
                )
            )  # fmt: skip
        return RequestOutput(self.id, prompt.text, prompt.tokens, None, outputs, finished=True)

    async def _step(
        self, search: BeamSearch, step: SamplingParams, id: str
    ) -> list[Position] | None:
        """Each beam's next token with its alternatives; None: a step was aborted."""
        streams: list[StepStream] = []
        try:
            for index, beam in enumerate(search.beams):
                prompt = Prompt(None, beam.tokens, self.prompt.salt, media=self.prompt.media)
                streams.append(
                    await self.open_step(prompt, step, f"{id}.{index}", self._step_output.set)
                )
                await asyncio.sleep(0)  # let other tasks run: a step of a wide beam takes long
            return await self._entries(streams)
        finally:
            for stream in streams:
                with suppress(Exception):
                    stream.close()

    async def _entries(self, streams: list[StepStream]) -> list[Position] | None:
        positions: dict[int, Position] = {}
        while not self.stopped:
            for index, stream in enumerate(streams):
                if index in positions:
                    continue
                output = stream.take()
                if output is not None and output.outputs[0].finish_reason != "abort":
                    positions[index] = entries_of(output)
                elif output is not None or stream.ended:
                    return None
            if len(positions) == len(streams):
                return [positions[index] for index in range(len(streams))]
            await self._step_output.wait()
            self._step_output.clear()
        return None
