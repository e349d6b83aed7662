"""DraftModelRunner: forward passes of a draft model on some rows, each with a draw.

Knows the parts of a worker's step, of which it has its own: batches, the fast path, and a sampler, which draws with the
sampling parameters and the noise of the requests. So a draft token is the target's token wherever both models have the
same logits (Daliri, Musco and Suresh, arXiv 2408.07978). Does not know which rows need draft tokens.

Shape suffixes: S draws, T tokens of a pass, D features, V the target's vocabulary, W the draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.features.speculation.draft_rows import DraftRows
from quire.forward_context import ForwardBatch, forward_context
from quire.models.base import LanguageModel
from quire.native.model import native_model
from quire.native.step import NativeStep, make_native_step
from quire.ops.cpu.structs import CModel, CSpeculator
from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.input_batch import InputBatchBuilder
from quire.worker.model_input import TokenModelInput
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampler_ops import SamplerOps


class TargetLogits:
    """A draft model, as a sampler sees it: with logits of the target's tokens.

    Args:
        target_ids_W: the target's token of each of the draft model's, or -1; None: the same ids.

    Attributes:
        model: the draft model.
        step: what else its `logits` takes.
    """

    def __init__(self, vocab_size: int, target_ids_W: Tensor | None = None):
        self.model: Any = None
        self.step: tuple[int, ...] = ()
        self.vocab_size, self.joined = vocab_size, target_ids_W is not None
        if target_ids_W is not None:
            self.own_N = (target_ids_W >= 0).nonzero()[:, 0]
            self.target_N = target_ids_W[self.own_N].long()

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """logits_SV; of tokens that the draft model lacks: -inf."""
        logits_SW: Tensor = self.model.logits(hidden_SD, *self.step)
        if not self.joined:
            return logits_SW[:, : self.vocab_size]
        logits_SV = logits_SW.new_full((len(logits_SW), self.vocab_size), -torch.inf)
        logits_SV[:, self.target_N] = logits_SW[:, self.own_N]
        return logits_SV


class DraftModelRunner:
    """The parts of a step, for a draft model.

    Args:
        rows: the rows as the draft model sees them.
        ops: the functions that draw.
        native: whether the fast path may run. It draws tokens by the ids of the model, or of the speculator's `target_ids_V`.
    """

    def __init__(self, rows: DraftRows, logits: TargetLogits, ops: SamplerOps, native: bool):
        self.rows, self.logits, self.batcher = rows, logits, InputBatchBuilder(rows)
        self.sampler = Sampler(logits, rows, ops=ops)  # type: ignore[arg-type]
        self.fast: NativeStep | None = None
        if native:
            self.fast = make_native_step(rows, self.sampler, rows.shift)
        self._fused: object = None  # the fused layers that the fast path has
        self._entered: dict[int, EnteredRow] = {}  # rows that no pass has computed

    def use_model(self, model: LanguageModel) -> None:
        """Run this model from now on."""
        self.logits.model = model

    def enter(self, new: EnteredRow) -> None:
        """A request took a row. Until a pass computes it, it costs nothing."""
        self._entered[new.row] = new

    def _enter(self, new: EnteredRow) -> None:
        """Its tokens are drawn with its parameters, and not scored."""
        if isinstance(new.params, SamplingParams):
            unscored = msgspec.structs.replace(
                new.params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None
            )
            new = msgspec.structs.replace(new, params=unscored)
        self.sampler.enter(new)

    def leave(self, row: int) -> None:
        """The row is freed."""
        if self._entered.pop(row, None) is None:
            self.sampler.leave(row)

    def draw(self, work: Sequence[WorkItem], draws: Sequence[int]) -> None:
        """`run`, then passes of one token for rows until each has drawn as often as `draws` says, by work item."""
        if self.fast is not None and self.accepts_fast_step(self.fast, work):
            self.fast.draft(work, draws)
            return
        self.run(work)
        for number in range(1, max(draws)):
            rows = [item.row for item, most in zip(work, draws, strict=True) if most > number]
            self.run([WorkItem(row, 1) for row in rows])

    @torch.inference_mode()
    def run(self, work: Sequence[WorkItem]) -> None:
        """Run the draft model without the fast path. Each row that is now fully computed gets a sampled token, which replaces
        the row's draft tokens."""
        self._enter_rows(work)
        plan = StepPlan(0, [], list(work), [])
        batch = self.batcher.build(plan)
        batch.lengths_S = batch.lengths_S + self.rows.shift
        for item in work:
            self.rows.num_drafts[item.row] = 0  # nothing is verified
        with forward_context(batch):
            hidden_TD = self.forward(batch)
        self.sampler.finish(plan, batch, hidden_TD)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD"""
        return TokenModelInput(self.logits.model).forward(batch)

    def native_model(self) -> CModel | CSpeculator | None:
        """The model as the fast path runs it; None: it cannot."""
        return native_model(self.logits.model)

    def _enter_rows(self, work: Sequence[WorkItem]) -> None:
        for item in work if self._entered else ():
            if (new := self._entered.pop(item.row, None)) is not None:
                self._enter(new)

    def accepts_fast_step(self, fast: NativeStep, work: Sequence[WorkItem]) -> bool:
        self._enter_rows(work)
        model = self.logits.model
        layers = getattr(getattr(model, "model", None), "layers", None)
        if (fused := getattr(layers, "fused", None)) is not self._fused:
            self._fused = fused
            fast.follow(self.native_model(), self.logits.vocab_size)
        if any(item.drafts for item in work):
            return False
        plan = StepPlan(0, [], list(work), [])
        return all(part.accepts_fast_step(plan) for part in (fast, model, self.sampler))
