"""POST /v1/embeddings, /pooling, /classify, and Cohere's /v2/embed: the outputs of single texts.

Knows these endpoints' request and answer shapes. Turns a request into a `PoolingBatch`, and its tensors into an answer.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from starlette.responses import Response

from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.pooling.inputs import PoolingInputs
from quire.frontend.pooling.outputs import Floats
from quire.frontend.prompts import Prompt
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.validators import wrong
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.limits import take_from_key
from quire.server.pooling.batch import PoolingAnswer, PoolingBatch, PromptSource
from quire.server.pooling.inputs import check_common, check_count, input_source, pooling_of
from quire.server.pooling.schemas import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingsRequest,
    InputBody,
    PoolingRequest,
)
from quire.server.pooling.vectors import LARGE_NUMBERS, VectorEncoding, vectors_answer
from quire.server.streaming_json import json_answer, listed

COHERE_TYPES = ("float", "binary", "ubinary", "base64")
COHERE_PROMPTS: dict[str, tuple[str, ...]] = {
    "search_query": ("query",), "search_document": ("document", "passage"), "classification": (), "clustering": (),
}  # fmt: skip
"""The input types that Cohere's clients must send -> names of the same prompts in checkpoints."""
COHERE_KEEPS = {"END": True, "START": False, "NONE": None}
"""`truncate` -> whether the beginning is kept; None: a longer text is refused."""


def encoding_of(body: InputBody) -> VectorEncoding:
    """Raises ValidationError: an unknown name."""
    return VectorEncoding(body.encoding_format, body.embed_dtype, body.endianness)


async def input_batch(
    context: RequestContext, body: InputBody, task: str | None, prefix: str
) -> PoolingBatch:
    """The batch of a request's inputs, not started. Raises ApiError, ValidationError: the request is refused."""
    check_common(body)
    pooling = pooling_of(context)
    asked = PoolingParams(use_activation=body.use_activation, dimensions=body.dimensions)
    params = pooling.params(asked, task)
    task, info = params.task or "", pooling.info
    prompts = await input_source(context, body, task)
    VectorEncoding(body.encoding_format).check_count(prompts.count)
    take_from_key(context.request, prompts.count)
    width = {"token_embed": info.num_dimensions, "token_classify": info.num_labels}.get(task, 0)
    return PoolingBatch(context, context.new_id(prefix, body), body, prompts, params, width)


@route(EmbeddingsRequest, pooling=True, media="messages input")
async def embeddings(context: RequestContext, body: EmbeddingsRequest) -> PoolingAnswer:
    """Vectors of texts."""
    encoding = encoding_of(body)
    batch = await input_batch(context, body, "embed", "embd-")
    kind = "embedding", "embedding"
    return PoolingAnswer(batch, lambda arrays: vectors_answer(batch, arrays, encoding, kind))


@route(PoolingRequest, pooling=True, media="messages input")
async def pooling(context: RequestContext, body: PoolingRequest) -> PoolingAnswer:
    """The outputs of texts for any task that the model has."""
    if body.dimensions is not None:
        raise invalid("`dimensions` belongs to /v1/embeddings", "dimensions")
    encoding = encoding_of(body)
    batch = await input_batch(context, body, body.task, "pooling-")
    kind = "pooling", "data"
    return PoolingAnswer(batch, lambda arrays: vectors_answer(batch, arrays, encoding, kind))


@route(ClassifyRequest, pooling=True, media="messages input")
async def classify(context: RequestContext, body: ClassifyRequest) -> PoolingAnswer:
    """Probabilities of classes."""
    labels = pooling_of(context).info.labels
    batch = await input_batch(context, body, "classify", "classify-")

    def item(index: int, array: Floats) -> dict[str, Any]:
        probs = array.reshape(-1)
        best = int(probs.argmax())
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}

    def respond(arrays: list[Floats]) -> Response:
        large = sum(array.size for array in arrays) >= LARGE_NUMBERS
        items = listed(lambda: map(item, count(), arrays), large)
        answer = batch.head() | {"data": items, "usage": batch.usage}
        return json_answer(answer, large, context.state.answering)

    return PoolingAnswer(batch, respond)


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
    return [_cohere_text(one, index) for index, one in enumerate(body.inputs or ())]


def _cohere_text(one: dict[str, Any], index: int) -> str:
    parts = one.get("content")
    if isinstance(parts, str):
        return parts
    texts = [
        part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    ] if isinstance(parts, list) else []  # fmt: skip
    if not texts or len(texts) != len(parts or ()):
        raise invalid(f"`inputs[{index}].content` must be a list of parts of type text", "inputs")
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
    keeps, max_tokens = COHERE_KEEPS.get(body.truncate.upper(), ""), pooling.max_tokens
    if keeps == "":
        raise wrong("truncate", body.truncate, "END, START or NONE")
    if body.max_tokens is not None and not 1 <= body.max_tokens <= max_tokens:
        raise wrong("max_tokens", body.max_tokens, f"from 1 to {max_tokens} (max_model_len)")
    limit = body.max_tokens or max_tokens
    options = TokenizeOptions(
        truncate=None if keeps is None else limit, keep_first=bool(keeps), parameter="texts"
    )
    name = cohere_prompt(body.input_type, pooling)

    def prepare(start: int, stop: int) -> list[Prompt]:
        prompts = pooling.with_prompt(name, texts[start:stop])
        tokenized = pooling.tokenize(prompts, options, "embed")
        if keeps is None and (longest := max(len(one.tokens) for one in tokenized)) > limit:
            raise invalid(f"a text has {longest} tokens, and `max_tokens` is {limit}; shorten it, or set `truncate` to END", "texts")  # fmt: skip
        return tokenized

    return PromptSource(len(texts), lambda index: len(texts[index]), prepare)


@route(CohereEmbedRequest, pooling=True)
async def cohere_embed(context: RequestContext, body: CohereEmbedRequest) -> PoolingAnswer:
    """Vectors of texts, in Cohere's form; version 1 has them without a type unless a request names types."""
    inputs, types = pooling_of(context), body.embedding_types or ["float"]
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
    prompts = cohere_source(body, texts, inputs)
    take_from_key(context.request, prompts.count)
    batch = PoolingBatch(context, context.new_id("embd-", body), body, prompts, params)

    def respond(arrays: list[Floats]) -> Response:
        large = len(types) * sum(array.size for array in arrays) >= LARGE_NUMBERS
        vectors: Any = {kind: _cohere_vectors(kind, arrays, large) for kind in dict.fromkeys(types)}
        if plain := context.request.url.path.startswith("/v1") and not body.embedding_types:
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
            large, context.state.answering,
        )  # fmt: skip

    return PoolingAnswer(batch, respond)


def _cohere_vectors(kind: str, arrays: list[Floats], large: bool) -> Any:
    def rows() -> Any:
        for array in arrays:
            if kind.endswith("binary"):
                bits = np.packbits(array >= 0).astype(np.int16)
                yield (bits - (128 if kind == "binary" else 0)).tolist()
            else:
                yield VectorEncoding(kind, endianness="little").value(array, False)

    return listed(rows, large)
