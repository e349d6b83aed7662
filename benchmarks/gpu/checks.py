"""Checks of a GPU's results: every kernel against its definition, and the engine's tokens against the CPU's.

Knows inputs and tolerances. Does not time anything. Checks are independent: `wrong` lists failures, and the other
checks still run.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu.fixtures import eight_bits, write_config
from quire import env

if TYPE_CHECKING:
    from benchmarks.gpu.run import Found, Run

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Bounds of |got - want| / |want| over a whole tensor."""


def formats(run: Run) -> dict[torch.dtype, float]:
    """Dtypes that the device supports, with their bounds; Triton's interpreter does not round bfloat16 correctly."""
    return {d: b for d, b in BOUNDS.items() if run.device == "cuda" or d != torch.bfloat16}


def distance(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def kernels(run: Run, found: Found) -> None:
    """Distances by kernel and dtype, and those out of bounds."""
    found.update(wrong=[], distances={}, bits={})
    for name, check in {
        "rows": rows,
        "attention": attention,
        "float8": float8,
        "int8": int8,
        "few bits": few_bits,
        "bits": bits,
        "sampling": sampling,
    }.items():
        try:
            check(run, found)
        except Exception as error:
            found["wrong"].append(f"{name}: {type(error).__name__}: {error}"[:1000])
        found.save()


def _note(found: dict[str, Any], name: str, got: Tensor, want: Tensor, bound: float) -> None:
    d = distance(got, want)
    found["distances"][name] = d
    if not d <= bound:
        found["wrong"].append(f"{name}: {d:.2e} is above {bound:.0e}")


def rows(run: Run, found: dict[str, Any]) -> None:
    """Norms, activations and rotation."""
    from quire.ops import reference  # noqa: F401
    from quire.ops.dispatch import OPS
    from quire.ops.triton import norm_rope_act as rows  # noqa: F401

    for dtype, bound in formats(run).items():

        def x(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=run.device).to(dtype)

        angle = torch.randn(33, 32, device=run.device)
        calls: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x(33, 896), x(896), 1e-6),
            "add_rms_norm": (x(33, 896), x(33, 896), x(896), 1e-6),
            "rotate": (x(33, 12, 80)[:, 2:9], angle.cos(), angle.sin()),
            "silu_and_mul": (x(33, 3072),),
            "gelu_and_mul": (x(33, 3072),),
        }
        for name, call in calls.items():
            answers = []
            for kind in ("triton", "reference"):
                fresh = [t.clone() if isinstance(t, Tensor) else t for t in call]
                answer = OPS[name].implementations[kind](*fresh)
                answers.append(answer[0] if isinstance(answer, tuple) else answer)
            _note(found, f"{name} {dtype}", answers[0], answers[1], bound)


