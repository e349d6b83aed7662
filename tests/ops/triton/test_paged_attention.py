"""Paged attention in Triton against the formula, and its bits against themselves.

Rows of `ops/test_attention.py` keep NaN wherever nothing was written, so a key that is read and should not be
shows at once.
"""

from __future__ import annotations

import random

import pytest
import torch
from ops.test_attention import KINDS, Rows, formula, layer_of
from ops.triton.kernel_device import DEVICE, needs_row_invariance

from quire.attention import kv_quantization
from quire.attention.reference import ReferenceAttention
from quire.attention.triton import TritonAttention
from quire.kvcache.specs import CacheSpec
from quire.layers.attention import Attention
from quire.ops.triton.attention import PagedAttentionStep, Scores, Sizes, attend
from quire.ops.triton.kv_write import write

torch.set_num_threads(1)
SMALL = Sizes(short=16, long=32, tile=16, segment=32)


def rows_of(kind: str | Attention, lengths, seed=0, block_size=16, dtype=torch.float32) -> Rows:
    layer = layer_of(kind) if isinstance(kind, str) else kind
    rows = Rows(layer, lengths, block_size, 16, seed=seed, dtype=dtype)
    layer.bind(TritonAttention(SMALL), layer.spec.cache)
    return rows


def worst(rows: Rows, done: list[tuple[int, int]], outs: list[torch.Tensor]) -> float:
    """The largest difference from the formula, at the first, a middle and the last token of each piece."""
    found = 0.0
    for (row, n), out in zip(done, outs, strict=True):
        for i in {0, n // 2, n - 1}:
            at = rows.done[row] - n + i
            want = formula(
                rows.layer, rows.q[row][at], rows.k[row][: at + 1], rows.v[row][: at + 1]
            )
            difference = (out[i].double().cpu() - want).abs().max()
            assert torch.isfinite(difference)
            found = max(found, float(difference))
    return found


LENGTHS = [23, 1, 60]
STEPS = ([(0, 20), (2, 33)], [(2, 26), (0, 1), (1, 1)], [(2, 1), (0, 1)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind: str) -> None:
    rows = rows_of(kind, LENGTHS)
    for work in STEPS:
        assert worst(rows, work, rows.step(work)) < 2e-6


@pytest.mark.parametrize(("kind", "block_size"), [("plain", 64), ("all", 16)])
def test_float16_is_near(kind: str, block_size: int) -> None:
    rows = rows_of(kind, LENGTHS, block_size=block_size, dtype=torch.float16)
    for work in STEPS:
        assert worst(rows, work, rows.step(work)) < 4e-3


@pytest.mark.parametrize("heads", [(7, 1, 24), (9, 3, 80), (4, 2, 512)])
def test_groups_and_head_sizes_that_are_no_power_of_two(heads: tuple[int, int, int]) -> None:
    rows = rows_of(Attention(*heads), [5, 40])
    for work in ([(0, 4), (1, 33)], [(1, 7), (0, 1)]):
        assert worst(rows, work, rows.step(work)) < 2e-6


def test_heads_of_a_latent_cache_are_divided_over_programs() -> None:
    rows = rows_of(Attention(40, 1, 144, v_head_dim=128, latent=True), [3, 37])
    for work in ([(0, 2), (1, 33)], [(1, 4), (0, 1)]):
        assert worst(rows, work, rows.step(work)) < 2e-6


@pytest.mark.sampled(2)
@needs_row_invariance
@pytest.mark.parametrize("kind", ["plain", "long window"])
def test_same_bits_alone_batched_and_chunked(kind: str) -> None:
    lengths = [9, 70, 34]
    alone = [rows_of(kind, lengths).step([(row, n)])[0] for row, n in enumerate(lengths)]
    rng = random.Random(5)
    for most in (6, 40):
        rows = rows_of(kind, lengths, seed=most)
        while left := [r for r, n in enumerate(lengths) if rows.done[r] < n]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            work = [(r, min(rng.randint(1, most), lengths[r] - rows.done[r])) for r in chosen]
            for (row, n), out in zip(work, rows.step(work), strict=True):
                at = rows.done[row]
                assert torch.equal(out, alone[row][at - n : at])


def made_step(
    lengths: list[int], new: int, block_size: int
) -> tuple[PagedAttentionStep, torch.Tensor, int]:
    """Rows whose last `new` tokens are this step's: (step, slots of all tokens, blocks)."""
    wide = -(-max(lengths) // block_size)
    table = torch.arange(1, 1 + wide * len(lengths), dtype=torch.int32).view(len(lengths), wide)
    slots = [
        int(table[row, p // block_size]) * block_size + p % block_size
        for row, n in enumerate(lengths)
        for p in range(n)
    ]
    starts = torch.arange(0, new * len(lengths) + 1, new, dtype=torch.int32)
    step = PagedAttentionStep(
        table.to(DEVICE), starts.to(DEVICE), torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
        len(lengths), None, len(lengths), None, max(lengths),
    )  # fmt: skip
    return step, torch.tensor(slots).to(DEVICE), 1 + wide * len(lengths)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [0, 50])
def test_the_reduction_of_segments_changes_no_bit(window: int) -> None:
    torch.manual_seed(2)
    lengths, new = [3, 33, 150], 2
    step, slots, blocks = made_step(lengths, new, 16)
    keys, values = (torch.full((blocks, 2, 16, 16), torch.nan, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 2, 16, device=DEVICE) for _ in range(2))
    write((keys, values), k, v, slots)
    q = torch.randn(new * 3, 4, 16, device=DEVICE)
    sinks = torch.randn(4, device=DEVICE)
    found = []
    for splits in (1, 2, 5):
        lse = torch.empty(new * 3, 4, device=DEVICE)
        scores = Scores(0.25, window=window, sinks_H=sinks)
        out = attend(q, (keys, values), step, scores, SMALL, lse_TH=lse, splits=splits)
        found.append((out, lse))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])
    # The log-sum-exp, of the last row's last token:
    low = max(0, lengths[2] - window) if window else 0
    row = k[-lengths[2] :].double()[low:].repeat_interleave(2, 1)
    scores = torch.einsum("hd,nhd->hn", q[-1].double(), row) * 0.25
    want = torch.logsumexp(torch.cat((scores, sinks.double()[:, None]), 1), 1)
    torch.testing.assert_close(found[0][1][-1].double(), want, atol=1e-5, rtol=0)


def test_padding_is_not_written() -> None:
    keys, values = torch.zeros(3, 2, 16, 8, device=DEVICE), torch.zeros(3, 2, 16, 4, device=DEVICE)
    both = torch.randn(3, 6, 8, device=DEVICE)
    slots = torch.tensor([17, -1, 47], device=DEVICE)
    write((keys, values), both[:, 1:3], both[:, 4:, :4], slots)
    for token, (block, at) in ((0, (1, 1)), (2, (2, 15))):
        assert torch.equal(keys[block, :, at], both[token, 1:3])
        assert torch.equal(values[block, :, at], both[token, 4:, :4])
    assert int((keys != 0).sum()) == 2 * 2 * 8


FORMATS = [
    "int8",
    pytest.param("fp8_e4m3", marks=pytest.mark.device),
    pytest.param("fp8_e5m2", marks=pytest.mark.device),
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_of_codes_has_the_bits_of_its_definition(name: str) -> None:
    torch.manual_seed(4)
    spec = CacheSpec(2, 24, 16, name)
    mine, theirs = (
        tuple(
            torch.zeros(p.shape, dtype=p.dtype, device=DEVICE)
            for p in kv_quantization.parts(spec, 3, 16)
        )
        for _ in range(2)
    )
    k, v = torch.randn(20, 2, 24, device=DEVICE), torch.randn(20, 2, 16, device=DEVICE)
    k[3], v[4, 1] = 0, 1e-32
    slots = torch.randperm(48, device=DEVICE)[:20]
    kv_quantization.write(theirs, k, v, slots)
    if name == "int8":
        write(
            mine,
            kv_quantization.hadamard(k),
            v,
            slots,
            127.0,
            1 / kv_quantization.hadamard_size(24),
        )
    else:
        write(mine, k, v, slots, kv_quantization.MAX_CODE[kv_quantization.DTYPES[name]])
    for got, want in zip(mine, theirs, strict=True):
        assert torch.equal(kv_quantization.as_bytes(got), kv_quantization.as_bytes(want))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "softcap"])
def test_a_quantized_cache_is_read_as_in_the_reference(name: str, kind: str) -> None:
    found = []
    for backend in (TritonAttention(SMALL), ReferenceAttention(tile=16)):
        rows = rows_of(kind, [40, 7])
        layer = rows.layer
        cache = tuple(
            torch.zeros(p.shape, dtype=p.dtype, device=DEVICE)
            for p in kv_quantization.parts(layer.spec.cache_spec(name), 8, 16)
        )
        layer.bind(backend, cache)
        found.append(torch.cat([*rows.step([(0, 39), (1, 6)]), *rows.step([(0, 1), (1, 1)])]))
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-5)
