"""Masks: what the grammars of a step's rows allow next, laid over the logits.

Knows rows, tokens and matchers. A row's grammar lives here, beside the tokens, so nothing has to travel to the
host and back between two steps: it works at any depth, with any chunking, and after a preemption the matcher is
fed what the row brings along.

    enter   -> thread: copy the compiled matcher, feed it the output so far, fill the mask
    apply      wait for the masks of the rows that draw; lay them over the logits
    after   -> thread: read the tokens that were drawn, feed them, fill the masks of the next step
    certain    wait for the feeding; tokens that the grammar forces next are not drawn at all (`jumps`)

A token is forced when the mask allows no other, so a jump changes no token. A step that was planned before a jump
was known draws at places which the jump has filled: it gets the token that stands there.

The thread works while the forward pass runs (llguidance lets go of the GIL). It is one thread, so a row's jobs run
in order; many masks are filled by llguidance's own pool.

Shape suffixes: R rows of the worker, S rows that draw, V vocabulary, W = words of 32 tokens.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from quire.features.structured.compile import Compiler
from quire.features.structured.gate import NAME, obey
from quire.features.structured.grammar import explained
from quire.features.structured.refusal import Refused
from quire.features.structured.xgrammar import XMatcher
from quire.ops import choose
from quire.protocol.constraint import StructuredOutputsParams
from quire.protocol.params import SamplingParams
from quire.protocol.plan import Entered
from quire.worker.hooks import Hook
from quire.worker.rows import Rows
from quire.worker.sample.outcome import Fault
from quire.worker.sample.processors import Picked, Processor, keep_only
from quire.worker.sample.rules import only

if TYPE_CHECKING:
    from quire.features.structured.compile import Matcher
    from quire.protocol.plan import StepPlan

DEAD_END = "no token continues the output as its constraint asks; the vocabulary may not be able to spell it"


@dataclass(slots=True, eq=False)
class Held:
    """A row's grammar. Touched by the thread alone, but for `job` and `gone`."""

    row: int
    constraint: StructuredOutputsParams
    ends: list[int]
    ends_late: bool  # ignore_eos: end only where nothing else is allowed
    compiled: Future[Matcher]
    start: int  # where the output begins
    room: int  # tokens it may have
    end_at: int  # if only one token ends it, from this place on it ends the request too: max_tokens elsewise
    jumps: bool
    known: list[int]  # the output so far, with what is forced next
    num_fed: int  # how many of them the matcher has read: all up to the first end
    matcher: Matcher | None = None
    renewed: bool = False
    over: bool = False  # only an end may come now
    ended: bool = False  # an end was drawn; whatever else comes is an end as well
    error: str | None = None
    gone: bool = False
    job: Future[None] | None = None


