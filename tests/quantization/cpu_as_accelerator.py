"""A CPU that reports a GPU's properties: GPU kernels run on it in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire.ops.dispatch import OPS
from quire.platforms.cpu import CpuPlatform
from tests.models.harness import Runner


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "kernels", ("triton", "reference"))
    for op in OPS.values():
        monkeypatch.setattr(op, "run", op.run)  # so that it comes back


def answer(model: Any, text: list[int]) -> Tensor:
    """Logits after a prompt."""
    with np.errstate(all="ignore"):
        return Runner(model).prefill(0, text)
