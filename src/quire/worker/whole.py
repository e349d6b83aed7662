"""A step in one call of the kernels: from the tokens that stand in rows to tokens drawn and written back.

Knows rows, plans and what a sink keeps by row, as addresses. Does not know how a step is computed (kernels/step.cpp), and
does nothing for rows that ask for more than a plain draw: those go in parts, by batch, source and sink. Both ways give
the same tokens. Nothing follows a plain draw for certain, so what `Rows.told` counts is not kept up here.

Between its parts a step is Python, whose share of a small model's step is a third.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire.models.whole import ToldModel, told
from quire.ops.cpu.library import Kernels, best
from quire.protocol.plan import StepPlan, StepResult
from quire.worker.rows import Rows
from quire.worker.sample.outcome import NO_NUMBER
from quire.worker.sample.sink import SampleSink

_P, _L = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    """`Rows` of kernels/step.h."""

    _fields_: ClassVar[Sequence[Any]] = [
        *(
            (name, _P)
            for name in (
                "tokens", "computed", "length", "blocks", "greedy", "temperature", "top_k", "top_p", "seeds",
            )
        ),
        *((name, _L) for name in ("tokens_step", "blocks_step")),
    ]  # fmt: skip


def whole_step(rows: Rows, sink: SampleSink) -> WholeStep | None:
    """None where no kernels run."""
    kernels = best()
    return None if kernels is None else WholeStep(kernels, rows, sink)


class WholeStep:
    """Steps of plain rows of a model that the kernels know whole.

    Args:
        sink: whose parameters by row are drawn with; it says which rows are plain.
    """

    def __init__(self, kernels: Kernels, rows: Rows, sink: SampleSink):
        self.kernels, self.rows, self.sink = kernels, rows, sink
        self.model: ToldModel | None = None
        # None of these arrays ever moves.
        limits, tokens_RL = sink.limits, rows.token_ids_RL
        self._tables = (_P * len(rows.blocks))(*(blocks.ctypes.data for blocks in rows.blocks))
        self._rows = _Rows(
            tokens_RL.data_ptr(), rows.computed.ctypes.data, rows.length.ctypes.data, ctypes.addressof(self._tables),
            sink.greedy.ctypes.data, sink.temperature.ctypes.data, limits.top_k.ctypes.data, limits.top_p.ctypes.data,
            sink.seeds.ctypes.data, tokens_RL.stride(0), rows.blocks[0].shape[1] if rows.blocks else 0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._rows)

    def place(self, model: object) -> None:
        """Steps are of this model from now on."""
        self.model = told(model)

    def run(self, plan: StepPlan) -> Drawn | None:
        """What the step drew. None, and nothing has happened: the model is not one that the kernels know, or some row is
        not plain, or longer than they have angles for.

        Raises:
            RuntimeError: a row has not as many tokens as the plan wants to compute.
        """
        work, rows = plan.work, self.rows
        if self.model is None or not self.sink.plain(work):
            return None
        if rows.max_model_len >= self.model.positions and rows.length.max() > self.model.positions:
            return None
        rows.grow(work)
        shares_B3 = np.array([(item.row, item.num_tokens, item.samples) for item in work], np.int64)
        drawn_B, whole_B = np.empty(len(work), np.int64), np.empty(len(work), np.float32)
        if not self.kernels.step(
            ctypes.addressof(self.model), self._address, shares_B3.ctypes.data, len(work),
            drawn_B.ctypes.data, whole_B.ctypes.data,
        ):  # fmt: skip
            raise RuntimeError(f"step {plan.step}: a row lacks the tokens that the plan computes")
        return Drawn(plan.step, drawn_B, whole_B)


class Drawn:
    """The pending result of a step that is done: by work item, a token or -1, and the highest logit."""

    def __init__(self, step: int, drawn_B: np.ndarray, whole_B: np.ndarray):
        self.step, self.drawn_B, self.whole_B = step, drawn_B, whole_B

    def result(self) -> StepResult:
        tokens = [[token] if token >= 0 else [] for token in self.drawn_B.tolist()]
        result = StepResult(self.step, tokens)
        if not math.isfinite(self.whole_B.sum()):
            result.errors = {
                at: NO_NUMBER for at in (~np.isfinite(self.whole_B)).nonzero()[0].tolist()
            }
        return result
