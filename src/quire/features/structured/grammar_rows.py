"""The rows of one grammar: each row's state in it (`GrammarState`), its forced tokens, and the mask of its next token.

Knows one compiled grammar and its rows, by number. Does not know logits, or which process it runs in. Each grammar
runs in its own process (`grammar_server.py`), because a matcher may take much time and memory at any token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.grammar import explained

if TYPE_CHECKING:
    from quire.features.structured.grammar_messages import GrammarRowSettings

DEAD_END = "no token of the vocabulary can continue the output under its constraint"
LIBRARY_FAILED = "the constraint cannot be enforced: the grammar library failed"
GAVE_UP = "the constraint is too complex, or the output violates it; make it smaller, or use fewer repetitions"
MANY = 4  # from this many rows (and cores) on, a thread pool computes the masks
THREADS = 8


class GrammarState:
    """The state of one row in the grammar."""

    __slots__ = (
        "ended", "error", "known", "looks_ahead", "matcher", "num_fed", "over", "renewed", "settings",
    )  # fmt: skip

    def __init__(self, matcher: LLMatcher, settings: GrammarRowSettings):
        self.matcher, self.settings = matcher, settings
        self.known: list[int] = []
        self.num_fed = 0  # tokens that the matcher has consumed: all before the first end token
        self.renewed = False
        self.looks_ahead = True  # False: looking ahead failed
        self.over = False  # only an end token is allowed now
        self.ended = False  # an end token was sampled; only end tokens may follow
        self.error: str | None = None

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.error is None


class GrammarStates:
    """All rows of one grammar.

    Args:
        make: compiles the grammar; called again when copies of the first one have exhausted its limits.
        accepts: the token whose bit in a mask means that the output may end.
        words: size of a mask in words of 32 tokens.
    """

    def __init__(self, make: Callable[[], LLMatcher], accepts: int, words: int):
        self.make, self.accepts, self.words = make, accepts, words
        self.grammar = make()
        self.states: dict[int, GrammarState] = {}
        self._par: LLExecutor | None = None
        self.check()

    def check(self) -> None:
        """Compute the first mask, which is most of the work of a compile.

        Raises:
            UnsupportedConstraint: the matcher fails on it.
        """
        first = self.grammar.deep_copy()
        _compute(first, np.zeros((1, self.words), np.int32), 0)
        if first.is_error():
            raise UnsupportedConstraint(explained(first.get_error()))

    def begin(self, number: int, settings: GrammarRowSettings, outputs: Sequence[int]) -> None:
        self.states[number] = state = GrammarState(self.grammar.deep_copy(), settings)
        for token in outputs:
            self._feed(state, token)

    def drop(self, number: int) -> None:
        self.states.pop(number, None)

    def feed(self, number: int, tokens: Sequence[int]) -> list[int]:
        """Feed tokens; returns the forced tokens after them, which are fed too."""
        state = self.states[number]
        try:
            for token in tokens:
                self._feed(state, token)
            return self._jump(state) if state.settings.jumps else []
        except BaseException:  # a Rust panic is no Exception
            state.error = LIBRARY_FAILED
            return []

    def look_ahead(
        self, number: int, drafts: Sequence[int], most: int
    ) -> tuple[list[int], list[bool], list[np.ndarray]]:
        """The draft tokens that may follow, forced tokens first, then `drafts` up to the first that is excluded.

        Returns them, at most `most`, and by draft token: whether only an end token may follow, and the mask of what may.
        The row's state remains.
        """
        state = self.states[number]
        taken: list[int] = []
        over: list[bool] = []
        masks: list[np.ndarray] = []
        if not (state.looks_ahead and state.goes_on):
            return taken, over, masks
        ahead = GrammarState(state.matcher, state.settings)
        try:
            for token in self._followers(state, drafts, most):
                taken.append(token)
                mask_1W = np.zeros((1, self.words), np.int32)
                _compute(state.matcher, mask_1W, 0)
                if state.matcher.is_error():
                    break
                self._set_ends(ahead, mask_1W[0])
                if ahead.error is not None:
                    break
                over.append(ahead.over)
                masks.append(mask_1W[0])
            sound = not state.matcher.is_error() and (
                not taken or state.matcher.rollback(len(taken))
            )
        except BaseException:  # a Rust panic is no Exception
            sound = False
        if not sound:  # only draft tokens may have caused it: the row goes on without them
            state.looks_ahead, state.matcher = False, self.grammar.deep_copy()
            state.matcher.consume_tokens(state.known[: state.num_fed])
        return taken[: len(masks)], over, masks

    def _followers(self, state: GrammarState, drafts: Sequence[int], most: int) -> Iterator[int]:
        """Feed draft tokens one by one; yields each."""
        matcher, wanted = state.matcher, list(drafts)
        forced: list[int] = []
        for _ in range(min(most, state.settings.room - len(state.known) - 1)):
            forced = forced or matcher.compute_ff_tokens()
            if forced:
                token, forced = forced[0], forced[1:]
                wanted = wanted[1:] if wanted[:1] == [token] else []
            elif wanted and matcher.validate_tokens(wanted[:1]):
                token, wanted = wanted[0], wanted[1:]
            else:
                return
            if token in state.settings.ends or not matcher.consume_token(token):
                return
            yield token

    def fill(self, numbers: Sequence[int]) -> np.ndarray:
        """The masks of these rows, in order; zeros for rows that have ended or failed."""
        masks_NW = np.zeros((len(numbers), self.words), np.int32)
        states = [self.states[number] for number in numbers]
        try:
            self._compute_all(states, masks_NW)
        except BaseException:  # below, compute each alone, so that only the row at fault fails
            masks_NW[:] = 0
        for row, state in enumerate(states):
            if state.goes_on:
                try:
                    self._finish(state, masks_NW, row)
                except BaseException:
                    state.error = LIBRARY_FAILED
        return masks_NW

    def _compute_all(self, states: Sequence[GrammarState], masks_NW: np.ndarray) -> None:
        todo = [(state.matcher, row) for row, state in enumerate(states) if state.goes_on]
        cores = os.cpu_count() or 1
        if len(todo) < MANY or cores < MANY:
            for matcher, row in todo:
                _compute(matcher, masks_NW, row)
            return
        self._par = self._par or LLExecutor(min(THREADS, cores // 2))
        self._par.unsafe_compute_mask_ptr(
            todo, masks_NW.ctypes.data, masks_NW.strides[0], len(masks_NW)
        )

    def _finish(self, state: GrammarState, masks_NW: np.ndarray, row: int) -> None:
        if not masks_NW[row].any() and not state.matcher.is_error():
            _compute(state.matcher, masks_NW, row)
        if state.matcher.is_error():
            self._renew(state)
            if state.error is None:
                _compute(state.matcher, masks_NW, row)
            if state.error is None and state.matcher.is_error():
                self._renew(state)
        if state.error is None:
            self._set_ends(state, masks_NW[row])

    def _feed(self, state: GrammarState, token: int) -> None:
        state.known.append(token)
        if state.ended:
            return
        if token in state.settings.ends:
            state.ended = state.over = True
        else:
            state.num_fed += 1
            if not state.matcher.consume_token(token):
                self._renew(state)

    def _jump(self, state: GrammarState) -> list[int]:
        """Feed the forced tokens; returns them."""
        settings, start = state.settings, len(state.known)
        while state.goes_on:
            forced = state.matcher.compute_ff_tokens()[: settings.room - len(state.known)]
            for token in forced:
                if token in settings.ends or state.error is not None:
                    return state.known[start:]
                self._feed(state, token)
            if not forced:
                break
        done = state.matcher.is_stopped() and state.matcher.is_accepting()
        if done and not state.ended and settings.end_at <= len(state.known) < settings.room:
            self._feed(state, settings.ends[0])
        return state.known[start:]

    def _renew(self, state: GrammarState) -> None:
        """The matcher has failed. Retry once with a new one, as other rows may have exhausted the grammar's limits."""
        if not state.renewed:
            state.renewed = True
            self.grammar = self.make()
            state.matcher = self.grammar.deep_copy()
            if state.matcher.consume_tokens(state.known[: state.num_fed]):
                return
        state.error = GAVE_UP

    def _set_ends(self, state: GrammarState, words_W: np.ndarray) -> None:
        accepts, ends = self.accepts, state.settings.ends
        may_end = bool(words_W[accepts >> 5] >> (accepts & 31) & 1)
        bits = words_W.view(np.uint32)
        for token in (accepts, *ends):
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        goes_on = bool(words_W.any())
        state.over = may_end and not goes_on
        if not may_end and not goes_on:
            state.error = DEAD_END
        elif may_end and not state.settings.ends_late:
            for token in ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))


def _compute(matcher: LLMatcher, masks_NW: np.ndarray, row: int) -> None:
    words_W = masks_NW[row]
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
