"""Grammar masks: a logits processor that allows only the tokens that the grammars of a step's rows allow.

Knows rows, tokens and the grammar processes. The worker keeps each row's grammar state beside its tokens, so nothing
travels to the scheduler and back between two steps: masks work at any pipeline depth and with any chunking. After a
preemption the row enters again with its output so far.

    enter   -> thread: the row enters its grammar's process with the output so far; receive its mask
    apply      wait for the masks of the rows that sample; apply them to the logits
    after   -> thread: send the sampled tokens to the grammars; receive the masks of the next step
    forced     wait until the tokens are fed; forced tokens are never sampled (`jumps`)

A token is forced if the mask allows no other, so a jump changes no token. A step planned before a jump was known
samples at positions that the jump has filled: it gets the tokens that are already there.

The processes work during the forward pass. One thread talks to them, so a row's jobs run in order. The kernel kills a
process that exceeds its limits. If its message was for one row, that row fails. Of several rows, each enters a new
process in turn, so that only the row at fault fails.

Shape suffixes: R rows of the worker, S rows that sample, P selected rows, N rows of one process, V vocabulary,
W = words of 32 tokens.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.errors import CompileDelayed, UnsupportedConstraint
from quire.features.structured.gate import NAME, apply_compile_requests
from quire.features.structured.grammar_messages import GrammarRowSettings
from quire.features.structured.grammar_process import STEP_S, GrammarProcess
from quire.features.structured.look_ahead import GrammarLookAhead
from quire.features.structured.row_grammar import RowGrammar
from quire.forward_context import ForwardBatch
from quire.logging import get_logger
from quire.ops import masked_argmax
from quire.processes.isolated_child import ProcessEnded
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.worker.hooks import Hook
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.builtin_processors import allow_only
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, allow_only_in_mask
from quire.worker.sampling.sampled_step import OverloadedFault

log = get_logger(__name__)

MAX_DEATHS = 2
WAIT_S = 3.0  # a step waits at most this long for all its masks

TOO_LONG = "its grammar needed too much processor time or memory for one token; make it smaller, or use fewer repetitions"

NO_TOKENIZER = (
    "constrained output cannot read this model's tokenizer; the server's log has the reason"
)
FAILED = "its grammar could not be used; the server's log has the exception"


class GrammarMasks(Processor):
    """One per worker; register `hook` with the worker's hooks."""

    mask_only = True
    accepts_drafts = True
    order = 60

    def __init__(self, compiler: GrammarCompiler, rows: RequestRows, jumps: bool = True):
        self.compiler, self.rows, self.jumps = compiler, rows, jumps
        self.row_grammars: dict[int, RowGrammar] = {}
        self.forced: dict[int, Future[dict[int, list[int]]]] = {}  # step -> row -> forced tokens
        self.hook = GrammarHook(self)
        self._drawing: tuple[list[RowGrammar], np.ndarray, np.ndarray] | None = None
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._second = ThreadPoolExecutor(1, "grammar-restart")
        self._ahead = GrammarLookAhead(self._thread, self._replace_process)

    # -- rows -----------------------------------------------------------------------------------
    def enter(self, new: EnteredRow) -> bool:
        if (constraint := new.sampling_params.structured_outputs) is None:
            return False
        params, compiled = new.sampling_params, self.compiler.submit(constraint, now=True)
        searched = params.num_searched_tokens or 0
        ends, room = list(params.eos_token_ids), (params.max_tokens or 0) + searched
        one_end = len(ends) == 1 and not params.ignore_eos
        settings = GrammarRowSettings(
            ends, params.ignore_eos, room, params.min_tokens if one_end else room,
            self.jumps and may_jump(params),
        )  # fmt: skip
        start = new.num_prompt - searched
        grammar = RowGrammar(
            new.row, next(self._numbers), constraint, compiled, settings, start, new.tokens[start:]
        )
        self.row_grammars[new.row] = grammar
        grammar.job = self._thread.submit(self._begin, grammar)
        return True

    def leave(self, row: int) -> None:
        grammar = self.row_grammars.pop(row)
        grammar.has_left = True
        self._thread.submit(self._drop, grammar)

    # -- a step ---------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Discard the draw of a step that failed."""
        self._drawing = None

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        words_SW = np.full(
            (len(logits_SV), masked_argmax.num_words(logits_SV.shape[1])), -1, np.int32
        )
        unmasked = self._apply_masks(words_SW, selected)
        masked_argmax.mask_logits(
            logits_SV, torch.from_numpy(words_SW).to(logits_SV.device, non_blocking=True)
        )
        for index, tokens in unmasked:
            allow_only(logits_SV[index], tokens)
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        for index, tokens in self._apply_masks(words_SW, selected):
            allow_only_in_mask(words_SW[index], tokens)

    def _apply_masks(
        self, words_SW: np.ndarray, selected: ProcessorRows
    ) -> list[tuple[int, list[int]]]:
        """Wait for the selected rows' masks and AND them into `words_SW`.

        Returns the rows whose next token needs no mask, with the allowed tokens.
        """
        grammars = [self.row_grammars[row] for row in selected.rows.tolist()]
        until = time.monotonic() + WAIT_S
        for index, grammar in zip(selected.indices.tolist(), grammars, strict=True):
            if grammar.job is not None:
                self._wait(grammar, grammar.job, until)
            if grammar.restart is not None:
                self._wait(grammar, grammar.restart, until)
                grammar.restart = None
            if grammar.error is not None:
                selected.errors.setdefault(index, grammar.error)
        self._drawing = grammars, selected.rows, selected.lengths
        unmasked: list[tuple[int, list[int]]] = []
        for index, grammar, length in zip(
            selected.indices.tolist(), grammars, selected.lengths.tolist(), strict=True
        ):
            if (place := length - grammar.start) < len(grammar.tokens):
                unmasked.append((index, [grammar.tokens[place]]))
            elif grammar.error is None:
                over, mask_W = self._state_at(grammar, place - len(grammar.tokens))
                if over:
                    unmasked.append((index, grammar.settings.ends))
                    continue
                mask_W = mask_W[: words_SW.shape[1]]
                words_SW[index, : len(mask_W)] &= mask_W
                words_SW[index, len(mask_W) :] = 0
        return unmasked

    def _state_at(self, grammar: RowGrammar, number: int) -> tuple[bool, Any]:
        """Whether the output must end after `number` draft tokens of the row, and the mask there."""
        if number:
            return grammar.ahead[number - 1]
        return grammar.over, grammar.mask_W

    @property
    def looks_ahead(self) -> bool:
        return bool(self.row_grammars)

    def look_ahead(self, drafts: dict[int, list[int]], most: dict[int, int]) -> None:
        """See `Processor.look_ahead`."""
        self._ahead.cut(self.row_grammars, drafts, most)

    def _wait(self, grammar: RowGrammar, job: Future[None], until: float) -> None:
        """Wait for a row's job. A row whose mask is late fails; the step continues."""
        try:
            job.result(max(until - time.monotonic(), 0))
        except TimeoutError:
            grammar.fail(TOO_LONG)

    def after_draw(self, step: int) -> None:
        """Feed the step's sampled tokens, which are now in the rows, to the grammars, in the thread."""
        drawing, self._drawing = self._drawing, None
        if drawing is None:
            return
        grammars, rows_P, lengths_P = drawing
        # the others were drawn after a wrong draft token
        kept_P = lengths_P < self.rows.length[rows_P]
        rows_P, lengths_P = rows_P[kept_P], lengths_P[kept_P]
        grammars = [grammar for grammar, kept in zip(grammars, kept_P, strict=True) if kept]
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
        if any(grammar.settings.jumps for grammar in grammars):
            self.forced[step] = found
        job = self._thread.submit(self._advance, grammars, tokens_P, lengths_P, event, found)
        for grammar in grammars:
            grammar.job = job

    # -- in the thread --------------------------------------------------------------------------
    def _begin(self, grammar: RowGrammar) -> None:
        """Enter the grammar's process with the output so far."""
        try:
            self._enter(grammar)
        except ProcessEnded:
            self._restart([grammar])

    def _enter(self, grammar: RowGrammar) -> None:
        """Raises ProcessEnded. Records all other errors in the row."""
        try:
            process = grammar.process = grammar.compiled.result(STEP_S)
            with process.lock:
                reply, masks_1W = process.begin(
                    grammar.number, grammar.settings, grammar.tokens, time.monotonic() + STEP_S
                )
        except ProcessEnded:
            raise
        except UnsupportedConstraint as error:
            grammar.fail(str(error))
        except CompileDelayed as error:
            grammar.fail(str(error), OverloadedFault)
        except ConfigError as error:
            log.warning("structured outputs: %s", error)
            grammar.fail(NO_TOKENIZER)
        except TimeoutError:
            grammar.fail(TOO_LONG)
        except BaseException:
            log.exception("the grammar of row %d failed", grammar.row)
            grammar.error = f"{grammar.field}: {FAILED}"
        else:
            grammar.update(reply, masks_1W, 0)

    def _restart(self, rows: list[RowGrammar]) -> None:
        """Their process has ended: each enters a new one in turn, in a second thread, while other grammars continue."""
        if len(rows) == 1 and rows[0].process is not None and rows[0].process.exceeded_limit:
            rows[0].fail(TOO_LONG)
            return
        for grammar in rows:
            self._replace_process(grammar)

    def _replace_process(self, grammar: RowGrammar) -> None:
        grammar.restart = self._second.submit(self._enter_new_process, grammar)

    def _enter_new_process(self, grammar: RowGrammar) -> None:
        """Enter a new process. The row at fault fails here again."""
        grammar.deaths += 1
        if grammar.deaths > MAX_DEATHS or grammar.has_left:
            grammar.fail(TOO_LONG)
            return
        grammar.compiled = self.compiler.submit(grammar.constraint, now=True)
        try:
            self._enter(grammar)
        except ProcessEnded:
            grammar.fail(TOO_LONG)

    def _drop(self, grammar: RowGrammar) -> None:
        if grammar.process is not None and grammar.process.alive:
            with grammar.process.lock:
                grammar.process.drop(grammar.number)

    def _advance(
        self,
        grammars: list[RowGrammar],
        tokens_P: Tensor,
        lengths_P: np.ndarray,
        event: torch.Event | None,
        found: Future[dict[int, list[int]]],
    ) -> None:
        forced_tokens: dict[int, list[int]] = {}
        fed: list[_SentRows] = []
        try:
            if event is not None:
                event.synchronize()
            sent = self._send(grammars, tokens_P.tolist(), lengths_P.tolist())
            until = time.monotonic() + STEP_S
            fed = [one for one in sent if self._fed(*one, until, forced_tokens)]
        finally:
            found.set_result(forced_tokens)  # also after an error: the hook waits for it
        for process, rows in fed:
            try:
                reply, masks_NW = process.read_masks(until)
            except ProcessEnded:
                self._restart(rows)
                continue
            finally:
                process.lock.release()
            for index, grammar in enumerate(rows):
                grammar.update(reply, masks_NW, index)

    def _send(
        self, grammars: list[RowGrammar], tokens: list[int], lengths: list[int]
    ) -> list[_SentRows]:
        """Send each process its rows' tokens."""
        new: dict[RowGrammar, list[int]] = {}
        for grammar, token, length in zip(grammars, tokens, lengths, strict=True):
            if (
                grammar.error is not None
                or grammar.has_left
                or length - grammar.start < len(grammar.tokens)
            ):
                continue
            grammar.tokens.append(token)
            new.setdefault(grammar, []).append(token)
        by_process: dict[GrammarProcess, list[RowGrammar]] = {}
        for grammar in new:
            if grammar.process is not None:
                by_process.setdefault(grammar.process, []).append(grammar)
        sent: list[_SentRows] = []
        until = time.monotonic() + STEP_S
        for process, rows in by_process.items():
            process.lock.acquire()
            try:
                process.step([(grammar.number, new[grammar]) for grammar in rows], until)
            except ProcessEnded:
                process.lock.release()
                self._restart(rows)
            else:
                sent.append((process, rows))
        return sent

    def _fed(
        self,
        process: GrammarProcess,
        rows: list[RowGrammar],
        until: float,
        forced_tokens: dict[int, list[int]],
    ) -> bool:
        """Receive the forced tokens that follow the fed ones. False: the process has ended."""
        try:
            reply = process.read_forced(until)
        except ProcessEnded:
            process.lock.release()
            self._restart(rows)
            return False
        for grammar, forced in zip(rows, reply.forced, strict=True):
            grammar.tokens += forced
            if forced and grammar.settings.jumps:
                forced_tokens[grammar.row] = forced
        return True


_SentRows = tuple[GrammarProcess, list[RowGrammar]]


def may_jump(params: SamplingParams) -> bool:
    """Whether forced tokens may skip sampling: no logprobs to report, and no other processor that may mask them."""
    reported = params.logprobs is not None or params.logprob_token_ids is not None
    barred = params.allowed_token_ids is not None or any(params.bad_word_ids)
    return not (reported or barred or (params.min_tokens and params.stop_token_ids))


class GrammarHook(Hook):
    """Advances the grammars after each step."""

    name = NAME
    order = 40

    def __init__(self, masks: GrammarMasks):
        self.masks = masks

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True  # the sampler refuses plans whose rows have a grammar

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.masks.begin_step()
        if (extra := plan.extras.get(self.name)) is not None:
            apply_compile_requests(self.masks.compiler, extra)

    def after(self, plan: StepPlan) -> None:
        self.masks.after_draw(plan.step)

    def added_tokens(self, step: int) -> dict[int, list[int]]:
        forced = self.masks.forced.pop(step, None)
        return {} if forced is None else forced.result()
