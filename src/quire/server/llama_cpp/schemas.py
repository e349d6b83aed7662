"""Request bodies of llama.cpp's routes. Knows names, types and defaults. Nulls mean "absent", and are removed before."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class InfillRequest(Struct, kw_only=True):
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    """More text of the prefix."""
    input_extra: list[dict[str, Any]] = []
    """Other files, as context: {"filename", "text"}."""
    model: str | None = None
    stream: bool = False
    n_predict: int = -1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    cache_prompt: bool = True