class GrammarMasks(Processor):
    """One for a worker; `hook` goes to the worker's hooks."""

    bars = True

    def __init__(self, compiler: Compiler, rows: Rows, jumps: bool = True):
        self.compiler, self.rows, self.jumps = compiler, rows, jumps
        self.held: dict[int, Held] = {}
        self.found: dict[int, Future[dict[int, list[int]]]] = {}  # by step: what is certain, by row
        self.hook = GrammarHook(self)
        self._drawing: tuple[list[Held], np.ndarray, np.ndarray] | None = None
        self._masks_RW: np.ndarray | None = None
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._par: LLExecutor | None = None

    # -- rows -----------------------------------------------------------------------------------
    def enter(self, new: Entered) -> bool:
        if (constraint := new.params.structured_outputs) is None:
            return False
        params, compiled = new.params, self.compiler.ask(constraint, now=True)
        ends, room = list(params.eos_token_ids), params.max_tokens or 0
        one_end = len(ends) == 1 and not params.ignore_eos
        held = Held(
            new.row, constraint, ends, params.ignore_eos, compiled, new.num_prompt, room,
            params.min_tokens if one_end else room, self.jumps and may_jump(params), [], 0,
        )  # fmt: skip
        self.held[new.row] = held
        held.job = self._thread.submit(self._begin, held, new.tokens[new.num_prompt :])
        return True

    def leave(self, row: int) -> None:
        self.held.pop(row).gone = True

    # -- a step ---------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Forget what a step that failed was about to draw."""
        self._drawing = None

    def apply(self, logits_SV: Tensor, picked: Picked) -> Tensor:
        words_SW = np.full((len(logits_SV), choose.num_words(logits_SV.shape[1])), -1, np.int32)
        settled = self._lay(words_SW, picked)
        choose.bar(logits_SV, torch.from_numpy(words_SW).to(logits_SV.device, non_blocking=True))
        for at, tokens in settled:
            only(logits_SV[at], tokens)
        return logits_SV

    def bar(self, words_SW: np.ndarray, picked: Picked) -> None:
        for at, tokens in self._lay(words_SW, picked):
            keep_only(words_SW[at], tokens)

    def _lay(self, words_SW: np.ndarray, picked: Picked) -> list[tuple[int, list[int]]]:
        """Masks of the picked rows, once they are filled; rows whose token is settled are told instead, with it."""
        helds = [self.held[row] for row in picked.rows.tolist()]
        for at, held in zip(picked.at.tolist(), helds, strict=True):
            if held.job is not None:
                held.job.result()
            if held.error is not None:
                picked.errors.setdefault(at, held.error)
        self._drawing = helds, picked.rows, picked.lengths
        settled: list[tuple[int, list[int]]] = []
        for at, held, length in zip(
            picked.at.tolist(), helds, picked.lengths.tolist(), strict=True
        ):
            if (place := length - held.start) < len(held.known):
                settled.append((at, [held.known[place]]))
            elif held.error is None and held.over:
                settled.append((at, held.ends))
            elif held.error is None:
                mask_W = self._masks()[held.row, : words_SW.shape[1]]
                words_SW[at, : len(mask_W)] &= mask_W
                words_SW[at, len(mask_W) :] = 0
        return settled

    def drew(self, step: int) -> None:
        """The step's tokens stand in the rows: feed them, in the thread."""
        drawing, self._drawing = self._drawing, None
        if drawing is None:
            return
        helds, rows_P, lengths_P = drawing
        state = self.rows
        where = (
            torch.from_numpy(rows_P).to(state.device, non_blocking=True),
            torch.from_numpy(lengths_P).to(state.device, non_blocking=True),
        )
        tokens_P = state.token_ids_RL[where]
        event: torch.Event | None = None
        if tokens_P.device.type != "cpu":
            device, tokens_P = tokens_P.device, tokens_P.to("cpu", non_blocking=True)
            event = torch.Event(device)
            event.record()

        found: Future[dict[int, list[int]]] = Future()
        if any(held.jumps for held in helds):
            self.found[step] = found
        job = self._thread.submit(self._advance, helds, tokens_P, lengths_P, event, found)
        for held in helds:
            held.job = job

    # -- in the thread --------------------------------------------------------------------------
    def _masks(self) -> np.ndarray:
        if self._masks_RW is None:
            words = (self.compiler.vocabulary.tokenizer.vocab_size + 31) // 32
            self._masks_RW = np.zeros((self.rows.max_rows, words), np.int32)
        return self._masks_RW

    # What goes wrong here is a row's own: BaseException, because Rust's panics are no Exception.
    def _begin(self, held: Held, outputs: list[int]) -> None:
        try:
            held.matcher = held.compiled.result().deep_copy()
            for token in outputs:
                self._feed(held, token)
            self._fill([held])
        except Refused as error:
            held.error = Fault(error)
        except BaseException as error:
            held.error = str(error)

    def _advance(
        self,
        helds: list[Held],
        tokens_P: Tensor,
        lengths_P: np.ndarray,
        event: torch.Event | None,
        found: Future[dict[int, list[int]]],
    ) -> None:
        live: list[Held] = []
        certain: dict[int, list[int]] = {}
        try:
            if event is not None:
                event.synchronize()
            self._read(helds, tokens_P.tolist(), lengths_P.tolist(), live, certain)
        finally:
            found.set_result(certain)  # whoever waits for it is not left waiting
        try:
            self._fill(live)
        except BaseException:
            for held in live:  # who was it?
                try:
                    self._fill([held])
                except BaseException as error:
                    held.error = f"the constraint cannot be kept: {error}"

    def _read(
        self,
        helds: list[Held],
        tokens: list[int],
        lengths: list[int],
        live: list[Held],
        certain: dict[int, list[int]],
    ) -> None:
        """Feed each its token, and what is forced after it."""
        for held, token, length in zip(helds, tokens, lengths, strict=True):
            if held.error is not None or held.gone or length - held.start < len(held.known):
                continue
            try:
                self._feed(held, token)
                live.append(held)
                if held.jumps and (forced := self._jump(held)):
                    certain[held.row] = forced
            except BaseException as error:
                held.error = f"the constraint cannot be kept: {error}"

    def _feed(self, held: Held, token: int) -> None:
        held.known.append(token)
        if held.ended or held.matcher is None:
            return
        if token in held.ends:
            held.ended = held.over = True
        else:
            held.num_fed += 1
            if not held.matcher.consume_token(token):
                self._renew(held)

    def _jump(self, held: Held) -> list[int]:
        """Feed what is forced next, and say what it was."""
        start = len(held.known)
        while (matcher := held.matcher) is not None and held.error is None:
            forced = matcher.compute_ff_tokens()[: held.room - len(held.known)]
            for token in forced:
                if token in held.ends or held.error is not None:
                    return held.known[start:]
                self._feed(held, token)
            if not forced:
                break
        done = matcher is not None and matcher.is_stopped() and matcher.is_accepting()
        if done and not held.ended and held.end_at <= len(held.known) < held.room:
            self._feed(held, held.ends[0])
        return held.known[start:]

    def _renew(self, held: Held) -> None:
        """The matcher has given up. If others have used up its limits, a new one goes on; else it was right."""
        if not held.renewed:
            held.renewed = True
            self.compiler.forget(held.constraint, held.compiled)
            held.compiled = self.compiler.ask(held.constraint, now=True)
            held.matcher = held.compiled.result().deep_copy()
            if held.matcher.consume_tokens(held.known[: held.num_fed]):
                return
        if held.matcher is not None:
            why = explained(held.matcher.get_error())
            held.error = f"the constraint is too much work, or the output left it: {why}"

    def _fill(self, helds: list[Held]) -> None:
        """Masks of rows that go on; then the ends are put where they belong."""
        todo = [
            (held.matcher, held.row)
            for held in helds
            if held.matcher is not None and not held.ended and held.error is None
        ]
        masks_RW = self._masks()
        slow = [one for one in todo if isinstance(one[0], XMatcher)]
        todo = [one for one in todo if not isinstance(one[0], XMatcher)]
        for matcher, row in slow if len(todo) > 1 else [*slow, *todo]:
            _compute(matcher, row, masks_RW)
        if len(todo) > 1:
            self._par = self._par or LLExecutor()
            rows, bytes_ = masks_RW.shape[0], masks_RW.strides[0]
            quick = cast("list[tuple[LLMatcher, int]]", todo)
            self._par.unsafe_compute_mask_ptr(quick, masks_RW.ctypes.data, bytes_, rows)
        for held in helds:
            if held.matcher is None or held.ended or held.error is not None:
                continue
            if held.matcher.is_error():
                self._renew(held)
                if held.error is None:
                    _compute(held.matcher, held.row, masks_RW)
                if held.error is None and held.matcher.is_error():
                    self._renew(held)
            if held.error is None:
                self._set_ends(held, masks_RW[held.row])

    def _set_ends(self, held: Held, words_W: np.ndarray) -> None:
        accepts = self.compiler.vocabulary.accepts
        may_end = bool(words_W[accepts >> 5] >> (accepts & 31) & 1)
        bits = words_W.view(np.uint32)
        for token in (accepts, *held.ends):
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        goes_on = bool(words_W.any())
        held.over = may_end and not goes_on
        if not may_end and not goes_on:
            held.error = DEAD_END
        elif may_end and not held.ends_late:
            for token in held.ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))


def may_jump(params: SamplingParams) -> bool:
    """Nothing is to be reported of a forced token, and no other rule may bar it."""
    reported = params.logprobs is not None or params.logprob_token_ids is not None
    barred = params.allowed_token_ids is not None or any(params.bad_word_ids)
    return not (reported or barred or (params.min_tokens and params.stop_token_ids))


def _compute(matcher: Matcher, row: int, masks_RW: np.ndarray) -> None:
    if isinstance(matcher, XMatcher):
        matcher.fill(masks_RW, row)
        return
    words_W = masks_RW[row]
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)


class GrammarHook(Hook):
    """After each step, the grammars go on."""

    name = NAME

    def __init__(self, masks: GrammarMasks):
        self.masks = masks

    def before(self, plan: StepPlan) -> None:
        self.masks.begin_step()
        if (extra := plan.extras.get(self.name)) is not None:
            obey(self.masks.compiler, extra)

    def after(self, plan: StepPlan) -> None:
        self.masks.drew(plan.step)

    def certain(self, step: int) -> dict[int, list[int]]:
        found = self.masks.found.pop(step, None)
        return {} if found is None else found.result()
