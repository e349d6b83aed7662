"""A logits processor that ends its process at one position of one request."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.worker.sampling.logits_processors import Processor, ProcessorRows


class Killer(Processor):
    """`vllm_xargs: {"kill_at": N}`: the draw of output token N kills."""

    def __init__(self) -> None:
        self.kill_at: dict[int, int] = {}

    def enter(self, new: EnteredRow) -> bool:
        at = (new.sampling_params.extra_args or {}).get("kill_at")
        if at is None:
            return False
        self.kill_at[new.row] = int(at)
        return True

    def leave(self, row: int) -> None:
        self.kill_at.pop(row, None)

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        for row, output in zip(selected.rows.tolist(), selected.outputs.tolist(), strict=True):
            if output == self.kill_at[row]:
                os.kill(os.getpid(), signal.SIGKILL)
        return logits_SV
