"""Decoder: embeddings, layers and last norm of a model that generates text, or one stage's part of them.

Knows the order of these parts. Does not know families, caches or batches.

Shape suffixes: T tokens of this step, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from quire.layers.decoder_layers import Layers
from quire.layers.embedding import Embedding
from quire.layers.norm import Norm
from quire.layers.rotary import LayerRotaries
from quire.parallel.ranks import TensorRanks, current_ranks
from quire.parallel.stages import ONE_STAGE, PipelineStage, StageLink, current_stage


class Decoder(nn.Module):
    """Turns embeddings and positions into hidden states. `layer(i)` makes layer i; see `Layers` for its call.

    A stage of a pipeline has a range of the layers; the first has the embeddings, and the last the norm. Hidden states and
    residual go from one to the next.

    `norm`: the last norm. `embedding_scale`: see `Embedding`. `head_dim`: of each layer, if they differ.
    """

    checkpoint_names: Mapping[str, str] = {}
    ranks: TensorRanks | None = None
    """They split the layers."""
    stage: PipelineStage = ONE_STAGE

    def __init__(
        self,
        cfg: Any,
        layer: Callable[[int], nn.Module],
        max_length: int,
        *,
        norm: Norm,
        embedding_scale: float | None = None,
        head_dim: Sequence[int] | None = None,
    ):
        super().__init__()
        self.stage, self.ranks = current_stage(), current_ranks()
        own = self.stage.layers(cfg.num_hidden_layers)
        self.embed_tokens: Embedding = None  # type: ignore[assignment]
        if self.stage.is_first or (self.stage.is_last and cfg.tie_word_embeddings):
            self.embed_tokens = Embedding(
                cfg.vocab_size, cfg.hidden_size, scale=embedding_scale, splits=True
            )
        self.layers = Layers((layer(i) for i in own), own.start, cfg.num_hidden_layers)
        self.norm: Norm = norm if self.stage.is_last else None  # type: ignore[assignment]
        ropes = [cfg.rope(i) for i in own]
        sizes = [head_dim[i] for i in own] if head_dim else cfg.head_dim
        self.rotary = LayerRotaries(sizes, ropes, max_length)

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        if self.stage.link is not None:
            return self._stage_forward(self.stage.link, embeddings_TD, positions)
        hidden_TD = self.layers(embeddings_TD, positions, self.rotary, self.norm)
        self.layers.record(len(self.layers) + 1, hidden_TD, None)
        return hidden_TD

    def _stage_forward(self, link: StageLink, x_TD: Tensor, positions: Tensor) -> Tensor:
        residual_TD: Tensor | None = None
        if not self.stage.is_first:
            x_TD, *rest = link.receive()
            residual_TD = rest[0] if rest else None
        if self.stage.is_last:
            return self.layers(x_TD, positions, self.rotary, self.norm, residual_TD)
        found = self.layers.advance(x_TD, residual_TD, positions, self.rotary)
        link.send([tensor_TD for tensor_TD in found if tensor_TD is not None])
        return found[0]
