"""POST /v1/embeddings, /pooling, /classify, and Cohere's /v2/embed: the outputs of single texts.

Knows these endpoints' request and answer shapes. Turns a request into a `PoolingBatch`, and its tensors into an answer.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.api.async_engine import AsyncEngine
from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.pooling.inputs import PoolingInputs
from quire.frontend.pooling.outputs import Floats
from quire.frontend.prompts import Prompt
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.validators import wrong
from quire.server.adapters import model_of
from quire.server.errors import invalid
from quire.server.limits import take_from_key
from quire.server.middleware import TENANT
from quire.server.openai.chunks import data_parallel_rank, new_id, priority
from quire.server.pooling.batch import PoolingBatch, PromptSource
from quire.server.pooling.inputs import check_common, check_count, input_source, pooling_of
from quire.server.pooling.schemas import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingsRequest,
    InputBody,
    PoolingRequest,
)
from quire.server.pooling.vectors import LARGE_NUMBERS, VectorEncoding, vectors_answer
from quire.server.request_body import prepared, read
from quire.server.sse import until_disconnect
from quire.server.state import state_of
from quire.server.streaming_json import json_answer, listed

COHERE_TYPES = ("float", "binary", "ubinary", "base64")
COHERE_PROMPTS: dict[str, tuple[str, ...]] = {
    "search_query": ("query",), "search_document": ("document", "passage"), "classification": (), "clustering": (),
}  # fmt: skip
"""The input types that Cohere's clients must send -> names of the same prompts in checkpoints."""
COHERE_KEEPS = {"END": True, "START": False, "NONE": None}
"""`truncate` -> whether the beginning is kept; None: a longer text is refused."""


def new_batch(
    request: Request, source: PromptSource, params: PoolingParams, prefix: str, body: Any, engine: AsyncEngine,
    adapter: str | None, numbers_per_token: int = 0,
) -> PoolingBatch:  # fmt: skip
    """The batch of a request, not started. Raises ApiError: the key's limits refuse it."""
    state = state_of(request)
    take_from_key(request, source.count)
    return PoolingBatch(
        state, engine, new_id(prefix, request, body), source, params, priority(request, body), body.timeout,
        request.scope.get(TENANT), adapter, numbers_per_token, data_parallel_rank(request),
    )  # fmt: skip


Body = TypeVar("Body", bound=InputBody)


async def _read(request: Request, kind: type[Body]) -> Body:
    """The body, where the model is a pooling model."""
    pooling_of(request, state_of(request).serving())
    return await read(request, kind)


async def _run(
    request: Request, body: InputBody, task: str | None, prefix: str
) -> tuple[PoolingBatch, list[Floats], dict[str, Any]]:
    """Run a request; returns its batch, its arrays, and the head of its answer."""
    state = state_of(request)
    engine = state.serving()
    pooling = pooling_of(request, engine)
    model, adapter = await model_of(request, body.model)
    check_common(body)
    params = pooling.params(
        PoolingParams(use_activation=body.use_activation, dimensions=body.dimensions), task
    )
    source = await prepared(request, input_source, body, pooling, params, engine, state)
    VectorEncoding(body.encoding_format).check_count(source.count)
    info = pooling.info
    width = {"token_embed": info.num_dimensions, "token_classify": info.num_labels}
    batch = new_batch(request, source, params, prefix, body, engine, adapter, width.get(params.task or "", 0))  # fmt: skip
    created = int(time.time())
    outputs = await until_disconnect(request.receive, batch.run())
    head = {"id": batch.id, "object": "list", "created": created, "model": model}
    return batch, [one.outputs.array for one in outputs], head


def encoding_of(body: InputBody) -> VectorEncoding:
    """Raises ValidationError: an unknown name."""
    return VectorEncoding(body.encoding_format, body.embed_dtype, body.endianness)


async def embeddings(request: Request) -> Response:
    """Vectors of texts."""
    body = await _read(request, EmbeddingsRequest)
    encoding = encoding_of(body)
    batch, arrays, head = await _run(request, body, "embed", "embd-")
    kind = "embedding", "embedding"
    return vectors_answer(head, arrays, encoding, kind, batch.usage, batch.state.answering)


async def pooling(request: Request) -> Response:
    """The outputs of texts for any task that the model has."""
    body = await _read(request, PoolingRequest)
    if body.dimensions is not None:
        raise invalid("`dimensions` belongs to /v1/embeddings", "dimensions")
    encoding = encoding_of(body)
    batch, arrays, head = await _run(request, body, body.task, "pooling-")
    kind = "pooling", "data"
    return vectors_answer(head, arrays, encoding, kind, batch.usage, batch.state.answering)


async def classify(request: Request) -> Response:
    """Probabilities of classes."""
    body = await _read(request, ClassifyRequest)
    batch, arrays, head = await _run(request, body, "classify", "classify-")
    labels = pooling_of(request, batch.engine).info.labels
    large = sum(array.size for array in arrays) >= LARGE_NUMBERS

    def item(index: int) -> dict[str, Any]:
        probs = arrays[index].reshape(-1)
        best = int(probs.argmax())
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}

    data = listed(lambda: map(item, range(len(arrays))), large)
    answering = batch.state.answering
    return json_answer({**head, "data": data, "usage": batch.usage}, large, answering)


