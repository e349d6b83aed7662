"""`AsyncTextEngine`: the TextEngine of a server, over AsyncLLM and its frontend.

Knows the frontend's parts. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from quire import __version__
from quire.api.async_llm import AsyncLLM
from quire.api.stream import OutputStream
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import Unsupported, ValidationError
from quire.frontend import chat, prompts
from quire.frontend.jinja_sandbox import SECONDS, TemplateTooSlow
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.untrusted_templates import AT_ONCE, UntrustedTemplateRenderer
from quire.protocol.output import EngineStats
from quire.protocol.sampling_params import SamplingParams
from quire.server.engine_protocol import RenderOptions, TokenizedPrompt
from quire.server.text_pool import TextPool

AT_ONCE_S = 0.03  # of the event loop, at most, for a template; nearly all take less than a tenth


class AsyncTextEngine:
    """A TextEngine. Created in any thread, used in one event loop."""

    def __init__(self, llm: AsyncLLM, client: EngineClient):
        self.llm, self.client = llm, client
        self.front = llm.front
        self.front.packs_logprobs = True
        ready = client.ready
        self.max_model_len = ready.max_model_len
        self.vocab_size = self.front.inputs.vocab_size
        self.eos_token_ids: Collection[int] = self.front.inputs.eos_token_ids
        self.created = int(time.time())
        self.fingerprint = fingerprint(client)
        self.texts = TextPool()
        self.templates = TextPool(AT_ONCE)
        """Threads that wait for the processes of `strangers`."""
        llm.in_thread = self.texts.run

    @classmethod
    def over(cls, client: EngineClient, config: EngineConfig) -> AsyncTextEngine:
        """Loads the tokenizer."""
        return cls(AsyncLLM.from_client(client, config), client)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.front.tokenizer is not None and self.front.tokenizer.template is not None

    @property
    def template_text(self) -> str:
        """The checkpoint's templates: they show how the model writes tool calls and reasoning."""
        return self.front.template_text

    @property
    def special_texts(self) -> list[str]:
        return [] if self.front.tokenizer is None else self.front.tokenizer.all_special_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValidationError: there is no tokenizer."""
        if self.front.tokenizer is None:
            raise ValidationError(
                "the server runs without a tokenizer (--skip-tokenizer-init): send token ids",
                parameter="prompt",
            )
        return self.front.tokenizer

    def defaults(self) -> Mapping[str, Any]:
        return self.front.inputs.defaults.sampling

    # -- text -----------------------------------------------------------------------------------
    def encode(self, text: str, *, special: bool) -> list[int]:
        return self.tokenizer.encode(text, special)

    def check_width(self, text: str) -> None:
        self.front.inputs.check_width(text)

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        return self.tokenizer.decode(tokens, skip_special)

    def token_text(self, token: int) -> str:
        return "" if self.front.tokenizer is None else self.front.tokenizer.piece(token)

    @functools.cached_property
    def strangers(self) -> UntrustedTemplateRenderer:
        """Renders templates that come with requests."""
        return UntrustedTemplateRenderer()

    async def render(self, messages: list[dict[str, Any]], options: RenderOptions) -> str:
        """Render in the event loop if that is quick, else in a thread; a request's own template in another process."""
        asked = chat.ChatOptions(
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            template=options.template,
            template_kwargs=options.template_kwargs,
            tools=options.tools,
            documents=options.documents,
            content_format=self.front.content_format,
            seconds=AT_ONCE_S,
        )
        if options.template is not None:
            specials = self.tokenizer.special_tokens_map
            return await self.templates.run(self.strangers.render, messages, asked, specials)
        if not self.texts.inside:
            with suppress(TemplateTooSlow):
                return self.front.render(messages, asked)
        slower = replace(asked, seconds=SECONDS)
        return await self.texts.run(self.front.render, messages, slower)

    # -- requests -------------------------------------------------------------------------------
    async def open(
        self, prompt: TokenizedPrompt, params: SamplingParams, request_id: str, heard: Callable[[], None],
        *, priority: int = 0, tenant: str = "", inner: bool = False,
        arrived: float | None = None,
    ) -> OutputStream:  # fmt: skip
        given = prompts.Prompt(tokens=prompt.tokens, salt=salted(prompt.salt, tenant))
        try:
            return await self.llm.open(
                given,
                params,
                request_id,
                heard,
                priority=priority,
                tenant=tenant,
                inner=inner,
                arrived=arrived,
            )
        except Unsupported as error:
            raise ValidationError(str(error)) from error

    async def abort(self, request_id: str) -> None:
        await self.llm.abort(request_id)

    # -- the engine -----------------------------------------------------------------------------
    def check_health(self) -> None:
        self.client.check()
        self.llm.check_alive()

    def serving(self) -> bool:
        """False while the engine is being replaced."""
        return self.client.state().condition == "ready"

    def stats(self) -> EngineStats:
        return self.client.stats()

    async def call(self, name: str, *args: Any) -> Any:
        return await asyncio.to_thread(self.client.call, name, *args)


def salted(salt: str, tenant: str) -> str:
    """Tenants share no cached prefixes: the latency of an answer would reveal other tenants' prompts."""
    return sha256(f"{tenant}\0{salt}".encode()).hexdigest()[:32] if tenant else salt


def fingerprint(client: EngineClient) -> str:
    """Changes with everything that may change an answer: version, model and its implementation, dtype, device."""
    ready = client.ready
    what = (__version__, client.resolved.path, ready.dtype, ready.device, ready.model_impl)
    return f"quire-{__version__}-{sha256(repr(what).encode()).hexdigest()[:8]}"
