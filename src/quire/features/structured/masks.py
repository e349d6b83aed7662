"""Grammar masks: a logits processor that allows only the tokens that the grammars of a step's rows allow.

Knows rows, tokens and the grammar processes. The worker keeps each row's grammar state beside its tokens, so nothing
travels to the scheduler and back between two steps: masks work at any pipeline depth and with any chunking. After a
preemption the row enters again with its output so far.

    enter   -> thread: the row enters its grammar's process with the output so far; receive its mask
    apply      wait for the masks of the rows that sample; apply them to the logits
    after   -> thread: send the sampled tokens to the grammars; receive the masks of the next step
    certain    wait until the tokens are fed; forced tokens are never sampled (`jumps`)

A token is forced if the mask allows no other, so a jump changes no token. A step planned before a jump was known
samples at positions that the jump has filled: it gets the tokens that are already there.

The processes work during the forward pass. One thread talks to them, so a row's jobs run in order. The kernel kills a
process that exceeds its limits. If its message was for one row, that row fails. Of several rows, each enters a new
process in turn, so that only the row at fault fails.

Shape suffixes: R rows of the worker, S rows that sample, P picked rows, N rows of one process, V vocabulary,
W = words of 32 tokens.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.gate import NAME, apply_compile_requests
from quire.features.structured.grammar_messages import Filled, ProcessEnded
from quire.features.structured.grammar_process import STEP_S, GrammarProcess
from quire.features.structured.grammar_rows import PlaceSettings
from quire.features.structured.refusal import Refused
from quire.ops import masked_argmax
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import FIELD, StructuredOutputsParams
from quire.worker.hooks import Hook
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.builtin_processors import allow_only
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, allow_only_in_mask
from quire.worker.sampling.sampled_step import RequestFault

MAX_DEATHS = 2
WAIT_S = 3.0  # a step waits at most this long for all its masks

TOO_LONG = "its grammar needed too much processor time or memory for one token; make it smaller, or repeat less in it"


@dataclass(slots=True, eq=False)
class RowGrammar:
    """The grammar state of a row. Belongs to the thread while `job` or `again` runs, except `gone`."""

    row: int
    number: int  # identifies the row in its grammar's process
    constraint: StructuredOutputsParams
    compiled: Future[GrammarProcess]
    settings: PlaceSettings
    start: int  # position of the first output token
    known: list[int]  # the output so far, with the forced tokens that follow
    process: GrammarProcess | None = None
    deaths: int = 0  # how often the row's process ended
    over: bool = False  # only an end-of-text token is allowed now
    error: str | None = None
    gone: bool = False
    job: Future[None] | None = None
    again: Future[None] | None = None  # entering a new process, which may take long

    def fail(self, why: str) -> None:
        """Set the row's error, which names the request field that the client used."""
        said, kind = self.constraint.said, self.constraint.kind
        self.error = RequestFault(f"{said if said != FIELD else f'{said}.{kind}'}: {why}")

    def told(self, told: Filled, at: int) -> bool:
        """Read the row's part of a process's answer. True: it has a mask."""
        self.over = told.over[at]
        if told.errors[at] is not None:
            self.fail(told.errors[at] or "")
        return self.error is None


