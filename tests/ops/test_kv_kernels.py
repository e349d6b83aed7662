"""The kernels on a quantized cache and on long contexts: the reference's codes to the bit, in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops.test_cpu_kernels import ADDRESS, Paged, draw, kernels, near

from quire.attention import kv_quantization
from quire.attention.cpu import KINDS as FORMATS
from quire.attention.cpu import cache_addresses
from quire.ops.cpu import bindings, isa

__all__ = ["kernels"]  # a fixture: every build that runs here
pytestmark = pytest.mark.skipif(
    not isa.usable(), reason="this CPU runs none of the kernels' builds"
)
QUANTIZED = FORMATS[1:]
SMALL = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", QUANTIZED, **SMALL)
@pytest.mark.parametrize("size", [32, 96, 128])
def test_codes_and_scales_are_the_definitions(
    kernels: bindings.Kernels, dtype: torch.dtype, size: int
) -> None:
    tokens, heads, block = 70, 3, 16
    rng = draw(size)
    wide = torch.randn(tokens, heads * size + 40, generator=rng)
    wide *= 10 ** torch.randn(tokens, 1, generator=rng)
    wide = wide.bfloat16()
    wide[5] = 0
    wide[6, : heads * size : 7] = 3e38  # as large as bf16 goes, before they are turned
    wide[6] /= 128
    x = wide[:, 8 : 8 + heads * size].unflatten(-1, (heads, size))
    slots = torch.randperm(6 * block, generator=rng)[:tokens]
    shape = (6, heads, block)
    for key, encode in ((True, kv_quantization.encode_key), (False, kv_quantization.encode)):
        got = torch.zeros(*shape, size, dtype=torch.uint8), torch.zeros(shape)
        want = torch.zeros(*shape, size, dtype=torch.uint8), torch.zeros(shape)
        kernels.write_cache(
            ADDRESS(x), x.stride(0), *map(ADDRESS, got), ADDRESS(slots), tokens, heads, size, block,
            FORMATS.index(dtype), key,
        )  # fmt: skip
        made, scales = encode(x, dtype)
        want[0][slots // block, :, slots % block] = kv_quantization.as_bytes(made)
        want[1][slots // block, :, slots % block] = scales
        assert torch.equal(got[1], want[1])
        # A zero of fp8 has a sign, which nothing sees.
        assert torch.equal(got[0].view(dtype).float(), want[0].view(dtype).float())


class Quantized(Paged):
    """The same rows, and their keys and values as codes."""

    def __init__(self, dtype: torch.dtype, *shape: object):
        super().__init__(*shape)  # type: ignore[arg-type]
        unwritten = self.keys.isnan()
        made = [kv_quantization.encode_key(self.keys.nan_to_num(), dtype)]
        made.append(kv_quantization.encode(self.values.nan_to_num(), dtype))
        for _, scale in made:  # no kernel may read what was never written
            scale[unwritten[..., 0]] = torch.nan
        (keys, key_scales), (values, value_scales) = made
        self.parts = keys, values, key_scales, value_scales
        # A query times what a key's codes stand for is the turned query times the codes.
        self.keys = kv_quantization.query(keys.float() * key_scales[..., None], dtype)
        self.values = values.float() * value_scales[..., None]

    def addresses(self) -> tuple[int | None, ...]:
        return cache_addresses(self.parts)


MIXED = [(1, 600), (7, 7), (40, 300), (1, 33), (70, 389), (1, 1), (3, 257)]
KINDS = {
    "heads of 64": (4, 2, 64, 64, 16, 0, 0.0, False),
    "all of it": (6, 2, 96, 32, 32, 300, 20.0, True),
    "many heads, all of it": (9, 1, 128, 192, 16, 300, 20.0, True),
}


@pytest.mark.parametrize("dtype", QUANTIZED, **SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_codes(kernels: bindings.Kernels, kind: str, dtype: torch.dtype) -> None:
    heads, kv, D, E, block, *rules = KINDS[kind]
    paged = Quantized(dtype, MIXED, heads, kv, D, E, block)
    whole = paged.run(kernels, [(r, 0, new) for r, (new, _) in enumerate(MIXED)], *rules)
    near(whole, paged.definition(*rules), 0.02)
    chunks = [(r, a, min(a + 9, new)) for r, (new, _) in enumerate(MIXED) for a in range(0, new, 9)]
    for r, a, b in chunks[::3]:  # alone, in chunks
        alone = paged.run(kernels, [(r, a, b)], *rules)
        assert torch.equal(alone, whole[paged.starts[r] + a : paged.starts[r] + b]), (r, a, b)


def test_int8_caches_lose_only_the_rounding_of_the_output(kernels: bindings.Kernels) -> None:
    """Where queries and weights are two bytes each (AMX), what is lost is the rounding of the output; else a little more."""
    heads, kv, D, E, block, *rules = KINDS["heads of 64"]
    paged = Quantized(torch.int8, MIXED, heads, kv, D, E, block)
    got = paged.run(kernels, [(r, 0, new) for r, (new, _) in enumerate(MIXED)], *rules)
    want = paged.definition(*rules)
    lost, rounding = ((x.double() - want).abs().mean() for x in (got, want.bfloat16()))
    assert lost < rounding * (1.02 if kernels.isa.name == "amx" else 2)


LONG = [(1, 5000), (4, 2050), (1, 2048), (2, 4097), (30, 2060)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rules", [(0, 0.0, False), (2500, 0.0, True)], ids=["full", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], **SMALL)
def test_long_contexts_are_divided_and_no_bit_changes(
    kernels: bindings.Kernels, dtype: torch.dtype, rules: tuple[int, float, bool]
) -> None:
    """Alone on several threads the splits of a context are work of their own; in company on one thread they are not."""
    if dtype == torch.bfloat16:
        paged = Paged(LONG, 4, 2, 32, 32, 64)
    else:
        paged = Quantized(dtype, LONG, 4, 2, 64, 64, 64)
    torch.set_num_threads(1)
    whole = paged.run(kernels, [(r, 0, new) for r, (new, _) in enumerate(LONG)], *rules)
    near(whole, paged.definition(*rules), 0.02)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for r, (new, _) in enumerate(LONG):
            alone = paged.run(kernels, [(r, new // 2, new)], *rules)
            assert torch.equal(alone, whole[paged.starts[r] + new // 2 : paged.starts[r + 1]]), r


@pytest.mark.parametrize("dtype", QUANTIZED, **SMALL)
def test_every_code_is_decoded_exactly(kernels: bindings.Kernels, dtype: torch.dtype) -> None:
    """One token, whose value is all codes there are, with a scale of 1: its attention is the value itself."""
    every = torch.arange(256).to(torch.uint8)
    every[~every.view(dtype).float().isfinite()] = 0
    paged = Quantized(dtype, [(1, 1)], 1, 1, 32, 256, 16)
    block = int(paged.table[0, 0])
    _, values, _, value_scales = paged.parts
    kv_quantization.as_bytes(values)[block, 0, 0] = every
    value_scales[block, 0, 0] = 1
    got = paged.run(kernels, [(0, 0, 1)], 0, 0.0, False)
    assert torch.equal(got[0, 0].float(), every.view(dtype).float())
