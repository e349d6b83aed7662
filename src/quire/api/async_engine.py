"""AsyncEngine: streams for many callers on one engine, in one event loop. AsyncLLM and the HTTP server use it.

    caller   open() -------------------- take() --> RequestOutput
                 |                          ^
    loop     client.submit           RequestManager.process_outputs
                 |                          ^
    thread       `---> client ----- outputs()

One thread waits for the engine's outputs and posts them to the loop. All else runs in the loop, without locks.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from quire.api.run_in_thread import run_in_thread
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import EngineDeadError, QuireError, ValidationError
from quire.frontend.adapters import Steps
from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.output_processor import Tap
from quire.frontend.outputs import error_of
from quire.frontend.prompts import Prompt, read_prompt
from quire.frontend.request_manager import Accepted, Collector, RequestManager
from quire.frontend.tokenizer import Tokenizer
from quire.logging import get_logger
from quire.protocol.output import EngineOutput, EngineStats
from quire.protocol.request import RequestParams
from quire.protocol.sampling_params import SamplingParams

log = get_logger(__name__)

BREATH_S = 0.01  # how long sending one request may occupy the loop at a time
LONG_TEXT = 20_000  # characters: about 5 ms of tokenizing, for which other streams would wait


async def in_thread(size: int, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Run a call over `size` bytes in a thread."""
    return await asyncio.to_thread(call, *args, **keywords)


class OutputStream:
    """One request's outputs without an async iterator: the caller waits in its own way and calls `take`."""

    def __init__(self, engine: AsyncEngine, collector: Collector, on_output: Callable[[], None]):
        self.engine, self.collector, self.on_output = engine, collector, on_output
        self.ended = False
        """No more output will come."""

    def take(self) -> Any:
        """The new RequestOutput or PoolingRequestOutput; None: there is none yet, or the stream has ended.

        Raises:
            QuireError: the request failed.
            EngineDeadError: the engine has stopped.
        """
        output = self.collector.take()
        self.ended = self.collector.finished
        if output is None:
            if not self.ended:
                self.engine.check_alive()
        elif self.collector.failed and (error := error_of(output)) is not None:
            raise error
        return output

    def close(self) -> None:
        """Abort the request if it still runs."""
        self.engine.closed(self)


