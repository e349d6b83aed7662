"""The vision transformers of CLIP and SigLIP, and of Idefics3 and SmolVLM, which is SigLIP's: pictures, or tiles of them, of one size.

Sources: arXiv 2103.00020 (CLIP), 2303.15343 (SigLIP), 2408.12637 (Idefics3).

Shape suffixes: P tiles (pictures), C channels, H, W pixels, R, Q rows and columns of patches, L patches of a tile (and its class), T those
of all tiles, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.forward_context import forward_context, packed_batch
from quire.layers.decoder_layer import SelfAttention
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderLayer, UngatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.weight_slots import Layer
from quire.models.vision_towers.base import (
    LayerSizes,
    PatchEmbedding,
    Stacks,
    grown,
    side,
    stack_ends,
)

NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj")
LAYER_NAMES = ("self_attn", "layer_norm1", "mlp", "layer_norm2")
CLIP = "clip_vision_model"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLIP: {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {},
    "idefics3": {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
}
"""By model_type of the vision tower: the values that Transformers takes for keys that config.json leaves out. Towers with another
model_type have the values of Idefics3."""
COMMON = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224,
    "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip


class ClassEmbedding(Layer):
    """CLIP's state before the patches of a tile."""

    def __init__(self, size: int):
        super().__init__()
        self.new("class_embedding", size)

    @property
    def state_D(self) -> Tensor:
        return self.get_parameter("class_embedding")


class PatchTransformer(nn.Module):
    """Patches to states.

    Args:
        config: `vision_config` of a wrapper.
        outputs: numbers of layers whose states are the result, one after the other: n after layer n - 1; negative from the end.
            None: the last layer's, after the last norm.
        resampled: positions of patches are fractions of the side (Idefics3).
    """

    def __init__(
        self, config: Mapping[str, Any], outputs: Sequence[int] | None, resampled: bool = False
    ):
        super().__init__()
        kind = str(config.get("model_type", "idefics3"))
        get = {**COMMON, **DEFAULTS.get(kind, DEFAULTS["idefics3"]), **config}
        self.patch, self.resampled, self.size = side(get["patch_size"]), resampled, int(get["hidden_size"])  # fmt: skip
        self.side, has_class = side(get["image_size"]) // self.patch, kind == CLIP
        depth, norm = int(get["num_hidden_layers"]), partial(LayerNorm, self.size, eps=get["layer_norm_eps"], bias=True)  # fmt: skip
        self.checkpoint_names = {
            "patch_embedding": "embeddings.patch_embedding", "positions": "embeddings.position_embedding",
            "first": "embeddings", "first_norm": "pre_layrnorm", "stacks": "",
        }  # fmt: skip
        self.patch_embedding = PatchEmbedding(grown(3 * self.patch**2), self.size, bias=not has_class)  # fmt: skip
        self.positions = Embedding(self.side**2 + has_class, self.size)
        self.first = ClassEmbedding(self.size) if has_class else None
        self.first_norm = norm() if has_class else None
        sizes = LayerSizes(self.size, int(get["num_attention_heads"]), grown(int(get["intermediate_size"])), get["hidden_act"])  # fmt: skip
        ends, self.order = stack_ends([-1] if outputs is None else outputs, depth)
        self.unread_layers = range(ends[-1], depth)
        self.stacks = Stacks(
            ends, partial(_layer, sizes, norm), final_norm=norm() if outputs is None else None,
            names=("encoder.layers", "post_layernorm"),
        )  # fmt: skip

    def forward(self, pixels_PCHW: Tensor) -> Tensor:
        """states_PLD, D of each of `outputs`.

        Raises:
            ValueError: the tiles have another size than config.json says.
        """
        patches_PRQI, count = patches_of(pixels_PCHW, self.patch), len(pixels_PCHW)
        rows, columns = patches_PRQI.shape[1:3]
        x_PLD = self.patch_embedding(patches_PRQI.flatten(0, 2)).view(count, rows * columns, -1)
        if self.first is not None:
            x_PLD = torch.cat((self.first.state_D.expand(count, 1, -1), x_PLD), 1)
        x_PLD = x_PLD + self._positions(rows, columns)
        x_TD, length = x_PLD.flatten(0, 1), x_PLD.shape[1]
        if self.first_norm is not None:
            x_TD = self.first_norm(x_TD)
        with forward_context(packed_batch([length] * count, x_TD.device)):
            found = self.stacks.run(x_TD, torch.empty(0, device=x_TD.device))
        return torch.cat([found[i] for i in self.order], -1).view(count, length, -1)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[L, D]"""
        table_LD = self.positions.weight
        if self.resampled:
            row_R, column_Q = (places(n, self.side, table_LD.device) for n in (rows, columns))
            return table_LD[(row_R[:, None] * self.side + column_Q).flatten()]
        if (rows, columns) != (self.side, self.side):
            raise ValueError(
                f"{rows} x {columns} patches; the tower takes {self.side} x {self.side}"
            )
        return table_LD


def _layer(sizes: LayerSizes, norm: Any, i: int) -> EncoderLayer:
    attention = SelfAttention(
        sizes, i, qkv_bias=True, o_bias=True, rope=False, causal=False, names=NAMES
    )
    mlp = UngatedMLP(sizes, names=("fc1", "fc2"))
    return EncoderLayer(attention, norm(), mlp, norm(), names=LAYER_NAMES, pre_norm=True)


def patches_of(pixels_PCHW: Tensor, patch: int) -> Tensor:
    """patches_PRQI, with the values of a patch in the order of a convolution's weight. Pixels that fill no patch are left out."""
    rows, columns = pixels_PCHW.shape[2] // patch, pixels_PCHW.shape[3] // patch
    whole = pixels_PCHW[:, :, : rows * patch, : columns * patch]
    blocks = whole.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))  # P C R p Q p
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3)


def places(count: int, side: int, device: torch.device) -> Tensor:
    """Where `count` patches of a line are among `side` places. (In float32 and in this way, as the models were trained.)"""
    fractions = torch.arange(count, dtype=torch.float32, device=device) * (
        1.0 / torch.tensor(count)
    )
    bounds = torch.arange(1 / side, 1.0, 1 / side, device=device)
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True)
