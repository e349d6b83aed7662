"""The prompt that asks a model for the text between a prefix and a suffix. Knows the tokens that code models have for it."""

from __future__ import annotations

from quire.api.async_engine import AsyncEngine
from quire.server.errors import invalid

MARKERS = (
    (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ),  # Qwen, CodeGemma, StarCoder 2 of others
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""Tokens before the prefix, before the suffix, and before the answer."""


def fill_prompt(engine: AsyncEngine, prefix: str, suffix: str, field: str) -> str:
    """Raises ApiError 400: the model has no such tokens."""
    tokenizer = engine.inputs.need_tokenizer(field)
    for before, between, after in MARKERS:
        if all(tokenizer.token_id(token) is not None for token in (before, between, after)):
            return f"{before}{prefix}{between}{suffix}{after}"
    raise invalid(f"`{field}`: this model has no tokens to fill a gap in a text; serve a code model that has (such as qwen2.5-coder:1.5b), or send a prompt without it", field)  # fmt: skip
