"""What the server asks of the rooms below it: one small face, so that tests can stand in for it.

`AsyncTextEngine` is the real one, over `api.async_llm.AsyncLLM`. Knows prompts as text and as token ids.
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
    """What is new of one completion (or all of it, when params ask for the final only)."""

    index: int
    text: str
    token_ids: Any
    logprobs: Any
    """One dict a token: id -> LogprobLike, the chosen one first."""
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
    """One request while it runs."""

    ended: bool
    """Nothing more will come."""

    def take(self) -> OutputLike | None:
        """What is new; None: nothing yet, unless it has ended. Raises why the request failed."""

    def close(self) -> None:
        """Nobody reads it any more: it is aborted if it still runs."""


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it: ids, and the text they came from if there was one."""

    tokens: list[int]
    text: str | None = None
    salt: str = ""


@dataclass(slots=True)
class RenderOptions:
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class TextEngine(Protocol):
    """A model that can be asked for text."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: Collection[int]
    """The model's ends of text."""
    fingerprint: str
    created: int
    texts: TextPool
    """Threads for long texts."""

    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters of the model's generation config, by SamplingParams' names."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Text -> ids; `special`: with what the tokenizer puts around a text (BOS)."""

    def check_width(self, text: str) -> None:
        """Raises ValidationError: a text that has more tokens than the model takes, however it is tokenized."""

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str: ...

    def token_text(self, token: int) -> str:
        """A token as it is named in logprobs."""

    async def render(self, messages: list[dict[str, Any]], options: RenderOptions) -> str:
        """Messages -> the prompt's text; others are served meanwhile.

        Raises:
            ValidationError: messages that the template cannot take.
        """

    async def open(
        self, prompt: TokenizedPrompt, params: SamplingParams, request_id: str, heard: Callable[[], None],
        *, priority: int = 0, tenant: str = "", inner: bool = False,
    ) -> StreamLike:  # fmt: skip
        """One request of `tenant`. `heard` is called when it may have something new. `inner`: as of an EngineRequest."""

    async def abort(self, request_id: str) -> None: ...

    def check_health(self) -> None:
        """Raises EngineDeadError when it cannot answer any more."""

    def serving(self) -> bool:
        """Whether requests are answered now; False while it is being replaced."""

    def stats(self) -> EngineStats:
        """The latest snapshot; never waits."""

    async def call(self, name: str, *args: Any) -> Any:
        """A named function of the engine."""