def _attended(
    run: Run, dtype: torch.dtype, kept: str, lengths: list[int], chunk: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output for each row's last token by Triton and by the reference: chunked prefill, then one decode step."""
    from benchmarks.gpu.fixtures import step_of
    from quire.attention.reference import ReferenceAttention
    from quire.attention.triton import TritonAttention
    from quire.forward_context import forward_context
    from quire.layers.attention import Attention

    answers = []
    for backend in (TritonAttention(), ReferenceAttention()):
        torch.manual_seed(5)
        layer = Attention(8, 2, 64, **options).to(run.device)
        blocks = sum(-(-n // 16) for n in lengths) + 1
        parts = backend.cache_parts(layer.spec.cache_spec(kept), blocks, 16)
        cache = tuple(torch.zeros(p.shape, dtype=p.dtype, device=run.device) for p in parts)
        layer.bind(backend, cache)
        done, out = [0] * len(lengths), torch.empty(0)
        while any(a < n for a, n in zip(done, lengths, strict=True)):
            counts = [max(0, min(chunk, n - 1 - a)) for a, n in zip(done, lengths, strict=True)]
            counts = counts if any(counts) else [1] * len(lengths)
            batch = step_of(done, counts, lengths, run.device)
            q, k, v = (
                torch.randn(batch.num_tokens, heads, 64, device=run.device).to(dtype)
                for heads in (8, 2, 2)
            )
            with forward_context(batch):
                out = layer(q, k, v)
            done = [a + n for a, n in zip(done, counts, strict=True)]
        answers.append(out)
    return answers[0], answers[1]


def attention(run: Run, found: dict[str, Any]) -> None:
    """All kinds of layers and cache dtypes, with rows of very different lengths."""
    sinks = torch.nn.Parameter(torch.randn(8, device=run.device), requires_grad=False)
    lengths = [1, 17, 70] if run.small else [1, 17, 130, 600, 2500]
    layers: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": 40},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": sinks},
    }
    for dtype, bound in formats(run).items():
        name = str(dtype).removeprefix("torch.")
        for kind, options in layers.items():
            got, want = _attended(run, dtype, name, lengths, 300, **options)
            _note(found, f"attention {kind} {name}", got, want, bound)
    for kept in ("int8", "fp8_e4m3", "fp8_e5m2"):
        if run.device == "cuda" or kept == "int8":
            got, want = _attended(run, list(formats(run))[-1], kept, lengths, 300)
            _note(found, f"attention in {kept}", got, want, 2e-2)


def float8(run: Run, found: dict[str, Any]) -> None:
    """fp8: codes, bit for bit; products with scales by row and by block, for every tile; torch's scaled GEMM."""
    from benchmarks.gpu import fp8_gemm_tma
    from quire.ops.triton import fp8_gemm as kernel
    from quire.quantization.fp8 import Float8Weight, quantize, torch_can

    torch.manual_seed(7)
    dtype = list(formats(run))[-1]
    counts, outs, ins = ((3, 40), 48, 160) if run.small else ((1, 17, 40, 300), 1536, 2048)
    weight = torch.randn(outs, ins, device=run.device)
    for wide in (0, 32) if run.small else (0, 128):
        codes, scale = quantize(weight, wide)
        made = Float8Weight(codes, scale, False, wide)
        for tokens in counts:
            x = torch.randn(tokens, ins, device=run.device).to(dtype)
            got, want = kernel.codes(x, wide), quantize(x, wide)
            same = torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
            found["bits"][f"codes of {tokens} tokens by {wide}"] = same and torch.equal(*(p[1] for p in (got, want)))  # fmt: skip
            pair = made.q_OI, made.scale
            exact = made.reference(x, None)
            y = kernel.product(got, pair, None, dtype, wide)
            _note(found, f"product of {tokens} tokens by {wide}", y, exact, BOUNDS[dtype])
            if tokens == counts[-1]:
                y = fp8_gemm_tma.product(got, pair, None, dtype, wide)
                _note(found, f"the same by descriptors, by {wide}", y, exact, BOUNDS[dtype])
    found["bits"]["torch's scaled product is used"] = torch_can(torch.device(run.device))


def int8(run: Run, found: dict[str, Any]) -> None:
    """int8 codes and products, bit for bit: every tile, tensor descriptors, and torch's sums."""
    from benchmarks.gpu import fp8_gemm_tma
    from quire.ops.triton import int8_gemm as kernel
    from quire.quantization.int8 import Int8Codes, quantize

    torch.manual_seed(9)
    dtype = list(formats(run))[-1]
    counts, outs, ins = ((3, 40), 48, 160) if run.small else ((1, 17, 40, 300, 3000), 6144, 2048)
    weight = Int8Codes.of(torch.randn(outs, ins, device=run.device), False, None)
    pair = weight.q_OI, weight.scale_O
    for tokens in counts:
        x = torch.randn(tokens, ins, device=run.device).to(dtype)
        bias = torch.randn(outs, device=run.device).to(dtype)
        coded, want = kernel.codes(x), weight.reference(x, bias)
        answers = {
            "codes": (coded[0], quantize(x)[0]),
            "product": (weight.multiply(x, bias), want),
            "product by descriptors": (fp8_gemm_tma.product(coded, pair, bias, dtype), want),
        }
        if tokens == counts[-1]:  # torch needs more than 16 tokens
            sums = torch._int_mm(coded[0], weight.q_OI.t()).float()
            scaled = sums * (coded[1][:, None] * weight.scale_O) + bias.float()
            answers["product by torch's sums"] = scaled.to(dtype), want
        for name, (got, exact) in answers.items():
            say = f"int8 {name} of {tokens} tokens"
            found["bits"][say] = torch.equal(got, exact)
            if not found["bits"][say]:
                found["wrong"].append(f"{say}: {int((got != exact).sum())} of {got.numel()} differ")


def few_bits(run: Run, found: dict[str, Any]) -> None:
    """WNA16 weights of 4 and 8 bits, for numbers of tokens that use each tile, and torch's product."""
    from quire.quantization.wna16 import FewBitsWeight

    torch.manual_seed(8)
    dtype = list(formats(run))[-1]
    counts, outs, ins = ((3,), 48, 160) if run.small else ((1, 40, 300, 600), 1536, 2048)
    weight = torch.randn(outs, ins, device=run.device)
    for name, made in {
        "4": FewBitsWeight.int4(weight, False),
        "4 in groups of 32": FewBitsWeight.int4(weight, False, group=32),
        "8": eight_bits(weight, 32),
    }.items():
        for tokens in counts:
            x = torch.randn(tokens, ins, device=run.device).to(dtype)
            y, want = made.multiply(x), made.reference(x, None)
            _note(found, f"{name} bits by {tokens} tokens", y, want, BOUNDS[dtype])


def bits(run: Run, found: dict[str, Any]) -> None:
    """Whether splits and item sizes change bits; reported, but not required in 16 bits."""
    from benchmarks.gpu.fixtures import filled_cache
    from quire.ops.triton.attention import Scores, attend, sizes_for

    for dtype in formats(run):
        lengths = [40, 90] if run.small else [700, 1800]
        cache, step, q = filled_cache(lengths, 1, dtype, run.device, heads=8, kv_heads=2)
        sizes, scores = sizes_for(4, 128, dtype.itemsize), Scores(0.09)
        one, many = (attend(q, cache, step, scores, sizes, splits=n) for n in (1, 3))
        work = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device=run.device)
        long = dataclasses.replace(step, num_short=0, long_W2=work)
        found["bits"][f"{dtype}: one program a row or three"] = torch.equal(one, many)
        found["bits"][f"{dtype}: as a short item or a long one"] = torch.equal(
            one, attend(q, cache, long, scores, sizes)
        )


