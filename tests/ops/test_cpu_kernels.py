"""The CPU's kernels: equal to their definitions, with the same bits for a row in any batch.

Every build that this machine can run is tested; without a compiler they are skipped by name.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.attention.cpu import cache_addresses
from quire.ops import reference
from quire.ops.cpu import bindings
from quire.ops.cpu.structs import ACTIVATIONS
from tests.kernel_builds import BUILDS, kernels_of

ADDRESS = Tensor.data_ptr


@pytest.fixture(params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> bindings.Kernels:
    return kernels_of(request.param)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near(got: Tensor, want: Tensor, share: float = 0.01) -> None:
    """Within a share of the largest value: the size of bf16's rounding errors."""
    assert torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) <= share * float(want.abs().max())


# -- linear ----------------------------------------------------------------------------------------
def pack(kernels: bindings.Kernels, weight: Tensor, gated: bool = False) -> Tensor:
    outs, ins = weight.shape
    padded = -(-outs // 32) * 32
    packed = torch.full((padded * ins,), float("nan"), dtype=torch.bfloat16)
    kernels.pack(ADDRESS(weight), ADDRESS(packed), padded, outs, ins, gated)
    return packed


def linear(
    kernels: bindings.Kernels,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    outs: int,
    act: int,
) -> Tensor:
    rows, ins = x.shape
    y = torch.full((rows, outs // 2 if act else outs), float("nan"), dtype=torch.bfloat16)
    kernels.linear(
        ADDRESS(x), x.stride(0), ADDRESS(packed), None if bias is None else ADDRESS(bias),
        ADDRESS(y), y.stride(0), rows, outs, ins, act,
    )  # fmt: skip
    return y


SHAPES = [
    (1, 64, 32), (2, 96, 64), (5, 64, 1024), (12, 32, 96), (16, 128, 96), (17, 160, 64), (31, 64, 256),
    (32, 64, 64), (33, 96, 3072), (64, 64, 288), (100, 256, 1024), (513, 128, 2048), (700, 64, 96), (520, 64, 32),
    (1030, 2112, 96),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(
    kernels: bindings.Kernels, shape: tuple[int, int, int], gated: bool, with_bias: bool
) -> None:
    rows, outs, ins = shape
    if gated and outs % 64:
        outs = 64
    rng = draw(rows * outs)
    x = torch.randn(rows, ins, generator=rng).bfloat16()
    weight = (torch.randn(outs, ins, generator=rng) * ins**-0.5).bfloat16()
    bias = torch.randn(outs, generator=rng).bfloat16() if with_bias else None
    packed = pack(kernels, weight, gated)
    y = linear(kernels, x, packed, bias, outs, gated)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if gated:
        want = F.silu(want[:, : outs // 2]) * want[:, outs // 2 :]
    near(y, want)
    for row in {0, rows // 2, rows - 1}:
        alone = linear(kernels, x[row : row + 1].clone(), packed, bias, outs, gated)
        assert torch.equal(y[row], alone[0]), f"row {row} depends on its neighbours"


def test_linear_processes_wide_inputs_in_parts(kernels: bindings.Kernels) -> None:
    """Many rows and inputs: a thread keeps sums of some outputs while it goes through the inputs."""
    rows, outs, ins = 520, 1088, 2624
    rng = draw(7)
    x = torch.randn(rows, ins, generator=rng).bfloat16()
    weight = (torch.randn(outs, ins, generator=rng) * ins**-0.5).bfloat16()
    packed, before, found = pack(kernels, weight, True), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(linear(kernels, x, packed, None, outs, True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    want = x.double() @ weight.double().T
    near(found[0], F.silu(want[:, : outs // 2]) * want[:, outs // 2 :])
    assert torch.equal(found[0][300:301], linear(kernels, x[300:301], packed, None, outs, True))


def test_linear_accepts_strided_rows(kernels: bindings.Kernels) -> None:
    rng = draw(1)
    wide = torch.randn(40, 200, generator=rng).bfloat16()
    weight = torch.randn(64, 128, generator=rng).bfloat16()
    packed = pack(kernels, weight)
    for rows in (3, 40):
        apart = linear(kernels, wide[:rows, 8:136], packed, None, 64, False)
        together = linear(kernels, wide[:rows, 8:136].contiguous(), packed, None, 64, False)
        assert torch.equal(apart, together)


def test_outputs_that_do_not_fill_a_panel_are_zeros(kernels: bindings.Kernels) -> None:
    weight = torch.randn(45, 64, generator=draw(2)).bfloat16()
    x = torch.randn(3, 64, generator=draw(3)).bfloat16()
    y = linear(kernels, x, pack(kernels, weight), None, 64, False)
    near(y[:, :45], x.double() @ weight.double().T)
    assert not y[:, 45:].any()


# -- attention -------------------------------------------------------------------------------------
class Paged:
    """Rows of a batch over a scattered cache."""

    def __init__(
        self, sizes: list[tuple[int, int]], heads: int, kv: int, D: int, E: int, block: int, latent: bool = False
    ):  # fmt: skip
        rng = draw(D * block + heads)
        self.sizes, self.block, self.heads, self.kv = (
            sizes,
            block,
            heads,
            kv,
        )  # (new tokens, length)
        most = max(-(-length // block) for _, length in sizes)
        order = torch.randperm(most * len(sizes), generator=rng) + 1
        self.table = order.view(len(sizes), most).int()
        count = most * len(sizes) + 1
        self.keys = torch.randn(count, kv, block, D, generator=rng).bfloat16()
        self.values = torch.randn(count, kv, block, E, generator=rng).bfloat16()
        if latent:
            self.values = self.keys[..., :E]
        for row, (_, length) in enumerate(sizes):  # no kernel may read what was never written
            blocks = self.table[row][torch.arange(length, most * block) // block].long()
            places = torch.arange(length, most * block) % block
            self.keys[blocks, :, places] = float("nan")
            self.values[blocks, :, places] = float("nan")
        self.q = torch.randn(sum(new for new, _ in sizes), heads, D, generator=rng).bfloat16()
        self.sinks = torch.randn(heads, generator=rng)
        self.starts = [0, *itertools.accumulate(new for new, _ in sizes)]

    def run(
        self,
        kernels: bindings.Kernels,
        rows: list[tuple[int, int, int]],
        window: int,
        cap: float,
        sinks: bool,
    ) -> Tensor:
        """Each of `rows` is (row, first of its new tokens, past the last)."""
        q = torch.cat([self.q[self.starts[r] + a : self.starts[r] + b] for r, a, b in rows])
        lengths = torch.tensor([self.sizes[r][1] - self.sizes[r][0] + b for r, _, b in rows]).int()
        starts = torch.tensor([0, *itertools.accumulate(b - a for _, a, b in rows)]).int()
        table = self.table[[r for r, _, _ in rows]].contiguous()
        E, D = self.values.shape[-1], self.keys.shape[-1]
        o = torch.full((len(q), self.heads, E), float("nan"), dtype=torch.bfloat16)
        kernels.attention(
            ADDRESS(q), q.stride(0), ADDRESS(o), *self.addresses(), ADDRESS(table),
            table.shape[1], ADDRESS(starts), ADDRESS(lengths), ADDRESS(self.sinks) if sinks else None,
            len(rows), self.heads, self.kv, D, E, self.block, window, D**-0.5, cap,
        )  # fmt: skip
        return o

    def addresses(self) -> tuple[int | None, ...]:
        return cache_addresses((self.keys, self.values))

    def definition(self, window: int, cap: float, sinks: bool) -> Tensor:
        out = []
        for row, (new, length) in enumerate(self.sizes):
            at = torch.arange(length)
            blocks = self.table[row][at // self.block].long()
            keys = self.keys[blocks, :, at % self.block].double()
            values = self.values[blocks, :, at % self.block].double()
            share = self.heads // self.kv
            keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
            q = self.q[self.starts[row] : self.starts[row + 1]].double()
            scores = torch.einsum("qhd,khd->hqk", q, keys) * keys.shape[-1] ** -0.5
            if cap:
                scores = cap * torch.tanh(scores / cap)
            position = torch.arange(length - new, length)[:, None]
            hidden = at[None] > position
            if window:
                hidden |= at[None] <= position - window
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks:
                scores = torch.cat(
                    [scores, self.sinks.double()[:, None, None].expand(-1, new, 1)], -1
                )
            out.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., :length], values))
        return torch.cat(out)


MIXED = [(1, 600), (7, 7), (40, 300), (1, 33), (130, 389), (1, 1), (3, 257)]
KINDS = {
    "heads of 64": (4, 2, 64, 64, 16, 0, 0.0, False),
    "one head for four": (4, 1, 128, 128, 32, 0, 0.0, False),
    "window and sinks": (2, 2, 64, 32, 64, 40, 0.0, True),
    "all of it": (6, 2, 96, 96, 128, 300, 20.0, True),
    "softcap": (16, 8, 128, 128, 64, 0, 30.0, False),
    "a window of one": (4, 4, 32, 64, 16, 1, 0.0, False),
    "large heads": (2, 1, 256, 256, 16, 0, 0.0, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kernels: bindings.Kernels, kind: str) -> None:
    heads, kv, D, E, block, window, cap, sinks = KINDS[kind]
    paged = Paged(MIXED, heads, kv, D, E, block)
    whole = paged.run(
        kernels, [(r, 0, new) for r, (new, _) in enumerate(MIXED)], window, cap, sinks
    )
    near(whole, paged.definition(window, cap, sinks), 0.02)
    chunks = [(r, a, min(a + 9, new)) for r, (new, _) in enumerate(MIXED) for a in range(0, new, 9)]
    for chunk in chunks[::3]:  # alone, in chunks
        r, a, b = chunk
        alone = paged.run(kernels, [chunk], window, cap, sinks)
        assert torch.equal(alone, whole[paged.starts[r] + a : paged.starts[r] + b]), chunk


@pytest.mark.parametrize("sizes", [(16, 1, 576, 512, 64), (4, 1, 96, 64, 16), (2, 2, 64, 32, 16)])
def test_values_that_are_the_first_features_of_their_keys(
    kernels: bindings.Kernels, sizes: tuple[int, int, int, int, int]
) -> None:
    """MLA keeps keys only; the same bits as with a copy of the values."""
    paged, both = Paged(MIXED, *sizes, latent=True), Paged(MIXED, *sizes)
    both.keys, both.values = paged.keys, paged.values.contiguous()
    rows = [(r, 0, new) for r, (new, _) in enumerate(MIXED)]
    whole = paged.run(kernels, rows, 0, 0.0, False)
    near(whole, both.definition(0, 0.0, False), 0.02)
    assert torch.equal(whole, both.run(kernels, rows, 0, 0.0, False))


def test_a_long_prompt_gets_the_bits_of_its_chunks(kernels: bindings.Kernels) -> None:
    """Its outputs are too large for the caches, and written past them; the outputs of its chunks are not."""
    paged = Paged([(1100, 1100)], 8, 1, 64, 64, 64)
    chunks = [(0, first, min(first + 300, 1100)) for first in range(0, 1100, 300)]
    parts = [paged.run(kernels, [chunk], 0, 0.0, False) for chunk in chunks]
    assert torch.equal(paged.run(kernels, [(0, 0, 1100)], 0, 0.0, False), torch.cat(parts))


def test_scores_that_grow_along_the_context(kernels: bindings.Kernels) -> None:
    """What weights are measured by rises on the way, in every other query, by more than a float could take."""
    paged = Paged([(60, 700), (2, 690)], 4, 2, 64, 64, 16)
    paged.q[..., 0] = torch.where(torch.arange(62 * 4).view(62, 4) % 3 < 2, 8.0, -8.0)
    for row, (_, length) in enumerate(paged.sizes):
        at = torch.arange(length)
        steps = sum((at >= first).float() * by for first, by in ((40, 30), (300, 60), (650, 120)))
        blocks = paged.table[row][at // paged.block].long()
        paged.keys[blocks, :, at % paged.block, 0] = steps[:, None].bfloat16()
    whole = paged.run(kernels, [(0, 0, 60), (1, 0, 2)], 0, 0.0, False)
    near(whole, paged.definition(0, 0.0, False), 0.02)
    parts = [paged.run(kernels, [(0, a, a + 5)], 0, 0.0, False) for a in range(0, 60, 5)]
    parts += [paged.run(kernels, [(1, a, a + 1)], 0, 0.0, False) for a in range(2)]
    assert torch.equal(torch.cat(parts), whole)


# -- rows ------------------------------------------------------------------------------------------
@pytest.fixture
def bound(kernels: bindings.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registered ops run on this build."""
    from quire.ops.cpu import norm_rope_act as rows

    monkeypatch.setattr(rows, "best", lambda: kernels)


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_row_ops(rows: int) -> None:
    rng = draw(rows)
    x = torch.randn(rows, 256, generator=rng).bfloat16()
    weight = torch.randn(256, generator=rng).bfloat16()
    for plus_one in (False, True):
        for factor in (weight, None) if not plus_one else (weight,):
            norm = reference.rms_norm
            args = (x, factor, 1e-5, plus_one)
            near(norm.implementations["native"](*args), norm.reference(*args).double())
    centered = reference.layer_norm
    shifted = x + 3
    near(
        centered.implementations["native"](shifted, weight, 1e-5),
        centered.reference(shifted, weight, 1e-5).double(),
    )
    for softcap in (None, 2.0):
        capped, wide = reference.scale_logits, x[:, :250]
        want = capped.reference(wide, 0.7, softcap)
        near(capped.implementations["native"](x.clone()[:, :250], 0.7, softcap), want.double())
    other = torch.randn(rows, 256, generator=rng).bfloat16()
    normed, total = reference.add_rms_norm.reference(x, other, weight, 1e-5)
    mine, sum_ = reference.add_rms_norm.implementations["native"](
        x.clone(), other.clone(), weight, 1e-5
    )
    assert torch.equal(sum_, total)
    near(mine, normed.double())


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_activations(kernels: bindings.Kernels, act: str) -> None:
    """Each value is within a bit of bf16, from tail to tail; in a product's epilogue it has the same bits."""
    tanh = act == "gelu_pytorch_tanh"
    native = (reference.silu_and_mul if act == "silu" else reference.gelu_and_mul).implementations[
        "native"
    ]
    options = {} if act == "silu" else {"tanh": tanh}
    gate = torch.linspace(-14, 14, 1792).bfloat16()
    got = native(torch.cat((gate, torch.ones_like(gate)))[None], **options)[0].double()
    wide = gate.double()
    exact = {"silu": F.silu(wide), "gelu": wide * torch.special.ndtr(wide)}
    want = exact.get(act, F.gelu(wide, approximate="tanh"))
    assert ((got - want).abs() <= want.abs() / 250 + 1e-12).all()

    weight = torch.randn(128, 64, generator=draw(1)).bfloat16()
    x = torch.randn(7, 64, generator=draw(2)).bfloat16()
    both = linear(kernels, x, pack(kernels, weight), None, 128, 0)
    y = linear(kernels, x, pack(kernels, weight, True), None, 128, ACTIVATIONS[act])
    assert torch.equal(y, native(both, **options))


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("part", [32, 36, 40, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate(part: int, interleaved: bool) -> None:
    rng = draw(part)
    qkv = torch.randn(9, 6 * 64, generator=rng).bfloat16()
    x = qkv[:, 64:256].unflatten(-1, (3, 64))  # heads that lie in a wider row
    angles = torch.randn(9, part // 2, generator=rng)
    rotate = reference.rotate
    args = (x, angles.cos(), angles.sin(), interleaved)
    got = rotate.implementations["native"](*args)
    near(got, rotate.reference(*args).double())
    assert torch.equal(got[..., part:], x[..., part:])


@pytest.mark.usefixtures("bound")
def test_unsupported_shapes_use_the_reference() -> None:
    x = torch.randn(4, 24, generator=draw(1))  # float32, and 24 is no multiple of 16
    weight = torch.ones(24)
    got = reference.rms_norm.implementations["native"](x, weight, 1e-5)
    assert torch.equal(got, reference.rms_norm.reference(x, weight, 1e-5))
    odd = torch.randn(4, 8, 24, generator=draw(2)).bfloat16()
    angles = torch.randn(4, 12, generator=draw(3))
    got = reference.rotate.implementations["native"](odd, angles.cos(), angles.sin())
    assert torch.equal(got, reference.rotate.reference(odd, angles.cos(), angles.sin()))


# -- sanitizers ------------------------------------------------------------------------------------
def test_every_kernel_is_called_under_the_sanitizers() -> None:
    checks = Path(__file__).parent / "sanitize"
    text = "".join(path.read_text() for path in checks.glob("*.cpp"))
    computing = bindings.signatures().keys() - {"init", "threads", "layouts"}
    assert {name for name in computing if f"quire_{name}(" not in text} == set()
