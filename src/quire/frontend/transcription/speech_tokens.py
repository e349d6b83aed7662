"""The special tokens of Whisper's vocabulary, by name, and the prompt of a window of sound.

Knows a tokenizer and generation_config.json. Does not know sound.

    <|startofprev|> TEXT <|startoftranscript|>   prompt
    <|en|> <|transcribe|> <|notimestamps|>       first output tokens, each forced, or drawn from those that are allowed
    TEXT <|endoftext|>                           with timestamps: <|0.00|> TEXT <|2.40|> <|2.40|> TEXT <|4.00|> <|endoftext|>

Language and task are output tokens, so that one request detects the language, and its first position says how likely silence is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import Unsupported, ValidationError
from quire.frontend.tokenizer import Tokenizer
from quire.models.sound import Transcriber
from quire.protocol.sound import DecodingRules

LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
STEP = 0.02  # seconds between two timestamps
ENGLISH_VOCABULARY = 51_864  # words of the checkpoints for English alone


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Ids. `languages`: by code; empty: the model writes English only. `no_speech`: -1: the vocabulary has none."""

    start: int
    end: int
    previous: int
    no_timestamps: int
    transcribe: int
    translate: int
    no_speech: int
    languages: Mapping[str, int]
    suppressed: tuple[int, ...]
    first_suppressed: tuple[int, ...]
    max_first: int | None

    @property
    def first_time(self) -> int:
        """The id of <|0.00|>."""
        return self.no_timestamps + 1

    @property
    def prefix_length(self) -> int:
        """Forced output tokens before the text, without <|notimestamps|>."""
        return 2 if self.languages else 0

    def rules(
        self, language: str | None, task: str, timestamps: bool, aligned: int = 0
    ) -> DecodingRules:
        """`language`: a code; None: it is detected. `task`: transcribe or translate. `aligned`: see `DecodingRules`."""
        prefix: list[list[int]] = []
        if self.languages:
            known = self.languages.values() if language is None else [self.languages[language]]
            prefix = [list(known), [self.translate if task == "translate" else self.transcribe]]
        if not timestamps:
            prefix.append([self.no_timestamps])
        return DecodingRules(
            prefix, list(self.suppressed), list(self.first_suppressed), self.first_time if timestamps else 0, self.no_timestamps,
            self.end, self.max_first, aligned,
        )  # fmt: skip

    def prompt(self, before: Sequence[int], most: int) -> list[int]:
        """`before`: tokens of the text before this window, of which the last `most` are kept."""
        kept = list(before[-most:]) if most else []
        return [self.previous, *kept, self.start] if kept else [self.start]

    def language_of(self, token: int) -> str | None:
        return next((code for code, id in self.languages.items() if id == token), None)


def speech_tokens(model: Transcriber, tokenizer: Tokenizer) -> SpeechTokens:
    """Raises Unsupported: the tokenizer lacks a token without which nothing can be transcribed."""
    says = model.generation

    def need(name: str) -> int:
        if (found := tokenizer.token_id(name)) is None:
            raise Unsupported(f"transcription with a tokenizer without {name}", "serve another checkpoint")  # fmt: skip
        return found

    no_timestamps = says.get("no_timestamps_token_id")
    no_timestamps = no_timestamps if isinstance(no_timestamps, int) else need("<|notimestamps|>")
    silence = [tokenizer.token_id(name) for name in ("<|nospeech|>", "<|nocaptions|>")]
    multilingual = model.multilingual
    if multilingual is None:
        multilingual = len(tokenizer) > ENGLISH_VOCABULARY
    start, translate = need("<|startoftranscript|>"), tokenizer.token_id("<|translate|>")
    if translate is None or tokenizer.token_id("<|transcribe|>") is None:
        multilingual = False
    first = says.get("max_initial_timestamp_index")
    return SpeechTokens(
        start, need("<|endoftext|>"), need("<|startofprev|>"), no_timestamps, tokenizer.token_id("<|transcribe|>") or 0,
        translate or 0, next((id for id in silence if id is not None), -1),
        languages(says, tokenizer, start, translate or start) if multilingual else {}, ids(says.get("suppress_tokens")),
        ids(says.get("begin_suppress_tokens")), first if isinstance(first, int) else None,
    )  # fmt: skip


def languages(
    says: Mapping[str, Any], tokenizer: Tokenizer, start: int, end: int
) -> dict[str, int]:
    """By code: as generation_config.json says, else the tokens between these two."""
    given = says.get("lang_to_id")
    if not isinstance(given, Mapping):
        given = {tokenizer.token(id): id for id in range(start + 1, end)}
    return {
        match[1]: id
        for name, id in given.items()
        if isinstance(id, int) and isinstance(name, str) and (match := LANGUAGE.fullmatch(name))
    }


def ids(value: Any) -> tuple[int, ...]:
    """A list of token ids; -1 in old files means: none."""
    return tuple(id for id in value or () if isinstance(id, int) and id >= 0)


def chosen_language(
    asked: str | None, tokens: SpeechTokens, names: Mapping[str, str]
) -> str | None:
    """The code of a language, which may be given by code or by name; None: it is detected.

    `names`: of languages in English, by code.

    Raises:
        ValidationError: the model does not know it.
    """
    if not asked:
        return None
    code = asked.strip().lower()
    code = next((known for known, name in names.items() if name == code), code.partition("-")[0])
    if not tokens.languages:
        if code == "en":
            return None
        raise ValidationError(f"`language`: this model writes English only, not {asked[:40]!r}", parameter="language")  # fmt: skip
    if code not in tokens.languages:
        known = ", ".join(sorted(tokens.languages))
        raise ValidationError(
            f"`language`: {asked[:40]!r} is unknown; this model has {known}. Leave it out to detect it.",
            parameter="language",
        )
    return code
