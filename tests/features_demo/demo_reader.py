"""The demo feature's part of the frontend: an item of a prompt is a tuple of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import ValidationError
from quire.frontend.chat import ChatOptions
from quire.frontend.media.content_parts import PartPlace
from quire.frontend.prompt_reader import PromptReader, Render
from quire.frontend.prompts import Prompt

ROUTE = "/demo"


class DemoReader(PromptReader):
    prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def takes(self, prompt: Prompt) -> bool:
        return bool(prompt.items)

    def read(self, prompt: Prompt, tokenization: Any) -> Prompt:
        tokens = [token for item in prompt.items for token in item.source]
        return self.inputs.checked(Prompt(None, [*prompt.tokens, *tokens], prompt.salt))

    def read_chat(
        self, messages: list[Any], places: Sequence[PartPlace], options: ChatOptions, render: Render
    ) -> Prompt | None:
        tokens = [token for place in places for token in place.given.source]
        return self.inputs.checked(Prompt(None, tokens))

    def check_route(self, what: str) -> None:
        if what == ROUTE:
            raise ValidationError("demo: no such route")
