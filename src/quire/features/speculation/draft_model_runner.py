"""DraftModelRunner: passes of a draft model or a speculator on some rows, each with a draw.

A pass runs as a step of the worker does (`worker/model_runner.py`), with rows and a sampler of the draft model. The sampler
draws with the sampling parameters and the noise of the requests. So a draft token is the target's token wherever both models have the
same logits (Daliri, Musco and Suresh, arXiv 2408.07978). Does not know which rows need draft tokens.

Shape suffixes: S draws, T tokens of a pass, D features, V the target's vocabulary, W the draft model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.features.speculation.draft_rows import DraftRows
from quire.features.speculation.pending_hidden_states import States, address_of, as_tensor
from quire.forward_context import ForwardBatch
from quire.models.base import LanguageModel
from quire.native.step import make_native_step
from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.model_input import TokenModelInput
from quire.worker.model_runner import ModelRunner
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampler_ops import SamplerOps


class TargetLogits:
    """A draft model, as a sampler sees it: with logits of the target's tokens.

    Args:
        target_ids_W: the target's token of each of the draft model's, or -1; None: the same ids.

    Attributes:
        model_input: has the draft model.
        step: what else its `logits` takes.
    """

    model_input: TokenModelInput

    def __init__(self, vocab_size: int, target_ids_W: Tensor | None = None):
        self.step: tuple[int, ...] = ()
        self.vocab_size, self.joined = vocab_size, target_ids_W is not None
        if target_ids_W is not None:
            self.own_N = (target_ids_W >= 0).nonzero()[:, 0]
            self.target_N = target_ids_W[self.own_N].long()

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """logits_SV; of tokens that the draft model lacks: -inf."""
        model: Any = self.model_input.model
        logits_SW: Tensor = model.logits(hidden_SD, *self.step)
        if not self.joined:
            return logits_SW[:, : self.vocab_size]
        logits_SV = logits_SW.new_full((len(logits_SW), self.vocab_size), -torch.inf)
        logits_SV[:, self.target_N] = logits_SW[:, self.own_N]
        return logits_SV


class SpeculatorInput(TokenModelInput):
    """Gives a speculator the embeddings and states of a pass, and keeps the states of the rows that drew for the next pass."""

    model: Any
    states: Tensor

    def __init__(self, logits: TargetLogits):
        self.logits = logits

    @torch.inference_mode()
    def begin(self, states: States) -> None:
        """Pass 0 comes next, with the target's hidden states."""
        self.logits.step = (0,)
        self.states = self.model.target_states(as_tensor(states))

    def advance(self, number: int, staying: Sequence[int]) -> None:
        """Pass `number` comes next. `staying`: its rows, among the rows that drew."""
        self.logits.step = (number,)
        if len(staying) < len(self.states):
            self.states = self.states[staying]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of the batch's tokens."""
        (number,) = self.logits.step
        embeddings_TD = self.model.embed(batch.token_ids_T, number)
        hidden_TD: Tensor = self.model(embeddings_TD, batch.positions_T, self.states, number)
        self.states = hidden_TD[batch.sample_at_S]
        return hidden_TD


class DraftModelRunner(ModelRunner):
    """The runner of a draft model, or of a speculator.

    Args:
        rows: the rows as the draft model sees them.
        ops: the functions that draw.
        native: whether the fast path may run. It draws tokens by the ids of the model, or of the speculator's `target_ids_V`.
        is_speculator: the model reads the target's hidden states.
    """

    rows: DraftRows
    model_input: TokenModelInput

    def __init__(
        self,
        rows: DraftRows,
        logits: TargetLogits,
        ops: SamplerOps,
        native: bool,
        is_speculator: bool = False,
    ):
        self.logits, sampler = logits, Sampler(logits, rows, ops=ops)  # type: ignore[arg-type]
        step = make_native_step(rows, sampler, rows.shift) if native else None
        self.speculator_input = SpeculatorInput(logits) if is_speculator else None
        logits.model_input = self.speculator_input or TokenModelInput()
        super().__init__(logits.model_input, sampler, rows, fast_step=step)
        self._entered: dict[int, EnteredRow] = {}  # rows that no pass has computed

    def use_model(self, model: LanguageModel) -> None:
        """See `ModelRunner`. The sampler asks `TargetLogits`, which reads the model's input."""
        self.model_input.model = model

    def set_fused(self, fused: bool) -> None:
        """See `ModelRunner`."""
        if self.fast_step is not None:
            self.fast_step.set_model(self.model if fused else None, self.logits.vocab_size)

    def enter(self, new: EnteredRow) -> None:
        """A request took a row. Until a pass computes it, it costs nothing."""
        self._entered[new.row] = new

    def _enter_rows(self, work: Sequence[WorkItem]) -> None:
        """Their tokens are drawn with their parameters, and not scored."""
        for item in work if self._entered else ():
            if (new := self._entered.pop(item.row, None)) is None:
                continue
            if isinstance(new.params, SamplingParams):
                unscored = msgspec.structs.replace(
                    new.params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None
                )
                new = msgspec.structs.replace(new, params=unscored)
            self.model_output.enter(new)

    def leave(self, row: int) -> None:
        """The row is freed."""
        if self._entered.pop(row, None) is None:
            self.model_output.leave(row)

    def draw(
        self, work: Sequence[WorkItem], draws: Sequence[int], states: States | None = None
    ) -> None:
        """Pass 0; then passes of one token for rows until each has drawn as often as `draws` says, by work item.

        Args:
            states: the target's hidden states at the tokens of `work`, for a speculator.
        """
        self._enter_rows(work)
        plan = StepPlan(0, [], list(work), [])
        if self.fast_step is not None and self.accepts_fast_step(plan):
            self.fast_step.draft(work, draws, 0 if states is None else address_of(states))
            return
        if self.speculator_input is not None and states is not None:
            self.speculator_input.begin(states)
        self.run(work)
        drew = [(item.row, count) for item, count in zip(work, draws, strict=True) if count]
        for number in range(1, max(draws)):
            staying = [place for place, (_, count) in enumerate(drew) if count > number]
            drew = [drew[place] for place in staying]
            if self.speculator_input is not None:
                self.speculator_input.advance(number, staying)
            self.run([WorkItem(row, 1) for row, _ in drew])

    @torch.inference_mode()
    def run(self, work: Sequence[WorkItem]) -> None:
        """Run one pass without the fast path. Each row that is now fully computed gets a sampled token, which replaces the row's
        draft tokens."""
        self._enter_rows(work)
        plan = StepPlan(0, [], list(work), [])
        batch = self.batcher.build(plan)
        batch.lengths_S = batch.lengths_S + self.rows.shift
        for item in work:
            self.rows.num_drafts[item.row] = 0  # nothing is verified
        self.forward(plan, batch)

    def accepts_fast_step(self, plan: StepPlan, hooks: Iterable[object] = ()) -> bool:
        """See `ModelRunner`. The fast path draws after no draft token."""
        if any(item.drafts for item in plan.work):
            return False
        return super().accepts_fast_step(plan, hooks)
