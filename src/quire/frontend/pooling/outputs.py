"""Results of pooling requests: a tensor, and vLLM's classes that read it as a vector, as probabilities or as a score.

Plain data. A tensor becomes a torch tensor when a program asks for it: the server never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.frontend.outputs import RequestMetrics
from quire.protocol.output import ErrorKind, FinishReason
from quire.protocol.tensor_data import TensorData

Floats = NDArray[np.float32]
Part = TypeVar("Part")


def floats(tensor: TensorData) -> Floats:
    """The tensor as a numpy array, without a copy. Raises TypeError: its dtype is not float32."""
    if tensor.dtype != "float32":
        raise TypeError(f"the output of a pooling model has dtype {tensor.dtype}, not float32")
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


@dataclass(slots=True)
class PoolingOutput:
    """The tensor of one prompt."""

    tensor: TensorData

    @property
    def array(self) -> Floats:
        return floats(self.tensor)

    @property
    def data(self) -> Any:
        """A torch tensor."""
        import torch  # programs that ask for it have it

        return torch.from_numpy(self.array.copy())


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(output.array.reshape(-1).tolist())

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number for each class."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(output.array.reshape(-1).tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well the texts of a pair fit."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(float(output.array.reshape(-1)[0]))


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Part]):
    """One prompt and its output."""

    request_id: str
    outputs: Part
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    """The reason, when finish_reason is "error"."""
    error_kind: ErrorKind = "internal"
    finish_reason: FinishReason | None = "stop"
    metrics: RequestMetrics | None = None
    prompt: str | None = None
    cached_tokens_by_source: dict[str, int] | None = None
    """As in `RequestOutput`."""

    @property
    def parts(self) -> list[Any]:
        """What `outputs.error_of` reads."""
        return [self]

    @classmethod
    def from_base(cls, one: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The same result, read as this class's kind of output."""
        return cls(
            one.request_id, cls.read(one.outputs), one.prompt_token_ids, one.num_cached_tokens, one.finished,
            one.error, one.error_kind, one.finish_reason, one.metrics, one.prompt, one.cached_tokens_by_source,
        )  # fmt: skip

    @staticmethod
    def read(output: PoolingOutput) -> Any:
        return output


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One prompt or pair and its vector."""

    read = staticmethod(EmbeddingOutput.from_base)


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One prompt or pair and its classes."""

    read = staticmethod(ClassificationOutput.from_base)


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """One prompt or pair and its score."""

    read = staticmethod(ScoringOutput.from_base)
