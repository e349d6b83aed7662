"""Transcription: the windows of a sound, from the engine to texts in order.

    sound -> windows at quiet places -> each an engine request, at most AT_ONCE of them at once -> texts, in order
    or, with condition_on_previous_text: one window after the other, each from the last timestamp of the one before, with its text

A window whose text repeats itself or is unlikely is tried again at a higher temperature, unless the answer is streamed. Knows
engine requests and windows. Does not know answer shapes.

Shape suffixes: N samples.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.frontend.media.sound_inputs import RATE, Sound
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.transcription.inputs import FEATURE, TranscriptionInputs
from quire.frontend.transcription.segments import WindowText, split, text_of
from quire.frontend.transcription.speech_tokens import SpeechTokens
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams
from quire.server.audio.fields import TranscriptionRequest
from quire.server.engine_requests import EngineRequests, RunningRequest, out_of_time
from quire.server.errors import invalid
from quire.server.wakeup import Wakeup

AT_ONCE = 8
RESET_ABOVE = 0.5
"""Text that was drawn at a higher temperature is not carried over."""
HALF_CHARACTER = "\ufffd"


@dataclass(slots=True)
class TextDelta:
    """New text of a window; `token`: with its log-probability."""

    window: int
    text: str
    num_tokens: int = 0


@dataclass(slots=True)
class Attempt:
    """The output of an engine request so far. `skipped`: its first tokens, which are no text."""

    skipped: int
    special: SpeechTokens
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    no_speech: float | None = None
    records: Sequence[tuple[int, bytes]] = ()
    """See `TranscriptionInputs.words`."""

    def add(self, one: CompletionOutput) -> None:
        self.records = one.details.get(FEATURE, ())
        for token, position in zip(one.token_ids, one.logprobs or (), strict=False):
            place = position or {}
            if not self.tokens and self.special.no_speech in place:
                self.no_speech = math.exp(place[self.special.no_speech].logprob)
            self.tokens.append(token)
            self.scores.append(place[token].logprob if token in place else 0.0)

    def window(self, seconds: float, timed: bool) -> WindowText:
        text, scores = self.tokens[self.skipped :], self.scores[self.skipped :]
        end = self.special.end
        tokens = text[:-1] if text[-1:] == [end] else text
        found = WindowText(0.0, seconds, tokens, text_of(tokens, self.special, self.tokenizer))
        found.no_speech = self.no_speech
        found.mean_logprob = sum(scores) / len(scores) if scores else 0.0
        found.logprobs = [pair for pair in zip(text, scores, strict=True) if pair[0] < end]
        split(found, timed, self.special, self.tokenizer)
        return found


@dataclass(slots=True)
class Transcription(EngineRequests):
    """Call `open`, then `next` until `ended`, and `close` in any case. `next` gives TextDelta and WindowText.

    Attributes:
        task: transcribe or translate.
        language: a code; None: it is detected in the first window.
        timed: whether the output has timestamps.
        before: tokens of the text before the sound.
    """

    body: TranscriptionRequest
    inputs: TranscriptionInputs
    sound: Sound
    task: str
    language: str | None
    timed: bool
    ended: bool = False
    before: list[int] = field(default_factory=list)
    windows: list[WindowText] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    _wakeup: Wakeup = field(default_factory=Wakeup)
    _new: list[TextDelta | WindowText] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _until: float | None = None
    _number: int = 0

    @property
    def seconds(self) -> int:
        """As usage counts them."""
        return math.ceil(self.sound.seconds)

    # -- an EventSource ---------------------------------------------------------------------------
    async def open(self) -> None:
        """Start. Raises ValidationError: the prompt is too long to be read."""
        tokens, tokenizer = self.inputs.tokens, self.inputs.tokenizer
        if self.body.prompt:
            self.context.engine.inputs.check_size(self.body.prompt)
            text = " " + self.body.prompt.strip()
            self.before = [id for id in tokenizer.encode(text, False) if id < tokens.end]
        if self.body.timeout is not None:
            self._until = asyncio.get_running_loop().time() + self.body.timeout
        self._task = asyncio.create_task(self._run())

    async def next(self) -> list[TextDelta | WindowText]:
        """What is new, as soon as there is any. It may be cancelled and called again: nothing is lost.

        Raises:
            QuireError: a window failed. ApiError: 408 when `timeout` ran out.
        """
        if self._task is None:
            raise RuntimeError("it is not open")
        while not (self._new or self._task.done()):
            await self._wakeup.wait()
        new, self._new = self._new, []
        if self._task.done() and not new:
            self._task.result()
            self.ended = True
        return new

    def close(self) -> None:
        """End what still runs, and count."""
        if self._task is not None:
            self._task.cancel()
        context = self.context
        if (tenant := context.tenant) is not None and tenant.name:
            tenant.tokens.take(self.num_prompt + self.num_output)
            context.state.metrics.by_key(tenant.name, self.num_prompt, self.num_output)
        self.num_prompt = self.num_output = 0

    async def whole(self) -> list[WindowText]:
        """All windows, in order."""
        try:
            await self.open()
            while not self.ended:
                await self.next()
        finally:
            self.close()
        return self.windows

    # -- windows ----------------------------------------------------------------------------------
    async def _run(self) -> None:
        try:
            async with asyncio.timeout_at(self._until):
                one_by_one = self.body.condition_on_previous_text
                found = self._in_sequence() if one_by_one else self._in_parallel()
                async with aclosing(found):
                    async for window in found:
                        self.windows.append(window)
                        self._tell(window)
        except TimeoutError:
            raise out_of_time(self.body.timeout) from None
        finally:
            self._wakeup.set()

    def _tell(self, new: TextDelta | WindowText) -> None:
        self._new.append(new)
        self._wakeup.set()

    async def _in_parallel(self) -> AsyncGenerator[WindowText, None]:
        """Windows between the cuts. Those after the first wait until the language is known."""
        cuts = [*self.sound.cuts, len(self.sound.samples_N)]
        bounds = list(itertools.pairwise(cuts))
        known, turns = asyncio.Event(), asyncio.Semaphore(AT_ONCE)
        turn_of = [asyncio.Event() for _ in bounds]  # whose deltas may be sent
        if self.language is not None or not self.inputs.tokens.languages:
            known.set()
        turn_of[0].set()

        async def one(number: int) -> WindowText:
            async with turns:
                if number:
                    await known.wait()
                try:
                    return await self._window(
                        number, *bounds[number], self.before, known, turn_of[number]
                    )
                finally:
                    known.set()

        tasks = [asyncio.create_task(one(number)) for number in range(len(bounds))]
        try:
            for number, task in enumerate(tasks):
                turn_of[number].set()
                await _first_failure(tasks, task)
                yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_sequence(self) -> AsyncGenerator[WindowText, None]:
        """Each window begins where the last segment of the one before ends, and its prompt has the text before."""
        samples, start, number = len(self.sound.samples_N), 0, 0
        before, always = list(self.before), asyncio.Event()
        always.set()
        while start < samples:
            end = min(start + self.inputs.model.samples, samples)
            window = await self._window(number, start, end, before, None, always)
            yield window
            number += 1
            start += max(int(window.advance * RATE), RATE // 50)
            text = [token for token in window.tokens if token < self.inputs.tokens.end]
            before = (
                (before + text)[-self.inputs.most_before :]
                if window.temperature <= RESET_ABOVE
                else []
            )

    async def _window(
        self, number: int, start: int, end: int, before: list[int], known: asyncio.Event | None,
        turn: asyncio.Event,
    ) -> WindowText:  # fmt: skip
        """The text of a window: the first attempt that can be trusted, else the last."""
        samples_N = self.sound.samples_N[start:end]
        for temperature in self._temperatures():
            sender = _Sender(self, number, turn) if self.body.stream else None
            window = await self._attempt(number, samples_N, before, temperature, known, sender)
            if self._can_be_trusted(window):
                break
        if self._is_silence(window):
            window.tokens, window.text, window.segments, window.words = [], "", [], []
        window.offset = start / RATE
        for segment in window.segments:
            segment.start, segment.end = segment.start + window.offset, segment.end + window.offset
        for word in window.words:
            word.start, word.end = word.start + window.offset, word.end + window.offset
        return window

    def _temperatures(self) -> Iterator[float]:
        first, step = self.body.temperature, self.body.temperature_increment_on_fallback
        yield first
        if self.body.stream or first or not step:
            return
        for attempt in range(1, int(1 / step + 1e-6) + 1):
            yield round(attempt * step, 6)

    def _is_silence(self, window: WindowText) -> bool:
        """Never of a stream, whose text is already sent."""
        body = self.body
        quiet = window.no_speech is not None and window.no_speech > body.no_speech_threshold
        return quiet and window.mean_logprob < body.logprob_threshold and not body.stream

    def _can_be_trusted(self, window: WindowText) -> bool:
        body = self.body
        if self._is_silence(window):
            return True
        return (
            window.compression <= body.compression_ratio_threshold
            and window.mean_logprob >= body.logprob_threshold
        )

    async def _attempt(
        self, number: int, samples_N: np.ndarray, before: list[int], temperature: float,
        known: asyncio.Event | None, sender: _Sender | None,
    ) -> WindowText:  # fmt: skip
        """One engine request."""
        inputs, special = self.inputs, self.inputs.tokens
        wants_words = "word" in self.body.timestamp_granularities
        aligned = inputs.states_of(len(samples_N)) if wants_words else 0
        rules = special.rules(self.language, self.task, self.timed, aligned)
        prompt = await inputs.window(samples_N, before, rules, self.body.cache_salt or "", "file")
        attempt = Attempt(len(rules.prefix), special, inputs.tokenizer)
        found = self._completions(prompt, self._params(temperature, attempt.skipped))
        with self.context.state.media_room.take(len(prompt.media[0].data)):
            async with aclosing(found):
                async for one in found:
                    attempt.add(one)
                    if self.language is None and special.languages and attempt.tokens:
                        self.language = special.language_of(attempt.tokens[0])
                        if known is not None:
                            known.set()
                    if sender is not None:
                        await sender.send(attempt.tokens[attempt.skipped :])
        window = attempt.window(len(samples_N) / RATE, self.timed)
        window.language, window.temperature = self.language, temperature
        if aligned:
            first = len(prompt.tokens) + attempt.skipped
            window.words = await inputs.words(attempt.records, window, first, aligned)
        if sender is not None:
            await sender.send(window.tokens, whole=True)
        return window

    # -- the engine -------------------------------------------------------------------------------
    def _params(self, temperature: float, skipped: int) -> SamplingParams:
        body, special = self.body, self.inputs.tokens
        most = body.max_completion_tokens
        given: dict[str, Any] = {
            "top_p": body.top_p, "top_k": body.top_k, "min_p": body.min_p, "frequency_penalty": body.frequency_penalty,
            "presence_penalty": body.presence_penalty, "repetition_penalty": body.repetition_penalty,
        }  # fmt: skip
        return SamplingParams(
            temperature=temperature, max_tokens=None if most is None else most + skipped, detokenize=False,
            logprob_token_ids=[special.no_speech] if special.no_speech >= 0 else [special.end],
            output_kind=RequestOutputKind.DELTA, extra_args=body.vllm_xargs,
            seed=(body.seed or 0) if temperature else body.seed,
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip

    async def _completions(
        self, prompt: Prompt, params: SamplingParams
    ) -> AsyncGenerator[CompletionOutput, None]:
        """The new output of an engine request, step by step. It ends when nobody waits for it any more."""
        self._number += 1
        running, wakeup = self.begin(self._number, 2, prompt, params), Wakeup()
        count = 0
        try:
            options = self.context.engine_options(self.body)
            running.stream = await self.context.engine.open(
                prompt, params, running.name, wakeup.set, **options
            )
            self.num_prompt += running.num_tokens
            while not running.stream.ended:
                await wakeup.wait()
                output: RequestOutput | None = self.take(running)
                if output is None:
                    continue
                count += len(output.outputs[0].token_ids)
                self.num_output += len(output.outputs[0].token_ids)
                self._note(running, output)
                yield output.outputs[0]
        finally:
            self.end(running, 0, [count], max_tokens=params.max_tokens)

    def _note(self, running: RunningRequest, output: RequestOutput) -> None:
        running.times = getattr(output, "metrics", None)
        running.timer.engine = getattr(running.times, "engine", 0)
        running.timer.output(whole=False)


class _Sender:
    """Sends the text of a window as it grows, when it is the window's turn. Parts of a character wait for the rest."""

    def __init__(self, run: Transcription, number: int, turn: asyncio.Event):
        self.run, self.number, self.turn = run, number, turn
        self.sent, self.seen = "", 0

    async def send(self, tokens: list[int], whole: bool = False) -> None:
        if whole:
            await self.turn.wait()
        if not self.turn.is_set():
            return
        inputs = self.run.inputs
        text = text_of(tokens, inputs.tokens, inputs.tokenizer)
        if text.endswith(HALF_CHARACTER) and not whole:
            return
        if new := text[len(self.sent) :]:
            self.run._tell(TextDelta(self.number, new, len(tokens) - self.seen))
            self.sent, self.seen = text, len(tokens)


async def _first_failure(
    tasks: list[asyncio.Task[WindowText]], wanted: asyncio.Task[WindowText]
) -> None:
    """Return when the task is done. Raises: what another raised before."""
    pending = {task for task in tasks if not task.done()} | {wanted}
    while not wanted.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def check_model(inputs: TranscriptionInputs, task: str) -> None:
    """Raises ApiError 400: the model does not translate."""
    if task == "translate" and not inputs.tokens.languages:
        raise invalid(
            "this model writes English only and does not translate: use /v1/audio/transcriptions"
        )
