"""Pairs of a program whose texts may have pictures: {"content": [parts]} with the parts of chats, `image_pil` among them.

Knows how conversations of programs become prompts. Does not know HTTP, or what a score is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ValidationError
from quire.frontend.chat import ChatOptions
from quire.frontend.pooling.scores import (
    PairOptions,
    Pairs,
    PairText,
    check_shapes,
    content_of,
    conversations_of,
    read_text,
)
from quire.frontend.prompts import Prompt
from quire.frontend.request_manager import RequestManager

NAMES = ("data_1", "data_2")


def read_program_pairs(
    front: RequestManager, firsts: Any, seconds: Any, options: PairOptions
) -> Pairs:
    """Pairs of texts, or lists of texts. Blocks while pictures are read.

    Raises:
        ValidationError: they make no pairs, or an item cannot be used. Unsupported: the model takes no pictures in pairs.
    """
    both = [list(one) if isinstance(one, list | tuple) else [one] for one in (firsts, seconds)]
    words = []
    for name, many in zip(NAMES, both, strict=True):
        if not many:
            raise ValidationError(f"{name} is empty: it needs at least one text", parameter=name)
        words.append([_words(one, f"{name}[{index}]") for index, one in enumerate(many)])
    check_shapes(words[0], words[1], NAMES)
    pairs = Pairs(front, words[0], words[1], options)
    if not any(_has_media(one) for many in both for one in many):
        return pairs
    if not pairs.renders:
        pairs.check_media()
        made = [[_vector_text(front, one, text) for one, text in zip(*each, strict=True)] for each in zip(both, words, strict=True)]  # fmt: skip
        return Pairs(front, made[0], made[1], options)
    pairs.check_uncut()
    how = ChatOptions(add_generation_prompt=False, template=options.template, template_kwargs=options.variables)  # fmt: skip
    for messages in conversations_of(*both):
        pairs.rendered.append(front.chat_prompt(messages, how))
    return pairs


def _vector_text(front: RequestManager, one: Any, words: str) -> PairText:
    """A text of a pair whose vectors are compared; with pictures, the conversation of one message."""
    if not _has_media(one):
        return words
    prompt: Prompt = front.chat_prompt([{"role": "user", "content": content_of(one)}], ChatOptions(add_generation_prompt=False))  # fmt: skip
    prompt.text = words
    return prompt


def _has_media(one: Any) -> bool:
    content = content_of(one)
    return isinstance(content, list) and any(isinstance(part, Mapping) and "text" not in part for part in content)  # fmt: skip


def _words(one: Any, name: str) -> str:
    """The words of a text. Raises: as `read_text`."""
    if not _has_media(one):
        return read_text(one, name)
    return "\n".join(str(part["text"]) for part in content_of(one) if isinstance(part, Mapping) and "text" in part)  # fmt: skip
