"""WS /v1/realtime: sound comes in pieces, and its text goes out as it is drawn.

    client   session.update {model}, input_audio_buffer.append {audio}, input_audio_buffer.commit {final}
    server   session.created, transcription.delta {delta}, transcription.done {text, usage}, error {error, code}

Sound is PCM of 16 bits, one channel, 16,000 samples a second, in base64. The first commit begins a transcription: what has
come is written down, then each full window as it comes, and the rest of it at each further commit; a final one ends it.
Knows events and the queue of sound, which is bounded in seconds. Does not know how text is made.

Shape suffixes: N samples.
"""

from __future__ import annotations

import asyncio
import binascii
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pybase64
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from quire.errors import QuireError
from quire.frontend.media.log_mel import quiet_cuts
from quire.frontend.media.sound_inputs import RATE, Sound
from quire.frontend.transcription.inputs import TranscriptionInputs
from quire.frontend.transcription.prompt_reader import need_transcription
from quire.frontend.transcription.segments import NO_SPACES
from quire.frontend.transcription.speech_tokens import chosen_language
from quire.server.adapters import model_of
from quire.server.audio.fields import TranscriptionRequest
from quire.server.audio.transcription import TextDelta, Transcription
from quire.server.endpoint import RequestContext
from quire.server.errors import ENDS, as_api_error, clean
from quire.server.state import state_of

MOST_PENDING_S = 120
"""Seconds of sound that wait for their turn; more is refused."""
MOST_SECONDS = 4 * 3600
"""Of one transcription."""
IDLE_S = 600.0
"""Without an event, the server ends a session."""
REFUSED, TRY_LATER = 1008, 1013


class EventRefused(Exception):
    """An event that has no effect but an error. `code`: as clients of vLLM know it."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


async def realtime(socket: WebSocket) -> None:
    """The endpoint."""
    if not is_same_site(socket):
        await socket.close(
            REFUSED, "the page is of another site: start the server with --allowed-origins ORIGIN"
        )
        return
    try:
        engine = state_of(socket).serving()  # type: ignore[arg-type]
        inputs = need_transcription(engine.front, "/v1/realtime")
    except QuireError as error:
        known = as_api_error(error)
        await socket.close(REFUSED if known.status < 500 else TRY_LATER, clean(known.message)[:120])
        return
    await socket.accept()
    session = RealtimeSession(socket, inputs)
    try:
        await session.run()
    finally:
        await session.end()
    if socket.application_state is WebSocketState.CONNECTED:
        with suppress(RuntimeError, OSError):
            await socket.close()


def is_same_site(socket: WebSocket) -> bool:
    """Browsers let every page open sockets, and say which page it is; other programs say nothing."""
    origin = socket.headers.get("origin")
    if origin is None:
        return True
    allowed = state_of(socket).config.server.allowed_origins  # type: ignore[arg-type]
    own = urlsplit(origin).netloc == socket.headers.get("host")
    return own or origin in allowed or "*" in allowed


class RealtimeSession:
    """One socket."""

    def __init__(self, socket: WebSocket, inputs: TranscriptionInputs):
        self.socket, self.inputs = socket, inputs
        self.context: RequestContext | None = None
        self.language: str | None = None
        self.prompt: list[int] = []
        self.pending: list[np.ndarray] = []
        self.num_pending = self.num_taken = 0
        self.commits: asyncio.Queue[bool] = asyncio.Queue()
        self.grown = asyncio.Event()
        self.worker: asyncio.Task[None] | None = None
        self.number = 0

    async def send(self, kind: str, **fields: Any) -> None:
        with suppress(RuntimeError, OSError):  # the client is gone
            await self.socket.send_text(msgspec.json.encode({"type": kind, **fields}).decode())

    async def fail(self, code: str, message: str) -> None:
        await self.send("error", error=clean(message), code=code)

    # -- in -------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Read events until the client leaves, or is silent for too long."""
        await self.send("session.created", id=f"sess-{id(self):x}", created=int(time.time()))
        with suppress(WebSocketDisconnect, TimeoutError):
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await self.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                try:
                    await self.take(text if text is not None else message.get("bytes") or b"")
                except EventRefused as error:
                    await self.fail(error.code, str(error))
                except ENDS:
                    raise
                except BaseException as error:
                    await self.fail("processing_error", as_api_error(error).message)

    async def take(self, text: str | bytes) -> None:
        """One event. Raises EventRefused."""
        try:
            event = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EventRefused("invalid_json", "the event is not JSON") from None
        kind = event.get("type") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            raise EventRefused("invalid_event", "an event is an object with a `type`")
        if kind == "session.update":
            await self.update(event)
        elif kind not in ("input_audio_buffer.append", "input_audio_buffer.commit"):
            raise EventRefused("unknown_event", f"unknown event {kind[:60]!r}; there are session.update, input_audio_buffer.append and input_audio_buffer.commit")  # fmt: skip
        elif self.context is None:
            raise EventRefused("model_not_validated", "send session.update with `model` first")
        elif kind == "input_audio_buffer.append":
            self.append(event.get("audio"))
        else:
            self.commit(event.get("final", False))

    async def update(self, event: dict[str, Any]) -> None:
        """`model`, and maybe `language` and `prompt`; also inside `session`."""
        inner = event.get("session")
        given = {**event, **inner} if isinstance(inner, dict) else event
        name, language, prompt = (given.get(key) for key in ("model", "language", "prompt"))
        if not isinstance(name, str):
            raise EventRefused("invalid_event", "session.update needs `model`, a string")
        if not isinstance(language, str | None) or not isinstance(prompt, str | None):
            raise EventRefused("invalid_event", "`language` and `prompt` are strings")
        request: Any = self.socket
        state = state_of(request)
        try:
            model, adapter = await model_of(state, request, name)
        except QuireError as error:
            raise EventRefused("model_not_found", str(error)) from None
        try:
            self.language = chosen_language(
                language, self.inputs.tokens, self.inputs.language_names
            )
        except QuireError as error:
            raise EventRefused("invalid_event", str(error)) from None
        if prompt:
            state.serving().inputs.check_size(prompt)
            ids = self.inputs.tokenizer.encode(" " + prompt.strip(), False)
            self.prompt = [token for token in ids if token < self.inputs.tokens.end]
        self.context = RequestContext(request, state, state.serving(), model, adapter)

    def append(self, audio: Any) -> None:
        try:
            data = pybase64.b64decode(audio, validate=True) if isinstance(audio, str) else b""
        except (binascii.Error, ValueError):
            data = b""
        if not data or len(data) % 2:
            raise EventRefused("invalid_audio", "`audio` must be base64 of 16-bit samples, one channel, 16000 a second")  # fmt: skip
        count = len(data) // 2
        if self.num_pending + count > MOST_PENDING_S * RATE:
            raise EventRefused("invalid_audio", f"{self.num_pending / RATE:.1f} s of sound wait already, and {MOST_PENDING_S} may: send slower; this piece is dropped")  # fmt: skip
        if self.num_taken + count > MOST_SECONDS * RATE:
            raise EventRefused("invalid_audio", f"a transcription may have {MOST_SECONDS} s: commit it with final=true")  # fmt: skip
        self.pending.append((np.frombuffer(data, "<i2") / 32768).astype(np.float32))
        self.num_pending += count
        self.num_taken += count
        self.grown.set()

    def commit(self, final: Any) -> None:
        if not isinstance(final, bool):
            raise EventRefused("invalid_event", "`final` must be true or false")
        if self.commits.qsize() >= 64:
            raise EventRefused("invalid_event", "64 commits wait already; this one is dropped")
        self.commits.put_nowait(final)
        self.grown.set()
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.transcribe())

    # -- out ------------------------------------------------------------------------------------
    async def transcribe(self) -> None:
        """Write down what comes, until a final commit."""
        writer = LiveText(self)
        try:
            while True:
                flushes = final = False
                while not self.commits.empty():
                    flushes, final = True, self.commits.get_nowait()
                    if final:
                        break
                while self.num_pending >= self.inputs.model.samples or (
                    flushes and self.num_pending
                ):
                    await writer.write(self.window())
                if final:
                    break
                self.grown.clear()
                if self.commits.empty() and self.num_pending < self.inputs.model.samples:
                    await self.grown.wait()
            await self.send("transcription.done", text=writer.text, usage=writer.usage())
        except ENDS:
            raise
        except BaseException as error:
            self.pending, self.num_pending = [], 0
            await self.fail("processing_error", as_api_error(error).message)
        self.num_taken = self.num_pending

    def window(self) -> np.ndarray:
        """Take the next samples_N: a window up to a quiet place, or all."""
        samples_N = np.concatenate(self.pending)
        cuts = quiet_cuts(samples_N, self.inputs.model.samples)
        end = cuts[1] if len(cuts) > 1 else len(samples_N)
        self.pending, self.num_pending = [samples_N[end:]], len(samples_N) - end
        return samples_N[:end]

    async def end(self) -> None:
        """End what runs."""
        if self.worker is not None:
            self.worker.cancel()
            with suppress(BaseException):
                await self.worker


