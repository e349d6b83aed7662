"""TranscriptionInputs: prompts of a model that writes down speech, one for each window of sound.

Knows the model, its tokens, and the frontend's reader of sound. Does not know HTTP, or the engine.

Shape suffixes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from quire.frontend.media.errors import refused
from quire.frontend.media.sound_inputs import SoundInputs, as_file
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.transcription.segments import WindowText, Word
from quire.frontend.transcription.speech_tokens import speech_tokens
from quire.frontend.transcription.words import token_times, words_of
from quire.models.sound import HOP, Transcriber
from quire.protocol.media import AUDIO
from quire.protocol.request import MediaItem
from quire.protocol.sound import SOUND, DecodingRules, Spectrogram, encode
from quire.protocol.tensor_data import TensorData

FEATURE = "transcription"


class TranscriptionInputs:
    """One for each frontend.

    Raises:
        Unsupported: the tokenizer lacks tokens of the model.
    """

    def __init__(self, model: Transcriber, tokenizer: Tokenizer, sound: SoundInputs, length: int):
        self.model, self.tokenizer, self.sound = model, tokenizer, sound
        self.tokens = speech_tokens(model, tokenizer)
        self.most_before = max(length // 2 - 1, 0)
        """Tokens of earlier text that a prompt may have."""

    @cached_property
    def language_names(self) -> dict[str, str]:
        """English names of languages, by code; empty, if this version of Transformers has no list of them. Takes time."""
        try:
            from transformers.models.whisper.tokenization_whisper import LANGUAGES
        except ImportError:
            return {}
        return dict(LANGUAGES)

    def prepare(self) -> None:
        """Make ready for the first file."""
        self.sound.prepare()
        self.sound.submit(lambda: self.language_names)

    async def window(
        self, samples_N: np.ndarray, before: Sequence[int], rules: DecodingRules, salt: str, where: str
    ) -> Prompt:  # fmt: skip
        """The prompt of a window. `before`: tokens of earlier text.

        Raises:
            ValidationError, QueueFull: as `SoundInputs.spectrogram`.
        """
        mel = await self.sound.spectrogram(samples_N, self.model.mels, self.model.frames, where)
        tokens = self.tokens.prompt(before, self.most_before)
        return self._prompt(None, tokens, mel, salt, {FEATURE: encode(rules)})

    def states_of(self, num_samples: int) -> int:
        """How many of a window's states have sound."""
        return min(max(num_samples // (2 * HOP), 1), self.model.states)

    async def words(
        self, records: Sequence[tuple[int, bytes]], window: WindowText, first: int, states: int
    ) -> list[Word]:
        """The words of a window, with times from its begin.

        `records`: (place in the request, attention as float32 [heads, states]) of drawn tokens. `first`: the place of the window's first
        token.
        """
        found: list[Word] = await self.sound.in_thread(self._words, records, window, first, states)
        return found

    def _words(
        self, records: Sequence[tuple[int, bytes]], window: WindowText, first: int, states: int
    ) -> list[Word]:
        by_place = dict(records)
        found = [by_place.get(first + index) for index in range(len(window.tokens))]
        if not found or None in found:
            return []
        weights = [np.frombuffer(one or b"", np.float32).reshape(-1, states) for one in found]  # fmt: skip
        times = token_times(np.stack(weights, 1))
        return words_of(window.tokens, times, window.seconds, window.language, self.tokens, self.tokenizer)  # fmt: skip

    def given(self, prompt: Prompt, text_tokens: list[int]) -> Prompt:
        """The prompt of a program with one sound, of at most one window, and tokens of its own. Blocks.

        Raises:
            ValidationError: the sound cannot be used.
        """
        where = "multi_modal_data.audio"
        sounds = [one.source for one in prompt.items if one.kind == AUDIO]
        if len(sounds) != 1 or len(prompt.items) != 1:
            raise refused(where, f"a prompt of this model has one sound and nothing else, not {len(sounds)} of {len(prompt.items)} items")  # fmt: skip
        sound = self.sound.read(as_file(sounds[0], where), where)
        if len(sound.samples_N) > self.model.samples:
            raise refused(
                where,
                f"the sound has {sound.seconds:.1f} s, and a prompt of this model {self.model.seconds:g}: cut it, or send it to"
                " /v1/audio/transcriptions",
            )
        mel = self.sound.processes.spectrogram(
            sound.samples_N, self.model.mels, self.model.frames, where
        )
        return self._prompt(prompt.text, text_tokens, mel, prompt.salt, {})

    def _prompt(
        self, text: str | None, tokens: list[int], mel: TensorData, salt: str, extras: dict[str, Any]
    ) -> Prompt:  # fmt: skip
        digest = blake2b(mel.data, digest_size=20, person=b"quire mel").hexdigest()
        item = MediaItem(digest, SOUND, 0, 0, encode(Spectrogram(mel)))
        return Prompt(
            text, tokens, salt, media=[item], extras=extras, num_encoder_tokens=self.model.states
        )
