"""Prompts of requests -> token ids.

Knows text, ids and truncation. Does not know endpoints. Threads tokenize long texts, so that other requests' streams
continue.
"""

from __future__ import annotations

from typing import Any

from quire import env
from quire.server.engine_protocol import TextEngine, TokenizedPrompt
from quire.server.errors import invalid
from quire.server.schemas import CompletionRequest, Sampling

LONG_TEXT = 20_000  # characters: about 5 ms of tokenizing
MOST_TEXT = (
    4 << 20
)  # bytes of UTF-8: about a million tokens, for which the tokenizer takes 300 MiB of memory
BYTES_A_TOKEN = 16  # ... or so many bytes for each token of a longer context
MOST_MESSAGES = 10_000


async def encode(engine: TextEngine, text: str, *, special: bool, fits: bool = True) -> list[int]:
    """Token ids of a text; a thread tokenizes a long one. `fits`: refuse a text that the model cannot take.

    Raises:
        ApiError: 400: the text is too long to be tokenized at all.
        ValidationError: it cannot fit into the model's context.
    """
    if len(text) < LONG_TEXT:
        return engine.encode(text, special=special)
    return await engine.texts.run_sized(len(text), encode_long, engine, text, special, fits)


def encode_long(engine: TextEngine, text: str, special: bool, fits: bool) -> list[int]:
    """`encode` of a long text, run in a thread."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    most = max(MOST_TEXT, BYTES_A_TOKEN * engine.max_model_len)
    if size > most:
        raise invalid(
            f"the text has {size} bytes of UTF-8; the limit is {most}: shorten it, or send it in parts",
            "input_tokens",
        )
    if fits:
        engine.check_width(text)
    return engine.encode(text, special=special)


def truncated(tokens: list[int], request: Sampling, engine: TextEngine) -> list[int]:
    """The last (or first) truncate_prompt_tokens of a prompt; -1: as many as the model takes."""
    most = request.truncate_prompt_tokens
    if most is None:
        return tokens
    if most == -1:
        most = engine.max_model_len - 1
    if most == 0:
        raise invalid("`truncate_prompt_tokens` is 0, which would leave an empty prompt; set at least 1, or -1", "truncate_prompt_tokens")  # fmt: skip
    return tokens[:most] if request.truncation_side == "right" else tokens[-most:]


def check_length(tokens: list[int], request: Sampling, engine: TextEngine) -> None:
    """Raises ApiError 400 for a prompt that is empty, too long, or has ids outside the vocabulary."""
    if not tokens:
        raise invalid("the prompt is empty: it must have at least one token", "prompt")
    check_fits(len(tokens), request, engine)
    low, high = min(tokens), max(tokens)
    if low < 0 or (engine.vocab_size and high >= engine.vocab_size):
        wrong = low if low < 0 else high
        raise invalid(
            f"token id {wrong} is out of range: the vocabulary has {engine.vocab_size} tokens",
            "prompt",
        )


def check_fits(count: int, request: Sampling, engine: TextEngine) -> None:
    """Raises ApiError 400 for a prompt of more tokens than the model takes."""
    least = 0 if getattr(request, "echo", False) and getattr(request, "max_tokens", 1) == 0 else 1
    if count + least > engine.max_model_len:
        raise invalid(
            f"this model's maximum context length is {engine.max_model_len} tokens, but the prompt has"
            f" {count}; make it shorter, or set truncate_prompt_tokens",
            "input_tokens",
        )


def given_prompts(request: CompletionRequest) -> list[Any]:
    """The prompts of the request, not tokenized yet.

    Raises:
        ApiError: 400: none or too many.
    """
    given = request.prompt
    if given is None or given in ("", []):
        raise invalid("`prompt` is missing or empty", "prompt")
    many: list[Any]
    if isinstance(given, str) or isinstance(given[0], int):
        many = [given]
    else:
        many = given
    if len(many) > 1 and len(many) > (most := env.get("MAX_COMPLETION_PROMPTS")):
        raise invalid(f"`prompt` has {len(many)} prompts; the limit is {most}", "prompt")
    return many


async def one_prompt(
    prompt: Any, request: CompletionRequest, engine: TextEngine
) -> TokenizedPrompt:
    text: str | None = None
    if isinstance(prompt, str):
        text = prompt
        tokens = await encode(
            engine, prompt, special=request.add_special_tokens,
            fits=request.truncate_prompt_tokens is None,
        )  # fmt: skip
    elif isinstance(prompt, list) and is_ids(prompt, request, engine):
        tokens = prompt
    else:
        raise invalid(
            "`prompt` must be a string, a list of strings, a list of token ids, or a list of such lists",
            "prompt",
        )
    kept = truncated(tokens, request, engine)
    if kept is not tokens and len(kept) < len(tokens):
        text = None
    check_length(kept, request, engine)
    return TokenizedPrompt(kept, text, request.cache_salt or "")


def is_ids(prompt: list[Any], request: CompletionRequest, engine: TextEngine) -> bool:
    """Whether a prompt is a list of token ids. Raises ApiError 400: it is too long to check."""
    if request.truncate_prompt_tokens is None:
        check_fits(len(prompt), request, engine)
    return all(type(token) is int for token in prompt)


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
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
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
        elif content is None and message["role"] != "assistant":
            raise invalid(f"`{where}.content` is missing", f"{where}.content")


def check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if kind in ("text", "refusal", "thinking"):
        if not isinstance(part.get(kind), str):
            raise invalid(f"`{where}.{kind}` must be a string", where)
    elif kind is None:
        raise invalid(f"`{where}` has no `type`", where)
    else:
        raise invalid(f"`{where}`: parts of type {kind!r} are not supported by this model", where)