class LiveText:
    """The text of one transcription of a session."""

    def __init__(self, session: RealtimeSession):
        self.session = session
        self.text = ""
        self.before = list(session.prompt)
        self.language = session.language
        self.num_prompt = self.num_output = 0

    async def write(self, samples_N: np.ndarray) -> None:
        """Transcribe a window, and send its text as it is drawn."""
        session = self.session
        session.number += 1
        if session.context is None:
            raise RuntimeError("the session has no model")
        body = TranscriptionRequest(stream=True)
        sound = Sound("", samples_N, [0])
        id = f"live-{id_of(session)}-{session.number}"
        run = Transcription(session.context, id, body, session.inputs, sound, "transcribe", self.language, False)  # fmt: skip
        run.before = self.before
        is_new = bool(self.text)
        try:
            await run.open()
            while not run.ended:
                for item in await run.next():
                    if isinstance(item, TextDelta):
                        is_new = await self.send(item.text, is_new)
                    else:
                        text = [token for token in item.tokens if token < session.inputs.tokens.end]
                        most = session.inputs.most_before
                        self.before = (self.before + text)[-most:] if most else []
            self.num_prompt += run.num_prompt
            self.num_output += run.num_output
        finally:
            run.close()
        self.language = run.language

    async def send(self, text: str, is_new: bool) -> bool:
        """Whether the next text is still the first of its window. Windows are separated by a space."""
        if is_new or not self.text:
            text = text.lstrip()
            if not text:
                return is_new
            if self.text and self.language not in NO_SPACES and not self.text.endswith(" "):
                text = f" {text}"
        self.text += text
        await self.session.send("transcription.delta", delta=text)
        return False

    def usage(self) -> dict[str, int]:
        given, made = self.num_prompt, self.num_output
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def id_of(session: RealtimeSession) -> str:
    return f"{id(session):x}"
