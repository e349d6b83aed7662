"""Times of words: dynamic time warping of the attention that the decoder paid to the sound when it drew each token.

Knows weights and texts. Does not know models. Source: arXiv 2212.04356 and the code of openai/whisper.

Shape suffixes: N tokens, A recorded heads, S encoder states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.frontend.tokenizer import Tokenizer
from quire.frontend.transcription.segments import NO_SPACES, Word
from quire.frontend.transcription.speech_tokens import STEP, SpeechTokens

FILTER = 7  # states over which weights are smoothed
HALF_CHARACTER = "\ufffd"
AFTER = "\"'.。,,!!??::”)]}、"
"""Punctuation that belongs to the word before."""


def token_times(weights_ANS: np.ndarray) -> list[float]:
    """The seconds at which each token begins."""
    if not weights_ANS.shape[1]:
        return []
    mean, std = weights_ANS.mean(1, keepdims=True), weights_ANS.std(1, keepdims=True)
    normed_ANS = (weights_ANS - mean) / np.maximum(std, 1e-10)
    matrix_NS = smoothed(normed_ANS).mean(0)
    return [STEP * state for state in warped(-matrix_NS)]


def smoothed(weights_ANS: np.ndarray) -> np.ndarray:
    """The median of FILTER neighbouring states."""
    side = FILTER // 2
    if weights_ANS.shape[-1] <= side:
        return weights_ANS
    padded = np.pad(weights_ANS, ((0, 0), (0, 0), (side, side)), mode="reflect")
    median: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, FILTER, -1), -1)
    return median


def warped(cost_NS: np.ndarray) -> list[int]:
    """The state at which each token begins, on the cheapest path from the first token and state to the last of both."""
    rows, columns = cost_NS.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    trace = np.full((rows + 1, columns + 1), 2, np.int8)
    total[0, 0], trace[1:, 0] = 0, 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_both = (both < up) & (both < left)
        is_up = ~is_both & (up < both) & (up < left)
        best = np.where(is_both, both, np.where(is_up, up, left))
        total[i, j] = cost_NS[i - 1, j - 1] + best
        trace[i, j] = np.where(is_both, 0, np.where(is_up, 1, 2))
    row, column, begins = rows, columns, [0] * rows
    while row > 0 or column > 0:
        if row > 0:
            begins[row - 1] = max(column - 1, 0)
        step = int(trace[row, column])
        row, column = row - (step != 2), column - (step != 1)
    return begins


def words_of(
    tokens: Sequence[int], times: Sequence[float], seconds: float, language: str | None,
    special: SpeechTokens, tokenizer: Tokenizer,
) -> list[Word]:  # fmt: skip
    """The words of a window's tokens, timestamps included. `times`: of each token."""
    found: list[Word] = []
    part: list[int] = []
    begin = 0.0
    for token, time in zip(tokens, times, strict=True):
        if token >= special.end:
            continue
        if not part:
            begin = time
        part.append(token)
        text = tokenizer.decode(part, True)
        if HALF_CHARACTER in text:
            continue
        part = []
        joins = bool(found and text.strip()) and text.strip() in AFTER
        starts = language in NO_SPACES or text.startswith(" ") or not found
        if starts and not joins:
            _close(found, begin)
            found.append(Word(text, begin, begin))
        else:
            found[-1].word += text
    _close(found, seconds)
    shown = [word for word in found if word.word.strip()]
    for word in shown:
        word.word = word.word.strip()
        word.end = max(word.end, word.start)
    return shown


def _close(found: list[Word], time: float) -> None:
    if found:
        found[-1].end = time