class AsyncEngine:
    """Created in any thread, used in one event loop at a time."""

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.client = client
        self.config = config or client.resolved.config
        self.front = RequestManager(client, tokenizer=tokenizer)
        self.inputs = self.front.inputs
        self.in_thread: Callable[..., Awaitable[Any]] = in_thread
        """Runs calls that would block the loop; a server sets threads of its own for that."""
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._close = weakref.finalize(self, client.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    # -- requests -------------------------------------------------------------------------------
    async def tokenize(self, prompt: Prompt, options: TokenizeOptions) -> Prompt:
        """The prompt as token ids that fit the model; a thread tokenizes a long text.

        Raises:
            ValidationError: as `InputProcessor.tokenize`.
        """
        if not is_long(prompt):
            return self.inputs.tokenize(prompt, options)
        tokenized: Prompt = await self.in_thread(
            len(prompt.text or ""), self.inputs.tokenize, prompt, options
        )
        return tokenized

    async def open(
        self, prompt: Any, params: RequestParams | None, request_id: str, on_output: Callable[[], None],
        *, prompt_text: str | None = None, lora_request: Any = None, tap: Tap | None = None, waits: bool = False,
        **options: Any,
    ) -> OutputStream:  # fmt: skip
        """Start a request. It runs until the stream is closed.

        Args:
            on_output: called in the loop when there may be a new output.
            lora_request: a LoRARequest, or the name of a loaded adapter.
            tap: gets each output of the engine, before the collector does.
            waits: the engine does not get it before `go_on`.
            options: as for `InputProcessor.accept`.
        """
        self._enter_loop()
        if lora_request is not None:
            options["adapter"] = await self.run(self.front.adapters.name_for(lora_request))
            options["lora_request"] = lora_request
        if not request_id:
            raise ValidationError("request_id must be a text of your own", parameter="request_id")
        parsed = read_prompt(prompt)
        accept = partial(self.front.accept, parsed, params, id=request_id, **options)
        takes_time = isinstance(params, SamplingParams) and params.structured_outputs is not None
        takes_time = takes_time or bool(parsed.items)
        size = len(parsed.text or "") if is_long(parsed) else 0
        accepted = await self.in_thread(size, accept) if takes_time or size else accept()
        if prompt_text is not None:
            accepted.prompt = accepted.prompt or prompt_text
        self.check_alive()
        collector = self.front.register(accepted)
        stream = self._streams[request_id] = OutputStream(self, collector, on_output)
        collector.tap = tap
        try:
            if not waits:
                await self._send(accepted, collector)
        except BaseException:
            self.closed(stream)
            raise
        return stream

    def replay(self, stream: OutputStream, outputs: Iterable[EngineOutput]) -> None:
        """Outputs that an earlier process received of a request that waits, which has one output."""
        for output in outputs:
            stream.collector.add(0, output, time.time())
        if stream.collector.finished:
            self.front.forget(stream.collector)
        stream.on_output()

    async def go_on(self, stream: OutputStream, tokens: list[int]) -> None:
        """Send a request that waits, of one output, which has these tokens already (`replay`)."""
        collector = stream.collector
        if not collector.finished:
            accepted = collector.accepted
            (child,) = accepted.children
            num_prompt = len(child.tokens) if tokens else 0
            accepted.children[0] = msgspec.structs.replace(
                child, tokens=[*child.tokens, *tokens], num_prompt=num_prompt
            )
            await self._send(accepted, collector)

    async def _send(self, accepted: Accepted, collector: Collector) -> None:
        """Send it to the engine. Lets other callbacks run between copies: encoding many of them takes time."""
        until = time.monotonic() + BREATH_S
        for child in accepted.children:
            if time.monotonic() > until:
                await asyncio.sleep(0)
                self.check_alive()
                if self.front.live.get(collector.id) is not collector:
                    return  # it was aborted
                until = time.monotonic() + BREATH_S
            try:
                self.client.submit(child)
            except BaseException:
                self.front.forget(collector)
                raise

    def closed(self, stream: OutputStream) -> None:
        """Remove a closed stream; abort its request if it still runs."""
        collector = stream.collector
        if self._streams.get(collector.id) is stream:
            del self._streams[collector.id]
        if not collector.finished and self.front.live.get(collector.id) is collector:
            with suppress(EngineDeadError):
                self.front.abort([collector.id])

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their streams end with finish_reason "abort". Ignores unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for collector in self.front.abort(ids):
            self._notify(collector)

    def _notify(self, collector: Collector) -> None:
        if (stream := self._streams.get(collector.id)) is not None:
            stream.on_output()

    # -- text -----------------------------------------------------------------------------------
    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        """Raises ValidationError: there is no tokenizer."""
        return self.front.need_tokenizer().decode(tokens, skip_special)

    def token_text(self, token: int) -> str:
        """The name of a token in log-probabilities."""
        return "" if self.tokenizer is None else self.tokenizer.piece(token)

    # -- the loop and the thread ----------------------------------------------------------------
    async def listen(self) -> None:
        """Process the engine's outputs from now on, not only from the first request on."""
        self._enter_loop()

    def _enter_loop(self) -> None:
        """Raises EngineDeadError; RuntimeError: another loop uses this object."""
        self.check_alive()
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._streams and not self._loop.is_closed():
            raise RuntimeError(
                "this AsyncLLM has requests in another event loop: make one for each loop"
            )
        first, self._loop = self._loop is None, loop
        self._streams.clear()
        self.front.abort(list(self.front.live))  # requests of a closed loop
        if first:
            threading.Thread(
                target=_receive_outputs, args=(self.client, weakref.ref(self)), name="quire-outputs", daemon=True
            ).start()  # fmt: skip

    def _process_outputs(self, outputs: list[EngineOutput]) -> None:
        try:
            for collector in self.front.process_outputs(outputs):
                self._notify(collector)
        except EngineDeadError as error:
            self._fail(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # A bug, or a tokenizer's panic, must not leave streams waiting forever.
            log.exception("the frontend failed")
            self._fail(EngineDeadError(f"the frontend failed: {type(error).__name__}: {error}"))

    def _fail(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        for stream in list(self._streams.values()):
            stream.on_output()

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        """Called in the thread: run `call` in the loop. Ignores a closed loop, which has no waiters."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call, *args)

    # -- the engine -----------------------------------------------------------------------------
    def check_alive(self) -> None:
        """Raises EngineDeadError: the engine will never answer again."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def check(self) -> None:
        """Raises EngineDeadError, or EngineDelayed: the engine restarts later."""
        self.client.check()
        self.check_alive()

    def is_ready(self) -> bool:
        """Whether the engine takes requests now; False while it is being replaced."""
        return self.client.state().condition == "ready"

    def stats(self) -> EngineStats:
        """The latest statistics; never waits."""
        return self.client.stats()

    async def run(self, steps: Steps[Any]) -> Any:
        """Make the calls of `frontend/adapters.py`, without blocking the loop."""
        try:
            wanted = next(steps)
            while True:
                try:
                    result = await run_in_thread(wanted)
                except Exception as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(result)
        except StopIteration as done:
            return done.value

    async def call(self, name: str, *args: Any, engine: int | None = None) -> Any:
        """Call a named function of the engine, without blocking the loop. `engine`: of this one of several alone."""
        client = self.client if engine is None else self.client.engines[engine]
        return await run_in_thread(client.call, name, *args)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine. Streams that still run end with EngineDeadError."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        self._close()
        self._post(self._fail, self._dead)


def is_long(prompt: Prompt) -> bool:
    """Whether its text must still be tokenized, or its embeddings checked, and takes long."""
    return not prompt.tokens and (
        len(prompt.text or "") >= LONG_TEXT or prompt.embeddings is not None
    )


def _receive_outputs(client: EngineClient, reference: weakref.ref[AsyncEngine]) -> None:
    """The output thread. It must not keep the AsyncEngine alive: a dropped one closes its client, which ends this."""
    while True:
        try:
            outputs = client.outputs()
        except Exception as error:
            if (engine := reference()) is not None:
                dead = error if isinstance(error, EngineDeadError) else _as_dead(error)
                # the loop may be closed, and the next one must know
                engine._dead = engine._dead or dead
                engine._post(engine._fail, dead)
            return
        if (engine := reference()) is not None:
            engine._post(engine._process_outputs, outputs)
        del engine


def _as_dead(error: Exception) -> EngineDeadError:
    if not isinstance(error, QuireError):
        log.error("waiting for the engine failed", exc_info=error)
    return EngineDeadError(f"{type(error).__name__}: {error}")
