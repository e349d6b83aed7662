"""Pixtral's vision tower, in LLaVA's form and in Mistral Small 3.1's: pictures of any size.

Source: arXiv 2410.07073.

Shape suffixes: T patches of a pass, I values of a patch, D features of the tower, F features of a row, N rows of an item, C components of
a position, H, W rows and columns of patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.forward_context import forward_context, packed_batch
from quire.layers.decoder_layer import GatedMLP, SelfAttention
from quire.layers.encoder import EncoderLayer
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.vision import tower_config
from quire.models.vision_towers.base import (
    LayerRope,
    LayerSizes,
    NativeTower,
    PatchEmbedding,
    Perceptron,
    Stacks,
    as_tensor,
    feature_layers,
    grown,
    picture_size,
    side,
    stack_ends,
)
from quire.models.vision_towers.patch_transformer import patches_of
from quire.models.wrapper_config import language_config
from quire.protocol.media import TowerInput

LAYER_NAMES = ("attention", "attention_norm", "feed_forward", "ffn_norm")
EPS = 1e-5


class PixtralTower(NativeTower):
    """Rows are patches, through a perceptron.

    Args:
        config: of the wrapper. width: of a row.
    """

    layer = -2
    """Where config.json leaves it out: `vision_feature_layer`."""

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        get = tower_config(config)
        size, heads = int(get.get("hidden_size", 1024)), int(get.get("num_attention_heads", 16))
        depth, self.patch = int(get.get("num_hidden_layers", 24)), side(get.get("patch_size", 16))
        theta = (get.get("rope_parameters") or get).get("rope_theta", 10000.0)
        sizes = LayerSizes(size, heads, grown(int(get.get("intermediate_size", 4096))), get.get("hidden_act", "gelu"))  # fmt: skip
        self.checkpoint_names = {
            "patches": "vision_tower.patch_conv", "first_norm": "vision_tower.ln_pre", "stacks": "",
            "projector": "multi_modal_projector",
        }  # fmt: skip
        ends, self.order = stack_ends(feature_layers(config, self.layer), depth)
        self.unread_layers = range(ends[-1], depth)
        self.patches = PatchEmbedding(grown(3 * self.patch**2), size, bias=False)
        self.first_norm = RMSNorm(size, eps=EPS)
        rope = {"rope_type": "axial_alternating", "rope_theta": float(theta)}
        self.stacks = Stacks(
            ends, partial(_layer, sizes), rope=LayerRope(sizes.head_dim, rope),
            names=("vision_tower.transformer.layers", ""),
        )  # fmt: skip
        self.projector = Perceptron(
            (size * len(self.order), width, width), ("linear_1", "linear_2"),
            act=config.get("projector_hidden_act", "gelu"), bias=self.has_bias(config),
        )  # fmt: skip

    def has_bias(self, config: Mapping[str, Any]) -> bool:
        """Of the projector."""
        return bool(config.get("multimodal_projector_bias", True))

    def own_tensor(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        own = name.removeprefix("model.")
        return (own, tensor) if own.startswith(("vision_tower.", "multi_modal_projector.")) else None  # fmt: skip

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        device, dtype = self.place()
        grids = [as_tensor(item.tensors["pixel_values"], device, dtype) for item in items]
        patches = [
            patches_of(pixels_PCHW, self.patch)[0, : height // self.patch, : width // self.patch]
            for pixels_PCHW, (height, width) in zip(grids, map(picture_size, items), strict=True)
        ]
        shapes = [tuple(one.shape[:2]) for one in patches]
        places_TC = torch.from_numpy(np.concatenate([np.indices(shape).reshape(2, -1).T for shape in shapes]))  # fmt: skip
        x_TD = self.first_norm(self.patches(torch.cat([one.flatten(0, 1) for one in patches])))
        counts = [height * width for height, width in shapes]
        with forward_context(packed_batch(counts, device)):
            states = self.stacks.run(x_TD, places_TC.to(device))
        found_TD = torch.cat([states[i] for i in self.order], -1)
        each = zip(found_TD.split(counts), shapes, strict=True)
        return [self.rows(own_TD.unflatten(0, shape)) for own_TD, shape in each]

    def rows(self, states_HWD: Tensor) -> Tensor:
        """rows_NF of a picture."""
        rows_NF: Tensor = self.projector(states_HWD.flatten(0, 1))
        return rows_NF


class Mistral3Tower(PixtralTower):
    """A norm, and squares of patches that become one row."""

    layer = -1

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__(config, width)
        self.square = int(config.get("spatial_merge_size", 2))
        size = self.first_norm.weight.shape[0]
        self.checkpoint_names |= {
            "norm": "multi_modal_projector.norm",
            "merger": "multi_modal_projector.patch_merger.merging_layer",
        }
        self.norm = RMSNorm(size, eps=float(language_config(config).get("rms_norm_eps", 1e-6)))
        self.merger = Linear(size * self.square**2, size)

    def has_bias(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("multimodal_projector_bias", False))

    def rows(self, states_HWD: Tensor) -> Tensor:
        height, width, size = states_HWD.shape
        square = self.square
        normed = self.norm(states_HWD.flatten(0, 1)).view(height, width, size)
        whole = normed[: height // square * square, : width // square * square]
        blocks = whole.unflatten(1, (-1, square)).unflatten(0, (-1, square))  # H s W s D
        wide_ND = blocks.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
        rows_NF: Tensor = self.projector(self.merger(wide_ND))
        return rows_NF


def _layer(sizes: LayerSizes, i: int) -> EncoderLayer:
    attention = SelfAttention(sizes, i, causal=False)
    norms = [RMSNorm(sizes.hidden_size, eps=EPS) for _ in range(2)]
    return EncoderLayer(attention, norms[0], GatedMLP(sizes), norms[1], names=LAYER_NAMES, pre_norm=True)  # fmt: skip
