"""The logits processor of trace replay: at each position, only the token of the request's trace is left.

It runs last, and decides over every processor before it. A row's log-probabilities come from the logits before any
processor, so they say how likely the model finds each token of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, allow_only_in_mask


class TraceReplay(Processor):
    """`trace_decode_token_ids`."""

    mask_only = True
    accepts_drafts = True
    order = 99

    def __init__(self) -> None:
        self.traces: dict[int, list[int]] = {}

    def enter(self, new: EnteredRow) -> bool:
        if (trace := new.sampling_params.trace_decode_token_ids) is None:
            return False
        self.traces[new.row] = trace
        return True

    def leave(self, row: int) -> None:
        del self.traces[row]

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        for index, token in self._tokens(selected):
            logits_SV[index] = float("-inf")
            logits_SV[index, token] = 0.0  # the model may have had -inf for it
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        for index, token in self._tokens(selected):
            allow_only_in_mask(words_SW[index], [token])

    def _tokens(self, selected: ProcessorRows) -> Iterator[tuple[int, int]]:
        """(index in S, token) of the rows; past the end of a trace, as after draft tokens, any token is left."""
        for index, row, place in zip(
            selected.indices.tolist(),
            selected.rows.tolist(),
            selected.outputs.tolist(),
            strict=True,
        ):
            if place < len(trace := self.traces[row]):
                yield index, trace[place]
