"""POST /score and /rerank, under all their paths: scores of pairs of texts.

Knows these endpoints' request and answer shapes. `frontend/pooling/scores.py` knows what a score is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.async_engine import LONG_TEXT, AsyncEngine
from quire.frontend.pooling.scores import PairOptions, Pairs, check_shapes, read_texts
from quire.frontend.prompts import Prompt, read_salt
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.validators import wrong
from quire.server.adapters import model_of
from quire.server.errors import invalid
from quire.server.pooling.batch import PoolingBatch, PromptSource
from quire.server.pooling.inputs import check_common, check_count, pooling_of, tokenize_options
from quire.server.pooling.schemas import PairBody, RerankRequest, ScoreRequest
from quire.server.pooling.vector_routes import new_batch
from quire.server.request_body import prepared, read
from quire.server.sse import until_disconnect
from quire.server.state import ServerState, state_of
from quire.server.streaming_json import json_answer, listed

FIELDS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))  # fmt: skip
RENDERED = 100  # characters that a template costs about as much time as
LARGE = 1 << 10  # pairs from which on an answer is encoded in parts


def pair_fields(body: ScoreRequest) -> tuple[str, str]:
    """The names of the fields that hold the pairs. Raises ApiError: none of the four pairs, or several."""
    filled = {name for names in FIELDS for name in names if getattr(body, name) is not None}
    for names in FIELDS:
        if filled == set(names):
            return names
    forms = ", ".join(f"`{first}` and `{second}`" for first, second in FIELDS)
    raise invalid(f"send one of these pairs of fields: {forms}", "queries")


async def read_pairs(
    body: PairBody, queries: Any, documents: Any, names: tuple[str, str], engine: AsyncEngine,
    state: ServerState,
) -> Pairs:  # fmt: skip
    """Raises ApiError, ValidationError: the texts make no pairs, or an option is invalid."""
    check_common(body)
    for name, value in zip(names, (queries, documents), strict=True):
        check_count(len(value) if isinstance(value, list) else 1, name)
    firsts, seconds = read_texts(names[0], queries), read_texts(names[1], documents)
    check_shapes(firsts, seconds, names)
    if body.chat_template is not None:
        raise invalid("`chat_template` in a request of pairs is not supported: start the server with --chat-template", "chat_template")  # fmt: skip
    kwargs = {**state.config.server.default_chat_template_kwargs, **body.chat_template_kwargs}
    options = PairOptions(
        body.instruction, None, kwargs, body.max_tokens_per_query, body.max_tokens_per_doc
    )
    return Pairs(engine.front, firsts, seconds, options)


async def _scored(
    request: Request, body: PairBody, queries: Any, documents: Any, names: tuple[str, str], prefix: str,
    adapter: str | None,
) -> tuple[PoolingBatch, Pairs, list[float]]:  # fmt: skip
    state = state_of(request)
    engine = state.serving()
    inputs = pooling_of(request, engine)
    pairs = await prepared(request, read_pairs, body, queries, documents, names, engine, state)
    params = pairs.params(PoolingParams(use_activation=body.use_activation))
    options, salt = tokenize_options(body, inputs, True), read_salt(body.cache_salt)

    def prepare(start: int, stop: int) -> list[Prompt]:
        prompts = pairs.prompts(start, stop)
        for one in prompts:
            one.salt = salt
        return inputs.tokenize(prompts, options, pairs.task)

    more = RENDERED if pairs.renders else 0
    source = PromptSource(pairs.num_prompts, lambda at: pairs.size(at) + more, prepare)
    width = inputs.info.num_dimensions if pairs.task == "token_embed" else 0
    batch = new_batch(request, source, params, prefix, body, engine, adapter, width)
    outputs = await until_disconnect(request.receive, batch.run())
    if width and batch.num_tokens > LONG_TEXT // 100:
        scores: list[float] = await asyncio.to_thread(pairs.scores, outputs)
    else:
        scores = pairs.scores(outputs)
    return batch, pairs, scores


async def score(request: Request) -> Response:
    """Scores of pairs of texts."""
    state = state_of(request)
    pooling_of(request, state.serving())
    body = await read(request, ScoreRequest)
    model, adapter = await model_of(request, body.model)
    names = pair_fields(body)
    created = int(time.time())
    batch, _, scores = await _scored(
        request, body, getattr(body, names[0]), getattr(body, names[1]), names, "score-", adapter
    )
    data = [{"index": at, "object": "score", "score": one} for at, one in enumerate(scores)]
    head = {"id": batch.id, "object": "list", "created": created, "model": model}
    return json_answer({**head, "data": data, "usage": batch.usage}, False, state.answering)


async def rerank(request: Request) -> Response:
    """Documents in the order of their scores with a query."""
    state = state_of(request)
    pooling_of(request, state.serving())
    body = await read(request, RerankRequest)
    model, adapter = await model_of(request, body.model)
    if body.query is None or body.documents is None:
        raise invalid("`/rerank` needs `query` and `documents`", "query" if body.query is None else "documents")  # fmt: skip
    if isinstance(body.query, list):
        raise wrong("query", body.query, "one text")
    if not isinstance(body.documents, list):
        raise wrong("documents", body.documents, "a list of texts")
    if body.top_n < 0:
        raise wrong("top_n", body.top_n, "a whole number of at least 0 (0: all documents)")
    batch, pairs, scores = await _scored(
        request, body, body.query, body.documents, ("query", "documents"), "rerank-", adapter
    )
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]

    def result(at: int) -> dict[str, Any]:
        document = {"text": pairs.documents[at], "multi_modal": None}
        return {"index": at, "document": document, "relevance_score": scores[at]}

    large = len(order) >= LARGE or sum(len(pairs.documents[at]) for at in order) > LONG_TEXT * 10
    results = listed(lambda: map(result, order), large)
    usage = {"prompt_tokens": batch.num_tokens, "total_tokens": batch.num_tokens}
    return json_answer(
        {"id": batch.id, "model": model, "usage": usage, "results": results}, large, state.answering
    )