def sampling(run: Run, found: dict[str, Any]) -> None:
    """Sampled tokens, cutoffs, logprobs and ranks, compared with the CPU's."""
    import numpy as np

    from quire.ops.triton import sampling as kernel
    from quire.worker.sampling import logprobs, top_k_top_p, triton_ops
    from quire.worker.sampling.gumbel import draw, keys, seed_words
    from quire.worker.sampling.row_params import ROW_PARAMS

    rows, vocab = (6, 3000) if run.small else (64, 151_936)
    made = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(rows, vocab, generator=made)
    drawn = torch.from_numpy(keys(seed_words(list(range(rows))), np.arange(rows) + 7))
    here, keys_2S = x.to(run.device), drawn.to(run.device)
    same = int((kernel.draw(here, keys_2S).cpu() == draw(x, drawn)).sum())
    found["bits"]["tokens drawn as on the CPU"] = f"{same} of {rows}"
    lots = np.array([(1.0, 0, 50, 0.9, np.log(0.01))] * rows, ROW_PARAMS)
    got, want = triton_ops.cutoff(here, lots), top_k_top_p.cutoff(x, lots)
    equal = int(((got.logits_S.cpu() == want.logits_S) & (got.ids_S.cpu() == want.ids_S)).sum())
    found["bits"]["cutoffs as on the CPU"] = f"{equal} of {rows}"
    if same < 0.99 * rows or equal < 0.99 * rows:
        found["wrong"].append("sampling: too few tokens or cutoffs as on the CPU")
    chosen = torch.arange(rows)
    a = triton_ops.score(here, chosen.to(run.device), 5, None, True)
    b = logprobs.score(x, chosen, 5, None, True)
    _note(found, "log-probabilities", a.values_NK.cpu(), b.values_NK, 1e-5)
    if not torch.equal(a.ranks_N.cpu(), b.ranks_N):
        found["wrong"].append("sampling: ranks differ")


# ------------------------------------------------------------------------------------ the engine


def engine(run: Run, found: Found) -> None:
    """Greedy and sampled tokens of a tiny float32 model with random weights, in every execution mode."""
    from quire.protocol.sampling_params import SamplingParams

    prompts = [[7 + i, *range(3, 3 + 11 * i % 90)] for i in range(6)]
    shared: dict[str, Any] = {"top_p": 0.9, "max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, **shared)
        for i in range(len(prompts))
    ]
    found["wrong"] = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "tiny")
        want = _tokens(folder, "cpu", prompts, params)
        ways: dict[str, dict[str, Any]] = {
            "depth 1, no graphs": {"async_scheduling": False, "enforce_eager": True},
            "depth 2, no graphs": {"async_scheduling": True, "enforce_eager": True},
            "depth 2, graphs": {"async_scheduling": True},
            "chunks of 8": {"max_num_batched_tokens": 8},
            "weights from the host": {"cpu_offload_gb": 1e-6},
        }
        for name, options in ways.items():
            try:
                got = _tokens(folder, run.device, prompts, params, **options)
            except Exception as error:
                found["wrong"].append(f"{name}: {type(error).__name__}: {error}"[:1000])
                continue
            same = sum(a == b for a, b in zip(got, want, strict=True))
            found[name] = f"{same} of {len(want)} texts are the CPU's"
            if same < len(want):
                found["wrong"].append(f"{name}: {found[name]}")


def _tokens(
    folder: str, device: str, prompts: list[list[int]], params: list[Any], **options: Any
) -> list[list[int]]:
    from benchmarks.gpu.fixtures import opened

    # With all of a GPU's memory, there would be tens of millions of blocks.
    settings = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 64 << 20, **options}
    with on(device), opened(folder, max_num_seqs=8, max_model_len=256, **settings) as ask:
        return ask(prompts, params)


@contextmanager
def on(device: str) -> Iterator[None]:
    """Set QUIRE_DEVICE within the context."""
    before = env.raw("DEVICE")
    env.set_outer("QUIRE_DEVICE", device)
    try:
        yield
    finally:
        env.set_outer("QUIRE_DEVICE", before or "auto")
