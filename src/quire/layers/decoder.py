"""Decoder: embeddings, layers and last norm of a model that generates text, or one stage's part of them.

Knows the order of these parts, and what goes from a layer to the next. Does not know families, caches or batches, nor what a
layer computes. `ModelParts` and `SpeculatorParts` say what is around a decoder (`native_parts.py`).

Shape suffixes: T tokens of this step, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.layers.decoder_layer import normed_sum
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.rotary import LayerRotaries
from quire.parallel.ranks import RankGroup, current_ranks
from quire.parallel.stages import ONE_STAGE, PipelineStage, StageLink, current_stage


class Layers(nn.ModuleList):
    """The decoder layers of a model, in order.

    A layer takes (x_TD, residual_TD or None, angles) and returns (x_TD, residual_TD); its output is their sum.

    Args:
        first, total: the number of the first of these layers in the model, and of all its layers; 0: these are all.
    """

    fused: Any = (
        None  # what computes `advance` and the last norm in few kernel calls, with the same results
    )
    is_target = False  # of the model that the step computes, not of a speculator
    recorded: frozenset[int] = frozenset()  # see `LanguageModel.record_hidden_states`

    def __init__(self, layers: Iterable[nn.Module], first: int = 0, total: int = 0):
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)
        self.first, self.total = first, total or len(self)

    def forward(
        self,
        x_TD: Tensor,
        positions: Tensor,
        rotary: LayerRotaries,
        norm: Norm | None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """The output of the last layer, normed if there is a norm; positions: see `Rotary.forward`."""
        x_TD, residual_TD = self.advance(x_TD, residual_TD, positions, rotary)
        return x_TD if self._running() else normed_sum(norm, x_TD, residual_TD)[0]

    def advance(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions: Tensor, rotary: LayerRotaries
    ) -> tuple[Tensor, Tensor | None]:
        """(x_TD, residual_TD) after these layers."""
        if (fused := self._running()) is not None:
            x_TD, residual_TD = fused.run(x_TD, residual_TD, positions, rotary)
            return x_TD, residual_TD
        for number, (layer, angles) in enumerate(zip(self, rotary(positions), strict=True)):
            self.record(number, x_TD, residual_TD)
            x_TD, residual_TD = layer(x_TD, residual_TD, angles)
            if self.is_target:
                residual_TD = with_added(self.first + number + 1, residual_TD)
        self.record(len(self), x_TD, residual_TD)
        return x_TD, residual_TD

    def _running(self) -> Any:
        """What runs in place of the modules in this step."""
        return None if self.fused is None or current_batch().needs_modules else self.fused

    def record(self, number: int, x_TD: Tensor, residual_TD: Tensor | None) -> None:
        """Copy the output of `number` layers to the batch, if it is wanted."""
        if number in self.recorded:
            copied = x_TD.clone() if residual_TD is None else x_TD + residual_TD
            current_batch().hidden_states[number] = copied


def with_added(number: int, states_TD: Tensor) -> Tensor:
    """States after `number` layers of the model, with those that hooks add there."""
    for at_N, more_ND in current_batch().added_states.get(number, ()):
        states_TD = states_TD.index_add(0, at_N, more_ND.to(states_TD.dtype))
    return states_TD


class Decoder(nn.Module):
    """Turns embeddings and positions into hidden states. `layer(i)` makes layer i; see `Layers` for its call.

    A stage of a pipeline has a range of the layers; the first has the embeddings, and the last the norm. Hidden states and
    residual go from one to the next.

    `norm`: the last norm. `embedding_scale`: see `Embedding`. `head_dim`: of each layer, if they differ.
    """

    checkpoint_names: Mapping[str, str] = {}
    ranks: RankGroup | None = None
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
        self.layers.is_target = True
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
