"""Two engines of one process, each in a thread: neither's tokens depend on the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire.layers.prepared_weight import PreparedWeight
from quire.ops.cpu import bindings
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from tests.kernel_builds import BUILDS, kernels_of

ROWS = [1, 40, 100]  # ways that the kernels take; more is the same as with one engine


def weight(scheme: str, rng: torch.Generator, kernels: bindings.Kernels) -> PreparedWeight:
    outs_OI = torch.randn(96, 1024, generator=rng).bfloat16()
    if scheme == "bfloat16":
        return PackedBf16Weight.of(kernels, outs_OI)
    return {"int8": Int8Weight, "int4": Int4Weight}[scheme].of(outs_OI, False, kernels)


@pytest.mark.parametrize("scheme", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", BUILDS)
def test_linears_at_the_same_time(name: str, scheme: str) -> None:
    kernels = kernels_of(name)
    rng = torch.Generator().manual_seed(1)
    linears = [weight(scheme, rng, kernels) for _ in range(2)]
    inputs = [[torch.randn(rows, 1024, generator=rng).bfloat16() for rows in ROWS] for _ in linears]
    alone = [[one.multiply(x, None) for x in xs] for one, xs in zip(linears, inputs, strict=True)]
    together = threading.Barrier(2)

    def use(number: int) -> bool:
        together.wait(60)
        return all(
            torch.equal(linears[number].multiply(x, None), want)
            for _ in range(60)
            for x, want in zip(inputs[number], alone[number], strict=True)
        )

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, (0, 1))) == [True, True]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3", "bfloat16"), ("mistral", "float32"), ("gemma3_text", "float32")]
)
def test_engines_at_the_same_time(kind: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    asked = [prompts(12, seed) for seed in (1, 2)]
    with engine(path, dtype=dtype) as first, engine(path, dtype=dtype) as second:
        alone = [one.tokens(p, greedy(8)) for one, p in zip((first, second), asked, strict=True)]
        together = threading.Barrier(2)

        def again(number: int) -> list[list[list[int]]]:
            one = (first, second)[number]
            together.wait(60)
            return [one.tokens(asked[number], greedy(8)) for _ in range(3)]

        with ThreadPoolExecutor(2) as threads:
            for number, found in enumerate(threads.map(again, (0, 1))):
                assert found == [alone[number]] * 3
