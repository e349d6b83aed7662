"""Prompts of requests: messages -> text -> token ids, in threads if they are long, so that other streams continue.

Knows request fields. `frontend/input_processor.py` checks what depends on the model. Does not know endpoints.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.errors import Unsupported
from quire.frontend.chat import ChatOptions
from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.jinja_sandbox import SECONDS, TemplateTooSlow
from quire.frontend.media.content_parts import MediaPart
from quire.frontend.media.processed_cache import ReadMedia
from quire.frontend.media.prompt_reader import need_media
from quire.frontend.prompt_embeddings import decode_embeddings
from quire.frontend.prompts import Prompt
from quire.protocol.sampling_params import truncation
from quire.server.endpoint import RequestContext
from quire.server.errors import invalid
from quire.server.schemas import CompletionRequest, Sampling

IN_LOOP_S = 0.03  # of the event loop, at most, for a template; nearly all take less than a tenth
MOST_MESSAGES = 10_000


async def render(
    messages: list[dict[str, Any]], options: ChatOptions, context: RequestContext
) -> str:
    """Messages -> the prompt's text: in the event loop if that is quick, else in a thread; with the template of a request
    or of a model by strangers in another process.

    Raises:
        ValidationError: the template rejects the messages.
    """
    front, state = context.engine.front, context.state
    if options.template is not None:
        specials = front.inputs.need_tokenizer("messages").special_tokens_map
        return await state.templates.run(state.untrusted.render, messages, options, specials)
    if not state.texts.inside and not front.template_is_isolated:
        with suppress(TemplateTooSlow):
            return front.render(messages, replace(options, seconds=IN_LOOP_S))
    return await state.texts.run(front.render, messages, replace(options, seconds=SECONDS))


def tokenize_options(request: Sampling, special: bool, *, fits_model: bool = True) -> TokenizeOptions:  # fmt: skip
    """How to tokenize the prompt of a request. Raises ValidationError: truncate_prompt_tokens is 0."""
    limit = request.truncate_prompt_tokens
    return TokenizeOptions(
        add_special_tokens=special,
        truncate=None if limit is None else truncation(limit),
        keep_first=request.truncation_side == "right",
        parameter="prompt",
        fits_model=fits_model,
    )


async def media_prompt(
    context: RequestContext, options: TokenizeOptions, text: str, mark: str,
    pictures: list[ReadMedia], salt: str,
) -> Prompt:  # fmt: skip
    """The tokens of a conversation with media. `text`: as the template wrote it, with `mark` in the place of placeholders
    that users spelt.

    Raises:
        ValidationError: the template writes another number of placeholders, or the prompt is too long for the model.
        Unsupported: the prompt must be truncated.
    """
    engine = context.engine
    reader = need_media(engine.front, "messages")
    if options.truncate is not None:
        raise Unsupported("truncate_prompt_tokens of a prompt with media", "shorten its text")
    written = reader.written(text, pictures, mark)
    special = options.add_special_tokens and reader.adds_special_tokens
    whole = replace(options, fits_model=False, add_special_tokens=special)
    prompt = await engine.tokenize(Prompt(written.text, salt=salt), whole)
    prompt.text = reader.placeholders.unmarked(text, mark)
    prompt = reader.placed(prompt, pictures, written)
    return engine.inputs.checked(prompt) if options.fits_model else prompt


class EncodedEmbeddings(str):
    """A prompt as embeddings: a file in base64."""


def given_prompts(request: CompletionRequest) -> list[Any]:
    """The prompts of the request, not tokenized yet: embeddings first.

    Raises:
        ApiError: 400: none or too many.
    """
    given, embeds = request.prompt, request.prompt_embeds or []
    many: list[Any] = [
        EncodedEmbeddings(e) for e in ([embeds] if isinstance(embeds, str) else embeds)
    ]
    if isinstance(given, list) and given and not isinstance(given[0], int):
        many += given
    elif given:
        many.append(given)
    if not many:
        raise invalid("`prompt` is missing or empty", "prompt")
    if len(many) > 1 and len(many) > (limit := env.get("MAX_COMPLETION_PROMPTS")):
        raise invalid(f"`prompt` has {len(many)} prompts; the limit is {limit}", "prompt")
    return many


async def one_prompt(prompt: Any, request: CompletionRequest, engine: AsyncEngine) -> Prompt:
    """One of the given prompts, tokenized. Raises ApiError, ValidationError: it is invalid."""
    options = tokenize_options(request, request.add_special_tokens)
    salt = request.cache_salt or ""
    if isinstance(prompt, EncodedEmbeddings):
        inputs = engine.inputs
        given = decode_embeddings(prompt, inputs.max_model_len, inputs.embedding_size)
        return await engine.tokenize(Prompt(salt=salt, embeddings=given), options)
    if isinstance(prompt, str):
        return await engine.tokenize(Prompt(prompt, salt=salt), options)
    if isinstance(prompt, list):
        if options.truncate is None:
            engine.inputs.check_length(len(prompt))  # before each of its items is
        if all(type(token) is int for token in prompt):
            return await engine.tokenize(Prompt(None, prompt, salt), options)
    raise invalid(
        "`prompt` must be a string, a list of strings, a list of token ids, or a list of such lists",
        "prompt",
    )


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Check the shape of a conversation. The template checks its content.

    Raises:
        ApiError: 400 that names the place.
    """
    if not messages:
        raise invalid("`messages` is empty", "messages")
    if len(messages) > MOST_MESSAGES:
        raise invalid(
            f"`messages` has {len(messages)} messages; the limit is {MOST_MESSAGES}: drop or merge old ones",
            "messages",
        )
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise invalid(f"`{where}.role` is missing", f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            for part_at, part in enumerate(content):
                check_part(part, f"{where}.content[{part_at}]")
        elif not isinstance(content, str | None):
            raise invalid(
                f"`{where}.content` must be a string or a list of parts", f"{where}.content"
            )
        elif "content" not in message and message["role"] != "assistant":
            raise invalid(f"`{where}.content` is missing", f"{where}.content")


def check_part(part: Any, where: str) -> None:
    if isinstance(part, str | MediaPart):
        return
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if kind in ("text", "refusal", "thinking"):
        if not isinstance(part.get(kind), str):
            raise invalid(f"`{where}.{kind}` must be a string", where)
    elif kind is None:
        raise invalid(f"`{where}` has no `type`", where)
    else:
        raise invalid(f"`{where}`: parts of type {kind!r} are not supported by this model", where)
