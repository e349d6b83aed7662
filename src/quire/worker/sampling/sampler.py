"""Sampler: turns hidden states into tokens, one for each row whose known tokens are all computed.

Knows the order of sampling. Does not know how any logits processor works.

    logits -> [raw scores] -> processors -> greedy rows: argmax
                                         -> others: / temperature -> top-k, top-p, min-p -> draw
           -> [processed scores] -> token into the rows -> host

The sampler computes only what some row of the step needs: a step of greedy rows is one argmax, a step of plain
sampling is one pass of noise and an argmax. Every computation is by row, so a row's token does not depend on
the other rows of the step.

Shape suffixes: T tokens of this step, D hidden size, S rows that draw, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.forward_context import ForwardBatch, forward_context
from quire.logging import get_logger
from quire.ops import masked_argmax
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.builtin_processors import builtin_processors
from quire.worker.sampling.gumbel import keys
from quire.worker.sampling.logits_processors import LogitsPipeline, Processor
from quire.worker.sampling.logprobs import MODES, ScoredTokens, best_allowed, joined
from quire.worker.sampling.row_params import ROW_PARAMS, is_greedy, is_limited, row_params
from quire.worker.sampling.sampled_step import RequestFault, SampledStep
from quire.worker.sampling.sampler_ops import TORCH_OPS, SamplerOps

if TYPE_CHECKING:
    from quire.models.base import LanguageModel

log = get_logger(__name__)

BEST, BEST_ALLOWED = -1, -2
PROMPT_CHUNK = 128  # prompt positions whose logits are computed at a time


class Sampler:
    """Draws tokens, with the sampling parameters of each row.

    Args:
        logprobs_mode: one of `logprobs.MODES`.
        processors: users' processors (from `load_processors.py`); they run before the penalties, after other built-ins.
        vocab_size: token ids of parameters are checked against it; None: model.vocab_size, if any.
        ops: the functions that draw and score.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: RequestRows,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[Processor] = (),
        vocab_size: int | None = None,
        ops: SamplerOps = TORCH_OPS,
    ):
        if logprobs_mode not in MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r}: choose from {', '.join(MODES)}")
        self.model, self.rows, self.device = model, rows, rows.device
        self.ops = ops
        self.raw = logprobs_mode.startswith("raw")
        self.normalise = logprobs_mode.endswith("logprobs")
        self.vocab_size = vocab_size or getattr(model, "vocab_size", None)
        before, after = builtin_processors(ops.penalties)
        self.pipeline = LogitsPipeline(rows, [*before, *processors, *after])
        self.params_R = np.zeros(rows.max_rows, ROW_PARAMS)
        # Rows with logprobs: the number of best tokens to report, or the tokens to report.
        self.logprobs: dict[int, tuple[int, Tensor | None]] = {}
        # Of these rows, those whose best tokens are the best ones that the processors allow.
        self.allowed_only: set[int] = set()
        # Rows with prompt logprobs: the number of best tokens to report.
        self.prompt_logprobs: dict[int, int] = {}
        # rows with unusable parameters, which fail when they run
        self.invalid: dict[int, RequestFault] = {}
        # Rows that need more than a draw by the numbers of `params_R`.
        self.slow_path_rows: set[int] = set()

    # -- rows -----------------------------------------------------------------------------------
    def enter(self, new: EnteredRow) -> None:
        """Read a request's parameters. If they cannot be used, the request fails in its first step."""
        if new.row in self.rows.faults:
            return
        try:
            if isinstance(new.params, SamplingParams):
                self._read(new, new.params)
            else:
                error = "this engine generates tokens, and the request asks for none"
                self.invalid[new.row] = RequestFault(error)
        except Exception:
            log.exception("row %d: its parameters are not valid", new.row)
            self.invalid[new.row] = RequestFault(
                "its parameters are not valid; see the exception in the server's log"
            )
        row, tables = new.row, (self.logprobs, self.prompt_logprobs, self.invalid)
        if (
            self.pipeline.needs_tokens
            or any(row in table for table in tables)
            or self.pipeline.uses[:, row].any()
        ):
            self.slow_path_rows.add(row)
        self.rows.accepts_drafts[row] = row not in self.invalid and self.pipeline.accepts_drafts(
            row
        )

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether all rows of the plan need only a draw by the numbers of `params_R`."""
        slow = self.slow_path_rows
        return not slow or slow.isdisjoint([item.row for item in plan.work])

    def _read(self, new: EnteredRow, params: SamplingParams) -> None:
        row = new.row
        if (error := self._out_of_vocabulary(params)) is not None:
            self.invalid[row] = RequestFault(error)
            return
        self.params_R[row] = row_params(params)
        if (ids := params.logprob_token_ids) is not None:
            self.logprobs[row] = 0, self.rows.tensor(np.array(ids, np.int64))
        elif params.logprobs is not None:
            self.logprobs[row] = params.logprobs, None
            if params.num_searched_tokens is not None:
                self.allowed_only.add(row)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = params.prompt_logprobs
        if (error := self.pipeline.enter(new)) is not None:
            self.invalid[row] = error

    def leave(self, row: int) -> None:
        self.pipeline.leave(row)
        self.slow_path_rows.discard(row)
        self.allowed_only.discard(row)
        for table in (self.logprobs, self.prompt_logprobs, self.invalid):
            table.pop(row, None)

    def _out_of_vocabulary(self, params: SamplingParams) -> str | None:
        if self.vocab_size is None:
            return None
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
            ("bad_words", [token for word in params.bad_word_ids for token in word]),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                return f"{name} has a token id outside the vocabulary of {self.vocab_size}"
        return None

    # -- a step ---------------------------------------------------------------------------------
    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> SampledStep:
        """Draw for the rows of `batch.sample_at_S`; score prompts whose requests want it."""
        sampled = SampledStep(plan.step, len(plan.work))
        if self.prompt_logprobs:
            self._score_prompts(plan, batch, hidden_TD, sampled)
        if drawing := batch.drawing:
            sampled.items, sampled.positions = drawing, batch.lengths_S.tolist()
            rows_S, lengths_S = batch.rows_S, batch.lengths_S
            whole = batch.num_tokens == len(drawing)
            hidden_SD = hidden_TD if whole else hidden_TD[batch.sample_at_S]
            with forward_context(batch.of_tokens(batch.sample_at_S)):
                logits_SV = self.model.logits(hidden_SD)
            verifies = self.rows.num_drafts[rows_S].any()
            drafts_S = self.rows.tokens(rows_S, lengths_S) if verifies else None
            tokens_S = self._sample(logits_SV, rows_S, lengths_S, sampled)
            if drafts_S is not None:
                self._verify(tokens_S == drafts_S, rows_S, lengths_S, sampled)
            if self.pipeline.needs_tokens:
                kept_draws = [number for number in range(len(rows_S)) if sampled.continues(number)]
                self.pipeline.on_tokens(rows_S[kept_draws], tokens_S[kept_draws].tolist())
        if self.invalid:
            for index, item in enumerate(plan.work):
                if (error := self.invalid.get(item.row)) is not None:
                    sampled.errors[index] = error
        sampled.copy_to_host()
        return sampled

    def _sample(
        self, logits_SV: Tensor, rows_S: np.ndarray, lengths_S: np.ndarray, sampled: SampledStep
    ) -> Tensor:
        """Draw a token for each row of S."""
        stage = self.pipeline.stage(rows_S, changes_argmax=True)
        scored = self._score_groups(rows_S) if self.logprobs else {}
        params_S = self.params_R[rows_S]
        errors: dict[int, str] = {}
        if not scored and is_greedy(params_S).all() and all(one.mask_only for one, _ in stage):
            vocab = logits_SV.shape[1]
            words_SW = self.pipeline.masks(stage, vocab, rows_S, lengths_S, errors)
            best = masked_argmax.argmax(logits_SV, words_SW)
            tokens_S, sampled.max_logit_S, max_allowed_logit_S = best
            sampled.max_allowed_logit_S = max_allowed_logit_S if stage else None
        elif self.ops.sample is not None and not (stage or scored or self._late_stage(rows_S)):
            tokens_S, sampled.max_logit_S = self.ops.sample(logits_SV, params_S, lengths_S)
        else:
            logits_SV = logits_SV.float()
            sampled.max_logit_S = logits_SV.amax(dim=-1)
            reported_SV = logits_SV.clone() if scored and self.raw and stage else logits_SV
            changed_SV = self.pipeline.apply(stage, logits_SV, rows_S, lengths_S, errors)
            tokens_S, scaled_SV, more = self._draw(changed_SV, params_S, rows_S, lengths_S, errors)
            if stage or more:
                sampled.max_allowed_logit_S = scaled_SV.amax(dim=-1)
            if scored:
                if not self.raw:
                    reported_SV = self._processed(scaled_SV, params_S)
                self._score(scored, reported_SV, changed_SV, tokens_S, rows_S, sampled)
        if sampled.max_allowed_logit_S is not None:
            sampled.params = [self.rows.params[row] for row in rows_S.tolist()]
        sampled.draw_errors = errors
        self.rows.write_sampled(rows_S, lengths_S, tokens_S)
        sampled.tokens_S = tokens_S
        return tokens_S

    def _verify(
        self, equal_S: Tensor, rows_S: np.ndarray, lengths_S: np.ndarray, sampled: SampledStep
    ) -> None:
        """Keep each row's draws up to the first that differs from the draft token at its position.

        A draw that fails its request waits for the next step, so that the request gets the tokens before it.

        The kept draws are the tokens that steps without draft tokens draw: logits, noise and processors are functions of
        the tokens before, and of the position (Daliri et al., arXiv 2408.07978, with the target's own noise).
        """
        right_S, faulty = equal_S.tolist(), sampled.faulty_draws()
        firsts = np.flatnonzero(np.diff(rows_S, prepend=-1))
        kept_S = [False] * len(rows_S)
        ends: list[int] = []
        for first, end in itertools.pairwise([*firsts.tolist(), len(rows_S)]):
            ends_at = (
                index
                for index in range(first, end - 1)
                if not right_S[index] or index + 1 in faulty
            )
            last = next(ends_at, end - 1)
            kept_S[first : last + 1] = [True] * (last + 1 - first)
            ends.append(last)
        sampled.continues_S = kept_S
        self.rows.take_back(rows_S[firsts], lengths_S[ends] + 1)

    def _late_stage(self, rows_S: np.ndarray) -> list[tuple[Processor, np.ndarray]]:
        """The processors that see logits divided by the temperature."""
        return self.pipeline.stage(rows_S, changes_argmax=False)

    def _draw(
        self,
        logits_SV: Tensor,
        params_S: np.ndarray,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        errors: dict[int, str],
    ) -> tuple[Tensor, Tensor, bool]:
        """(tokens_S, logits divided by the temperature, whether processors changed these)."""
        greedy_S, limited_S = is_greedy(params_S), is_limited(params_S)
        if greedy_S.all():
            return masked_argmax.argmax(logits_SV)[0], logits_SV, False
        temperature_S = np.where(greedy_S, np.float32(1), params_S["temperature"])
        scaled_SV = logits_SV / self.rows.tensor(temperature_S)[:, None]
        stage = self._late_stage(rows_S)
        scaled_SV = self.pipeline.apply(stage, scaled_SV, rows_S, lengths_S, errors)
        keys_2S = self.rows.tensor(keys(params_S["seed"], lengths_S))
        plain_S = ~(greedy_S | limited_S)
        if plain_S.all():
            return self.ops.draw(scaled_SV, keys_2S), scaled_SV, bool(stage)
        tokens_S = torch.empty(len(rows_S), dtype=torch.int64, device=self.device)
        if greedy_S.any():
            indices = self.rows.tensor(greedy_S.nonzero()[0])
            tokens_S[indices] = masked_argmax.argmax(scaled_SV[indices])[0]
        if plain_S.any():
            indices = self.rows.tensor(plain_S.nonzero()[0])
            tokens_S[indices] = self.ops.draw(scaled_SV[indices], keys_2S[:, indices])
        if limited_S.any():
            indices = self.rows.tensor(limited_S.nonzero()[0])
            part_SV = scaled_SV if limited_S.all() else scaled_SV[indices]
            limits_S = params_S[limited_S]
            tokens_S[indices] = self.ops.draw_top_k_top_p(part_SV, limits_S, keys_2S[:, indices])
        return tokens_S, scaled_SV, bool(stage)

    # -- scores ---------------------------------------------------------------------------------
    def _score_groups(self, rows_S: np.ndarray) -> dict[tuple[int, int], list[int]]:
        """Indices in S, by (number of best tokens, number of given tokens, or -1, or -2 for the best allowed ones).

        Rows are scored with others of equal numbers only, since how topk breaks ties may depend on its k.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for index, row in enumerate(rows_S.tolist()):
            if (request := self.logprobs.get(row)) is not None:
                best, token_ids = request
                kind = BEST_ALLOWED if row in self.allowed_only else BEST
                given = kind if token_ids is None else len(token_ids)
                groups.setdefault((best, given), []).append(index)
        return groups

    def _score(
        self,
        groups: dict[tuple[int, int], list[int]],
        reported_SV: Tensor,
        changed_SV: Tensor,
        tokens_S: Tensor,
        rows_S: np.ndarray,
        sampled: SampledStep,
    ) -> None:
        for (best, num_token_ids), members in groups.items():
            indices = self.rows.tensor(np.array(members, np.int64))
            also = None
            if num_token_ids >= 0:
                tables = (self.logprobs[row][1] for row in rows_S[members].tolist())
                also = torch.stack([ids for ids in tables if ids is not None])
            elif num_token_ids == BEST_ALLOWED:
                also = best_allowed(changed_SV[indices], best)
            scored = self.ops.score(
                reported_SV[indices], tokens_S[indices], best, also, self.normalise
            )
            sampled.scored.append((scored, members))

    def _processed(self, scaled_SV: Tensor, params_S: np.ndarray) -> Tensor:
        """The logits that the draw used: tokens that did not survive have -inf."""
        limited_S = is_limited(params_S)
        if not limited_S.any():
            return scaled_SV
        indices = self.rows.tensor(limited_S.nonzero()[0])
        part_SV = scaled_SV[indices]
        cut = self.ops.cutoff(part_SV, params_S[limited_S])
        scaled_SV = scaled_SV.clone()
        scaled_SV[indices] = cut.masked_(part_SV)
        return scaled_SV

    def _score_prompts(
        self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor, sampled: SampledStep
    ) -> None:
        """Score prompt token p with the hidden state of token p - 1."""
        offset = 0
        for index, (item, count) in enumerate(zip(plan.work, batch.query_lens, strict=True)):
            first, offset = offset, offset + count
            if item.row not in self.prompt_logprobs:
                continue
            start = batch.lengths[index] - count
            here = min(count, int(self.rows.num_prompt[item.row]) - 1 - start)
            if here <= 0:
                continue
            next_ids = self.rows.token_ids_RL[item.row, start + 1 : start + 1 + here]
            parts: list[ScoredTokens] = []
            for chunk in range(0, here, PROMPT_CHUNK):
                end = min(chunk + PROMPT_CHUNK, here)
                indices = slice(first + chunk, first + end)
                with forward_context(batch.of_tokens(indices)):
                    logits = self.model.logits(hidden_TD[indices])
                chosen = next_ids[chunk:end]
                best = self.prompt_logprobs[item.row]
                parts.append(self.ops.score(logits, chosen, best, None, self.normalise))
            sampled.prompts[index] = start + 1, joined(parts)
