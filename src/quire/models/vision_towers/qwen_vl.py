"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures and videos of any size.

Patches come in the order of the squares that become one row. The patches of a frame see each other; in most layers of Qwen2.5-VL
only those of a window do, so its patches are in the order of windows while the layers run.
Sources: arXiv 2409.12191, 2502.13923, 2511.21631.

Shape suffixes: T patches of a pass, I values of a patch, D features, G rows (squares of M patches), C components of a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.forward_context import forward_context, packed_batch
from quire.layers.decoder_layer import GatedMLP, SelfAttention
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderLayer, UngatedMLP
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.models.vision import tower_config
from quire.models.vision_towers.base import (
    LayerRope,
    LayerSizes,
    NativeTower,
    PatchEmbedding,
    Perceptron,
    Stacks,
    as_tensor,
    first_of,
    grown,
)
from quire.protocol.media import TowerInput

Grid = tuple[int, int, int]
"""Frames (or pairs of them), rows and columns of patches."""
WINDOWS = "windows"
NAMES = ("q", "k", "v", "qkv", "proj")
LAYER_NAMES = ("attn", "norm1", "mlp", "norm2")
EPS = 1e-6
ROPE = {"rope_type": "axial", "rope_theta": 10000.0}


class QwenTower(NativeTower):
    """What the generations share; the defaults of config.json are those of the first (Qwen2-VL).

    Args:
        wrapper: config.json. width: of a row.

    Class attributes:
        patch_bias: of the patch embedding. mlp_names: of `UngatedMLP`.
        norm_name, merger_names: of the merger in checkpoints.
    """

    patch_bias = False
    mlp_names = ("fc1", "fc2")
    norm_name, merger_names = "ln_q", ("mlp.0", "mlp.2")

    defaults: Mapping[str, Any] = {}

    def __init__(self, wrapper: Mapping[str, Any], width: int):
        super().__init__()
        config = {**self.defaults, **tower_config(wrapper)}
        self.merge = int(config.get("spatial_merge_size", 2))
        sizes = self.sizes(config)
        depth, size, self.patch = int(config.get("depth", 32)), sizes.hidden_size, int(config.get("patch_size", 14))  # fmt: skip
        self.checkpoint_names = {
            "stacks": "", "patch_embed": "patch_embed.proj", "inner_mergers": "deepstack_merger_list",
        }  # fmt: skip
        values = 3 * int(config.get("temporal_patch_size", 2)) * self.patch**2
        self.patch_embed = PatchEmbedding(grown(values), size, bias=self.patch_bias)
        self.taps = [int(i) + 1 for i in config.get("deepstack_visual_indexes") or ()]
        """Numbers of layers after which the language model takes states, too."""
        self.stacks = Stacks(
            sorted({*self.taps, depth}), partial(self.layer, sizes, config), final_norm=self.norm(size),
            rope=LayerRope(sizes.head_dim, ROPE), names=("blocks", f"merger.{self.norm_name}"),
        )  # fmt: skip
        wide = size * self.merge**2
        self.merger = Perceptron((wide, wide, width), self.merger_names)
        self.inner_mergers = nn.ModuleList(InnerMerger(wide, width) for _ in self.taps)

    # -- what differs between generations
    def sizes(self, config: Mapping[str, Any]) -> LayerSizes:
        size = int(config.get("embed_dim", 1280))
        inner = int(size * config.get("mlp_ratio", 4))
        return LayerSizes(size, int(config.get("num_heads", 16)), grown(inner), config.get("hidden_act", "quick_gelu"))  # fmt: skip

    def norm(self, size: int) -> Norm:
        return LayerNorm(size, eps=EPS, bias=True)

    def mlp(self, sizes: LayerSizes) -> nn.Module:
        return UngatedMLP(sizes, names=self.mlp_names)

    def runs(self, config: Mapping[str, Any], i: int) -> str | None:
        """See `PackedAttention`, of layer i."""
        return None

    def position_embeddings(self, grids: Sequence[Grid]) -> Tensor | None:
        """What is added to the patches, [T, D]; None: nothing."""
        return None

    def window_order(self, grids: Sequence[Grid]) -> tuple[np.ndarray, list[int]] | None:
        """The order of rows while the layers run, and the patches of each window; None: their own order, without windows."""
        return None

    # -- the interface
    def layer(self, sizes: LayerSizes, config: Mapping[str, Any], i: int) -> EncoderLayer:
        attention = SelfAttention(sizes, i, qkv_bias=True, o_bias=True, causal=False, names=NAMES)
        attention.attn.runs = self.runs(config, i)
        size = sizes.hidden_size
        return EncoderLayer(
            attention, self.norm(size), self.mlp(sizes), self.norm(size), names=LAYER_NAMES, pre_norm=True
        )  # fmt: skip

    def own_tensor(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        _, found, own = name.rpartition("visual.")
        return (own, tensor) if found else None

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        device, dtype = self.place()
        pixels, grids, counts = [], [], []
        for item in items:
            given = first_of(item.tensors, "pixel_values", "pixel_values_videos")
            sizes = first_of(item.tensors, "image_grid_thw", "video_grid_thw")
            own = [tuple(grid) for grid in as_tensor(sizes, "cpu", dtype).view(-1, 3).tolist()]
            pixels.append(as_tensor(given, device, dtype))
            counts.append(sum(t * h * w for t, h, w in own))
            if len(pixels[-1]) != counts[-1]:
                raise ValueError(f"{len(pixels[-1])} patches for grids of {counts[-1]}")
            grids += own
        x_TD = self.patch_embed(torch.cat(pixels))
        if (added_TD := self.position_embeddings(grids)) is not None:
            x_TD = x_TD + added_TD.to(dtype)
        rows_GF = self._rows(x_TD, grids)
        return list(rows_GF.split([count // self.merge**2 for count in counts]))

    def _rows(self, x_TD: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Layers and mergers: [G, F], F of the last layer, then of the `taps`."""
        square, device = self.merge**2, x_TD.device
        places_TC = torch.from_numpy(
            np.concatenate([patch_places(grid, self.merge) for grid in grids])
        )
        frames = [h * w for t, h, w in grids for _ in range(t)]
        windows, order_G = {}, None
        if (found := self.window_order(grids)) is not None:
            order_G, windows[WINDOWS] = torch.from_numpy(found[0]), found[1]
            places_TC = places_TC.unflatten(0, (-1, square))[order_G].flatten(0, 1)
            x_TD = x_TD.unflatten(0, (-1, square))[order_G.to(device)].flatten(0, 1)
        with forward_context(packed_batch(frames, device, windows)):
            *inner, last_TD = self.stacks.run(x_TD, places_TC.to(device))
        mergers = [self.merger, *self.inner_mergers]
        states = [x_TD.reshape(len(x_TD) // square, -1) for x_TD in (last_TD, *inner)]
        rows_GF = torch.cat([merge(x_GD) for merge, x_GD in zip(mergers, states, strict=True)], -1)
        return rows_GF if order_G is None else rows_GF[order_G.argsort().to(device)]


class InnerMerger(nn.Module):
    """Rows of an inner layer's states, that the language model adds to its own (DeepStack): its norm is over all of a row."""

    def __init__(self, wide: int, width: int):
        super().__init__()
        self.checkpoint_names = {"perceptron": ""}
        self.norm = LayerNorm(wide, eps=EPS, bias=True)
        self.perceptron = Perceptron((wide, wide, width), ("linear_fc1", "linear_fc2"))

    def forward(self, x_GD: Tensor) -> Tensor:
        """y_GF"""
        y_GF: Tensor = self.perceptron(self.norm(x_GD))
        return y_GF


class Qwen25Tower(QwenTower):
    """With windows, RMS norms and gated MLPs."""

    def __init__(self, wrapper: Mapping[str, Any], width: int):
        super().__init__(wrapper, width)
        self.window = int(tower_config(wrapper).get("window_size", 112))

    def sizes(self, config: Mapping[str, Any]) -> LayerSizes:
        inner = grown(int(config.get("intermediate_size", 3420)))
        size, heads = int(config.get("hidden_size", 3584)), int(config.get("num_heads", 16))
        return LayerSizes(size, heads, inner, config.get("hidden_act", "silu"))

    def norm(self, size: int) -> Norm:
        return RMSNorm(size, eps=EPS)

    def mlp(self, sizes: LayerSizes) -> nn.Module:
        return GatedMLP(sizes, bias=True)

    def runs(self, config: Mapping[str, Any], i: int) -> str | None:
        return None if i in config.get("fullatt_block_indexes", (7, 15, 23, 31)) else WINDOWS

    def window_order(self, grids: Sequence[Grid]) -> tuple[np.ndarray, list[int]]:
        side, square = self.window // self.merge // self.patch, self.merge**2
        order, lengths, start = [], [], 0
        for t, h, w in grids:
            rows, columns = h // self.merge, w // self.merge
            row_G, column_G = np.indices((rows, columns)).reshape(2, -1) // side
            window_G = row_G * -(-columns // side) + column_G
            own, counts = np.argsort(window_G, kind="stable"), np.bincount(window_G) * square
            for _ in range(t):
                order.append(own + start)
                lengths += counts.tolist()
                start += rows * columns
        return np.concatenate(order), lengths


class Qwen3Tower(QwenTower):
    """With a table of positions that is resampled to the picture, and states of inner layers (Qwen3-VL; not Qwen3.5)."""

    patch_bias = True
    mlp_names = ("linear_fc1", "linear_fc2")
    norm_name, merger_names = "norm", ("linear_fc1", "linear_fc2")

    defaults: Mapping[str, Any] = {"depth": 27, "patch_size": 16}

    def __init__(self, wrapper: Mapping[str, Any], width: int):
        super().__init__(wrapper, width)
        count = int(tower_config(wrapper).get("num_position_embeddings", 2304))
        self.pos_embed = Embedding(count, self.merger.up.ref.num_in // self.merge**2)
        self.table_side = round(count**0.5)

    def sizes(self, config: Mapping[str, Any]) -> LayerSizes:
        inner = grown(int(config.get("intermediate_size", 4304)))
        size, heads = int(config.get("hidden_size", 1152)), int(config.get("num_heads", 16))
        return LayerSizes(size, heads, inner, config.get("hidden_act", "gelu_pytorch_tanh"))

    def position_embeddings(self, grids: Sequence[Grid]) -> Tensor:
        table_VD, side = self.pos_embed.weight.float(), self.table_side
        parts = []
        for t, h, w in grids:
            rows, columns = (between(n, side, table_VD.device) for n in (h, w))
            corners = [
                (
                    table_VD[row_H[:, None] * side + column_W]
                    * (share_H[:, None] * share_W)[..., None]
                )
                for row_H, share_H in rows
                for column_W, share_W in columns
            ]
            own_HWD = corners[0] + corners[1] + corners[2] + corners[3]
            blocks = own_HWD.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            parts.append(blocks.transpose(1, 2).reshape(h * w, -1).repeat(t, 1))
        return torch.cat(parts)


def between(count: int, side: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Of `count` points that are spread evenly over `side` places: the place before each and its share, and the place after."""
    at_N = torch.arange(count, device=device).float() * (side - 1) / max(count - 1, 1)
    first_N = at_N.floor().long()
    share_N = at_N - first_N
    return [(first_N, 1 - share_N), ((first_N + 1).clamp(max=side - 1), share_N)]


def patch_places(grid: Grid, merge: int) -> np.ndarray:
    """[T, C]: the row and the column of each patch, in the order in which they come."""
    t, h, w = grid
    places_CHW = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    places_TC = places_CHW.transpose(1, 3, 2, 4, 0).reshape(h * w, 2)
    return np.tile(places_TC, (t, 1))
