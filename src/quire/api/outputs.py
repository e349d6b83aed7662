"""Output classes of the API; `frontend/outputs.py` defines them."""

from __future__ import annotations

from quire.frontend.logprobs import FlatLogprobs, Logprob
from quire.frontend.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    error_of,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "FlatLogprobs",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "error_of",
]
