"""Pooling collector: the engine's outputs of one pooling request -> its PoolingRequestOutput.

The counterpart of `output_processor.py` for requests whose output is a tensor. Joins the vectors of a text that was
embedded in pieces. Does not know which caller waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.frontend.outputs import RequestMetrics, by_source
from quire.frontend.pooling.inputs import AcceptedPooling
from quire.frontend.pooling.outputs import PoolingOutput, PoolingRequestOutput, floats
from quire.protocol.output import EngineOutput, ErrorKind, FinishReason
from quire.protocol.tensor_data import TensorData


@dataclass(slots=True)
class PieceState:
    """The state of one piece of the text."""

    id: str
    num_tokens: int
    finish: FinishReason | None = None
    tensor: TensorData | None = None


class PoolingCollector:
    """Collects the outputs of one request. Not thread-safe."""

    def __init__(self, accepted: AcceptedPooling):
        self.id, self.accepted, self.params = accepted.id, accepted, accepted.params
        self.children = [PieceState(child.id, len(child.tokens)) for child in accepted.children]
        self.metrics = RequestMetrics(arrival_time=accepted.arrived, queued_ts=accepted.arrived)
        self.num_cached_tokens = 0
        self.loaded_tokens = Counter[str]()
        self.error: str | None = None
        self.error_kind: ErrorKind = "internal"
        self.finished = False
        self.failed = False
        """A piece ended with an error."""
        self._is_delivered = False
        self.tap: Callable[[EngineOutput], None] | None = None
        """Gets each output before this object does."""

    def add(self, index: int, output: EngineOutput, now: float) -> bool:
        """Add an engine output of piece `index`. False: the engine has nothing left to abort."""
        piece, metrics = self.children[index], self.metrics
        metrics.engine = output.engine
        if output.queued and not metrics.scheduled_ts:
            metrics.scheduled_ts = metrics.queued_ts + output.queued
        metrics.num_preemptions = max(metrics.num_preemptions, output.preemptions)
        if piece.finish is not None or output.finish is None:
            return False
        self.num_cached_tokens += output.num_cached_tokens
        self.loaded_tokens.update(output.loaded_tokens)
        piece.finish, piece.tensor = output.finish, output.tensor
        if output.finish == "error":
            self.failed, self.error, self.error_kind = True, output.error, output.error_kind
        elif output.finish != "abort" and output.tensor is None:
            self.failed, self.error = True, "the engine sent no tensor"
            piece.finish = "error"
        self.finished = all(one.finish is not None for one in self.children)
        if self.finished:
            metrics.finished_time = now
        return False

    def end(self, finish: FinishReason, error: str | None = None) -> list[str]:
        """End all unfinished pieces; returns their ids, for the engine to abort."""
        ended = [piece.id for piece in self.children if piece.finish is None]
        for piece in self.children:
            piece.finish = piece.finish or finish
        self.finished, self.error = True, error or self.error
        self.failed |= finish == "error"
        self.metrics.finished_time = time.time()
        return ended

    def take(self) -> PoolingRequestOutput[PoolingOutput] | None:
        """The output, once; None before the end. Its tensor is empty if the request failed or was aborted."""
        if not self.finished or self._is_delivered:
            return None
        self._is_delivered = True
        tensors = [piece.tensor for piece in self.children if piece.tensor is not None]
        whole = len(tensors) == len(self.children) and not self.failed
        ends = [piece.finish for piece in self.children if piece.finish in ("error", "abort")]
        finish: FinishReason = ends[0] if ends and ends[0] is not None else "stop"
        tensor = self._joined(tensors) if whole else TensorData("float32", (0,), b"")
        return PoolingRequestOutput(
            self.id, PoolingOutput(tensor), self.accepted.tokens, self.num_cached_tokens, True, self.error,
            self.error_kind, finish, self.metrics, self.accepted.prompt,
            by_source(self.num_cached_tokens, self.loaded_tokens),
        )  # fmt: skip

    def _joined(self, tensors: Sequence[TensorData]) -> TensorData:
        """The mean of the pieces' vectors by their token counts, of length 1 if they are."""
        if len(tensors) == 1:
            return tensors[0]
        weights = np.array([piece.num_tokens for piece in self.children], np.float32)
        mean = weights @ np.stack([floats(tensor) for tensor in tensors]) / weights.sum()
        if self.accepted.normalizes:
            mean /= max(float(np.linalg.norm(mean)), 1e-12)
        return TensorData("float32", mean.shape, mean.astype(np.float32).tobytes())
