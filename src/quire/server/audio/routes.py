"""POST /v1/audio/transcriptions and /v1/audio/translations.

Knows the order: form, limits, sound, engine, answer. Does not know how texts are made.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from quire import env
from quire.errors import Unsupported
from quire.frontend.transcription.inputs import TranscriptionInputs
from quire.frontend.transcription.prompt_reader import need_transcription
from quire.frontend.transcription.speech_tokens import chosen_language
from quire.models.sound import has_parts
from quire.server.adapters import model_of
from quire.server.audio.answers import TranscriptionAnswer
from quire.server.audio.fields import TranscriptionRequest, read_fields
from quire.server.audio.multipart import PACKAGE, Form, boundary_of, read_form
from quire.server.audio.transcription import Transcription, check_model
from quire.server.endpoint import RequestContext
from quire.server.errors import ApiError, invalid
from quire.server.request_body import read_body
from quire.server.sse import EventStream, until_disconnect
from quire.server.state import state_of
from quire.server.tokenizer_pool import run_alone

MIB = 1 << 20
FORM_ROOM = MIB  # bytes of a form beside its file
IDS = {"transcribe": "trsc-", "translate": "trsl-"}
TIMED = ("srt", "vtt", "verbose_json")


async def transcriptions(request: Request) -> Response | EventStream:
    """Writes down the speech of a sound file."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response | EventStream:
    """Writes down the speech of a sound file in English."""
    return await _answer(request, "translate")


async def realtime_needs_a_socket(request: Request) -> Response:
    """Live sound needs a WebSocket."""
    lacks = (
        ""
        if find_spec("websockets")
        else ", and this server lacks a package: pip install quire[audio]"
    )
    raise invalid(f"/v1/realtime needs a WebSocket{lacks}")


async def _answer(request: Request, task: str) -> Response | EventStream:
    state = state_of(request)
    engine = state.serving()
    inputs = need_transcription(engine.front, request.url.path)
    check_model(inputs, task)
    form = await _form(request)
    body = read_fields(form)
    file = form.files.get("file")
    if file is None:
        kind = "is a text, not a file: send it with a file name (curl: -F file=@speech.wav)"
        raise invalid("`file` " + (kind if "file" in form.fields else "is missing"), "file")
    model, adapter = await model_of(state, request, body.model)
    context = RequestContext(request, state, engine, model, adapter)
    language = _language(body, inputs)
    if "word" in body.timestamp_granularities and has_parts(engine.client.resolved):
        raise Unsupported("times of words with several ranks", "ask for segment, or serve with one")
    window = inputs.model.samples
    loading = inputs.sound.load(file.data, "file", window)
    del form, file
    sound = await until_disconnect(request.receive, loading)
    timed = body.response_format in TIMED or body.condition_on_previous_text
    id = context.new_id(IDS[task], body)
    source = Transcription(context, id, body, inputs, sound, task, language, timed)
    answer = TranscriptionAnswer(source)
    if body.stream:
        stream = EventStream(source, answer, request.receive, state.config.server.sse_keep_alive_interval)  # fmt: skip
        await stream.prepare()
        return stream
    return await answer.response(await until_disconnect(request.receive, source.whole()))


def _language(body: TranscriptionRequest, inputs: TranscriptionInputs) -> str | None:
    return chosen_language(body.language, inputs.tokens, inputs.language_names)


async def _form(request: Request) -> Form:
    """The form of a request; a thread reads it.

    Raises:
        ApiError: 400: no form; 413: it is too long; 408: it does not arrive in time.
    """
    if find_spec("python_multipart") is None:
        raise invalid(f"forms need a package that this server lacks: pip install {PACKAGE}")
    state = state_of(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    most = int(env.get("MAX_AUDIO_CLIP_FILESIZE_MB"))
    try:
        body = await read_body(request, most * MIB + FORM_ROOM, state.config.server.receive_timeout)
    except ApiError as error:
        if error.status != 413:
            raise
        raise ApiError(
            413, f"`file`: the limit is {most} MiB (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB): send it in parts",
            param="file", headers=error.headers,
        ) from None  # fmt: skip
    form = await state.texts.run_sized(len(body), partial(run_alone, read_form, body, boundary))
    for name, file in form.files.items():
        if len(file.data) > most * MIB:
            raise ApiError(413, f"`{name[:40]}`: the file has {len(file.data)} bytes; the limit is {most} MiB (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB)", param=name[:40])  # fmt: skip
    return form
