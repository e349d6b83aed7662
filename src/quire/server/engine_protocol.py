"""What the server needs of an engine: a small interface, which tests can implement.

`AsyncTextEngine` implements it over `api.async_llm.AsyncLLM`. Knows prompts as text and as token ids.
Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.protocol.output import EngineStats
from quire.protocol.sampling_params import SamplingParams
from quire.server.text_pool import TextPool


class LogprobLike(Protocol):
    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLike(Protocol):
    """The new output of one completion (or all of it, if the params ask for the final output only)."""

    index: int
    text: str
    token_ids: Any
    logprobs: Any
    """One dict a token: id -> LogprobLike, the chosen token first."""
    finish_reason: str | None
    stop_reason: int | str | None


class OutputLike(Protocol):
    request_id: str
    prompt_token_ids: Any
    prompt_logprobs: Any
    outputs: Any
    finished: bool
    num_cached_tokens: int | None


class StreamLike(Protocol):
    """A running request."""

    ended: bool
    """No more output will come."""

    def take(self) -> OutputLike | None:
        """The new output; None: there is none. Raises the error if the request failed."""

    def close(self) -> None:
        """Stop reading; aborts the request if it still runs."""


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt for the engine: token ids, and their text if the client sent text."""

    tokens: list[int]
    text: str | None = None
    salt: str = ""


@dataclass(slots=True)
class RenderOptions:
    """How to render messages to a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class TextEngine(Protocol):
    """A model that generates text."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: Collection[int]
    """The model's EOS tokens."""
    fingerprint: str
    created: int
    texts: TextPool
    """Threads for long texts."""

    def defaults(self) -> Mapping[str, Any]:
        """Default sampling parameters of the model's generation config, by SamplingParams' names."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Text -> token ids; `special`: add the tokenizer's special tokens (BOS)."""

    def check_width(self, text: str) -> None:
        """Raises ValidationError: the text has more tokens than the model takes, however it is tokenized."""

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str: ...

    def token_text(self, token: int) -> str:
        """The name of a token in logprobs."""

    async def render(self, messages: list[dict[str, Any]], options: RenderOptions) -> str:
        """Messages -> the prompt's text, without blocking other requests.

        Raises:
            ValidationError: the template rejects the messages.
        """

    async def open(
        self, prompt: TokenizedPrompt, params: SamplingParams, request_id: str, heard: Callable[[], None],
        *, priority: int = 0, tenant: str = "", inner: bool = False,
        arrived: float | None = None,
    ) -> StreamLike:  # fmt: skip
        """Start a request of `tenant`. Calls `heard` when it may have new output. `inner`: as in EngineRequest.

        `arrived`: its arrival time, for the waiting queue (seconds of time.time()); None: now.
        """

    async def abort(self, request_id: str) -> None: ...

    def check_health(self) -> None:
        """Raises EngineDeadError, or EngineDelayed: the engine restarts later."""

    def serving(self) -> bool:
        """Whether it takes requests now; False while the engine is being replaced."""

    def stats(self) -> EngineStats:
        """The latest statistics; never waits."""

    async def call(self, name: str, *args: Any) -> Any:
        """Call a named function of the engine."""
