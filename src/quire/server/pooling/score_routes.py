"""POST /score and /rerank, under all their paths: scores of pairs of texts.

Knows these endpoints' request and answer shapes. `frontend/pooling/scores.py` knows what a score is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from quire.api.async_engine import LONG_TEXT
from quire.frontend.media.placeholders import media_in
from quire.frontend.pooling.scores import (
    PairOptions,
    Pairs,
    PairText,
    check_shapes,
    content_of,
    conversations_of,
    read_text,
    shown,
)
from quire.frontend.prompts import Prompt, read_salt
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.validators import wrong
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.limits import take_from_key
from quire.server.pooling.batch import Output, PoolingBatch, PromptSource
from quire.server.pooling.inputs import (
    check_common,
    check_count,
    conversation,
    pooling_of,
    tokenize_options,
)
from quire.server.pooling.schemas import InputBody, PairBody, RerankRequest, ScoreRequest
from quire.server.request_body import json_response
from quire.server.streaming_json import json_answer, listed

FIELDS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))  # fmt: skip
MEDIA = "queries documents items data_1 data_2 text_1 text_2"
"""The fields whose texts may have pictures."""
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


async def read_texts_and_media(
    context: RequestContext, body: PairBody, name: str, value: Any
) -> list[PairText]:
    """The texts of a field; those with pictures as conversations of one message. Raises: as `read_text` and `conversation`."""
    found: list[PairText] = []
    many = value if isinstance(value, list) else [value]
    for index, one in enumerate(many):
        content = one.get("content") if isinstance(one, dict) else None
        if not (isinstance(content, list) and media_in(content)):
            found.append(read_text(one, f"{name}[{index}]"))
            continue
        options = InputBody(
            chat_template_kwargs=body.chat_template_kwargs, truncate_prompt_tokens=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens,
        )  # fmt: skip
        prompt = await conversation([{"role": "user", "content": content}], options, context)
        if isinstance(prompt, Prompt):
            prompt.text = _text(one, f"{name}[{index}]")
        found.append(prompt)
    return found


async def rendered_pairs(
    context: RequestContext, body: PairBody, queries: Any, documents: Any, names: tuple[str, str], options: PairOptions
) -> Pairs | None:  # fmt: skip
    """Pairs with pictures for a model that reads both texts of a pair at once: its template makes a conversation of each, with the roles
    query and document. None: no text has pictures, or the model reads them otherwise. Raises: as `read_texts_and_media`."""
    texts = [value if isinstance(value, list) else [value] for value in (queries, documents)]
    front = context.engine.front
    renders = Pairs(front, [""], [""], options).renders
    if not renders or not any(media_in(content_of(one)) for many in texts for one in many):
        return None
    shown_texts = [[_text(one, f"{name}[{i}]") for i, one in enumerate(many)] for name, many in zip(names, texts, strict=True)]  # fmt: skip
    check_shapes(shown_texts[0], shown_texts[1], names)
    how = InputBody(
        chat_template_kwargs=options.variables, truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens is not False,
    )  # fmt: skip
    found = Pairs(front, shown_texts[0], shown_texts[1], options)
    found.check_uncut()
    for messages in conversations_of(*texts):
        prompt = await conversation(messages, how, context)
        found.rendered.append(Prompt(prompt) if isinstance(prompt, str) else prompt)
        await asyncio.sleep(0)  # others wait for one pair, not for all
    return found


def _text(one: Any, name: str) -> str:
    """The words of a text that may have pictures. Raises: as `read_text`."""
    content = content_of(one)
    if not (isinstance(content, list) and media_in(content)):
        return read_text(one, name)
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


async def read_pairs(
    context: RequestContext, body: PairBody, queries: Any, documents: Any, names: tuple[str, str]
) -> Pairs:
    """Raises ApiError, ValidationError: the texts make no pairs, or an option is invalid."""
    check_common(body)
    for name, value in zip(names, (queries, documents), strict=True):
        check_count(len(value) if isinstance(value, list) else 1, name)
    if body.chat_template is not None:
        raise invalid("`chat_template` in a request of pairs is not supported: start the server with --chat-template", "chat_template")  # fmt: skip
    kwargs = {
        **context.state.config.server.default_chat_template_kwargs,
        **body.chat_template_kwargs,
    }
    options = PairOptions(
        body.instruction, None, kwargs, body.max_tokens_per_query, body.max_tokens_per_doc
    )
    rendered = await rendered_pairs(context, body, queries, documents, names, options)
    if rendered is not None:
        return rendered
    firsts = await read_texts_and_media(context, body, names[0], queries)
    seconds = await read_texts_and_media(context, body, names[1], documents)
    check_shapes(firsts, seconds, names)
    return Pairs(context.engine.front, firsts, seconds, options)


def pair_batch(context: RequestContext, body: PairBody, pairs: Pairs, prefix: str) -> PoolingBatch:
    """The batch of a request's pairs, not started. Raises ApiError, ValidationError: the request is refused."""
    inputs = pooling_of(context)
    params = pairs.params(PoolingParams(use_activation=body.use_activation))
    options, salt = tokenize_options(body, inputs, True), read_salt(body.cache_salt)

    def prepare(start: int, stop: int) -> list[Prompt]:
        prompts = pairs.prompts(start, stop)
        for one in prompts:
            one.salt = salt
        return inputs.tokenize(prompts, options, pairs.task)

    more = RENDERED if pairs.renders else 0
    source = PromptSource(pairs.num_prompts, lambda index: pairs.size(index) + more, prepare)
    width = inputs.info.num_dimensions if pairs.task == "token_embed" else 0
    take_from_key(context.request, source.count)
    return PoolingBatch(context, context.new_id(prefix, body), body, source, params, width)


