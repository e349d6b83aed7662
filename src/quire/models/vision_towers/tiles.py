"""Vision towers whose pictures are tiles of one size, with CLIP's or SigLIP's transformer, and their projectors: LLaVA, LLaVA-NeXT,
LLaVA-OneVision, Gemma 3, PaliGemma, Idefics3 and SmolVLM.

Sources: arXiv 2310.03744, 2408.03326, 2503.19786, 2407.07726, 2408.12637, 2504.05299; llava-vl.github.io/blog/2024-01-30-llava-next.

Shape suffixes: P tiles, C channels, H, W pixels, L states of a tile, D features of the tower, F features of a row, N rows of an item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weight_slots import Layer
from quire.models.vision import tower_config
from quire.models.vision_towers.base import (
    NativeTower,
    Perceptron,
    as_tensor,
    feature_layers,
    picture_size,
)
from quire.models.vision_towers.patch_transformer import PatchTransformer
from quire.protocol.media import TowerInput

PIXELS = "pixel_values"


class TileTower(NativeTower):
    """All tiles of a pass run together, and each item's are projected alone.

    Args:
        config: of the wrapper. width: of a row.

    Class attributes:
        parts: module -> the name of it in checkpoints.
    """

    parts: Mapping[str, str] = {"projector": "multi_modal_projector"}
    vision: PatchTransformer

    @property
    def unread_layers(self) -> range:  # type: ignore[override]
        """See `NativeTower`."""
        return self.vision.unread_layers

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        device, dtype = self.place()
        pixels = [
            self.tiles(item, as_tensor(item.tensors[PIXELS], device, dtype).flatten(0, -4))
            for item in items
        ]
        states_PLD = self._states(pixels)
        each = states_PLD.split([len(one) for one in pixels])
        return [self.rows(item, own_PLD) for item, own_PLD in zip(items, each, strict=True)]

    def _states(self, pixels: Sequence[Tensor]) -> Tensor:
        return self.vision(torch.cat(list(pixels)))

    def own_tensor(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        for prefix in ("vision_tower.vision_model.", "vision_tower.", "vision_model."):
            if prefix in name:
                return f"vision.{name.rpartition(prefix)[2]}", tensor
        for own, called in self.parts.items():
            if (place := name.find(called)) >= 0 and name[:place] in ("", "model."):
                return own + name[place + len(called) :], tensor
        return None

    # -- what differs between families
    def tiles(self, item: TowerInput, pixels_PCHW: Tensor) -> Tensor:
        """The tiles that have rows."""
        return pixels_PCHW

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        """rows_NF of an item."""
        raise NotImplementedError


class LlavaTower(TileTower):
    """LLaVA 1.5: states of a layer before the last, without that of the class, through a perceptron."""

    layer, select = -2, "default"
    """Where config.json leaves them out: `vision_feature_layer`, `vision_feature_select_strategy`."""

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        layers = feature_layers(config, self.layer)
        self.vision = PatchTransformer(tower_config(config), layers)
        self.skips = int(config.get("vision_feature_select_strategy", self.select) == "default")
        self.projector = Perceptron(
            (self.vision.size * len(layers), width, width), ("linear_1", "linear_2"),
            act=config.get("projector_hidden_act", "gelu"), bias=config.get("multimodal_projector_bias", True),
        )  # fmt: skip

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        return self.projected(states_PLD).flatten(0, 1)

    def projected(self, states_PLD: Tensor) -> Tensor:
        """[P, L, F]"""
        kept_PLD = states_PLD[:, self.skips :]
        flat: Tensor = self.projector(kept_PLD.flatten(0, 1))
        return flat.unflatten(0, kept_PLD.shape[:2])


class NewLine(Layer):
    """The row after each line of patches."""

    def __init__(self, width: int):
        super().__init__()
        self.new("image_newline", width)

    @property
    def row_F(self) -> Tensor:
        return self.get_parameter("image_newline")


class LlavaNextTower(LlavaTower):
    """LLaVA-NeXT: the whole picture as a tile, then its parts, of which what the processor padded is left out."""

    parts: Mapping[str, str] = {"projector": "multi_modal_projector", "line_end.image_newline": "image_newline"}  # fmt: skip
    grids: Sequence[Sequence[int]] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__(config, width)
        self.line_end = NewLine(width)
        self.grids = config.get("image_grid_pinpoints") or self.grids
        self.pixels = self.vision.side * self.vision.patch

    def tiles(self, item: TowerInput, pixels_PCHW: Tensor) -> Tensor:
        rows, columns = self._grid(item)
        return pixels_PCHW[: 1 + rows * columns]

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        all_PLF, side = self.projected(states_PLD), self.vision.side
        if len(all_PLF) == 1:
            return torch.cat((all_PLF[0], self.line_end.row_F[None]))
        tiles = all_PLF[1:].unflatten(1, (side, side)).unflatten(0, self._grid(item))
        whole_HWF = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        whole_HWF = self.shrunk(unpadded(whole_HWF, picture_size(item)))
        ends_HF = self.line_end.row_F.expand(len(whole_HWF), 1, -1)
        return torch.cat((all_PLF[0], torch.cat((whole_HWF, ends_HF), 1).flatten(0, 1)))

    def shrunk(self, whole_HWF: Tensor) -> Tensor:
        """A picture of too many rows, made smaller."""
        return whole_HWF

    def _grid(self, item: TowerInput) -> tuple[int, int]:
        """Rows and columns of tiles."""
        height, width = best_resolution(picture_size(item), self.grids)
        return height // self.pixels, width // self.pixels


class LlavaOnevisionTower(LlavaNextTower):
    """LLaVA-OneVision: SigLIP's states after the last layer; pictures of many tiles are made smaller."""

    layer, select = -1, "full"
    grids = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__(config, width)
        self.most_tiles = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))  # fmt: skip

    def shrunk(self, whole_HWF: Tensor) -> Tensor:
        height, width, _ = whole_HWF.shape
        ratio = math.sqrt(height * width / (self.most_tiles * self.vision.side**2))
        if ratio <= 1.1:
            return whole_HWF
        sizes = [int(height // ratio), int(width // ratio)]
        return F.interpolate(whole_HWF.permute(2, 0, 1)[None].contiguous(), sizes, mode="bilinear")[0].permute(1, 2, 0)  # fmt: skip


class Gemma3Tower(TileTower):
    """Gemma 3: squares of states are averaged, normed and projected."""

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        self.vision = PatchTransformer(tower_config(config), None)
        self.pool = self.vision.side // math.isqrt(int(config.get("mm_tokens_per_image", 256)))
        self.projector = NormedProjection(self.vision.size, width, float(tower_config(config).get("layer_norm_eps", 1e-6)))  # fmt: skip

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        side, pool = self.vision.side, self.pool
        grid = states_PLD.unflatten(1, (side // pool, pool, side // pool, pool))
        return self.projector(grid.mean((2, 4)).flatten(0, 2))

    def own_tensor(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        found = super().own_tensor(name, tensor)
        if found is not None and found[0] == "projector.mm_input_projection_weight":
            return "projector.linear.weight", tensor.T
        return found


class PaliGemmaTower(TileTower):
    """PaliGemma: SigLIP's states after the last norm, projected."""

    parts: Mapping[str, str] = {"projector": "multi_modal_projector.linear"}

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        self.vision = PatchTransformer(tower_config(config), None)
        self.projector = Linear(self.vision.size, width, bias=True)

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        return self.projector(states_PLD.flatten(0, 1))


class NormedProjection(nn.Module):
    """A norm, then a product."""

    def __init__(self, size: int, width: int, eps: float):
        super().__init__()
        self.checkpoint_names = {"norm": "mm_soft_emb_norm"}
        self.norm = RMSNorm(size, eps=eps, plus_one=True)
        self.linear = Linear(size, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """y_NF"""
        y_NF: Tensor = self.linear(self.norm(x_ND))
        return y_NF


class Idefics3Tower(TileTower):
    """Idefics3 and SmolVLM: squares of states become one row."""

    parts: Mapping[str, str] = {"projector": "connector.modality_projection.proj"}

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        self.vision = PatchTransformer(tower_config(config), None, resampled=True)
        self.square = int(config.get("scale_factor", 2))
        self.projector = Linear(self.vision.size * self.square**2, width)

    def tiles(self, item: TowerInput, pixels_PCHW: Tensor) -> Tensor:
        mask = item.tensors.get("pixel_attention_mask")
        if mask is not None and not as_tensor(mask, "cpu", torch.float32).all():
            raise ValueError("tiles with padding")
        there = [number for number, tile in enumerate(pixels_PCHW) if tile.any()]
        return pixels_PCHW[there or [0]]

    def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
        square, side = self.square, math.isqrt(states_PLD.shape[1])
        grid = states_PLD.unflatten(1, (side // square, square, side // square, square))
        return self.projector(grid.transpose(2, 3).flatten(3).flatten(0, 2))


def best_resolution(size: tuple[int, int], grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(height, width) of the grid that keeps most pixels of a picture, and wastes least of its own."""
    height, width = size

    def score(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    best = max(grids, key=score)
    return int(best[0]), int(best[1])


def unpadded(whole_HWF: Tensor, size: tuple[int, int]) -> Tensor:
    """Without the lines that the processor added to a picture of `size` at two sides."""
    height, width = whole_HWF.shape[:2]
    if size[1] / size[0] > width / height:
        own = int(round(size[0] * (width / size[1]), 7))
        more = (height - own) // 2
        return whole_HWF[more : height - more]
    own = int(round(size[1] * (height / size[0]), 7))
    more = (width - own) // 2
    return whole_HWF[:, more : width - more]
