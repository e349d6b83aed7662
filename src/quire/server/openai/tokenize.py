"""POST /tokenize and /detokenize; GET /tokenizer_info.

Knows texts, messages and ids. Does not run the model.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.prompts import Prompt
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.limits import take_from_key
from quire.server.openai.chat import tokenized_chat
from quire.server.request_body import json_response
from quire.server.schemas import DetokenizeRequest, TokenizeRequest
from quire.server.state import state_of

MOST_TOKENS = 1 << 19
"""Limit of /detokenize: the tokenizer keeps the GIL while it decodes."""


@route(TokenizeRequest, pooling=None, media="messages")
async def tokenize(context: RequestContext, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation with its pictures."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either `prompt` or `messages`", "prompt")
    take_from_key(context.request)
    special = body.add_special_tokens
    if body.prompt is not None:
        options = TokenizeOptions(True if special is None else special, fits_model=False)
        prompt = await context.engine.tokenize(Prompt(body.prompt), options)
    else:
        options = TokenizeOptions(bool(special), fits_model=False)
        prompt = await tokenized_chat(context, body, body.messages or [], options)
    engine, tokens = context.engine, prompt.tokens
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": engine.inputs.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = engine.front.need_tokenizer().convert_ids_to_tokens(tokens)
    return json_response(answer)


@route(DetokenizeRequest, pooling=None)
async def detokenize(context: RequestContext, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    engine, tokens = context.engine, body.tokens
    take_from_key(context.request)
    limit = max(MOST_TOKENS, engine.inputs.max_model_len)
    if len(tokens) > limit:
        raise invalid(
            f"`tokens` has {len(tokens)} entries; the limit is {limit}: send them in several requests",
            "tokens",
        )
    engine.inputs.check_ids("tokens", tokens)
    return json_response({"prompt": engine.decode(tokens)})


async def tokenizer_info(request: Request) -> Response:
    """The configuration of the tokenizer: tokenizer_config.json, its special tokens and its chat template."""
    tokenizer = state_of(request).serving().front.need_tokenizer()
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.config,
        **tokenizer.special_tokens_map,
    }
    return json_response({**info, "chat_template": tokenizer.chat_template})
