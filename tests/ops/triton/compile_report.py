"""Compile every kernel for a GPU that is not here, and print what the compiler says: one line of JSON a kernel.

    python tests/ops/triton/compile_report.py 90

Knows the launches of a Llama-like model. Nothing runs: the driver is a stand-in that names the target. What steps differ in
from one to the next (tokens, rows, lengths) is changed in the end, and must not have anything compiled anew, which would
hold up a server for seconds: `anew` names what is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

sys.path.insert(0, str(Path(__file__).parents[3]))  # the first entry is this script's own folder

from benchmarks.gpu import fp8_gemm_tma
from quire.layers.moe import Experts
from quire.ops.experts import CodedWeight, ExpertWeights
from quire.ops.lora import LoraTable
from quire.ops.recurrent import Gates, StateRows, recurrence_shape, scan_shape
from quire.ops.triton import (
    attention,
    experts,
    fp8_gemm,
    gather_inputs,
    int8_gemm,
    kv_write,
    lora,
    packed_attention,
    qk_norm_rope_kv,
    recurrent,
    sampling,
    wna16_gemm,
)
from quire.ops.triton import norm_rope_act as rows

BF16 = torch.bfloat16
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Target:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def report(what: str, name: str, kernel: Any) -> dict[str, Any]:
    """Registers a thread, bytes of stack (spilled registers), shared memory and matrix instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [OBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    return {
        "what": what, "kernel": name, "registers": int(registers), "stack": int(stack),
        "shared": kernel.metadata.shared, "wgmma": kernel.asm["ptx"].count("wgmma.mma"),
        "mma": kernel.asm["ptx"].count("mma.sync"), "fma": kernel.asm["ptx"].count("fma.rn.f32"),
    }  # fmt: skip


def launch_rows(tokens: int = 4) -> None:
    x, w = torch.zeros(tokens, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    rows.rms_norm(x, w, 1e-6)
    rows.rms_norm(torch.zeros(tokens, 8, 128, dtype=BF16), w[:128], 1e-6, True)
    rows.add_rms_norm(x, x.clone(), w, 1e-6)
    angle = torch.zeros(tokens, 64)
    rows.rotate(torch.zeros(tokens, 8, 128, dtype=BF16), angle, angle)
    rows.rotate(torch.zeros(tokens, 8, 96, dtype=BF16), angle[:, :16], angle[:, :16], True)
    rows.silu_and_mul(x)
    rows.gelu_and_mul(x)
    rows.gelu_and_mul(x, True)


def launch_attention(dtype: torch.dtype, kept: torch.dtype, size: int = 128) -> None:
    parts = [torch.zeros(9, 8, 16, size, dtype=kept)] * 2
    top = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}.get(kept, 0.0)
    if top:
        parts += [torch.zeros(9, 8, 16)] * 2
    new = torch.zeros(4, 8, size, dtype=dtype)
    kv_write.write(tuple(parts), new, new, torch.zeros(4, dtype=torch.int64), top)
    angle = torch.zeros(4, size // 2)
    if not top:
        norms = qk_norm_rope_kv.Norms(*torch.zeros(2, size, dtype=dtype), 1e-6, False)
        for given in (None, norms):
            qk_norm_rope_kv.prepare(
                torch.zeros(4, 32, size, dtype=dtype), new, new, (angle, angle), False, given,
                tuple(parts), torch.zeros(4, dtype=torch.int64),
            )  # fmt: skip
    sizes = attention.sizes_for(4, size, dtype.itemsize)
    ints = torch.arange(5, dtype=torch.int32)
    long = torch.zeros(3, 2, dtype=torch.int32)
    step = attention.PagedAttentionStep(ints.repeat(4, 8), ints, ints[:4], 4, None, 4, long, 8192)
    q = torch.zeros(4, 32, size, dtype=dtype)
    attention.attend(q, tuple(parts), step, attention.Scores(0.1), sizes)
    scores = attention.Scores(0.1, 100, 30.0, torch.zeros(32))
    attention.attend(q, tuple(parts), step, scores, sizes, torch.zeros(4, 32), splits=1)


def launch_latent(heads: int) -> None:
    """DeepSeek's attention: keys of 576 features, whose first 512 are the values."""
    keys = torch.zeros(9, 1, 16, 576, dtype=BF16)
    cache = (keys, keys[..., :512])
    new = torch.zeros(4, 1, 576, dtype=BF16)
    kv_write.write(cache, new, new[..., :512], torch.zeros(4, dtype=torch.int64))
    ints, long = torch.arange(5, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    step = attention.PagedAttentionStep(ints.repeat(4, 8), ints, ints[:4], 4, None, 4, long, 8192)
    sizes = attention.sizes_for(attention.latent_group(heads), 576, 2)
    attention.attend(
        torch.zeros(4, heads, 576, dtype=BF16), cache, step, attention.Scores(0.1), sizes
    )


def launch_recurrent(tokens: int = 4) -> None:
    """The delta nets of Qwen 3.5, a layer of Mamba-2 and one of Mamba-1, RecurrentGemma's and RWKV's recurrences."""
    ints = torch.arange(tokens + 1, dtype=torch.int32)
    of = StateRows(
        torch.zeros(tokens, dtype=torch.int64), ints, torch.zeros(tokens, dtype=torch.int64)
    )
    x, one = torch.zeros(tokens, 8192, dtype=BF16), torch.zeros(8192)
    q, v = x[:, :2048].unflatten(1, (16, 128)), x[:, :4096].unflatten(1, (32, 128))
    recurrent.causal_conv(
        x, torch.zeros(8192, 4, dtype=BF16), None, torch.zeros(3, 3, 8192, dtype=BF16), of, True
    )
    recurrent.causal_conv(
        x[:, :2048], torch.zeros(2048, 3, dtype=BF16), x[0, :2048], torch.zeros(3, 2, 2048, dtype=BF16), of, False
    )  # fmt: skip
    gates, state = Gates(one[:32], one[:32]), torch.zeros(3, *recurrence_shape(32, 128, 128))
    recurrent.linear_recurrence(q, q, v, x[:, :32], x[:, 32:64], gates, state, of)
    gates = gates._replace(skip_G=one[:32])
    recurrent.linear_recurrence(q[:, :8], q[:, 8:], v, x[:, :32], None, gates, state, of)
    steps, states = torch.zeros(tokens, 8192), torch.zeros(3, *scan_shape(8192, 16))
    recurrent.selective_scan(
        x, steps, torch.zeros(8192, 16), x[:, :16], x[:, 16:32], one, states, of
    )
    for first in (False, True):
        recurrent.gated_rms_norm(steps[:, :4096], x[:, 4096:], x[0, :128], 1e-6, 128, first)
    recurrent.decaying_sum(steps, steps, torch.zeros(3, 8192), of)
    recurrent.wkv(steps, steps, one, one, torch.zeros(3, 3, 8192), of)


def launch_sampling(rows: int = 4) -> None:
    logits, keys = torch.zeros(rows, 151_936), torch.zeros(2, rows, dtype=torch.int32)
    longs, doubles = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.float64)
    tokens = torch.zeros(rows, 100, dtype=torch.int32)
    sampling.draw(logits, keys)
    sampling.draw(logits, keys, sampling.cutoff(logits, longs, doubles, doubles))
    sampling.rank(logits.bfloat16(), longs, True)
    sampling.penalize(logits, longs, longs, longs, longs, torch.zeros(3, rows), tokens, 50)


def launch_other_steps() -> None:
    """Of kernels that were compiled: one token, sixteen, odd numbers; tables and lists of other lengths."""
    for tokens in (1, 2, 16):
        launch_rows(tokens)
        launch_recurrent(tokens)
        launch_products(0, tokens)
        launch_products(128, tokens)
        launch_int8(tokens)
        launch_sampling(tokens + 1)
        launch_few_bits(4, 128, tokens)
        launch_quantized_experts(8, 0, (tokens,))
        launch_quantized_experts(4, 128, (tokens,))
        launch_lora((tokens,))
        launch_packed((tokens + 1,))
    launch_steps(((1, 1, 16), (3, 7, 8192), (16, 16, 40000)), (2, 5))


def launch_steps(steps: tuple[tuple[int, ...], ...], splits: tuple[int, ...]) -> None:
    """Attention of (rows, width of the table, longest context), as every row, and by lists of work."""
    parts = (torch.zeros(9, 8, 16, 128, dtype=BF16),) * 2
    sizes = attention.sizes_for(4, 128, 2)
    for count, width, longest in steps:
        ints, work = (
            torch.arange(count + 1, dtype=torch.int32),
            torch.zeros(7, 2, dtype=torch.int32),
        )
        table, q = (
            torch.zeros(count, width, dtype=torch.int32),
            torch.zeros(count, 32, 128, dtype=BF16),
        )
        for short, few, long in (
            (None, count, None),
            (work[:3], 3, work[3:]),
            (work[:4], 4, work[4:]),
        ):
            step = attention.PagedAttentionStep(
                table, ints, ints[:count], count, short, few, long, longest, 1
            )
            for many in (1, *splits):
                attention.attend(q, parts, step, attention.Scores(0.1), sizes, splits=many)


def launch_batch() -> None:
    table, ints = torch.zeros(4, 100, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    gather_inputs.gather(table, ints, ints, ints, 7, 3)
    gather_inputs.slots(table, ints, ints, ints, 7, 3, 16)
    gather_inputs.scatter(table, ints[:4], ints[:4], ints, ints, 7)


def launch_products(wide: int, few: int = 1) -> None:
    """Of the 8B shape: sums that are cut into parts, sums that are not, and many tokens."""
    shapes = (
        (few, 4096, 4096),
        (16 + few, 28672, 4096),
        (48 + few, 4096, 4096),
        (8191 + few, 4096, 14336),
    )
    for tokens, outs, ins in shapes:
        x = torch.zeros(tokens, ins, dtype=BF16, device="meta")
        weight = torch.zeros(outs, ins, dtype=fp8_gemm.CODES, device="meta")
        scale = torch.zeros((outs // wide, ins // wide) if wide else (outs,), device="meta")
        bias = torch.zeros(outs, dtype=BF16, device="meta")
        coded = fp8_gemm.codes(x, wide)
        for given in (None, bias):
            fp8_gemm.product(coded, (weight, scale), given, BF16, wide, wide or 1)
            if tokens > fp8_gemm.FEW:
                fp8_gemm_tma.product(
                    coded, (weight, scale), given, BF16, wide, wide or 1, programs=132
                )


def launch_int8(few: int = 1) -> None:
    """Likewise."""
    for tokens in (few, 16 + few, 48 + few, 511 + few, 8191 + few):
        outs, ins = 4096, 14336
        x = torch.zeros(tokens, ins, dtype=BF16, device="meta")
        weight = (
            torch.zeros(outs, ins, dtype=torch.int8, device="meta"),
            torch.zeros(outs, device="meta"),
        )
        coded = int8_gemm.codes(x)
        for given in (None, torch.zeros(outs, dtype=BF16, device="meta")):
            int8_gemm.product(coded, weight, given, BF16)
            if tokens > fp8_gemm.FEW:
                fp8_gemm_tma.product(coded, weight, given, BF16, programs=132)


def launch_few_bits(bits: int, group: int, few: int = 1) -> None:
    """Of the 8B shape: sums that are cut into parts, many rows, and a weight that is made 16 bits."""
    step = wna16_gemm.step_of(group)
    for tokens, outs, ins in ((few, 4096, 4096), (48 + few, 4096, 14336), (255 + few, 28672, 4096)):
        x = torch.zeros(tokens, ins, dtype=BF16, device="meta")
        data = torch.zeros(outs, ins * bits // 8, dtype=torch.uint8, device="meta")
        scale = torch.zeros(ins // group, outs, device="meta")
        given = (data, scale, scale.to(torch.uint8))
        wna16_gemm.product(x, *given, None, step)
    wna16_gemm.widened(*given, step, ins, BF16)


def launch_experts() -> None:
    """Of Qwen3-30B-A3B, and of gpt-oss: a biased, clamped activation."""
    for act, biased in (("silu", False), ("clamped_swiglu", True)):
        with torch.device("meta"):
            layer = Experts(2048, 768, 128, act=act, bias=biased).to(BF16)
            for tokens in (1, 64, 2048):
                x, weights = torch.zeros(tokens, 2048, dtype=BF16), torch.zeros(tokens, 8)
                experts.experts(x, torch.zeros(tokens, 8, dtype=torch.int64), weights, layer.of)


def launch_quantized_experts(
    bits: int, group: int, tokens: tuple[int, ...] = (1, 64, 2048)
) -> None:
    """As `launch_experts`. Group 0: int8 with a scale for each output."""

    def weight(outs: int, ins: int, bias: bool) -> SimpleNamespace:
        data = torch.zeros(outs, ins * bits // 8, dtype=torch.uint8 if group else torch.int8)
        scale = torch.zeros((ins // group, outs) if group else outs)
        coded = CodedWeight(data, scale)
        if group:
            step = wna16_gemm.step_of(group)
            coded = CodedWeight(data, scale, scale.to(torch.uint8), bits, step)
        given = torch.zeros(outs, dtype=BF16) if bias else None
        return SimpleNamespace(prepared=SimpleNamespace(coded=lambda: coded), bias=given)

    for act, biased in (("silu", False), ("clamped_swiglu", True)):
        with torch.device("meta"):
            gate_up, down = weight(2 * 768, 2048, biased), weight(2048, 768, biased)
            of = ExpertWeights([gate_up] * 128, [down] * 128, act)
            for count in tokens:
                x, weights = torch.zeros(count, 2048, dtype=BF16), torch.zeros(count, 8)
                experts.experts(x, torch.zeros(count, 8, dtype=torch.int64), weights, of)


def launch_lora(tokens: tuple[int, ...] = (1, 300)) -> None:
    """Adapters of rank 16 and 64 on the q, k and v of an 8B model."""
    for rank in (16, 64):
        table = LoraTable(4, torch.device("cpu"), BF16, 2 * rank)
        for count in tokens:
            x, y = torch.zeros(count, 4096, dtype=BF16), torch.zeros(count, 6144, dtype=BF16)
            lora._lora(x, y, torch.zeros(count, dtype=torch.int64), table)


def launch_packed(prompts: tuple[int, ...] = (1, 5)) -> None:
    """Of encoders: 12 heads of 64, 16 of 128; with a window, and with a bias by distance."""
    for heads, size in ((12, 64), (16, 128)):
        for count in prompts:
            q = torch.zeros(40 * count, heads, size, dtype=BF16)
            starts = torch.arange(count + 1, dtype=torch.int32) * 40
            for more in ({}, {"window": 64}, {"bias_HL": torch.zeros(heads, 129)}):
                packed_attention._packed_attention(q, q, q, starts, 0.1, **more)


LAUNCHES = {
    "rows": launch_rows,
    "attention bfloat16": lambda: launch_attention(BF16, BF16),
    "attention bfloat16 in steps": lambda: launch_steps(((4, 9, 8000),), (3,)),
    "attention bfloat16 of 256": lambda: launch_attention(BF16, BF16, 256),
    "attention float16 of 64": lambda: launch_attention(torch.float16, torch.float16, 64),
    "attention fp8": lambda: launch_attention(BF16, torch.float8_e4m3fn),
    "attention int8": lambda: launch_attention(BF16, torch.int8),
    "attention float32": lambda: launch_attention(torch.float32, torch.float32),
    "latent attention of 16 heads": lambda: launch_latent(16),
    "latent attention of 128 heads": lambda: launch_latent(128),
    "fp8 products by row": lambda: launch_products(0),
    "fp8 products by block": lambda: launch_products(128),
    "int8 products": launch_int8,
    "4 bits in groups of 128": lambda: launch_few_bits(4, 128),
    "4 bits in groups of 32": lambda: launch_few_bits(4, 32),
    "8 bits in groups of 2048": lambda: launch_few_bits(8, 2048),
    "experts": launch_experts,
    "experts in int8": lambda: launch_quantized_experts(8, 0),
    "experts of 4 bits in groups of 128": lambda: launch_quantized_experts(4, 128),
    "adapters": launch_lora,
    "packed prompts": launch_packed,
    "sampling": launch_sampling,
    "recurrent layers": launch_recurrent,
    "batch": launch_batch,
}


def main(capability: int) -> None:
    driver.set_active(Target(capability))
    for module in (rows, recurrent, experts, lora, packed_attention):
        module.runs_on = lambda x: True
    run, what, seen = jit.JITFunction.run, "", set[str]()

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            said = report(what, self.fn.__name__, kernel) if what else {"anew": self.fn.__name__}
            print(json.dumps(said), flush=True)
        seen.add(kernel.hash)
        return kernel

    jit.JITFunction.run = compiled
    for what, launch in LAUNCHES.items():
        if not (capability < 89 and "fp8" in what):
            launch()
    what = ""
    if capability >= 89:
        launch_other_steps()


if __name__ == "__main__":
    main(int(sys.argv[1]))
