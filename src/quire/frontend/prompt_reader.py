"""PromptReader: a feature's part of the frontend. It completes prompts with what a tokenizer does not read.

`Feature.prompt_reader` names the class; the request manager makes one object for each frontend, and knows the base class only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.config.engine import Resolved
from quire.engine.feature import Feature
from quire.frontend.media.content_parts import PartPlace
from quire.frontend.prompts import Prompt

if TYPE_CHECKING:
    from quire.frontend.chat import ChatOptions
    from quire.frontend.input_processor import InputProcessor

Render = Callable[[Sequence[Any], "ChatOptions"], str]


class PromptReader:
    """The base reads nothing. All methods may be called from any thread.

    Raises:
        Unsupported: the tokenizer does not fit the model.
    """

    def __init__(self, resolved: Resolved, inputs: InputProcessor):
        self.resolved, self.inputs = resolved, inputs

    def prepare(self) -> None:
        """Start the processes that the first request would wait for; does not wait for them."""

    def takes(self, prompt: Prompt) -> bool:
        """Whether `read` must complete this prompt of a program."""
        return False

    def read(self, prompt: Prompt, tokenization: Any) -> Prompt:
        """The prompt with all of its tokens, checked. `tokenization`: of `tokenization_kwargs`. Blocks.

        Raises:
            ValidationError: an item cannot be used.
        """
        return prompt

    def read_chat(
        self, messages: list[Any], places: Sequence[PartPlace], options: ChatOptions, render: Render
    ) -> Prompt | None:
        """The prompt of a program's conversation with these items; None: this feature reads none. Blocks.

        Raises:
            ValidationError: an item cannot be used.
        """
        return None

    def check_route(self, what: str) -> None:
        """Raises ValidationError: the model does not generate on this route or method."""


def prompt_readers(
    features: Iterable[Feature], resolved: Resolved, inputs: InputProcessor
) -> dict[str, PromptReader]:
    """The readers of the features, by name of the feature."""
    readers: dict[str, PromptReader] = {}
    for feature in features:
        if not feature.prompt_reader:
            continue
        module, _, name = feature.prompt_reader.partition(":")
        kind: type[PromptReader] = getattr(importlib.import_module(module), name)
        readers[feature.name] = kind(resolved, inputs)
    return readers
