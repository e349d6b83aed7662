"""The reference backend against the formula, written out one query and one key at a time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from models.harness import make_batch, spoiled

from quire.attention import torch_sdpa
from quire.attention.reference import ReferenceAttention
from quire.forward_context import ForwardBatch, SeenSpan, forward_context
from quire.layers.attention import Attention

torch.set_num_threads(1)


def formula(layer: Attention, q_HD, k_NKD, v_NKE):
    """The last of N tokens, in double precision."""
    out = []
    last = len(k_NKD) - 1
    for head in range(layer.spec.num_heads):
        kv = head * layer.spec.num_kv_heads // layer.spec.num_heads
        keys = [
            p for p in range(last + 1) if layer.spec.window is None or p > last - layer.spec.window
        ]
        scores = [
            float(q_HD[head].double() @ k_NKD[p, kv].double()) * layer.spec.scale for p in keys
        ]
        if layer.spec.softcap:
            scores = [layer.spec.softcap * math.tanh(s / layer.spec.softcap) for s in scores]
        total = sum(math.exp(s) for s in scores)
        if layer.spec.sinks is not None:
            total += math.exp(float(layer.spec.sinks[head]))
        out.append(
            sum(
                math.exp(s) / total * v_NKE[p, kv].double()
                for s, p in zip(scores, keys, strict=True)
            )
        )
    return torch.stack(out)


def layer_of(kind: str) -> Attention:
    torch.manual_seed(3)
    sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    return {
        "plain": lambda: Attention(4, 2, 16),
        "one head each": lambda: Attention(3, 3, 8),
        "one for all": lambda: Attention(6, 1, 8, v_head_dim=24, scale=0.3),
        "window": lambda: Attention(4, 2, 16, window=5),
        "long window": lambda: Attention(4, 2, 16, window=37, sinks=sinks),
        "softcap": lambda: Attention(4, 2, 16, softcap=1.5),
        "sinks": lambda: Attention(4, 4, 16, sinks=sinks),
        "all": lambda: Attention(4, 1, 16, window=9, softcap=2.0, sinks=sinks, v_head_dim=8),
        "latent": lambda: Attention(4, 1, 24, v_head_dim=16, latent=True),
    }[kind]()


KINDS = [
    "plain",
    "one head each",
    "one for all",
    "window",
    "long window",
    "softcap",
    "sinks",
    "all",
    "latent",
]


class Rows:
    """Requests with random q, k, v, run in any chunks against one cache that starts full of NaN."""

    def __init__(self, layer, lengths, block_size, tile, seed=0, dtype=torch.float32, kept=None):
        torch.manual_seed(11)
        self.layer, self.block_size = layer, block_size
        self.q = [
            torch.randn(n, layer.spec.num_heads, layer.spec.head_dim, dtype=dtype) for n in lengths
        ]
        self.k = [
            torch.randn(n, layer.spec.num_kv_heads, layer.spec.head_dim, dtype=dtype)
            for n in lengths
        ]
        self.v = [
            torch.randn(n, layer.spec.num_kv_heads, layer.spec.v_head_dim, dtype=dtype)
            for n in lengths
        ]
        if layer.spec.latent:
            self.v = [k[..., : layer.spec.v_head_dim] for k in self.k]
        need = [-(-n // block_size) for n in lengths]
        blocks = list(range(1, sum(need) + 3))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in need]
        backend = ReferenceAttention(tile=tile)
        spec = layer.spec.cache_spec(kept or str(dtype).removeprefix("torch."))
        parts = backend.cache_parts(spec, sum(need) + 3, block_size)
        layer.bind(backend, tuple(spoiled(part) for part in parts))
        self.done = [0] * len(lengths)

    def step(self, work: list[tuple[int, int]]) -> list[torch.Tensor]:
        spans = [(row, self.done[row], self.done[row] + n) for row, n in work]
        batch: ForwardBatch = make_batch(
            [(row, a, [0] * (b - a)) for row, a, b in spans],
            [self.tables[row] for row, _ in work],
            self.block_size,
        )
        batch.spans += self.seen_spans(spans)
        q, k, v = (
            torch.cat([t[row][a:b] for row, a, b in spans]) for t in (self.q, self.k, self.v)
        )
        with forward_context(batch):
            out = self.layer(q, k, v)
        for row, _, b in spans:
            self.done[row] = b
        return list(out.split([n for _, n in work]))

    def seen_spans(self, parts: list[tuple[int, int, int]]) -> list[SeenSpan]:
        """Of (row, first token, last + 1): tokens that see later ones."""
        return []

    def forget_behind_window(self, row: int) -> None:
        """Blocks that the next token cannot see any more go back: the table has 0 there."""
        low = self.done[row] - self.layer.spec.window + 1
        for index in range(max(0, low // self.block_size)):
            block, self.tables[row][index] = self.tables[row][index], 0
            if block:
                for cache in self.layer.spec.cache:
                    cache[block] = torch.nan


LENGTHS = [23, 1, 70, 41, 2, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind):
    rows = Rows(layer_of(kind), LENGTHS, block_size=8, tile=16)
    steps = [
        [(0, 20), (2, 33), (3, 40)],
        [(3, 1), (2, 30), (0, 1), (1, 1)],
        [(2, 3), (0, 1), (4, 2), (5, 37)],
        [(2, 4), (0, 1), (5, 3)],
    ]
    for work in steps:
        for (row, n), out in zip(work, rows.step(work), strict=True):
            for i in {0, n // 2, n - 1}:
                at = rows.done[row] - n + i
                want = formula(
                    rows.layer, rows.q[row][at], rows.k[row][: at + 1], rows.v[row][: at + 1]
                )
                torch.testing.assert_close(out[i].double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [16, 128])
def test_without_causality_each_token_attends_to_the_whole_prompt(tile, dtype):
    lengths = [23, 1, 300, 41, 41]
    layer = Attention(4, 2, 16, causal=False)
    rows = Rows(layer, lengths, 16, tile, dtype=dtype)
    together = rows.step(list(enumerate(lengths)))
    for row, (n, out) in enumerate(zip(lengths, together, strict=True)):
        alone = Rows(Attention(4, 2, 16, causal=False), lengths, 16, tile, dtype=dtype)
        assert torch.equal(out, alone.step([(row, n)])[0])
        for at in {0, n // 2, n - 1}:
            want = formula(layer, rows.q[row][at], rows.k[row], rows.v[row])
            near = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}  # fmt: skip
            torch.testing.assert_close(out[at].double(), want, **near)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [16, 128])
def test_same_bits_alone_batched_and_chunked(kind, tile):
    """Pieces of 1, 3, 40 and 200 tokens at most; the first two begin with two thirds of the text."""
    lengths = [23, 9, 300, 41]
    alone = []
    for row, n in enumerate(lengths):
        alone.append(Rows(layer_of(kind), lengths, 16, tile).step([(row, n)])[0])
    rng = random.Random(5)
    for trial in range(4):
        rows = Rows(layer_of(kind), lengths, 16, tile, seed=trial)
        while left := [r for r, n in enumerate(lengths) if rows.done[r] < n]:
            most = [1, 3, 40, 200][trial]
            chosen = rng.sample(left, rng.randint(1, len(left)))
            work = [(r, min(rng.randint(1, most), lengths[r] - rows.done[r])) for r in chosen]
            if most < 40:
                work = [(r, n if rows.done[r] else lengths[r] * 2 // 3) for r, n in work]
            for (row, n), out in zip(work, rows.step(work), strict=True):
                at = rows.done[row]
                assert torch.equal(out, alone[row][at - n : at])


def test_blocks_behind_the_window_may_be_anything():
    layer = layer_of("window")
    want = Rows(layer, [50], 4, 8).step([(0, 50)])[0]
    rows = Rows(layer, [50], 4, 8)
    got = [rows.step([(0, 20)])[0]]
    while rows.done[0] < 50:
        rows.forget_behind_window(0)
        got.append(rows.step([(0, 3)])[0])
    assert rows.tables[0][:8] == [0] * 8
    torch.testing.assert_close(torch.cat(got), want)


@pytest.mark.parametrize("block_size", [1, 12, 16, 32, 128])
def test_any_block_size(block_size):
    lengths = [130, 5]
    layer = layer_of("plain")
    want = Rows(layer, lengths, 8, 256).step([(0, 130), (1, 5)])
    got = Rows(layer, lengths, block_size, 32).step([(0, 130), (1, 5)])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_float32_rounded_once():
    rows = Rows(layer_of("all"), [40], 8, 16, dtype=torch.bfloat16)
    got = rows.step([(0, 40)])[0]
    want = formula(rows.layer, rows.q[0][39], rows.k[0], rows.v[0])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got[39].double(), want, atol=4e-3, rtol=8e-3)


FUSED = ["plain", "one head each", "window", "wide window"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("block_size", [4, 16])
def test_in_16_bits_plain_layers_equal_the_formula(kind, dtype, block_size):
    """Side by side and in pieces, with rows of all lengths, among blocks of NaN."""
    layer = Attention(4, 2, 16, window=37) if kind == "wide window" else layer_of(kind)
    lengths = [23, 1, 70, 41, 2, 40, 33, 64]
    rows = Rows(layer, lengths, block_size, tile=16, dtype=dtype)
    for t in rows.q:
        t *= 3  # scores that stand out
    rng = random.Random(block_size)
    sums: list[float] = []
    while left := [r for r, n in enumerate(lengths) if rows.done[r] < n]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        most = rng.choice([1, 1, 3, 30])
        work = [(r, min(rng.randint(1, most), lengths[r] - rows.done[r])) for r in chosen]
        for (row, n), out in zip(work, rows.step(work), strict=True):
            assert out.dtype == dtype
            for i in {0, n // 2, n - 1}:
                at = rows.done[row] - n + i
                want = formula(layer, rows.q[row][at], rows.k[row][: at + 1], rows.v[row][: at + 1])
                torch.testing.assert_close(out[i].double(), want, atol=0.012, rtol=0.012)
                sums.append(float((out[i].double() - want).abs().mean()))
            if layer.spec.window:
                rows.forget_behind_window(row)
    assert sum(sums) / len(sums) < 0.003, "closer than the bound on the whole"


def test_many_16_bit_rows_are_processed_in_pieces(monkeypatch):
    lengths = [90, 3, 50, 51, 17, 64, 64, 1]
    work = [(row, 1) for row in range(len(lengths))]
    found = []
    for piece in (8192, 64):
        monkeypatch.setattr("quire.attention.torch_sdpa.PIECE", piece)
        rows = Rows(layer_of("plain"), lengths, 16, 16, dtype=torch.bfloat16)
        for row, n in enumerate(lengths):
            if n > 1:
                rows.step([(row, n - 1)])
        found.append(torch.cat(rows.step(work)).float())
    torch.testing.assert_close(found[0], found[1], atol=0.01, rtol=0.01)


def test_long_16_bit_rows_are_split_into_query_blocks(monkeypatch):
    layer = layer_of("long window")
    layer.sinks = None
    want = Rows(layer, [300], 16, 16, dtype=torch.bfloat16).step([(0, 300)])[0].float()
    monkeypatch.setattr("quire.attention.torch_sdpa.QUERY_BLOCK", 48)
    rows = Rows(layer, [300], 16, 16, dtype=torch.bfloat16)
    got = torch.cat([rows.step([(0, n)])[0] for n in (130, 20, 150)]).float()
    torch.testing.assert_close(got, want, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("kind", ["softcap", "sinks", "one for all"])
def test_in_16_bits_other_layers_go_in_tiles(kind):
    spec = replace(layer_of(kind).spec, cache=(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16),) * 2)
    assert not torch_sdpa.supports(spec, torch.zeros(1, 4, 16, dtype=torch.bfloat16))
    spec = replace(layer_of("plain").spec, cache=(torch.zeros(1, 1, 1, 16),) * 2)
    assert not torch_sdpa.supports(spec, torch.zeros(1, 4, 16, dtype=torch.bfloat16))
    assert not torch_sdpa.supports(spec, torch.zeros(1, 4, 16))
