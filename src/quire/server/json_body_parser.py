"""Decodes a long body into a Struct, field by field, so that no single JSON call takes long.

    bytes -> raw JSON of each known field -> check of its size and its number of values -> its value

A JSON call keeps the GIL until it ends, in any thread, and 16 MiB of small values take half a second. Fields that a
Struct does not have are skipped, not decoded. Knows JSON and Structs; of fields it knows only their size limits.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.server.errors import ApiError, invalid

T = TypeVar("T", bound=msgspec.Struct)

PIECE = 1 << 20  # bytes of a list of numbers for one JSON call
MOST_OF_A_FIELD = 256 << 10  # bytes; for stop, bad_words, and much shorter ones
MOST_VALUES = 250_000  # JSON values of a field: decoding them takes less than 0.1 s
FIELD_BYTES = {
    "chat_template_kwargs": 64 << 10,
    "vllm_xargs": 64 << 10,
    "metadata": 64 << 10,
    "tools": 2 << 20,
    **dict.fromkeys(("response_format", "structured_outputs", "text", "output_config"), 2 << 20),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), 2 << 20),
    "logit_bias": 4 << 20,  # 65,536 entries fit
    "allowed_token_ids": 4 << 20,  # every token of the largest vocabulary fits
    "request_ids": 4 << 20,
    "sampling_params": 4 << 20,
}
"""Field -> bytes of JSON. Fields of the prompt have no limit here, but the body has one, and the model's context."""
PROMPTS = frozenset(
    "prompt tokens token_ids messages input instructions system documents queries query items data_1 data_2 text_1 text_2 texts"
    " inputs prompt_embeds".split()
)
IDS = frozenset(("prompt", "tokens", "token_ids", "allowed_token_ids", "input"))
"""Fields that may be long lists of token ids."""

_AT = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<where>[^`]*)`$", re.DOTALL)
_NULL = msgspec.Raw(b"null")
_IDS = msgspec.json.Decoder(list[int], strict=False)
_LISTS = msgspec.json.Decoder(list[msgspec.Raw])


class Field(NamedTuple):
    name: str
    encoded: str
    required: bool
    decoder: msgspec.json.Decoder[Any]


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    return tuple(
        Field(f.name, f.encode_name, f.required, msgspec.json.Decoder(f.type, strict=False))
        for f in msgspec.structs.fields(kind)
    )


@cache
def _parts(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Decodes a body to the raw JSON of each field of `kind`; skips the others."""
    names = [(field.encoded, msgspec.Raw, _NULL) for field in _fields(kind)]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Parts", names))


def read_long(raw: bytes, kind: type[T]) -> T:
    """A body as a Struct; accepts numbers as strings.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        raw.decode()  # checks skipped fields too
        parts = _parts(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise not_an_object() from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from error
    fields = {}
    for field in _fields(kind):
        part = bytes(getattr(parts, field.encoded))
        if part != b"null":
            fields[field.name] = _value(field, part)
        elif field.required:
            raise not_valid(f"Object missing required field `{field.encoded}`")
    return kind(**fields)


def _value(field: Field, part: bytes) -> Any:
    name = field.encoded
    limit = len(part) if name in PROMPTS else FIELD_BYTES.get(name, MOST_OF_A_FIELD)
    if len(part) > limit:
        raise invalid(
            f"`{name}` has {len(part)} bytes of JSON; the limit is {limit}: shorten it",
            name,
        )
    try:
        if len(part) > MOST_OF_A_FIELD:
            if name in IDS and (ids := _ids(part)) is not None:
                return ids
            if number_of_values(part) > MOST_VALUES:
                raise invalid(
                    f"`{name}` has more than {MOST_VALUES} JSON values (strings, numbers, lists, objects and their"
                    " keys); send less in one request",
                    name,
                )
        return field.decoder.decode(part)
    except msgspec.ValidationError as error:
        raise not_valid(str(error), name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from error


def _ids(part: bytes) -> list[Any] | None:
    """A list of token ids, or a list of such lists; None: something else."""
    inner = part[1:64].lstrip()
    if not inner.startswith(b"["):
        return _flat_ids(part)
    if _count(part, b"[") > MOST_VALUES:
        return None
    lists = [_flat_ids(bytes(one)) for one in _LISTS.decode(part)]
    return None if None in lists else lists


def _flat_ids(part: bytes) -> list[int] | None:
    """Decoded in pieces; None: not only numbers."""
    if not part.startswith(b"[") or _count(part, b'[{"tfn') > 1:
        return None
    ids: list[int] = []
    start, end = 1, len(part) - 1
    while start < end:
        cut = part.find(b",", start + PIECE)
        cut = end if cut < 0 else cut
        ids += _IDS.decode(b"[" + part[start:cut] + b"]")
        start = cut + 1
    return ids


def number_of_values(part: bytes) -> int:
    """Number of JSON values: lists, objects, and what is between commas and colons; marks within strings do not count."""
    if _count(part, b",:[{") <= MOST_VALUES:
        return 0  # few enough, even if no mark is within a string
    count, within, carried = 0, 0, b""
    for start in range(0, len(part), PIECE):
        piece = carried + part[start : start + PIECE]
        tail = len(piece) - len(piece.rstrip(b"\\"))
        carried = b"\\" if tail % 2 else b""  # the character that it escapes is in the next piece
        piece = piece[: len(piece) - len(carried)]
        texts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        count += _count(b"".join(texts[within::2]), b",:[{")
        within = (within + len(texts) - 1) % 2
        if count > MOST_VALUES:
            break
    return count


def _count(part: bytes, marks: bytes) -> int:
    count = 0
    for start in range(0, len(part), PIECE):
        piece = part[start : start + PIECE]
        count += len(piece) - len(piece.translate(None, marks))
    return count


def not_valid(message: str, name: str = "") -> ApiError:
    """The error for a value of a wrong type. `name`: the field, if the message does not contain it."""
    match = _AT.match(message)
    what, where = (match["what"], match["where"]) if match else (message, "")
    if missing := re.search(r"missing required field `(\w+)`", what):
        where = f"{where}.{missing[1]}".lstrip(".")
    if name:
        where = name + (where if where.startswith("[") else f".{where}" if where else "")
    return ApiError(
        400,
        f"1 validation error: {where or 'body'}: {what}",
        param=where or None,
        kind="Bad Request",
    )


def not_json(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", kind="Bad Request")
    return ApiError(400, f"the body is not valid JSON: {error}", kind="Bad Request")


def not_an_object() -> ApiError:
    return ApiError(400, "the body must be a JSON object", kind="Bad Request")
