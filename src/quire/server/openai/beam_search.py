"""Beam search over HTTP, as a stream with a single output at its end.

Knows which request fields it accepts and how to request its steps. `frontend/beam_search.py` does the search itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.frontend.beam_search import BeamSearch, entries_of, step_params
from quire.frontend.logprobs import Position
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams
from quire.server.engine_protocol import StreamLike, TextEngine, TokenizedPrompt
from quire.server.errors import invalid
from quire.server.schemas import Sampling

NOT_WITH_IT = (
    "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "prompt_logprobs", "logprob_token_ids", "repetition_detection",
    "thinking_token_budget", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_json_object", "echo", "best_of", "tools",
)  # fmt: skip
"""Fields that would change the search. Sampling fields (top_p, seed) are accepted and ignored: nothing is sampled."""


def beams_of(
    request: Sampling, params: SamplingParams, defaults: Mapping[str, Any]
) -> BeamSearchParams | None:
    """None: the request uses no beam search.

    Raises:
        ApiError: 400 that names a field that beam search does not support.
    """
    if not request.use_beam_search:
        return None
    for name in NOT_WITH_IT:
        if getattr(request, name, None):
            raise invalid(
                f"`{name}` is not supported with `use_beam_search`; leave one of them out", name
            )
    asked = request.temperature
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or 1 << 30,
        ignore_eos=params.ignore_eos,
        temperature=float(defaults.get("temperature", 1.0)) if asked is None else asked,
        length_penalty=request.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


class BeamStream:
    """The beam search of one prompt."""

    def __init__(
        self, engine: TextEngine, prompt: TokenizedPrompt, params: BeamSearchParams, name: str,
        heard: Callable[[], None], *, logprobs: bool, **options: Any,
    ):  # fmt: skip
        self.engine, self.prompt, self.params, self.name = engine, prompt, params, name
        self.logprobs, self.options = logprobs, options
        self.ended, self.stopped, self._news = False, False, asyncio.Event()
        self.arrived = time.time()
        self._task = asyncio.ensure_future(self._counted())
        self._task.add_done_callback(lambda _: heard())

    def take(self) -> RequestOutput | None:
        """The whole output once the search is done; None before. Raises the error if the search failed."""
        if self.ended or not self._task.done():
            return None
        self.ended = True
        return self._task.result()

    def stop(self) -> None:
        """End the search with the beams found so far; their finish reason is "abort"."""
        self.stopped = True
        self._news.set()

    def close(self) -> None:
        self._task.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # the error may not have been taken

    async def _counted(self) -> RequestOutput:
        """The search's output. Reports its finish reasons to the engine's counters, also after an error."""
        ends: Mapping[Any, int] = {"error": self.params.beam_width}
        try:
            found = await self._found()
            ends = dict(Counter(one.finish_reason for one in found.outputs))
            return found
        except asyncio.CancelledError:
            ends = {"abort": self.params.beam_width}
            raise
        finally:
            with suppress(QuireError):  # a dead engine counts nothing
                await self.engine.call("count_ended", ends)

    async def _found(self) -> RequestOutput:
        engine, params, prompt = self.engine, self.params, self.prompt
        search = BeamSearch(
            params,
            prompt.tokens,
            frozenset(engine.eos_token_ids),
            engine.max_model_len,
            self.logprobs,
        )
        step = step_params(params)
        for number in range(min(params.max_tokens, engine.max_model_len)):
            answers = await self._step(search, step, f"{self.name}.{number}")
            if answers is None:
                search.stop("abort")
            else:
                search.advance(answers)
            if not search.beams:
                break
        outputs = []
        for index, beam in enumerate(search.best()):
            tokens = beam.tokens[len(prompt.tokens) :]
            text = engine.decode(tokens, skip_special=params.skip_special_tokens)
            told = beam.logprobs if self.logprobs else None
            finish: Any = beam.finish_reason
            outputs.append(
                CompletionOutput(
                    index, text, tokens, beam.cum_logprob, told, finish, beam.stop_reason
                )
            )
        return RequestOutput(self.name, prompt.text, prompt.tokens, None, outputs, finished=True)

    async def _step(
        self, search: BeamSearch, step: SamplingParams, name: str
    ) -> list[Position] | None:
        """Each beam's next token with its alternatives; None: a step was aborted."""
        news = self._news
        streams: list[StreamLike] = []
        try:
            for at, beam in enumerate(search.beams):
                prompt, own = TokenizedPrompt(beam.tokens, None, self.prompt.salt), f"{name}.{at}"
                params = msgspec.structs.replace(step)
                streams.append(
                    await self.engine.open(
                        prompt,
                        params,
                        own,
                        news.set,
                        inner=True,
                        arrived=self.arrived,
                        **self.options,
                    )
                )
                await asyncio.sleep(0)  # let other tasks run: a step of a wide beam takes long
            return await self._answers(streams)
        finally:
            for stream in streams:
                with suppress(Exception):
                    stream.close()

    async def _answers(self, streams: list[StreamLike]) -> list[Position] | None:
        found: dict[int, Position] = {}
        while not self.stopped:
            for at, stream in enumerate(streams):
                if at in found:
                    continue
                output = stream.take()
                if output is not None and output.outputs[0].finish_reason != "abort":
                    found[at] = entries_of(output)
                elif output is not None or stream.ended:
                    return None
            if len(found) == len(streams):
                return [found[at] for at in range(len(streams))]
            await self._news.wait()
            self._news.clear()
        return None
