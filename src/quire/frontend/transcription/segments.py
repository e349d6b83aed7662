"""What the tokens of a window say: segments with times, text, and how far they can be trusted.

Knows token ids and times. Does not know engines. Source: arXiv 2212.04356, section 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.frontend.tokenizer import Tokenizer
from quire.frontend.transcription.speech_tokens import STEP, SpeechTokens


@dataclass(slots=True)
class Word:
    """Seconds from the begin of the sound."""

    word: str
    start: float
    end: float


@dataclass(slots=True)
class Segment:
    """Seconds from the begin of the sound. `tokens`: with timestamps."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(slots=True)
class WindowText:
    """The output for one window.

    Attributes:
        offset: the window's begin, in seconds. seconds: its length.
        tokens: after the prefix, without the end.
        advance: seconds after which the next window may begin, if windows follow each other.
        no_speech: probability that the window has no speech; None: unknown.
    """

    offset: float
    seconds: float
    tokens: list[int]
    text: str
    segments: list[Segment] = field(default_factory=list)
    advance: float = 0.0
    language: str | None = None
    temperature: float = 0.0
    mean_logprob: float = 0.0
    no_speech: float | None = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    """(token, log-probability) of the text."""
    words: list[Word] = field(default_factory=list)

    @property
    def compression(self) -> float:
        """How many times shorter zlib makes the text: more than about 2.4 is a text that repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


def text_of(tokens: Sequence[int], special: SpeechTokens, tokenizer: Tokenizer) -> str:
    """Without timestamps and other special tokens, which have the highest ids."""
    return tokenizer.decode([token for token in tokens if token < special.end], True)


def split(
    window: WindowText, timed: bool, special: SpeechTokens, tokenizer: Tokenizer, step: float = STEP
) -> None:
    """Set the segments of a window, and how far the next may advance.

    Two timestamps after each other end one segment and begin the next. What follows the last pair is not complete: the next
    window begins there, unless one timestamp closes the text.
    """
    tokens, first = window.tokens, special.first_time
    is_time = [token >= first for token in tokens]
    window.advance = window.seconds
    if not timed:
        _add(window, 0, window.seconds, tokens, special, tokenizer)
        return
    ends = [index for index in range(1, len(tokens)) if is_time[index - 1] and is_time[index]]
    closes = is_time[-2:] == [False, True]
    if not ends:
        times = [token for token, known in zip(tokens, is_time, strict=True) if known]
        last = (times[-1] - first) * step if times and times[-1] > first else window.seconds
        start = (times[0] - first) * step if len(times) > 1 else 0.0
        _add(window, min(start, last), last, tokens, special, tokenizer)
        return
    begin = 0
    for end in [*ends, len(tokens)] if closes else ends:
        part = tokens[begin:end]
        _add(window, (part[0] - first) * step, (part[-1] - first) * step, part, special, tokenizer)
        begin = end
    if not closes:
        window.advance = min((tokens[begin - 1] - first) * step, window.seconds)
    rest = tokens[begin:]
    if not closes and any(token < special.end for token in rest):
        window.segments.append(_segment(window, (rest[0] - first) * step, window.seconds, rest, special, tokenizer))  # fmt: skip


def _add(
    window: WindowText, start: float, end: float, tokens: list[int], special: SpeechTokens, tokenizer: Tokenizer,
) -> None:  # fmt: skip
    if any(token < special.end for token in tokens):
        window.segments.append(_segment(window, start, end, tokens, special, tokenizer))


def _segment(
    window: WindowText, start: float, end: float, tokens: list[int], special: SpeechTokens, tokenizer: Tokenizer,
) -> Segment:  # fmt: skip
    start, end = (min(max(time, 0.0), window.seconds) for time in (start, end))
    text = text_of(tokens, special, tokenizer)
    offset = window.offset
    return Segment(offset + start, offset + max(start, end), text, list(tokens))


NO_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no spaces between words."""


def joined(texts: Sequence[str], language: str | None) -> str:
    """The texts of windows, one after the other."""
    if language in NO_SPACES:
        return "".join(text.strip() for text in texts)
    return " ".join(stripped for text in texts if (stripped := text.strip()))
