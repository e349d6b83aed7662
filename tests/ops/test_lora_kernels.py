"""The kernel of adapters against its definition, and each token's bits against its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import pytest
import torch
from torch import Tensor

from quire.layers.prepared_weight import PreparedWeight
from quire.ops import lora as definitions
from quire.ops.cpu.bindings import best
from quire.ops.cpu.lora import _lora as native
from quire.ops.cpu.norm_rope_act import _act_and_mul
from quire.ops.lora import LoraFactors, LoraTable, NewPart
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.gguf_blocks import BlockRows, BlocksWeight
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight

Sizes = tuple[int, int, int]  # rank, inputs, outputs


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def randoms(*shape: int, seed: int, whole: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-3, 4, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


def factors(
    sizes: Sizes, dtype: torch.dtype, *, seed: int = 0, whole: bool = False, dora: bool = False
) -> LoraFactors:
    """Of a weight with two parts: one has two thirds of the outputs, the other a smaller rank."""
    rank, ins, outs = sizes
    split, less = outs * 2 // 3, max(1, rank // 2)
    parts = [
        NewPart(0, split, 2.0, *(randoms(*s, seed=seed, whole=whole) for s in ((rank, ins), (split, rank)))),
        NewPart(
            split, outs - split, 0.5 if whole else 0.7,
            *(randoms(*s, seed=seed + 1, whole=whole) for s in ((less, ins), (outs - split, less))),
        ),
    ]  # fmt: skip
    vectors = [randoms(outs, seed=seed + 2 + i) for i in range(2)] if dora else [None, None]
    return LoraFactors(ins, outs, parts, dtype, *vectors)


def table_of(*found: LoraFactors | None) -> LoraTable:
    table = LoraTable(len(found))
    for number, each in enumerate(found):
        table.set(number, each)
    return table


@pytest.mark.skipif(best() is None, reason="no CPU kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_gives_the_bits_of_its_definition(dtype: torch.dtype) -> None:
    if best().isa.name == "portable":
        pytest.skip("without fused products the last bits differ")
    for rank in (*range(1, 65), 256):
        ins, outs, tokens = 1 + rank * 7 % 50, 3 + rank * 11 % 70, 1 + rank % 17
        table = table_of(factors((rank, ins, outs), dtype, seed=rank, dora=rank % 3 == 0))
        x_TI = randoms(tokens, ins, seed=rank + 1).to(dtype)
        y_TO = randoms(tokens, outs, seed=rank + 2).to(dtype)
        numbers_T = torch.tensor([-1 if t % 5 == 3 else 0 for t in range(tokens)])
        want = definitions.lora.reference(x_TI, y_TO.clone(), numbers_T, table)
        assert torch.equal(native(x_TI, y_TO.clone(), numbers_T, table), want), rank


@pytest.mark.skipif(best() is None, reason="no CPU kernels")
def test_whole_numbers_are_exact() -> None:
    """A merged weight gives the same numbers."""
    sizes, tokens = (8, 40, 60), 5
    found = factors(sizes, torch.float32, whole=True)
    merged_OI = torch.zeros(60, 40)
    for part in (NewPart(0, 40, 2.0, randoms(8, 40, seed=0, whole=True), randoms(40, 8, seed=0, whole=True)),
                 NewPart(40, 20, 0.5, randoms(4, 40, seed=1, whole=True), randoms(20, 4, seed=1, whole=True))):  # fmt: skip
        merged_OI[part.start : part.start + part.outs] = part.scale * (part.b_OR @ part.a_RI)
    weight_OI, x_TI = randoms(60, 40, seed=7, whole=True), randoms(tokens, 40, seed=8, whole=True)
    y_TO = native(x_TI, x_TI @ weight_OI.T, torch.zeros(tokens, dtype=torch.int64), table_of(found))
    assert torch.equal(y_TO, x_TI @ (weight_OI + merged_OI).T)


@pytest.mark.skipif(best() is None, reason="no CPU kernels")
def test_bits_are_those_of_a_token_alone() -> None:
    """Whatever the other tokens, their order, the adapters' numbers, the threads."""
    sizes = [(16, 200, 300), (64, 200, 300), (3, 200, 300)]
    found = [factors(each, torch.bfloat16, seed=i, dora=i == 2) for i, each in enumerate(sizes)]
    table = table_of(found[0], None, found[1], found[2])
    tokens = 150
    x_TI = randoms(tokens, 200, seed=5).bfloat16()
    y_TO = randoms(tokens, 300, seed=6).bfloat16()
    numbers_T = torch.randint(-1, 4, (tokens,), generator=torch.Generator().manual_seed(9))
    numbers_T[:70] = 2
    together = native(x_TI, y_TO.clone(), numbers_T, table)
    torch.set_num_threads(1)
    assert torch.equal(native(x_TI, y_TO.clone(), numbers_T, table), together)
    torch.set_num_threads(2)
    other = table_of(found[2], found[1], found[0])
    renamed = torch.tensor([2, -1, 1, 0, -1])  # from 0, 1, 2, 3, -1
    for at in (*range(0, 150, 13), 149):
        one = slice(at, at + 1)
        alone = native(x_TI[one], y_TO[one].clone(), renamed[numbers_T[one]], other)
        assert torch.equal(alone, together[one])
    untouched = (numbers_T == -1) | (numbers_T == 1)
    assert torch.equal(together[untouched], y_TO[untouched])


def q8_0(weight_OI: Tensor) -> BlockRows:
    rows = gguf.quants.quantize(weight_OI.numpy(), gguf.GGMLQuantizationType.Q8_0)
    return BlockRows("Q8_0", torch.from_numpy(rows))


GATED: dict[str, Callable[[Tensor], PreparedWeight]] = {
    "bf16": lambda w_OI: PackedBf16Weight.of(best(), w_OI.bfloat16(), True),
    "int8": lambda w_OI: Int8Weight.of(w_OI.bfloat16(), True, best()),
    "int4": lambda w_OI: Int4Weight.of(w_OI.bfloat16(), True, best()),
    "blocks": lambda w_OI: BlocksWeight([q8_0(w_OI[:64]), q8_0(w_OI[64:])], True, best()),
}


@pytest.mark.skipif(best() is None, reason="no CPU kernels")
@pytest.mark.parametrize("name", GATED)
def test_halves_of_a_gated_product_have_the_bits_of_the_product(name: str) -> None:
    """So tokens without an adapter keep their bits beside tokens whose adapters change the halves."""
    weight = GATED[name](randoms(128, 256, seed=1))
    for act in ("silu", "gelu_pytorch_tanh"):
        weight.act = act
        for tokens in (1, 7, 40):
            x_TI = randoms(tokens, 256, seed=tokens).bfloat16()
            halves_TO = weight.before_activation().multiply(x_TI)
            assert halves_TO.shape == (tokens, 128)
            assert torch.equal(_act_and_mul(halves_TO, act), weight.multiply(x_TI))
