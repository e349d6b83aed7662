"""GGUF's blocks: every build of the kernels equals the definition in plain torch, and the weights equal the weights of the package `gguf`."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.checkpoint_quantization import BLOCKS
from quire.models.gguf.header import TYPES
from quire.quantization.gguf_blocks import BlockRows, BlocksWeight
from quire.quantization.gguf_forms import FORMS
from tests.kernel_builds import BUILDS, kernels_of
from tests.models.gguf_files import HALVES, random_blocks
from tests.quantization.test_int4 import activations

ROWS = (1, 2, 3, 5, 17, 50)


def stored(kind: str, outs: int, ins: int) -> BlockRows:
    number = gguf.GGMLQuantizationType[kind]
    if number in HALVES:
        rows = random_blocks(number, (outs, ins), seed=outs)
    else:
        draw = np.random.default_rng(outs)
        rows = gguf.quants.quantize(draw.standard_normal((outs, ins), dtype=np.float32), number)
    return BlockRows(kind, torch.from_numpy(rows))


def dequantized(*parts: BlockRows) -> Tensor:
    found = [one_bit(part) if part.kind == "Q1_0" else by_gguf(part) for part in parts]
    return torch.from_numpy(np.concatenate(found))


def by_gguf(part: BlockRows) -> np.ndarray:
    return gguf.quants.dequantize(part.rows_ON.numpy(), gguf.GGMLQuantizationType[part.kind])


def one_bit(part: BlockRows) -> np.ndarray:
    """Q1_0, which the package does not decode: a scale, then a bit for each of 128 weights, 1 for plus."""
    rows = part.rows_ON.numpy()
    blocks = rows.reshape(len(rows), -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    return (scales * signs).reshape(len(rows), -1)


def test_the_forms_are_those_of_the_file() -> None:
    assert tuple(FORMS) == tuple(BLOCKS)
    sizes = {name: (elements, size) for name, elements, size in TYPES.values()}
    assert {name: (form.block, form.size) for name, form in FORMS.items()} == {
        name: sizes[name] for name in FORMS
    }


@pytest.mark.parametrize("kind", FORMS)
def test_stored_numbers_mean_what_gguf_says(kind: str) -> None:
    """In bits."""
    part = stored(kind, 70, 512)
    form, codes = part.form, part.form.codes_of(part.rows_ON)
    scale, minimum = codes.numbers(512 // form.group)
    w = scale.repeat_interleave(form.group, 1) * (codes.q_OI.float() - form.zero)
    if minimum is not None:
        w = w - minimum.repeat_interleave(form.group, 1)
    assert torch.equal(w, dequantized(part))
    assert torch.equal(form.floats(part.rows_ON), w)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("kind", FORMS)
def test_rows_that_the_kernels_look_up_are_the_stored_numbers(kind: str, name: str) -> None:
    """Rounded to bfloat16."""
    part, ids = stored(kind, 70, 512), torch.tensor([69, 0, 31, 32, 5])
    weight = BlocksWeight([part], False, kernels_of(name))
    assert weight.rows is not None
    assert torch.equal(weight.rows(ids), part.form.floats(part.rows_ON)[ids].bfloat16())


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("kind", FORMS)
def test_kernels_equal_the_definition(kind: str, name: str) -> None:
    """With parts of one type and of two; gated, and with a last panel that is not full; a row's bits in any company."""
    kernels = kernels_of(name)
    one, two, odd = stored(kind, 64, 512), stored("Q6_K", 64, 512), stored(kind, 45, 512)
    both = BlockRows(kind, torch.cat([one.rows_ON, stored(kind, 64, 512).rows_ON.flip(0)]))
    for turn, (parts, gated) in enumerate(
        [([one, two], False), ([one, two], True), ([both], True), ([odd], False)]
    ):
        outs = sum(len(part.rows_ON) for part in parts)
        mine, plain = BlocksWeight(parts, gated, kernels), BlocksWeight(parts, gated, None)
        bias = torch.randn(outs, generator=torch.Generator().manual_seed(5)).bfloat16()
        for rows in ROWS[turn % 2 :: 2]:
            x = activations(rows, 512)
            got, want = mine.multiply(x, bias), plain.multiply(x, bias)
            off = (got.float() - want.float()).abs()
            assert float(off.max()) <= 0.008 * float(want.float().abs().max())
            assert float((off > 0).float().mean()) < 0.1
            for row in {0, rows // 2, rows - 1}:
                assert torch.equal(mine.multiply(x[row : row + 1].clone(), bias)[0], got[row])


@pytest.mark.parametrize("kind", FORMS)
def test_the_definition_is_near_the_product(kind: str) -> None:
    """As near as llama.cpp's, which rounds x to bytes with a scale for each block of the type: 32 or 256 inputs."""
    part, x = stored(kind, 64, 512), activations(50, 512).float()
    w = dequantized(part)
    want, got = x @ w.T, BlocksWeight([part], False, None).multiply(x)
    scale = x.unflatten(1, (-1, part.form.step)).abs().amax(2, keepdim=True) / 127
    rounded = ((x.unflatten(1, (-1, part.form.step)) / scale).round() * scale).flatten(1)
    off = float((got - want).norm() / want.norm())
    assert off <= 1.01 * float((rounded @ w.T - want).norm() / want.norm())
    assert off < 0.015  # row 0 has an outlier, which makes the bytes of its block coarse


@pytest.mark.parametrize("name", BUILDS)
def test_the_largest_factors_and_weights(name: str) -> None:
    """Their products are integers of two bytes in the tiles of AMX; all bits set, none, only the upper one of each byte, all others."""
    kernels = kernels_of(name)
    x = torch.full((20, 512), 2.0).bfloat16()
    x[1::2] = -x[1::2]
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):
        number = gguf.GGMLQuantizationType[kind]
        blocks = random_blocks(number, (64, 512)).reshape(64, 2, -1)
        scales = [at + i for at in HALVES[number] for i in (0, 1)]
        others = [i for i in range(blocks.shape[2]) if i not in scales]
        blocks[..., others] = np.array([255, 0, 128, 127] * 16, np.uint8)[:, None, None]
        part = BlockRows(kind, torch.from_numpy(blocks.reshape(64, -1)))
        mine, plain = BlocksWeight([part], False, kernels), BlocksWeight([part], False, None)
        got, want = mine.multiply(x), plain.multiply(x)
        assert torch.equal(got, want), kind
        for rows in (1, 6):
            assert torch.equal(mine.multiply(x[:rows]), got[:rows])