@dataclass(slots=True)
class ScoreAnswer:
    """The answer of a route for pairs: `respond` makes it of the scores."""

    source: PoolingBatch
    pairs: Pairs
    respond: Callable[[list[float]], Response]

    async def response(self, outputs: list[Output]) -> Response:
        if self.source.numbers_per_token and self.source.num_tokens > LONG_TEXT // 100:
            scores = await asyncio.to_thread(self.pairs.scores, outputs)
        else:
            scores = self.pairs.scores(outputs)
        return self.respond(scores)


@route(ScoreRequest, pooling=True, media=MEDIA)
async def score(context: RequestContext, body: ScoreRequest) -> ScoreAnswer:
    """Scores of pairs of texts."""
    names = pair_fields(body)
    pairs = await read_pairs(context, body, getattr(body, names[0]), getattr(body, names[1]), names)
    batch = pair_batch(context, body, pairs, "score-")

    def respond(scores: list[float]) -> Response:
        data = [
            {"index": index, "object": "score", "score": one} for index, one in enumerate(scores)
        ]
        return json_response(batch.head() | {"data": data, "usage": batch.usage})

    return ScoreAnswer(batch, pairs, respond)


@route(RerankRequest, pooling=True, media="query documents")
async def rerank(context: RequestContext, body: RerankRequest) -> ScoreAnswer:
    """Documents in the order of their scores with a query."""
    if body.query is None or body.documents is None:
        raise invalid("`/rerank` needs `query` and `documents`", "query" if body.query is None else "documents")  # fmt: skip
    if isinstance(body.query, list):
        raise wrong("query", body.query, "one text")
    if not isinstance(body.documents, list):
        raise wrong("documents", body.documents, "a list of texts")
    if body.top_n < 0:
        raise wrong("top_n", body.top_n, "a whole number of at least 0 (0: all documents)")
    pairs = await read_pairs(context, body, body.query, body.documents, ("query", "documents"))
    batch = pair_batch(context, body, pairs, "rerank-")

    def respond(scores: list[float]) -> Response:
        texts = [shown(one) for one in pairs.documents]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]

        def result(index: int) -> dict[str, Any]:
            document = {"text": texts[index], "multi_modal": None}
            return {"index": index, "document": document, "relevance_score": scores[index]}

        large = len(order) >= LARGE or sum(len(texts[index]) for index in order) > LONG_TEXT * 10
        results = listed(lambda: map(result, order), large)
        usage = {"prompt_tokens": batch.num_tokens, "total_tokens": batch.num_tokens}
        answer = {"id": batch.id, "model": context.model, "usage": usage, "results": results}
        return json_answer(answer, large, context.state.answering)

    return ScoreAnswer(batch, pairs, respond)
