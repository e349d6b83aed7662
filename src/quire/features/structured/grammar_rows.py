"""The rows of one grammar: each row's state in it (`Place`), its forced tokens, and the mask of its next token.

Knows one compiled grammar and its rows, by number. Does not know logits, or which process it runs in. Each grammar
runs in its own process (`grammar_server.py`), because a matcher may take much time and memory at any token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher
from msgspec import Struct

from quire.features.structured.grammar import explained
from quire.features.structured.refusal import Refused

if TYPE_CHECKING:
    from quire.features.structured.matcher import Matcher

DEAD_END = "no token continues the output as its constraint asks; the vocabulary may not be able to spell it"
NOT_KEPT = "the constraint cannot be kept: the grammar library fails on it"
GAVE_UP = (
    "the constraint is too much work, or the output left it; make it smaller, or repeat less in it"
)
MANY = 4  # from this many rows (and cores) on, a thread pool computes the masks
THREADS = 8


class PlaceSettings(Struct, array_like=True):
    """A request's settings for the end of its output and for forced tokens."""

    ends: list[int]
    """Tokens that end the output."""
    ends_late: bool
    """`ignore_eos`: the output ends only where no other token is allowed."""
    room: int
    """Maximum number of output tokens."""
    end_at: int
    """From this length on, the end token of a finished grammar is forced."""
    jumps: bool
    """Feed forced tokens at once, without sampling."""


class Place:
    """The state of one row in the grammar."""

    __slots__ = ("ended", "error", "known", "matcher", "num_fed", "over", "renewed", "settings")

    def __init__(self, matcher: Matcher, settings: PlaceSettings):
        self.matcher, self.settings = matcher, settings
        self.known: list[int] = []
        self.num_fed = 0  # tokens that the matcher has consumed: all before the first end token
        self.renewed = False
        self.over = False  # only an end token is allowed now
        self.ended = False  # an end token was sampled; only end tokens may follow
        self.error: str | None = None

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.error is None


class Places:
    """All rows of one grammar.

    Args:
        make: compiles the grammar; called again when copies of the first one have exhausted its limits.
        accepts: the token whose bit in a mask means that the output may end.
        words: size of a mask in words of 32 tokens.
    """

    def __init__(self, make: Callable[[], Matcher], accepts: int, words: int):
        self.make, self.accepts, self.words = make, accepts, words
        self.grammar = make()
        self.at: dict[int, Place] = {}
        self._par: LLExecutor | None = None
        self.check()

    def check(self) -> None:
        """Compute the first mask, which is most of the work of a compile.

        Raises:
            Refused: the matcher fails on it.
        """
        first = self.grammar.deep_copy()
        _compute(first, np.zeros((1, self.words), np.int32), 0)
        if first.is_error():
            raise Refused(explained(first.get_error()))

    def begin(self, number: int, settings: PlaceSettings, outputs: Sequence[int]) -> None:
        self.at[number] = place = Place(self.grammar.deep_copy(), settings)
        for token in outputs:
            self._feed(place, token)

    def drop(self, number: int) -> None:
        self.at.pop(number, None)

    def feed(self, number: int, token: int) -> list[int]:
        """Feed a token; returns the forced tokens after it, which are fed too."""
        place = self.at[number]
        try:
            self._feed(place, token)
            return self._jump(place) if place.settings.jumps else []
        except BaseException:  # a Rust panic is no Exception
            place.error = NOT_KEPT
            return []

    def fill(self, numbers: Sequence[int]) -> np.ndarray:
        """The masks of these rows, in order; zeros for rows that have ended or failed."""
        masks_NW = np.zeros((len(numbers), self.words), np.int32)
        places = [self.at[number] for number in numbers]
        try:
            self._compute_all(places, masks_NW)
        except BaseException:  # below, compute each alone, so that only the row at fault fails
            masks_NW[:] = 0
        for row, place in enumerate(places):
            if place.goes_on:
                try:
                    self._finish(place, masks_NW, row)
                except BaseException:
                    place.error = NOT_KEPT
        return masks_NW

    def _compute_all(self, places: Sequence[Place], masks_NW: np.ndarray) -> None:
        todo = [(place.matcher, row) for row, place in enumerate(places) if place.goes_on]
        cores = os.cpu_count() or 1
        if len(todo) < MANY or cores < MANY or not isinstance(todo[0][0], LLMatcher):
            for matcher, row in todo:
                _compute(matcher, masks_NW, row)
            return
        self._par = self._par or LLExecutor(min(THREADS, cores // 2))
        quick = cast("list[tuple[LLMatcher, int]]", todo)
        self._par.unsafe_compute_mask_ptr(
            quick, masks_NW.ctypes.data, masks_NW.strides[0], len(masks_NW)
        )

    def _finish(self, place: Place, masks_NW: np.ndarray, row: int) -> None:
        if not masks_NW[row].any() and not place.matcher.is_error():
            _compute(place.matcher, masks_NW, row)
        if place.matcher.is_error():
            self._renew(place)
            if place.error is None:
                _compute(place.matcher, masks_NW, row)
            if place.error is None and place.matcher.is_error():
                self._renew(place)
        if place.error is None:
            self._set_ends(place, masks_NW[row])

    def _feed(self, place: Place, token: int) -> None:
        place.known.append(token)
        if place.ended:
            return
        if token in place.settings.ends:
            place.ended = place.over = True
        else:
            place.num_fed += 1
            if not place.matcher.consume_token(token):
                self._renew(place)

    def _jump(self, place: Place) -> list[int]:
        """Feed the forced tokens; returns them."""
        settings, start = place.settings, len(place.known)
        while place.goes_on:
            forced = place.matcher.compute_ff_tokens()[: settings.room - len(place.known)]
            for token in forced:
                if token in settings.ends or place.error is not None:
                    return place.known[start:]
                self._feed(place, token)
            if not forced:
                break
        done = place.matcher.is_stopped() and place.matcher.is_accepting()
        if done and not place.ended and settings.end_at <= len(place.known) < settings.room:
            self._feed(place, settings.ends[0])
        return place.known[start:]

    def _renew(self, place: Place) -> None:
        """The matcher has failed. Retry once with a new one, as other rows may have exhausted the grammar's limits."""
        if not place.renewed:
            place.renewed = True
            self.grammar = self.make()
            place.matcher = self.grammar.deep_copy()
            if place.matcher.consume_tokens(place.known[: place.num_fed]):
                return
        place.error = GAVE_UP

    def _set_ends(self, place: Place, words_W: np.ndarray) -> None:
        accepts, ends = self.accepts, place.settings.ends
        may_end = bool(words_W[accepts >> 5] >> (accepts & 31) & 1)
        bits = words_W.view(np.uint32)
        for token in (accepts, *ends):
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        goes_on = bool(words_W.any())
        place.over = may_end and not goes_on
        if not may_end and not goes_on:
            place.error = DEAD_END
        elif may_end and not place.settings.ends_late:
            for token in ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))


def _compute(matcher: Matcher, masks_NW: np.ndarray, row: int) -> None:
    if not isinstance(matcher, LLMatcher):
        matcher.fill(masks_NW, row)
        return
    words_W = masks_NW[row]
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
