"""Which code computes the towers of a checkpoint: Quire's own, or Transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.models.wrapper_config import wrapper_config
from quire.native.fused_decoder import fuse_model

if TYPE_CHECKING:
    from quire.config.engine import Resolved
    from quire.features.media.item_encoder import Tower
    from quire.models.media import MediaModel
    from quire.models.vision_towers.base import NativeTower
    from quire.parallel.ranks import RankGroup
    from quire.platforms.base import Platform


def tower_loader(
    resolved: Resolved, model: MediaModel, platform: Platform, ranks: RankGroup | None
) -> Callable[[], Tower]:
    """What loads the towers of `model`. `ranks`: that split the language model; None: there are no others."""
    load = _loader(resolved, model, platform)
    if ranks is None or resolved.config.media.mm_encoder_tp_mode != "data":
        return load
    return partial(_data_parallel, load, ranks, resolved, model, platform)


def _data_parallel(
    load: Callable[[], Tower],
    ranks: RankGroup,
    resolved: Resolved,
    model: MediaModel,
    platform: Platform,
) -> Tower:
    import torch

    from quire.features.media.data_parallel_tower import DataParallelTower

    width = model.width * (1 + model.inner_layers)
    return DataParallelTower(load(), ranks, width, getattr(torch, resolved.dtype), platform.device)


def _loader(resolved: Resolved, model: MediaModel, platform: Platform) -> Callable[[], Tower]:
    if model.native:
        return partial(_native, resolved, model, platform)
    from quire.models.transformers.tower import TransformersTower

    return partial(TransformersTower, resolved.spec, model, platform.device)


def _native(resolved: Resolved, model: MediaModel, platform: Platform) -> NativeTower:
    from quire.models.vision_towers.load import build_tower

    tower = build_tower(resolved.spec, model, wrapper_config(resolved), platform)
    if "native" in platform.kernels:
        fuse_model(tower)
    return tower
