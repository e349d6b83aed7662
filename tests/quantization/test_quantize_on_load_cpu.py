"""Weights that the kernels quantize and pack many at once: the same bits as the methods give one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.prepared_weight import PreparedWeight
from quire.layers.weight_slots import slots_of
from quire.models.construction import construction
from quire.quantization.apply import MAKERS
from quire.quantization.int8 import Int8Weight
from quire.quantization.packing import Packing
from quire.quantization.quantize_on_load_cpu import quantize_later
from tests.kernel_builds import BUILDS, kernels_of

CPU = torch.device("cpu")


class Weights(nn.Module):
    """Weights as layers have them: in parts, gated, with outputs that fill no panel, in pieces that fill none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(128, {"q": 64, "k": 32, "v": 40})
        self.odd = Linear(192, {"a": 40, "b": 24})
        self.alone = Linear(96, 45, bias=True)
        self.gate_up = Linear(128, {"gate": 96, "up": 96}, packed="both", act="silu")
        self.whole = Linear(320, {"g": 32, "u": 32}, packed="joined", act="silu")
        self.left = Linear(40, 32)


def weights() -> list[Linear]:
    """With values of every size; rows of zeros, of one sign, and of one large value."""
    draw = torch.Generator().manual_seed(3)
    with construction(torch.bfloat16):
        made = Weights()
    for name, slot in slots_of(made).items():
        if name.strip(".").split(".")[0] in ("both", "g", "u"):
            continue
        values = torch.randn(slot.shape(), generator=draw)
        if values.ndim > 1:
            values *= 10 ** torch.randn(len(values), 1, generator=draw)
            values[1], values[2], values[3, 5] = 0, values[2].abs(), -1e30
        slot.fill(values.bfloat16(), CPU, name)
    return [made.qkv, made.odd, made.alone, made.gate_up, made.whole, made.left]


def tensors(prepared: PreparedWeight) -> Sequence[Tensor]:
    return [
        value.flatten() for _, value in sorted(vars(prepared).items()) if isinstance(value, Tensor)
    ]


GROUPS = {name: maker.group for name, maker in MAKERS.items() if maker.group is not None}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("method", GROUPS)
def test_many_weights_by_one_call(method: str, name: str) -> None:
    kernels, done = kernels_of(name), 0
    packing = Packing(kernels.quantize_weights)
    many, alone = weights(), weights()
    for layer in many:
        done += quantize_later(layer.ref, packing, kernels, GROUPS[method])
    packing.finish()
    assert done >= 4
    for one, layer in zip(many, alone, strict=True):
        if one.ref.prepared is None:
            continue
        layer.ref.join()
        want = MAKERS[method].on_cpu(layer.ref.weight, layer.ref.gated, kernels)
        assert type(one.ref.prepared) is type(want)
        assert want.kernels is kernels
        for got, wanted in zip(tensors(one.ref.prepared), tensors(want), strict=True):
            assert torch.equal(got, wanted)
    assert many[-1].ref.prepared is None or method != "int8"
    assert isinstance(many[0].ref.prepared, Int8Weight) is (GROUPS[method] == 0)
