"""A step in one call of the kernels: from the tokens that stand in rows to tokens drawn and written back.

Knows rows, plans and what a sink keeps by row, as addresses. Does not know how a step is computed (kernels/step.cpp), and
does nothing for rows that ask for more than a plain draw: those go in parts, by batch, source and sink. Both ways give
the same tokens. Nothing follows a plain draw for certain, so what `RequestRows.told` counts is not kept up here.

Between its parts a step is Python, whose share of a small model's step is a third.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire.models.whole import CModel, native_model
from quire.ops.cpu.bindings import Kernels, best
from quire.protocol.plan import StepPlan, StepResult
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.sampled_step import NO_NUMBER
from quire.worker.sampling.sampler import Sampler
from quire.worker.worker import FinishedStep, PlanMismatch

_P, _L = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    """`RequestRows` of kernels/step.h."""

    _fields_: ClassVar[Sequence[Any]] = [
        *(
            (name, _P)
            for name in (
                "tokens", "computed", "length", "blocks", "greedy", "temperature", "top_k", "top_p", "seeds",
            )
        ),
        *((name, _L) for name in ("tokens_step", "blocks_step")),
    ]  # fmt: skip


def make_native_step(rows: RequestRows, sink: Sampler) -> NativeStep | None:
    """None where no kernels run."""
    kernels = best()
    return None if kernels is None else NativeStep(kernels, rows, sink)


class NativeStep:
    """Steps of plain rows of a model that the kernels know whole.

    Args:
        sink: whose parameters by row are drawn with; it says which rows are plain.
    """

    def __init__(self, kernels: Kernels, rows: RequestRows, sink: Sampler):
        self.kernels, self.rows, self.sink = kernels, rows, sink
        self.model: CModel | None = None
        # None of these arrays ever moves.
        limits, tokens_RL = sink.limits, rows.token_ids_RL
        self._tables = (_P * len(rows.blocks))(*(blocks.ctypes.data for blocks in rows.blocks))
        self._rows = _Rows(
            tokens_RL.data_ptr(), rows.computed.ctypes.data, rows.length.ctypes.data, ctypes.addressof(self._tables),
            sink.greedy.ctypes.data, sink.temperature.ctypes.data, limits.top_k.ctypes.data, limits.top_p.ctypes.data,
            sink.seeds.ctypes.data, tokens_RL.stride(0), rows.blocks[0].shape[1] if rows.blocks else 0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._rows)
        self._model = 0  # its address
        # By work item of a step: a token or -1, and the highest logit.
        self._drawn_B = np.zeros(rows.max_rows, np.int64)
        self._whole_B = np.zeros(rows.max_rows, np.float32)
        self._drawn, self._whole = self._drawn_B.ctypes.data, self._whole_B.ctypes.data

    def place(self, model: object) -> None:
        """Steps are of this model from now on."""
        self.model = native_model(model)
        self._model = 0 if self.model is None else ctypes.addressof(self.model)

    def run(self, plan: StepPlan) -> FinishedStep | None:
        """What the step drew. None, and nothing has happened: the model is not one that the kernels know, or some row is
        not plain, or longer than they have angles for.

        Raises:
            PlanMismatch: a row has not as many tokens as the plan wants to compute.
        """
        work, rows = plan.work, self.rows
        if self.model is None or not self.sink.plain(work):
            return None
        if rows.max_model_len >= self.model.positions and rows.length.max() > self.model.positions:
            return None
        rows.grow(work)
        count = len(work)
        shares = [item.row for item in work] + [item.num_tokens for item in work]
        shares += [item.samples for item in work]
        told_3B = array("q", shares)
        wrong = self.kernels.step(
            self._model, self._address, told_3B.buffer_info()[0], count, self._drawn, self._whole
        )
        if wrong < 0:
            raise PlanMismatch(f"step {plan.step}: a row lacks the tokens that the plan computes")
        tokens = [[token] if token >= 0 else [] for token in self._drawn_B[:count].tolist()]
        result = StepResult(plan.step, tokens)
        if wrong:
            highest_B = self._whole_B[:count]
            result.errors = {
                at: NO_NUMBER for at in (~np.isfinite(highest_B)).nonzero()[0].tolist()
            }
        return FinishedStep(result)
