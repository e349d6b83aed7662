"""The hook that tells a model which tokens belong to the second text of a pair.

Knows where the second text of each row begins. Does not know what models do with it.

Shape suffixes: T tokens of this step.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.forward_context import TOKEN_TYPES, ForwardBatch
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.pooling_params import PoolingParams
from quire.worker.hooks import Hook


class TokenTypesHook(Hook):
    """Puts TOKEN_TYPES into the batch, if a row of the step has a second text."""

    name = "token_types"
    order = 30

    def __init__(self, device: torch.device):
        self.device = device
        self.second_text: dict[int, int] = {}  # by row

    def enter(self, new: EnteredRow) -> None:
        if isinstance(new.params, PoolingParams) and new.params.second_text:
            self.second_text[new.row] = new.params.second_text

    def leave(self, row: int) -> None:
        self.second_text.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return not any(item.row in self.second_text for item in plan.work)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None or not self.second_text:
            return
        types_T = np.zeros(batch.num_tokens, np.int64)
        start = 0
        for item, length in zip(plan.work, batch.lengths, strict=True):
            first = length - item.num_tokens
            if (second := self.second_text.get(item.row)) is not None:
                types_T[start + max(second - first, 0) : start + item.num_tokens] = 1
            start += item.num_tokens
        if types_T.any():
            batch.extras[TOKEN_TYPES] = torch.from_numpy(types_T).to(self.device)
