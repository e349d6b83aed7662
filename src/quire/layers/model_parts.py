"""What a whole model or speculator says of its parts, for steps in one native call (`native/`); see `native_parts.py`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.layers.decoder import Decoder
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.norm import Norm


class ModelParts(NamedTuple):
    """A model from token ids to logits. `head`: None on a stage that does not draw."""

    decoder: Decoder
    head: Head | None


class SpeculatorParts(NamedTuple):
    """A speculator, with the table and the head that it uses: its own, or the target's.

    Attributes:
        embedding_norm, state_norm: of what the first layer reads.
        last_norm: of what the head reads.
        state_projection: of the target's hidden states, before pass 0.
        join: projects cat(norm(embedding), norm(state)) for the first layer; None: the layer has `joined_attention`.
        normed_residual: the residual of that attention is norm(state).
        passes_sum: the next pass takes the state before `last_norm`.
        target_ids_V: see `Speculator`.
    """

    decoder: Decoder
    embedding: Embedding | None
    head: Head | None
    vocab_size: int
    target_vocab_size: int
    target_ids_V: Tensor | None
    embedding_norm: Norm | None
    state_norm: Norm | None
    last_norm: Norm | None
    state_projection: Linear | None = None
    join: Linear | None = None
    normed_residual: bool = False
    passes_sum: bool = False
