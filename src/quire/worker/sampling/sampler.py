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

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.ops import masked_argmax
from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.builtin_processors import rules
from quire.worker.sampling.gumbel import keys, seed_word
from quire.worker.sampling.logits_processors import LogitsPipeline, Processor
from quire.worker.sampling.logprobs import MODES, ScoredTokens, joined
from quire.worker.sampling.sampled_step import SampledStep
from quire.worker.sampling.sampler_ops import PLAIN, SamplerOps
from quire.worker.sampling.top_k_top_p import SamplingLimits

if TYPE_CHECKING:
    from quire.models.base import LanguageModel

MOST = (1 << 31) - 1
PROMPT_PIECE = 128  # prompt positions whose logits are computed at a time


class Sampler:
    """Draws tokens, with the sampling parameters of each row.

    Args:
        logprobs_mode: one of `logprobs.MODES`.
        processors: users' processors (from `load_processors.py`); they run before the penalties, after other built-ins.
        vocab_size: token ids are checked against it when a request enters; None: model.vocab_size, if any.
        drawing: the functions that draw and score.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: RequestRows,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[Processor] = (),
        vocab_size: int | None = None,
        drawing: SamplerOps = PLAIN,
    ):
        if logprobs_mode not in MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r} is none of {', '.join(MODES)}")
        self.model, self.rows, self.device = model, rows, rows.device
        self.how = drawing
        self.raw = logprobs_mode.startswith("raw")
        self.normalise = logprobs_mode.endswith("logprobs")
        self.vocab_size = vocab_size or getattr(model, "vocab_size", None)
        before, after = rules(drawing.penalties)
        self.pipeline = LogitsPipeline(rows, [*before, *processors, *after])
        self.greedy = np.ones(rows.max_rows, bool)
        self.limited = np.zeros(rows.max_rows, bool)
        self.temperature = np.ones(rows.max_rows, np.float32)
        self.seeds = np.zeros(rows.max_rows, np.uint32)
        self.limits = SamplingLimits(
            np.zeros(rows.max_rows, np.int64), np.ones(rows.max_rows), np.zeros(rows.max_rows)
        )
        self.scored: dict[
            int, tuple[int, Tensor | None]
        ] = {}  # rows with logprobs: number of the best tokens, or given tokens
        self.prompts: dict[int, int] = {}  # rows with prompt logprobs: number of the best tokens
        self.broken: dict[int, str] = {}  # rows with unusable parameters, which fail when they run
        # Rows that need more than a draw by temperature, top-k and top-p.
        self.particular: set[int] = set()

    # -- rows -----------------------------------------------------------------------------------
    def enter(self, new: EnteredRow) -> None:
        """Read a request's parameters. If they cannot be used, the request fails in its first step."""
        try:
            self._take_in(new)
        except Exception as error:
            self.broken[new.row] = f"its parameters cannot be used: {type(error).__name__}: {error}"
        row, tables = new.row, (self.scored, self.prompts, self.broken)
        if (
            new.params.min_p
            or self.pipeline.watched
            or any(row in table for table in tables)
            or self.pipeline.uses[:, row].any()
        ):
            self.particular.add(row)

    def plain(self, work: Sequence[WorkItem]) -> bool:
        """Whether all these rows need only a plain draw."""
        return not self.particular or self.particular.isdisjoint([item.row for item in work])

    def _take_in(self, new: EnteredRow) -> None:
        row, params = new.row, new.params
        if (wrong := self._out_of_vocabulary(new)) is not None:
            self.broken[row] = wrong
            self.rows.put(row, 0, [0] * len(new.tokens))  # its ids would overrun the embedding
            return
        self.greedy[row] = params.greedy
        self.temperature[row] = 1.0 if params.greedy else params.temperature
        limits = self.limits
        limits.top_k[row] = min(max(params.top_k, 0), MOST)  # exceeds any vocabulary: no limit
        limits.top_p[row], limits.min_p[row] = params.top_p, params.min_p
        self.limited[row] = not params.greedy and (
            params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        )
        self.seeds[row] = seed_word(params.seed or 0)
        if (ids := params.logprob_token_ids) is not None:
            self.scored[row] = 0, self.rows.tensor(np.array(ids, np.int64))
        elif params.logprobs is not None:
            self.scored[row] = params.logprobs, None
        if params.prompt_logprobs is not None:
            self.prompts[row] = params.prompt_logprobs
        if (wrong := self.pipeline.enter(new)) is not None:
            self.broken[row] = wrong

    def leave(self, row: int) -> None:
        self.pipeline.leave(row)
        self.particular.discard(row)
        for table in (self.scored, self.prompts, self.broken):
            table.pop(row, None)

    def _out_of_vocabulary(self, new: EnteredRow) -> str | None:
        if self.vocab_size is None:
            return None
        params = new.params
        for name, ids in (
            ("prompt", new.tokens),
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
        outcome = SampledStep(plan.step, len(plan.work))
        if self.prompts:
            self._score_prompts(plan, batch, hidden_TD, outcome)
        if drawing := batch.drawing:
            outcome.items = drawing
            rows_S, lengths_S = batch.rows_S, batch.lengths_S
            whole = batch.num_tokens == len(drawing)
            hidden_SD = hidden_TD if whole else hidden_TD[batch.sample_at_S]
            logits_SV = self.model.logits(hidden_SD)
            self._choose(logits_SV, rows_S, lengths_S, outcome)
        if self.broken:
            for index, item in enumerate(plan.work):
                if (error := self.broken.get(item.row)) is not None:
                    outcome.errors[index] = error
                    outcome.invalid.append(index)
        outcome.leave_device()
        return outcome

    def _choose(
        self, logits_SV: Tensor, rows_S: np.ndarray, lengths_S: np.ndarray, outcome: SampledStep
    ) -> None:
        stage = self.pipeline.stage(rows_S, changes_argmax=True)
        asked = self._asked(rows_S) if self.scored else {}
        all_greedy = all(self.greedy[rows_S].tolist())
        errors: dict[int, str] = {}
        if all_greedy and not asked and all(processor.bars for processor, _ in stage):
            vocab = logits_SV.shape[1]
            words_SW = self.pipeline.allowed(stage, vocab, rows_S, lengths_S, errors)
            tokens_S, outcome.whole_S, kept_S = masked_argmax.best(logits_SV, words_SW)
            outcome.kept_S = kept_S if stage else None
        elif self.how.sample is not None and not (stage or asked or self._late(rows_S)):
            temperature_S = np.where(self.greedy[rows_S], np.float32(0), self.temperature[rows_S])
            limits, seeds_S = self.limits[rows_S], self.seeds[rows_S]
            drawn = self.how.sample(logits_SV, temperature_S, limits, seeds_S, lengths_S)
            tokens_S, outcome.whole_S = drawn
        else:
            logits_SV = logits_SV.float()
            outcome.whole_S = logits_SV.amax(dim=-1)
            reported_SV = logits_SV.clone() if asked and self.raw and stage else logits_SV
            changed_SV = self.pipeline.apply(stage, logits_SV, rows_S, lengths_S, errors)
            tokens_S, scaled_SV, more = self._draw(changed_SV, rows_S, lengths_S, errors)
            if stage or more:
                outcome.kept_S = scaled_SV.amax(dim=-1)
            if asked:
                if not self.raw:
                    reported_SV = self._processed(scaled_SV, rows_S)
                self._score(asked, reported_SV, tokens_S, rows_S, lengths_S, outcome)
        if outcome.kept_S is not None:
            outcome.params = [self.rows.params[row] for row in rows_S.tolist()]
        outcome.errors.update({outcome.items[at]: text for at, text in errors.items()})
        self.rows.drawn(rows_S, lengths_S, tokens_S)
        outcome.tokens_S = tokens_S
        if self.pipeline.watched:
            self.pipeline.drawn(rows_S, tokens_S.tolist())

    def _late(self, rows_S: np.ndarray) -> list[tuple[Processor, np.ndarray]]:
        """The processors that see logits divided by the temperature."""
        return self.pipeline.stage(rows_S, changes_argmax=False)

    def _draw(
        self, logits_SV: Tensor, rows_S: np.ndarray, lengths_S: np.ndarray, errors: dict[int, str]
    ) -> tuple[Tensor, Tensor, bool]:
        """(tokens_S, logits divided by the temperature, whether processors changed these)."""
        greedy_S, limited_S = self.greedy[rows_S], self.limited[rows_S]
        if greedy_S.all():
            return masked_argmax.best(logits_SV)[0], logits_SV, False
        scaled_SV = logits_SV / self.rows.tensor(self.temperature[rows_S])[:, None]
        stage = self._late(rows_S)
        scaled_SV = self.pipeline.apply(stage, scaled_SV, rows_S, lengths_S, errors)
        keys_2S = self.rows.tensor(keys(self.seeds[rows_S], lengths_S))
        plain_S = ~(greedy_S | limited_S)
        if plain_S.all():
            return self.how.draw(scaled_SV, keys_2S), scaled_SV, bool(stage)
        tokens_S = torch.empty(len(rows_S), dtype=torch.int64, device=self.device)
        if greedy_S.any():
            at = self.rows.tensor(greedy_S.nonzero()[0])
            tokens_S[at] = masked_argmax.best(scaled_SV[at])[0]
        if plain_S.any():
            at = self.rows.tensor(plain_S.nonzero()[0])
            tokens_S[at] = self.how.draw(scaled_SV[at], keys_2S[:, at])
        if limited_S.any():
            at = self.rows.tensor(limited_S.nonzero()[0])
            limits = self.limits[rows_S[limited_S]]
            part_SV = scaled_SV if limited_S.all() else scaled_SV[at]
            tokens_S[at] = self.how.draw_top_k_top_p(part_SV, limits, keys_2S[:, at])
        return tokens_S, scaled_SV, bool(stage)

    # -- scores ---------------------------------------------------------------------------------
    def _asked(self, rows_S: np.ndarray) -> dict[tuple[int, int], list[int]]:
        """Indices in S, by (number of best tokens, number of given tokens or -1).

        Rows are scored with others of equal numbers only, since how topk breaks ties may depend on its k.
        """
        asked: dict[tuple[int, int], list[int]] = {}
        for at, row in enumerate(rows_S.tolist()):
            if (wish := self.scored.get(row)) is not None:
                best, given = wish
                asked.setdefault((best, -1 if given is None else len(given)), []).append(at)
        return asked

    def _score(
        self,
        asked: dict[tuple[int, int], list[int]],
        reported_SV: Tensor,
        tokens_S: Tensor,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        outcome: SampledStep,
    ) -> None:
        for (best, given), members in asked.items():
            at = self.rows.tensor(np.array(members, np.int64))
            also = None
            if given >= 0:
                tables = (self.scored[row][1] for row in rows_S[members].tolist())
                also = torch.stack([ids for ids in tables if ids is not None])
            scored = self.how.score(reported_SV[at], tokens_S[at], best, also, self.normalise)
            places = [(outcome.items[index], int(lengths_S[index])) for index in members]
            outcome.scored.append((scored, places))

    def _processed(self, scaled_SV: Tensor, rows_S: np.ndarray) -> Tensor:
        """The logits that the draw used: tokens that did not survive have -inf."""
        limited_S = self.limited[rows_S]
        if not limited_S.any():
            return scaled_SV
        at = self.rows.tensor(limited_S.nonzero()[0])
        part_SV = scaled_SV[at]
        cut = self.how.cutoff(part_SV, self.limits[rows_S[limited_S]])
        scaled_SV = scaled_SV.clone()
        scaled_SV[at] = cut.masked_(part_SV)
        return scaled_SV

    def _score_prompts(
        self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor, outcome: SampledStep
    ) -> None:
        """Score prompt token p with the hidden state of token p - 1."""
        offset = 0
        for index, (item, count) in enumerate(zip(plan.work, batch.query_lens, strict=True)):
            first, offset = offset, offset + count
            if item.row not in self.prompts:
                continue
            start = batch.lengths[index] - count
            here = min(count, int(self.rows.num_prompt[item.row]) - 1 - start)
            if here <= 0:
                continue
            next_ids = self.rows.token_ids_RL[item.row, start + 1 : start + 1 + here]
            parts: list[ScoredTokens] = []
            for piece in range(0, here, PROMPT_PIECE):
                end = min(piece + PROMPT_PIECE, here)
                logits = self.model.logits(hidden_TD[first + piece : first + end])
                chosen = next_ids[piece:end]
                best = self.prompts[item.row]
                parts.append(self.how.score(logits, chosen, best, None, self.normalise))
            outcome.prompts[index] = start + 1, joined(parts)
