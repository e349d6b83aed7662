"""The fields of a form that asks for a transcription: OpenAI's, vLLM's and openai-whisper's names.

Knows names, types and ranges. Does not know sound.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.errors import Unsupported
from quire.server.audio.multipart import Form
from quire.server.errors import invalid

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
Granularity = Literal["segment", "word"]
LISTS = ("timestamp_granularities", "include")


class TranscriptionRequest(Struct, kw_only=True):
    """The fields beside `file`."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    timestamp_granularities: list[Granularity] = []
    include: list[str] = []
    temperature: float = 0.0
    stream: bool = False
    stream_format: Literal["openai", "vllm"] = "openai"
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    chunking_strategy: Any = None
    condition_on_previous_text: bool = False
    temperature_increment_on_fallback: float = 0.2
    compression_ratio_threshold: float = 2.4
    logprob_threshold: float = -1.0
    no_speech_threshold: float = 0.6
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    n: int = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0


KNOWN = frozenset(TranscriptionRequest.__struct_encode_fields__)


def read_fields(form: Form) -> TranscriptionRequest:
    """Raises ApiError 400, Unsupported: a field has a wrong value."""
    values: dict[str, Any] = {}
    for name, given in form.fields.items():
        plain = name.removesuffix("[]")
        if plain not in KNOWN:
            continue
        if plain in LISTS:
            values.setdefault(plain, []).extend(given)
        elif given[-1] != "":
            values[plain] = given[-1]
    for name in ("vllm_xargs", "chunking_strategy"):
        if str(values.get(name, "")).lstrip().startswith(("{", "[")):
            try:
                values[name] = json.loads(values[name])
            except (ValueError, RecursionError):
                raise invalid(f"`{name}`: must be JSON", name) from None
    try:
        body = msgspec.convert(values, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        field = text.rpartition("`$.")[2].strip("`").partition("[")[0] if "`$." in text else None
        raise invalid(
            f"`{field}`: {text.partition(' - at')[0]}" if field else text, field
        ) from None
    check(body)
    return body


def check(body: TranscriptionRequest) -> None:
    """Raises ApiError 400, Unsupported."""
    if body.response_format == "diarized_json":
        raise Unsupported("response_format diarized_json", "use verbose_json")
    if body.response_format not in FORMATS:
        raise invalid(f"`response_format`: must be one of {', '.join(FORMATS)}", "response_format")
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("temperature_increment_on_fallback", 0.0, 1.0),
        ("no_speech_threshold", 0.0, 1.0),
    ):
        if not low <= getattr(body, name) <= high:  # NaN too
            raise invalid(f"`{name}`: must be between {low:g} and {high:g}", name)
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise invalid("`max_completion_tokens`: must be at least 1", "max_completion_tokens")
    if body.n != 1:
        raise invalid("`n`: a transcription has one text", "n")
    if body.use_beam_search:
        raise Unsupported("use_beam_search of transcriptions", "leave it out")
    if body.stream and body.response_format not in ("json", "text", "verbose_json"):
        raise invalid(f"`stream`: {body.response_format} is sent in one piece; stream json, text or verbose_json", "stream")  # fmt: skip
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise invalid(
            "`timestamp_granularities`: needs response_format=verbose_json",
            "timestamp_granularities",
        )
    strategy = body.chunking_strategy
    if strategy not in (None, "auto") and not isinstance(strategy, dict):
        raise invalid("`chunking_strategy`: must be auto, or an object", "chunking_strategy")
