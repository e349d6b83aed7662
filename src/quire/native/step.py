"""The fast path: one call of the CPU kernels runs a whole step, from the rows' tokens to drawn tokens written back.

Knows rows, plans and the addresses of the sampler's arrays. Does not know how a step is computed (kernels/step.cpp).
The worker asks each part of a step first (`accepts_fast_step`, which changes nothing); other steps run as batch, model
input and model output. Both paths give the same tokens. What runs is decided in `fuse` and `unfuse`.

The reason: between its parts a step runs Python code, which takes a third of a small model's step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import NOT_FINITE, PlanMismatch
from quire.layers.decoder import SpeculatorParts
from quire.layers.lora import AdapterTable
from quire.layers.native_parts import native_parts
from quire.native.fused_decoder import fuse_model, unfuse_model
from quire.native.model import native_model, record_states
from quire.native.speculator import native_speculator
from quire.ops.cpu.bindings import Kernels, best
from quire.ops.cpu.structs import CModel, CRows, CSpeculator
from quire.parallel.ranks import RankGroup
from quire.protocol.plan import StepPlan, StepResult, WorkItem

if TYPE_CHECKING:
    from quire.worker.request_rows import RequestRows
    from quire.worker.sampling.sampler import Sampler


def make_native_step(
    rows: RequestRows, sampler: Sampler | None, shift: int = 0
) -> NativeStep | None:
    """None if the CPU kernels are not available."""
    kernels = best()
    return None if kernels is None else NativeStep(kernels, rows, sampler, shift)


class NativeStep:
    """Runs steps of plain rows, for models that the kernels can run in one call.

    Args:
        sampler: its arrays give the sampling parameters by row; it says which rows need no more. None: nothing draws.
        shift: the model reads token[i + shift] at position i.
    """

    def __init__(
        self, kernels: Kernels, rows: RequestRows, sampler: Sampler | None, shift: int = 0
    ):
        self.kernels, self.rows = kernels, rows
        self.model: CModel | None = None
        self.ranks: RankGroup | None = None  # that split the model
        # The kernels keep these addresses: none of these arrays may move.
        tokens_RL = rows.token_ids_RL
        self._tables = (ctypes.c_void_p * len(rows.blocks))(
            *(blocks.ctypes.data for blocks in rows.blocks)
        )
        self._rows = CRows(
            tokens_RL.data_ptr(), rows.num_computed_tokens.ctypes.data, rows.length.ctypes.data,
            rows.num_drafts.ctypes.data, ctypes.addressof(self._tables),
            None if sampler is None else sampler.params_R.ctypes.data, None,
            rows.rope_offset.ctypes.data, tokens_RL.stride(0),
            rows.blocks[0].shape[1] if rows.blocks else 0, shift,
        )  # fmt: skip
        self._address = ctypes.addressof(self._rows)
        self._model = 0  # its address
        self._layers: Any = None
        self._speculator: CSpeculator | None = None  # that has it
        # By work item of a step: how many tokens it drew, and its highest logit.
        self._sampled_B = np.zeros(rows.max_rows, np.int64)
        self._max_logit_B = np.zeros(rows.max_rows, np.float32)
        self._sampled, self._max_logit = self._sampled_B.ctypes.data, self._max_logit_B.ctypes.data

    def fuse(self, models: Sequence[object]) -> None:
        """Fuse the layers of all models where the kernels support them, and run the first from now on."""
        for model in models:
            fuse_model(model)
        adapters: AdapterTable | None = getattr(models[0], "adapters", None)
        self._rows.adapters = None if adapters is None else adapters.number_of_row.ctypes.data
        self.set_model(models[0])

    def unfuse(self, models: Sequence[object]) -> None:
        """Undo `fuse`: the models run module by module, and no address of them is kept."""
        for model in models:
            unfuse_model(model)
        self.set_model(None)

    def set_model(self, model: object, vocab_size: int | None = None) -> None:
        """Run this model from now on, until its layers are fused again or unfused. None: no model.

        `vocab_size`: tokens beyond it are not drawn.
        """
        parts = native_parts(model)
        self._speculator = native_speculator(parts) if isinstance(parts, SpeculatorParts) else None
        self.model = native_model(model) if self._speculator is None else self._speculator.model
        self._model = 0 if self.model is None else ctypes.addressof(self.model)
        self._layers = None if self.model is None else parts.decoder.layers
        self.ranks = None if self.model is None else parts.decoder.ranks
        if self.model is not None and vocab_size is not None:
            self.model.vocab = min(self.model.vocab, vocab_size)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether the kernels support the model, and the rows' rotary positions are in its table."""
        if self.model is None:
            return False
        max_positions, rows = self.model.positions, self.rows
        if rows.rope_offset.any():
            used = rows.length > 0
            first, end = (
                part[used] + rows.rope_offset[used]
                for part in (rows.num_computed_tokens, rows.length)
            )
            return bool(first.min(initial=0) >= 0 and end.max(initial=0) <= max_positions)
        return rows.max_model_len < max_positions or bool(rows.length.max() <= max_positions)

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result, for a plan that every part accepted.

        Raises:
            PlanMismatch: a row has fewer tokens than the plan wants to compute.
        """
        work, rows = plan.work, self.rows
        rows.grow(work)
        count = len(work)
        if self.model is not None and (self._layers.recorded or self.model.num_recorded):
            record_states(self.model, sum(item.num_tokens for item in work))
        work_4B = _columns(work)
        status = self.kernels.step(
            self._model,
            self._address,
            work_4B.buffer_info()[0],
            count,
            self._sampled,
            self._max_logit,
        )
        if self.ranks is not None:
            self.ranks.check()
        if status < 0:
            raise PlanMismatch(f"step {plan.step}: a row lacks the tokens that the plan computes")
        draws = zip(work, self._sampled_B[:count].tolist(), strict=True)
        tokens = [rows.last_tokens(item.row, number) if number else [] for item, number in draws]
        result = StepResult(plan.step, tokens)
        if status:
            highest_B = self._max_logit_B[:count]
            result.errors = {
                index: NOT_FINITE for index in (~np.isfinite(highest_B)).nonzero()[0].tolist()
            }
        return result

    def draft(self, work: Sequence[WorkItem], draws: Sequence[int], states: int = 0) -> None:
        """Run a step, then steps of one token for rows until each has drawn as often as `draws` says, by work item.

        Args:
            states: for a speculator, the address of the target's hidden states at each token, bf16.

        Raises:
            PlanMismatch: as `run`.
        """
        work_4B, draws_B = _columns(work), array("q", draws)
        speculator = None if self._speculator is None else ctypes.addressof(self._speculator)
        status = self.kernels.draft(
            self._model, self._address, work_4B.buffer_info()[0], len(work), draws_B.buffer_info()[0],
            speculator, states, self._sampled, self._max_logit,
        )  # fmt: skip
        if self.ranks is not None:
            self.ranks.check()
        if status < 0:
            raise PlanMismatch("a row lacks the tokens that a draft model computes")


def _columns(work: Sequence[WorkItem]) -> array[int]:
    """Rows, tokens, whether they draw, and draft tokens, of all work items."""
    numbers = [item.row for item in work] + [item.num_tokens for item in work]
    numbers += [item.samples for item in work] + [item.drafts for item in work]
    return array("q", numbers)
