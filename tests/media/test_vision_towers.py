"""Quire's own vision towers: rows against Transformers' in float32, and an item alone against company, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_checkpoints
from test_picture_equality import processor
from vision_checkpoints import CHECKPOINTS, picture

from quire.errors import ConfigError
from quire.frontend.media.media_process import as_rgb, processed
from quire.layers.encoder import EncoderStack
from quire.layers.weights import weights_of
from quire.models.checkpoint_files import tensors
from quire.models.json_files import read_object
from quire.models.transformers.tower import rows_of
from quire.models.vision_towers.base import NativeTower
from quire.models.vision_towers.load import TOWERS, construct_tower, fill_tower
from quire.native.fused_decoder import fuse_model
from quire.ops.cpu.bindings import best
from quire.ops.dispatch import bind
from quire.platforms.base import platform_of
from quire.protocol.media import TowerInput
from quire.quantization.apply import pack_weights

KINDS = [kind for kind, made in CHECKPOINTS.items() if made.get("model_type", kind) in TOWERS]
SIZES = ((150, 90), (70, 50), (50, 160), (70, 50))


def tower_of(path: str, dtype: torch.dtype = torch.float32, *, fused: bool = True) -> NativeTower:
    config = read_object(Path(path) / "config.json")
    tower = construct_tower(config, config["text_config"]["hidden_size"], dtype)
    fill_tower(tower, tensors(path), torch.device("cpu"), path)
    if dtype == torch.bfloat16:
        bind(platform_of("cpu").kernels)
        pack_weights(weights_of(tower))
        if fused:
            fuse_model(tower)
    return tower


def inputs_of(path: str) -> list[TowerInput]:
    pictures = [picture(n, *size) for n, size in enumerate(SIZES)]
    found = [processed(as_rgb(each), processor(path)) for each in pictures]
    return [TowerInput([], [], one.tensors) for one in found]


def peer(path: str, item: TowerInput) -> torch.Tensor:
    """rows_NF by Transformers."""
    model = vision_checkpoints.transformers_model(path)
    takes = inspect.signature(model.model.get_image_features).parameters
    given = {
        name: torch.from_numpy(np.frombuffer(bytearray(data.data), data.dtype).reshape(data.shape))
        for name, data in item.tensors.items()
        if name in takes
    }
    output = model.get_image_features(**given, return_dict=True)
    inner = getattr(output, "deepstack_features", None) or ()
    return torch.cat([rows_of(output.pooler_output), *map(rows_of, inner)], -1)


@torch.inference_mode()
def encoded(tower: NativeTower, items: Sequence[TowerInput]) -> list[torch.Tensor]:
    return tower.encode(items)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_transformers_whatever_the_company(
    kind: str, checkpoint: Callable[[str], str]
) -> None:
    path = checkpoint(kind)
    tower, items = tower_of(path), inputs_of(path)
    together = encoded(tower, items)
    for item, got in zip(items, together, strict=True):
        with torch.inference_mode():
            want = peer(path, item)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5 * max(1, want.abs().max())
        assert torch.equal(encoded(tower, [item])[0], got)
    assert all(map(torch.equal, encoded(tower, items[::-1]), together[::-1]))


WIDE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 160, "mlp_ratio": 2, "num_heads": 2},
    "qwen2_5_vl": {"hidden_size": 160, "num_heads": 2, "intermediate_size": 100, "depth": 3},
    "qwen3_vl": {"hidden_size": 160, "num_heads": 2, "intermediate_size": 100},
    "llava": {"hidden_size": 160, "num_attention_heads": 2, "intermediate_size": 100},
    "gemma3": {"hidden_size": 96, "num_attention_heads": 2, "intermediate_size": 100},
    "mistral3": {"hidden_size": 160, "num_attention_heads": 2, "intermediate_size": 100, "head_dim": 80},
}  # fmt: skip
QUICK = ("qwen2_vl", "qwen2_5_vl", "gemma3", "mistral3")
"""Windows, heads of 48 features, other positions. WIDE has sizes that the CPU kernels take: heads of 48 and 80 features, and inner sizes that grow to a multiple of 32."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a checkpoint whose tower has these sizes."""

    def get(kind: str) -> str:
        made = CHECKPOINTS[kind]
        own = {**made["config"]["vision_config"], **WIDE[kind]}
        folder = tmp_path_factory.mktemp(f"wide-{kind}")
        vision_checkpoints.make_checkpoint({**made, "model_type": kind, "config": {**made["config"], "vision_config": own}}, folder)  # fmt: skip
        return str(folder)

    return get


@pytest.mark.skipif(best() is None, reason="the CPU kernels are not available")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in WIDE])  # fmt: skip
def test_one_call_of_the_kernels_gives_the_bits_of_the_modules(
    kind: str, wide: Callable[[str], str]
) -> None:
    path = wide(kind)
    fused, plain = (tower_of(path, torch.bfloat16, fused=each) for each in (True, False))
    stacks = [one for one in fused.modules() if isinstance(one, EncoderStack)]
    assert stacks
    assert all(one.fused is not None for one in stacks)
    items = inputs_of(path)
    together = encoded(fused, items)
    for item, got, want in zip(items, together, encoded(plain, items), strict=True):
        assert torch.equal(got, want)
        assert torch.equal(encoded(fused, [item])[0], got)
        with torch.inference_mode():
            truth = peer(path, item)
        assert torch.cosine_similarity(got.float(), truth, dim=-1).mean() > 0.995


def test_a_checkpoint_without_weights_of_the_tower_is_refused(checkpoint: Callable[[str], str]) -> None:  # fmt: skip
    path = checkpoint("llava")
    some = [one for one in tensors(path) if "linear_2" not in one[0]]
    tower = construct_tower(read_object(Path(path) / "config.json"), 64, torch.float32)
    with pytest.raises(
        ConfigError, match=r"lacks 2 weights of the towers: projector\.linear_2\.bias"
    ):
        fill_tower(tower, some, torch.device("cpu"), path)
