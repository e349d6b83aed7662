"""Request bodies of Ollama's routes. Knows names, types and defaults. Nulls mean "absent", and are removed before."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class OllamaOptions(Struct, kw_only=True, frozen=True):
    """`options`: sampling parameters. The others (num_ctx, num_gpu, ...) belong to the server's start and are ignored."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    """At most this number of tokens; below 0: until the answer ends."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(Struct, kw_only=True):
    """The fields of generate and chat."""

    model: str | None = None
    stream: bool = True
    format: Any = None
    options: OllamaOptions = OllamaOptions()
    think: bool | str | None = None
    keep_alive: Any = None

    def __post_init__(self) -> None:
        self.model = plain_name(self.model)


class OllamaChatRequest(OllamaBody, kw_only=True):
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaBody, kw_only=True):
    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    images: list[str] = []
    raw: bool = False
    template: str | None = None
    context: Any = None


class OllamaEmbedRequest(Struct, kw_only=True):
    input: Any = None
    model: str | None = None
    truncate: bool = True
    dimensions: int | None = None
    options: dict[str, Any] = {}
    keep_alive: Any = None

    def __post_init__(self) -> None:
        self.model = plain_name(self.model)


class OllamaShowRequest(Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.model = plain_name(self.model or self.name)


def plain_name(name: str | None) -> str | None:
    """Ollama's clients add a tag to each name that has none."""
    return name and name.removesuffix(":latest")
