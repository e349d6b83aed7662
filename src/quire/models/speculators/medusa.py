"""Medusa: a head for each token to come, which guesses it from the target's last hidden state alone.

Source: arXiv 2401.10774; the checkpoints of FasterDecoding and of vLLM.

Shape suffixes: T positions of a pass, S rows that draw, D features of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.models.hf_config import TextConfig
from quire.models.speculators.base import Speculator, SpeculatorDecoder


class ResidualBlock(nn.Module):
    """x + silu(layer(x)) for each layer."""

    def __init__(self, size: int, num_layers: int, *, bias: bool):
        super().__init__()
        layers = (Linear(size, size, bias=bias, after="silu") for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, x_SD: Tensor) -> Tensor:
        for layer in self.layers:
            x_SD = x_SD + layer(x_SD)
        return x_SD


class Medusa(Speculator):
    """Every pass hands on the target's state; pass `step` guesses with head `step`."""

    spellings: ClassVar = (
        (r"^medusa_heads?\.", ""),
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
        (r"^lm_head\.weight$", "lm_heads.0.weight"),
    )

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        size, count = cfg.hidden_size, cfg.num_heads
        self.most = int(count)
        self.blocks = nn.ModuleList(ResidualBlock(size, cfg.num_hidden_layers, bias=cfg.fc_bias) for _ in range(count))  # fmt: skip
        # One for each block, one for all blocks, or none: then the target's head is used.
        heads = (Head(cfg.draft_vocab_size, size) for _ in range(cfg.num_lm_heads))
        self.lm_heads = nn.ModuleList(heads)

    def decoder(self, cfg: TextConfig, max_length: int) -> SpeculatorDecoder:
        return SpeculatorDecoder(cfg)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> None:  # type: ignore[override]
        """None: see `lm_heads`."""
        return

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`."""
        return states_TD

    def logits(self, states_SD: Tensor, step: int = 0) -> Tensor:
        """See `Speculator`."""
        x_SD = self.blocks[step](states_SD)
        if not self.lm_heads:
            return super().logits(x_SD)
        head = self.lm_heads[min(step, len(self.lm_heads) - 1)]
        return head(x_SD)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `LanguageModel`. A head for the whole vocabulary is cut to the tokens of `token_map`."""
        for usual, found in super().checkpoint_tensors(name, tensor):
            is_head = usual.startswith("lm_heads.")
            if is_head and usual.split(".")[1] not in map(str, range(len(self.lm_heads))):
                continue
            whole = is_head and self.target_ids_V is not None and len(found) > len(self.target_ids_V)  # fmt: skip
            yield usual, found[self.target_ids_V] if whole else found
