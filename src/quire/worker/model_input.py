"""Model input: builds what the model computes on, and runs the model.

Knows the two tensors that every model takes. Does not know rows, caches or how the output is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quire.forward_context import ForwardBatch

ROPE_POSITIONS = "rope_positions_TC"
"""The extra tensor of a batch with positions of several components, for the rotary embedding only (M-RoPE)."""

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan


class ModelInput(Protocol):
    """Runs the model on a batch and returns the hidden states of its tokens, [T, D]."""

    model: LanguageModel

    def set_fused(self, fused: bool) -> None:
        """Whether larger calls (captured graphs) may run in place of the model's modules."""
        ...

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether the model's input on the fast path (the rows' token ids) is what `forward` would give it."""
        return False

    def forward(self, batch: ForwardBatch) -> Tensor: ...


class TokenModelInput:
    """Gives the model the embeddings of the tokens and their positions, or what hooks put into the batch instead."""

    def __init__(self, model: Any = None):
        """`model`: None if it is set later."""
        self.model = model

    def set_fused(self, fused: bool) -> None:
        """It always calls the model's modules."""

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of the batch's tokens."""
        hidden_TD: Tensor = self.model(*self.inputs(batch))
        return hidden_TD

    def inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """embeddings_TD, and the positions for the rotary embedding."""
        embeddings_TD = self.model.embed(batch.token_ids_T)
        for at_N, new_ND in batch.embeddings:
            embeddings_TD[at_N] = new_ND.to(embeddings_TD.dtype)
        return embeddings_TD, batch.extras.get(ROPE_POSITIONS, batch.positions_T)