# -- Cohere ------------------------------------------------------------------------------------------


def cohere_texts(body: CohereEmbedRequest) -> list[str]:
    """Raises ApiError: not exactly one kind of inputs, or media."""
    kinds = ("texts", "images", "inputs")
    filled = [kind for kind in kinds if getattr(body, kind)]
    if len(filled) != 1:
        raise invalid("send exactly one of `texts`, `images`, `inputs`, and not empty", "texts")
    if filled[0] == "images":
        raise invalid("`images` are not supported by this model: send `texts`", "images")
    if body.texts:
        check_count(len(body.texts), "texts")
        return body.texts
    check_count(len(body.inputs or ()), "inputs")
    return [_cohere_text(one, at) for at, one in enumerate(body.inputs or ())]


def _cohere_text(one: dict[str, Any], at: int) -> str:
    parts = one.get("content")
    if isinstance(parts, str):
        return parts
    texts = [
        part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    ] if isinstance(parts, list) else []  # fmt: skip
    if not texts or len(texts) != len(parts or ()):
        raise invalid(f"`inputs[{at}].content` must be a list of parts of type text", "inputs")
    return "\n".join(texts)


def cohere_prompt(input_type: str | None, pooling: PoolingInputs) -> str | None:
    """The name of the prompt for an input type; None: there is none. A model without prompts takes Cohere's types.

    Raises:
        ValidationError: the model has prompts, but not this one.
    """
    known = {**pooling.info.prompts, **pooling.info.task_instructions}
    if input_type is None or (input_type in COHERE_PROMPTS and not known):
        return None
    names = (input_type, *COHERE_PROMPTS.get(input_type, ()))
    name = next((name for name in names if name in known), input_type)
    pooling.prompt_text(name, "input_type")
    return name


def cohere_source(
    body: CohereEmbedRequest, texts: list[str], pooling: PoolingInputs
) -> PromptSource:
    """Raises ApiError, ValidationError: a wrong field."""
    keeps, most = COHERE_KEEPS.get(body.truncate.upper(), ""), pooling.max_tokens
    if keeps == "":
        raise wrong("truncate", body.truncate, "END, START or NONE")
    if body.max_tokens is not None and not 1 <= body.max_tokens <= most:
        raise wrong("max_tokens", body.max_tokens, f"from 1 to {most} (max_model_len)")
    limit = body.max_tokens or most
    options = TokenizeOptions(
        truncate=None if keeps is None else limit, keep_first=bool(keeps), parameter="texts"
    )
    name = cohere_prompt(body.input_type, pooling)

    def prepare(start: int, stop: int) -> list[Prompt]:
        prompts = pooling.with_prompt(name, texts[start:stop])
        found = pooling.tokenize(prompts, options, "embed")
        if keeps is None and (longest := max(len(one.tokens) for one in found)) > limit:
            raise invalid(f"a text has {longest} tokens, and `max_tokens` is {limit}; shorten it, or set `truncate` to END", "texts")  # fmt: skip
        return found

    return PromptSource(len(texts), lambda at: len(texts[at]), prepare)


async def cohere_embed(request: Request) -> Response:
    """Vectors of texts, in Cohere's form; version 1 has them without a type unless a request names types."""
    state = state_of(request)
    engine = state.serving()
    inputs = pooling_of(request, engine)
    body = await read(request, CohereEmbedRequest)
    _, adapter = await model_of(request, body.model)
    types = body.embedding_types or ["float"]
    for kind in types:
        if kind not in COHERE_TYPES:
            raise wrong("embedding_types", kind, f"a list of {', '.join(COHERE_TYPES)}")
    params = inputs.params(PoolingParams(dimensions=body.output_dimension), "embed")
    size = body.output_dimension or inputs.info.num_dimensions
    if {"binary", "ubinary"} & set(types) and size % 8:
        raise invalid(
            f"binary vectors need a dimension that 8 divides; it is {size}", "output_dimension"
        )
    texts = cohere_texts(body)
    source = cohere_source(body, texts, inputs)
    batch = new_batch(request, source, params, "embd-", body, engine, adapter)
    outputs = await until_disconnect(request.receive, batch.run())
    arrays = [one.outputs.array for one in outputs]
    large = len(types) * sum(array.size for array in arrays) >= LARGE_NUMBERS
    vectors: Any = {kind: _cohere_vectors(kind, arrays, large) for kind in dict.fromkeys(types)}
    if plain := request.url.path.startswith("/v1") and not body.embedding_types:
        vectors = vectors["float"]
    return json_answer(
        {
            "id": batch.id, "embeddings": vectors, "texts": texts if body.texts else None,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": batch.num_tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_floats" if plain else "embeddings_by_type",
        },
        large, state.answering,
    )  # fmt: skip


def _cohere_vectors(kind: str, arrays: list[Floats], large: bool) -> Any:
    def rows() -> Any:
        for array in arrays:
            if kind.endswith("binary"):
                bits = np.packbits(array >= 0).astype(np.int16)
                yield (bits - (128 if kind == "binary" else 0)).tolist()
            else:
                yield VectorEncoding(kind, endianness="little").value(array, False)

    return listed(rows, large)
