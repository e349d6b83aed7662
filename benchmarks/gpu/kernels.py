"""Speed of the GPU kernels at real shapes, with the floor of each.

Knows the bytes and operations that each kernel needs at least; section `machine` measures the GPU's ceilings. Does not
check results (`checks.py` does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu.fixtures import eight_bits, filled_cache
from benchmarks.gpu.timing import cold

if TYPE_CHECKING:
    from benchmarks.gpu.run import Found, Run


def line(
    run: Run, seconds: float, num_bytes: float = 0, flops: float = 0, kind: str = "flops"
) -> dict[str, Any]:
    """A time with its floor: the larger of the times of bytes and operations at the measured ceilings."""
    floor = max(num_bytes / run.ceilings.get("bytes", 1e30), flops / run.ceilings.get(kind, 1e30))
    return {
        "microseconds": round(seconds * 1e6, 1),
        "floor": round(floor * 1e6, 1),
        "of the floor": round(floor / seconds, 3),
    }


def kernels(run: Run, found: Found) -> None:
    """Attention at the 8B shape, and the memory-bound kernels."""
    dtype = torch.float32 if run.small else torch.bfloat16
    steps = ((2, 40),) if run.small else ((1, 1024), (1, 32768), (64, 2048), (256, 1024))
    for rows, length in steps:
        found[f"decode of {rows} rows of {length}"] = _attention(run, [length] * rows, 1, dtype)
    for new in (24,) if run.small else (2048, 8192):
        found[f"prefill of {new}"] = _attention(run, [new], new, dtype)
    for name, made in _movers(run, dtype).items():
        found[name] = made
    for rows, length in steps:
        if run.left > 20:
            name = f"sizes for {rows} rows of {length}"
            found[name] = _other_sizes(run, [length] * rows, dtype)


OTHERS: tuple[dict[str, int], ...] = (
    {}, {"segment": 256}, {"segment": 128}, {"segment": 1024}, {"stages": 3}, {"stages": 4}, {"tile": 32, "stages": 3},
    {"tile": 128}, {"tile": 128, "warps": 8}, {"segment": 256, "stages": 3},
)  # fmt: skip
"""Changes to the sizes of `sizes_for` that may be faster for single tokens; the first is no change."""


def _other_sizes(run: Run, lengths: list[int], dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of decode attention, by the kernel's sizes."""
    from quire.ops.triton.attention import Scores, attend, sizes_for

    heads, kv_heads = (4, 2) if run.small else (32, 8)
    cache, step, q = filled_cache(lengths, 1, dtype, run.device, heads, kv_heads)
    found: dict[str, float] = {}
    for other in OTHERS[:2] if run.small else OTHERS:
        if run.left < 10:
            break
        sizes = sizes_for(heads // kv_heads, 128, dtype.itemsize)._replace(**other)
        name = ", ".join(f"{what} {value}" for what, value in other.items()) or "as they are"

        def call(sizes: Any = sizes) -> Any:
            return attend(q, cache, step, Scores(0.09), sizes)

        try:
            found[name] = round(cold(run, call) * 1e6, 1)
        except Exception as error:
            found[f"{name}: {type(error).__name__}"] = 0.0
    return found


def _attention(run: Run, lengths: list[int], new: int, dtype: torch.dtype) -> dict[str, Any]:
    from quire.ops.triton.attention import Scores, attend, sizes_for

    heads, kv_heads = (4, 2) if run.small else (32, 8)
    cache, step, q = filled_cache(lengths, new, dtype, run.device, heads, kv_heads)
    sizes = sizes_for(heads // kv_heads, 128, dtype.itemsize)
    tokens_each = sizes.long // (heads // kv_heads)
    if new > sizes.short // (heads // kv_heads):
        work = [(row, at) for row in range(len(lengths)) for at in range(0, new, tokens_each)]
        step.long_W2 = torch.tensor(work, dtype=torch.int32, device=run.device)
        step.num_short = 0
    seconds = cold(run, lambda: attend(q, cache, step, Scores(0.09), sizes))
    num_bytes = sum(lengths) * 2 * kv_heads * 128 * dtype.itemsize + 2 * q.numel() * dtype.itemsize
    pairs = sum(new * (n - new) + new * (new + 1) / 2 for n in lengths)
    return line(run, seconds, num_bytes, 4 * pairs * heads * 128)


def _movers(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Memory-bound kernels: their floor is to read and write all bytes once."""
    from quire.ops.triton import norm_rope_act as rows
    from quire.ops.triton import sampling

    tokens, size = (8, 256) if run.small else (8192, 4096)
    x = torch.randn(tokens, size, device=run.device).to(dtype)
    other, weight = torch.randn_like(x), torch.ones(size, device=run.device, dtype=dtype)
    one = x.numel() * dtype.itemsize
    few, vocab = (2, 3000) if run.small else (256, 151_936)
    logits = torch.randn(few, vocab, device=run.device)
    keys = torch.randint(0, 1 << 30, (2, few), dtype=torch.int32, device=run.device)
    ks = torch.full((few,), 50, dtype=torch.int64, device=run.device)
    ps = torch.full((few,), 0.9, dtype=torch.float64, device=run.device)
    none = torch.full_like(ps, -torch.inf)
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "add_rms_norm": (lambda: rows.add_rms_norm(x, other, weight, 1e-5), 4 * one),
        "silu_and_mul": (lambda: rows.silu_and_mul(x), 1.5 * one),
        "draw": (lambda: sampling.draw(logits, keys), 4 * logits.numel()),
        "cutoff of top-k and top-p": (lambda: sampling.cutoff(logits, ks, ps, none), 4 * logits.numel()),
        "the same by a sort": (lambda: logits.sort(dim=-1), 4 * logits.numel()),
    }  # fmt: skip
    return {name: line(run, cold(run, call), cost) for name, (call, cost) in calls.items()}


# ------------------------------------------------------------------------------------ 8-bit floats

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))  # outputs, inputs, of the 8B shape


MORE = {"bf16": 1.0, "8 bits": 0.0, "4 bits": 5 / 128 - 0.5}
"""Methods with bf16 activations -> bytes of a weight, minus the one byte of fp8."""


def products(run: Run, found: Found) -> None:
    """fp8 GEMM by implementation, compared with bf16, int8 and WNA16; then other tiles for one token."""
    from quire.ops.triton import fp8_gemm

    wide, counts = (32, (2, 33)) if run.small else (128, (1, 16, 64, 512, 8192))
    dtype = torch.float32 if run.small else torch.bfloat16
    for outs, ins in ((32, 64),) if run.small else SHAPES:
        weight = torch.randn(outs, ins, device=run.device)
        for tokens in counts:
            x = torch.randn(tokens, ins, device=run.device).to(dtype)
            cost = outs * ins + tokens * (ins * (1 + dtype.itemsize) + outs * dtype.itemsize)
            for name, call in _ways(x, weight, wide).items():
                say = f"{tokens} x {ins} x {outs} {name}"
                try:
                    seconds = cold(run, call)
                    more = MORE.get(name, 0.0) * weight.numel()
                    kind = (
                        "flops" if name in MORE else f"{'int8' if 'int8' in name else 'fp8'} flops"
                    )
                    found[say] = line(run, seconds, cost + more, 2.0 * tokens * outs * ins, kind)
                except Exception as error:
                    found[say] = f"{type(error).__name__}: {error}"[:300]
    for outs, ins in ((32, 64),) if run.small else SHAPES:
        if run.left < 15:
            break
        found[f"tiles of 1 x {ins} x {outs}"] = _tiles(run, outs, ins, dtype, fp8_gemm)


def _ways(x: Tensor, weight: Tensor, wide: int) -> dict[str, Callable[[], Any]]:
    """Name -> call; the fp8 and int8 calls include the quantization of activations."""
    from torch.nn import functional as F

    from benchmarks.gpu import fp8_gemm_tma
    from quire.ops.triton import fp8_gemm, int8_gemm
    from quire.quantization.fp8 import quantize, scaled_product
    from quire.quantization.int8 import Int8Codes
    from quire.quantization.wna16 import FewBitsWeight

    rows, (codes, scale) = quantize(weight), quantize(weight, wide)
    blocks, dtype = (codes, scale[::wide].contiguous()), x.dtype
    plain = weight.to(dtype)
    four, eight = FewBitsWeight.int4(plain, False), eight_bits(weight, wide)
    made = Int8Codes.of(plain, False, None)
    whole = made.q_OI, made.scale_O

    def by_torch_in_blocks() -> Any:
        coded, scales = fp8_gemm.codes(x, wide)
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        across = scales.t().contiguous().t()
        return F.scaled_mm(
            coded, codes.t(), across, recipes[0], blocks[1].t(), recipes[1], output_dtype=dtype
        )

    return {
        "bf16": lambda: x @ plain.T,
        "4 bits": lambda: four.multiply(x),
        "8 bits": lambda: eight.multiply(x),
        "int8": lambda: made.multiply(x),
        "int8, descriptors": lambda: fp8_gemm_tma.product(int8_gemm.codes(x), whole, None, dtype),
        "int8, torch's sums alone": lambda: torch._int_mm(int8_gemm.codes(x)[0], whole[0].t()),
        "by row, ours": lambda: fp8_gemm.product(fp8_gemm.codes(x), rows, None, dtype),
        "by row, descriptors": lambda: fp8_gemm_tma.product(fp8_gemm.codes(x), rows, None, dtype),
        "by block, descriptors": lambda: fp8_gemm_tma.product(
            fp8_gemm.codes(x, wide), blocks, None, dtype, wide, wide
        ),
        "by row, torch's": lambda: scaled_product(fp8_gemm.codes(x), rows, None, torch.bfloat16),
        "by block, ours": lambda: fp8_gemm.product(
            fp8_gemm.codes(x, wide), blocks, None, dtype, wide, wide
        ),
        "by block, torch's": by_torch_in_blocks,
        "codes alone": lambda: fp8_gemm.codes(x),
    }


def _tiles(run: Run, outs: int, ins: int, dtype: torch.dtype, kernel: Any) -> dict[str, float]:
    """Microseconds for one token, by tile (outputs x inputs) and parts; the first tile is the default."""
    torch.manual_seed(1)
    codes = kernel.codes(torch.randn(1, ins, device=run.device).to(dtype))
    weight = kernel.codes(torch.randn(outs, ins, device=run.device).to(dtype))
    table = kernel.tile_for(1)
    others = [(16, 512, 4), (32, 512, 3), (64, 128, 5), (64, 256, 3), (128, 128, 4)]
    tiles = [table, *(kernel.Tile(16, o, i, 4, stages) for o, i, stages in others)]
    found: dict[str, float] = {}
    for tile in tiles[:2] if run.small else tiles:
        own = kernel.parts_of(outs, ins, tile)
        for parts in sorted({own, 1, 2 * own}):
            if run.left < 10:
                return found

            def call(tile: Any = tile, parts: int = parts) -> Any:
                return kernel.product(codes, weight, None, dtype, tile=tile, parts=parts)

            name = f"{tile.outputs} x {tile.inputs}, {parts} parts"
            try:
                found[name] = round(cold(run, call) * 1e6, 1)
            except Exception as error:
                found[f"{name}: {type(error).__name__}"] = 0.0
    return found