class GrammarMasks(Processor):
    """One per worker; register `hook` with the worker's hooks."""

    mask_only = True

    def __init__(self, compiler: GrammarCompiler, rows: RequestRows, jumps: bool = True):
        self.compiler, self.rows, self.jumps = compiler, rows, jumps
        self.held: dict[int, RowGrammar] = {}
        self.found: dict[int, Future[dict[int, list[int]]]] = {}  # step -> row -> forced tokens
        self.hook = GrammarHook(self)
        self._drawing: tuple[list[RowGrammar], np.ndarray, np.ndarray] | None = None
        self._masks_RW: np.ndarray | None = None
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._second = ThreadPoolExecutor(1, "grammar-again")

    # -- rows -----------------------------------------------------------------------------------
    def enter(self, new: EnteredRow) -> bool:
        if (constraint := new.params.structured_outputs) is None:
            return False
        params, compiled = new.params, self.compiler.ask(constraint, now=True)
        ends, room = list(params.eos_token_ids), params.max_tokens or 0
        one_end = len(ends) == 1 and not params.ignore_eos
        settings = PlaceSettings(
            ends, params.ignore_eos, room, params.min_tokens if one_end else room,
            self.jumps and may_jump(params),
        )  # fmt: skip
        outputs = new.tokens[new.num_prompt :]
        held = RowGrammar(
            new.row, next(self._numbers), constraint, compiled, settings, new.num_prompt, outputs
        )
        self.held[new.row] = held
        held.job = self._thread.submit(self._begin, held)
        return True

    def leave(self, row: int) -> None:
        held = self.held.pop(row)
        held.gone = True
        self._thread.submit(self._drop, held)

    # -- a step ---------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Discard the draw of a step that failed."""
        self._drawing = None

    def apply(self, logits_SV: Tensor, picked: ProcessorRows) -> Tensor:
        words_SW = np.full(
            (len(logits_SV), masked_argmax.num_words(logits_SV.shape[1])), -1, np.int32
        )
        settled = self._lay(words_SW, picked)
        masked_argmax.mask_logits(
            logits_SV, torch.from_numpy(words_SW).to(logits_SV.device, non_blocking=True)
        )
        for at, tokens in settled:
            allow_only(logits_SV[at], tokens)
        return logits_SV

    def mask(self, words_SW: np.ndarray, picked: ProcessorRows) -> None:
        for at, tokens in self._lay(words_SW, picked):
            allow_only_in_mask(words_SW[at], tokens)

    def _lay(self, words_SW: np.ndarray, picked: ProcessorRows) -> list[tuple[int, list[int]]]:
        """Wait for the picked rows' masks and AND them into `words_SW`.

        Returns the rows whose next token needs no mask, with the allowed tokens.
        """
        helds = [self.held[row] for row in picked.rows.tolist()]
        until = time.monotonic() + WAIT_S
        for at, held in zip(picked.at.tolist(), helds, strict=True):
            if held.job is not None:
                self._wait(held, held.job, until)
            if held.again is not None:
                self._wait(held, held.again, until)
                held.again = None
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
                settled.append((at, held.settings.ends))
            elif held.error is None:
                mask_W = self._masks(0)[held.row, : words_SW.shape[1]]
                words_SW[at, : len(mask_W)] &= mask_W
                words_SW[at, len(mask_W) :] = 0
        return settled

    def _wait(self, held: RowGrammar, job: Future[None], until: float) -> None:
        """Wait for a row's job. A row whose mask is late fails; the step continues."""
        try:
            job.result(max(until - time.monotonic(), 0))
        except TimeoutError:
            held.fail(TOO_LONG)

    def drew(self, step: int) -> None:
        """Feed the step's sampled tokens, which are now in the rows, to the grammars, in the thread."""
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
        if any(held.settings.jumps for held in helds):
            self.found[step] = found
        job = self._thread.submit(self._advance, helds, tokens_P, lengths_P, event, found)
        for held in helds:
            held.job = job

    # -- in the thread --------------------------------------------------------------------------
    def _masks(self, words: int) -> np.ndarray:
        if self._masks_RW is None:
            self._masks_RW = np.zeros((self.rows.max_rows, words), np.int32)
        return self._masks_RW

    def _begin(self, held: RowGrammar) -> None:
        """Enter the grammar's process with the output so far."""
        try:
            self._enter(held)
        except ProcessEnded:
            self._again([held])

    def _enter(self, held: RowGrammar) -> None:
        """Raises ProcessEnded. Records all other errors in the row."""
        try:
            process = held.process = held.compiled.result(STEP_S)
            with process.turn:
                told, masks_1W = process.begin(
                    held.number, held.settings, held.known, time.monotonic() + STEP_S
                )
        except ProcessEnded:
            raise
        except (Refused, ConfigError) as error:
            held.fail(str(error))
        except TimeoutError:
            held.fail(TOO_LONG)
        except BaseException as error:
            held.error = str(error)
        else:
            if held.told(told, 0):
                self._masks(process.words)[held.row] = masks_1W[0]

    def _again(self, rows: list[RowGrammar]) -> None:
        """Their process has ended: each enters a new one in turn, in a second thread, while other grammars continue."""
        if len(rows) == 1 and rows[0].process is not None and rows[0].process.overran:
            rows[0].fail(TOO_LONG)
            return
        for held in rows:
            held.again = self._second.submit(self._enter_again, held)

    def _enter_again(self, held: RowGrammar) -> None:
        """Enter a new process. The row at fault fails here again."""
        held.deaths += 1
        if held.deaths > MAX_DEATHS or held.gone:
            held.fail(TOO_LONG)
            return
        held.compiled = self.compiler.ask(held.constraint, now=True)
        try:
            self._enter(held)
        except ProcessEnded:
            held.fail(TOO_LONG)

    def _drop(self, held: RowGrammar) -> None:
        if held.process is not None and held.process.alive:
            with held.process.turn:
                held.process.drop(held.number)

    def _advance(
        self,
        helds: list[RowGrammar],
        tokens_P: Tensor,
        lengths_P: np.ndarray,
        event: torch.Event | None,
        found: Future[dict[int, list[int]]],
    ) -> None:
        certain: dict[int, list[int]] = {}
        fed: list[_Rows] = []
        try:
            if event is not None:
                event.synchronize()
            asked = self._send(helds, tokens_P.tolist(), lengths_P.tolist())
            until = time.monotonic() + STEP_S
            fed = [one for one in asked if self._fed(*one, until, certain)]
        finally:
            found.set_result(certain)  # also after an error, so that `certain` never hangs
        for process, rows in fed:
            try:
                told, masks_NW = process.filled(until)
            except ProcessEnded:
                self._again(rows)
                continue
            finally:
                process.turn.release()
            for at, held in enumerate(rows):
                if held.told(told, at):
                    self._masks(process.words)[held.row] = masks_NW[at]

    def _send(self, helds: list[RowGrammar], tokens: list[int], lengths: list[int]) -> list[_Rows]:
        """Send each process its rows' tokens."""
        by_process: dict[GrammarProcess, list[tuple[RowGrammar, int]]] = {}
        for held, token, length in zip(helds, tokens, lengths, strict=True):
            if held.error is not None or held.gone or length - held.start < len(held.known):
                continue
            held.known.append(token)
            if held.process is not None:
                by_process.setdefault(held.process, []).append((held, token))
        asked: list[_Rows] = []
        until = time.monotonic() + STEP_S
        for process, pairs in by_process.items():
            rows = [held for held, _ in pairs]
            process.turn.acquire()
            try:
                process.step([(held.number, token) for held, token in pairs], until)
            except ProcessEnded:
                process.turn.release()
                self._again(rows)
            else:
                asked.append((process, rows))
        return asked

    def _fed(
        self,
        process: GrammarProcess,
        rows: list[RowGrammar],
        until: float,
        certain: dict[int, list[int]],
    ) -> bool:
        """Receive the forced tokens that follow the fed ones. False: the process has ended."""
        try:
            told = process.fed(until)
        except ProcessEnded:
            process.turn.release()
            self._again(rows)
            return False
        for held, forced in zip(rows, told.forced, strict=True):
            held.known += forced
            if forced and held.settings.jumps:
                certain[held.row] = forced
        return True


_Rows = tuple[GrammarProcess, list[RowGrammar]]


def may_jump(params: SamplingParams) -> bool:
    """Whether forced tokens may skip sampling: no logprobs to report, and no other processor that may mask them."""
    reported = params.logprobs is not None or params.logprob_token_ids is not None
    barred = params.allowed_token_ids is not None or any(params.bad_word_ids)
    return not (reported or barred or (params.min_tokens and params.stop_token_ids))


class GrammarHook(Hook):
    """Advances the grammars after each step."""

    name = NAME

    def __init__(self, masks: GrammarMasks):
        self.masks = masks

    def before(self, plan: StepPlan) -> None:
        self.masks.begin_step()
        if (extra := plan.extras.get(self.name)) is not None:
            apply_compile_requests(self.masks.compiler, extra)

    def after(self, plan: StepPlan) -> None:
        self.masks.drew(plan.step)

    def certain(self, step: int) -> dict[int, list[int]]:
        found = self.masks.found.pop(step, None)
        return {} if found is None else found.result()
