"""Reads the inputs of pooling requests: texts, token ids and conversations, and the options that they share.

Knows request fields. `frontend/pooling/inputs.py` checks what depends on the model. Does not know answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.media.placeholders import media_in
from quire.frontend.pooling.inputs import PoolingInputs
from quire.frontend.prompts import Prompt, read_salt
from quire.protocol.sampling_params import truncation
from quire.server.endpoint import RequestContext
from quire.server.errors import invalid
from quire.server.openai.chat import chat_options, tokenized_chat
from quire.server.pooling.batch import PromptSource
from quire.server.pooling.schemas import InputBody, PoolingBody
from quire.server.prompts import check_messages, render

MOST_INPUTS = 2048
"""Inputs of one request, as in OpenAI's API."""


def pooling_of(context: RequestContext) -> PoolingInputs:
    return context.engine.front.need_pooling(context.request.url.path)


def check_common(body: PoolingBody) -> None:
    """Raises ApiError: a removed field, or one that the model cannot use."""
    if body.normalize is not None:
        raise invalid("`normalize` is an old name: use `use_activation`", "normalize")


def check_count(count: int, name: str) -> None:
    """Raises ApiError: none, or too many."""
    if not count:
        raise invalid(f"`{name}` is empty: it needs at least one text", name)
    if count > MOST_INPUTS:
        raise invalid(
            f"`{name}` has {count} entries; the limit for one request is {MOST_INPUTS}", name
        )


def tokenize_options(body: PoolingBody, pooling: PoolingInputs, special: bool) -> TokenizeOptions:
    """Raises ValidationError: truncate_prompt_tokens or truncation_side is invalid."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    if side not in (None, "left", "right"):
        raise invalid("`truncation_side` must be left (keep the end) or right (keep the beginning)", "truncation_side")  # fmt: skip
    return pooling.options(
        TokenizeOptions(
            add_special_tokens=special if body.add_special_tokens is None else body.add_special_tokens,
            truncate=None if limit is None else truncation(limit),
            keep_first=pooling.keeps_first if side is None else side == "right", parameter="input",
        )
    )  # fmt: skip


def listed_inputs(body: InputBody) -> list[Any]:
    """The inputs: texts, lists of token ids, or conversations, all of one kind.

    Raises:
        ApiError: none, too many, or another form.
    """
    if body.messages is not None:
        if body.input is not None:
            raise invalid("send either `input` or `messages`", "input")
        return [body.messages]
    inputs = body.input
    if inputs is None:
        raise invalid("`input` is missing: send a text, or a list of texts", "input")
    if isinstance(inputs, str) or (isinstance(inputs, list) and inputs and _is_flat(inputs[0])):
        inputs = [inputs]
    if not isinstance(inputs, list):
        raise wrong_form()
    check_count(len(inputs), "input")
    kind = type(inputs[0])
    if kind not in (str, list) or any(type(one) is not kind for one in inputs):
        raise wrong_form()
    return inputs


def _is_flat(item: Any) -> bool:
    """Whether a list that begins with this is a single input: token ids, or a conversation."""
    return type(item) is int or isinstance(item, dict)


def wrong_form() -> Exception:
    return invalid(
        "`input` must be a string, a list of strings, a list of token ids, a list of such lists, a conversation, or a"
        " list of conversations; all entries of one kind",
        "input",
    )


async def input_source(context: RequestContext, body: InputBody, task: str) -> PromptSource:
    """The prompts of a request. Raises ApiError, ValidationError: they are invalid."""
    inputs, pooling = listed_inputs(body), pooling_of(context)
    salt, special = read_salt(body.cache_salt), True
    if isinstance(inputs[0], list) and (inputs[0] and isinstance(inputs[0][0], dict)):
        texts = []
        for one in inputs:
            texts.append(await conversation(one, body, context))
            await asyncio.sleep(0)  # others wait for one conversation, not for all
        inputs = texts
        special = False
    options = tokenize_options(body, pooling, special)
    name = body.prompt_name
    if name is not None:
        pooling.prompt_text(name)
        if task != "embed":
            raise invalid("`prompt_name` is for vectors of texts (task embed)", "prompt_name")
    if isinstance(inputs[0], list):
        for one in inputs:
            check_ids(one, pooling, options, task)

    def prepare(start: int, stop: int) -> list[Prompt]:
        some = inputs[start:stop]
        if not special:
            prompts = [Prompt(one) if isinstance(one, str) else one for one in some]
        elif isinstance(some[0], list):
            prompts = [Prompt(None, one) for one in some]
        elif task == "embed":
            prompts = pooling.with_prompt(name, some)
        else:
            prompts = [Prompt(text) for text in some]
        for one in prompts:
            one.salt = salt
        return pooling.tokenize(prompts, options, task)

    return PromptSource(len(inputs), lambda at: len(getattr(inputs[at], "tokens", inputs[at])), prepare)  # fmt: skip


def check_ids(ids: list[Any], pooling: PoolingInputs, options: TokenizeOptions, task: str) -> None:
    """Raises ApiError: entries that are no ids. ValidationError: too many; this is checked first."""
    if options.truncate is None:
        pooling.check_length(len(ids), task)
    if not all(type(token) is int for token in ids):
        raise wrong_form()


async def conversation(messages: Any, body: InputBody, context: RequestContext) -> str | Prompt:
    """A conversation as text; with pictures as tokens. Raises ApiError, ValidationError: it is invalid."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise wrong_form()
    if media_in(messages):
        options = tokenize_options(body, pooling_of(context), special=False)
        return await tokenized_chat(context, body, messages, options)
    check_messages(messages)
    return await render(messages, chat_options(body, context.state), context)
