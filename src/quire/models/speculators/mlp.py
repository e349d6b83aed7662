"""MLP speculators: small recurrent networks, which mix a state with the embedding of each guess.

Source: arXiv 2404.19124; the checkpoints of IBM.

Shape suffixes: T positions of a pass, S rows that draw, E features of the target's state, D features of a state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.weight_slots import Layer
from quire.models.hf_config import TextConfig
from quire.models.speculators.base import Speculator, SpeculatorDecoder
from quire.ops.reference import rms_norm

EPS = 1e-6


class ShiftedNorm(Layer):
    """x scaled to unit mean square, times weight, plus bias."""

    weight: Tensor
    bias: Tensor
    random_mean = 1.0

    def __init__(self, size: int):
        super().__init__()
        self.new("weight", size)
        self.new("bias", size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, EPS) + self.bias


class MlpSpeculator(Speculator):
    """gelu(norm(projection of the state + weighted embedding)), with weights for each pass, or the same for all."""

    spellings: ClassVar = ((r"^speculator\.", ""),)

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        count, tied = cfg.n_predict, cfg.get("tie_weights", False)
        self.most, self.tied = count, tied
        target, size = cfg.emb_dim, cfg.inner_dim
        words, own = cfg.vocab_size, 1 if tied else count
        inputs = [target, *[size] * (min(count, 2) - 1 if tied else count - 1)]
        self.emb = nn.ModuleList(Embedding(words, size) for _ in range(own))
        self.proj = nn.ModuleList(Linear(num_in, size) for num_in in inputs)
        self.ln = nn.ModuleList(ShiftedNorm(size) for _ in range(own))
        self.heads = nn.ModuleList(Head(words, size) for _ in range(own))
        self.checkpoint_names = {"heads": "head"}
        state = 0.5 ** (0.5 / count)
        self.embedding_weight = math.sqrt((1 - state**2) * size / 2) / state

    def decoder(self, cfg: TextConfig, max_length: int) -> SpeculatorDecoder:
        return SpeculatorDecoder(cfg)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> None:  # type: ignore[override]
        """None: see `heads`."""
        return

    def target_states(self, states_TE: Tensor) -> Tensor:
        """See `Speculator`."""
        if not self.cfg.get("scale_input"):
            return states_TE
        return rms_norm(states_TE, None, EPS) / math.sqrt(2)

    def embed(self, token_ids_T: Tensor, step: int = 0) -> Tensor:
        """See `Speculator`."""
        return self.emb[min(step, len(self.emb) - 1)](token_ids_T)

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`."""
        x_TD = self.proj[min(step, len(self.proj) - 1)](states_TD)
        x_TD = x_TD + embeddings_TD * self.embedding_weight
        return F.gelu(self.ln[min(step, len(self.ln) - 1)](x_TD))

    def logits(self, states_SD: Tensor, step: int = 0) -> Tensor:
        """See `Speculator`."""
        return self.heads[min(step, len(self.heads) - 1)](states_SD)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `LanguageModel`. Checkpoints with the same weights for all passes store them for each."""
        for usual, found in super().checkpoint_tensors(name, tensor):
            part, _, rest = usual.partition(".")
            number = rest.partition(".")[0]
            limit = len(self.proj) if part == "proj" else len(self.emb)
            if not (self.tied and number.isdigit() and number not in map(str, range(limit))):
                yield usual, found
