"""MediaReader: reads the pictures, videos and sounds in prompts of programs, and gives the server their reader.

Knows `MediaInputs` and the frontend's input processor. Does not know HTTP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.config.engine import Resolved
from quire.errors import Unsupported
from quire.frontend.chat import ChatOptions
from quire.frontend.input_processor import InputProcessor, TokenizeOptions
from quire.frontend.media.content_parts import MediaPart, PartPlace
from quire.frontend.media.errors import refused
from quire.frontend.media.inputs import MediaInputs
from quire.frontend.media.placeholders import media_in, new_mark
from quire.frontend.prompt_reader import PromptReader, Render
from quire.frontend.prompts import Prompt
from quire.models.media import media_model
from quire.protocol.media import IMAGE

if TYPE_CHECKING:
    from quire.frontend.request_manager import RequestManager

NAME = "media"


class MediaReader(PromptReader):
    """`media` reads items and places them in prompts; None: there is no tokenizer that fits, and `no_media` of the input
    processor says why."""

    def __init__(self, resolved: Resolved, inputs: InputProcessor):
        super().__init__(resolved, inputs)
        self.media: MediaInputs | None = None
        model = media_model(resolved)
        if model is None or inputs.tokenizer is None:
            return
        try:
            self.media = MediaInputs(model, resolved, inputs.tokenizer)
        except Unsupported as why:
            inputs.no_media = dict.fromkeys(inputs.no_media, str(why))

    def prepare(self) -> None:
        if self.media is not None:
            self.media.prepare()

    def takes(self, prompt: Prompt) -> bool:
        return self.media is not None and bool(prompt.items)

    def read(self, prompt: Prompt, tokenization: Any) -> Prompt:
        if (reader := self.media) is None:
            return prompt
        items = reader.load_now(prompt.items, prompt.salt)
        options = TokenizeOptions.read(tokenization)
        options.fits_model = False
        options.add_special_tokens &= reader.adds_special_tokens
        if options.truncate is not None:
            raise Unsupported("truncation of a prompt with media", "shorten its text")
        tokenize = functools.partial(self.inputs.tokenize, options=options)
        return self.inputs.checked(reader.tokenized(prompt, items, tokenize))

    def read_chat(
        self, messages: list[Any], places: Sequence[PartPlace], options: ChatOptions, render: Render
    ) -> Prompt | None:
        if (reader := self.media) is None:
            return None
        items = reader.load_now([place.given for place in places])
        for place, item in zip(places, items, strict=True):
            place.parts[place.index] = MediaPart(item)
        mark = new_mark()
        options = dataclasses.replace(options, media=reader.texts, media_in_place=reader.in_place)
        text = render(reader.placeholders.marked(messages, mark), options)
        options_of_text = TokenizeOptions(False, fits_model=False)
        tokenize = functools.partial(self.inputs.tokenize, options=options_of_text)
        found = reader.tokenized(Prompt(text), media_in(messages), tokenize, mark)
        return self.inputs.checked(found)


def media_inputs(front: RequestManager) -> MediaInputs | None:
    """What reads pictures, videos and sound in prompts; None: `inputs.no_media` says why there are none."""
    reader = front.readers.get(NAME)
    return reader.media if isinstance(reader, MediaReader) else None


def need_media(front: RequestManager, where: str, kind: str = IMAGE) -> MediaInputs:
    """As `media_inputs`. Raises ValidationError: this server takes none; the message says why."""
    found = media_inputs(front)
    if found is None:
        raise refused(where, front.inputs.no_media[kind])
    return found
