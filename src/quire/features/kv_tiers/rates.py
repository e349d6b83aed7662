"""TierRates: whether to load kept blocks or to compute their tokens again, from what both take here.

    load if   bytes / rate of reads  <  tokens / rate of computing

Knows seconds, bytes and tokens. Observes steps (`observe/step_observer.py`) to measure how fast prompts are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.protocol.plan import StepPlan, StepResult

FEWEST_TOKENS = 64
"""Fewer tokens are not worth a look-up and a read."""
FEWEST_STEP_TOKENS = 64
"""A step with fewer says little about prompts."""
PATIENCE = 4.0
"""A read may take this many times as long as expected ..."""
GRACE_S = 1.0
"""... and this much longer."""


class TierRates:
    """See above. `tokens_per_second`: of prompts; 0: not measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.tokens_per_second = 0.0
        self._steps: dict[int, tuple[float, int]] = {}
        self._finished = 0.0

    def loads_faster(
        self, num_tokens: int, num_bytes: int, read_rate: float, is_near: bool = False
    ) -> bool:
        """Whether to load; without a measurement, a load is taken to be faster. `is_near`: nothing is looked up or read."""
        if num_tokens < (1 if is_near else FEWEST_TOKENS):
            return False
        if not (read_rate and self.tokens_per_second):
            return True
        return num_bytes / read_rate < num_tokens / self.tokens_per_second

    def most_seconds(self, num_bytes: int, read_rate: float) -> float:
        """How long a read of this many bytes may take."""
        return GRACE_S + (PATIENCE * num_bytes / read_rate if read_rate else PATIENCE)

    def step_seconds(self, num_tokens: int) -> float:
        """How long a step with this many tokens of prompts takes; 0: not measured."""
        return num_tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    # -- as a StepObserver ------------------------------------------------------------------------
    def launched(self, plan: StepPlan) -> None:
        self._steps[plan.step] = self.clock(), sum(item.num_tokens for item in plan.work)

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        began, num_tokens = self._steps.pop(step, (0.0, 0))
        now = self.clock()
        seconds, self._finished = now - max(began, self._finished), now
        if num_tokens < FEWEST_STEP_TOKENS or isinstance(result, BaseException) or seconds <= 0:
            return
        rate, known = num_tokens / seconds, self.tokens_per_second
        self.tokens_per_second = 0.8 * known + 0.2 * rate if known else rate
