"""Encoders in the CPU kernels: one call for all layers against the modules, and a prompt alone against company."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.native.fused_decoder import fuse_model, unfuse_model
from quire.ops.cpu.bindings import best
from quire.ops.packed_attention import packed_attention
from tests.models.encoder_cases import ENCODERS, Encoder, write
from tests.models.test_encoders import build, hidden, texts

pytestmark = pytest.mark.skipif(best() is None, reason="the CPU kernels are not available")

LENGTHS = (61, 1, 9, 34, 17, 33, 7, 60)
WIDE = {"hidden_size": 128, "intermediate_size": 192}
CASES = [
    replace(case, config={**case.config, **WIDE, **({"dim": 128, "hidden_dim": 192} if case.kind == "distilbert" else {})})
    for case in ENCODERS
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name.replace(" ", "-")) for c in CASES])
def test_one_call_gives_the_bits_of_the_modules(case: Encoder, tmp_path: Path) -> None:
    theirs = write(case, tmp_path)
    ours = build(tmp_path, type(theirs).__name__, "bfloat16")
    lines = texts(LENGTHS)
    unfuse_model(ours)
    plain = hidden(ours, lines)
    fuse_model(ours)
    assert ours.model.fused is not None
    together = hidden(ours, lines)
    for line, module, got in zip(lines, plain, together, strict=True):
        assert torch.equal(got, module)
        assert torch.equal(hidden(ours, [line])[0], got)
        with torch.inference_mode():
            ids = torch.tensor([line])
            truth = theirs(input_ids=ids).last_hidden_state[0]
        cosine = torch.cosine_similarity(got.float(), truth, dim=-1)
        assert cosine.min() > 0.999


def test_rounding_is_that_of_transformers(tmp_path: Path) -> None:
    """Errors of bf16 are no larger than errors of Transformers in bf16."""
    theirs = write(CASES[0], tmp_path)
    ours = build(tmp_path, "BertModel", "bfloat16")
    fuse_model(ours)
    lines = texts((61, 40))
    with torch.inference_mode():
        for line, got in zip(lines, hidden(ours, lines), strict=True):
            ids = torch.tensor([line])
            truth = copy.deepcopy(theirs).double()(input_ids=ids).last_hidden_state[0]
            rounded = copy.deepcopy(theirs).bfloat16()(input_ids=ids).last_hidden_state[0]
            bound = (rounded - truth).square().mean().sqrt()
            assert (got - truth).square().mean().sqrt() < 1.2 * bound


@pytest.mark.parametrize("window", [None, 1, 5, 40, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_kernel_equals_the_definition(window: int | None, biased: bool) -> None:
    """Prompts of one token, of a tile and its neighbours; heads that share keys and values; a row alone."""
    torch.manual_seed(0)
    lengths = [1, 15, 16, 17, 33, 256, 257, 40]
    starts_B1 = torch.tensor([0, *lengths]).cumsum(0)
    tokens, heads, kv_heads, size = int(starts_B1[-1]), 4, 2, 32
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).bfloat16()
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
    q_THD, k_TKD, v_TKD = (x.unflatten(-1, (-1, size)) for x in (q, k, v))
    bias_HL = torch.randn(heads, 2 * 300 - 1) if biased else None
    kernel = packed_attention.implementations["native"]
    got = kernel(q_THD, k_TKD, v_TKD, starts_B1, 0.2, window, bias_HL)
    floats = (x.float() for x in (q_THD, k_TKD, v_TKD))
    want = packed_attention.reference(*floats, starts_B1, 0.2, window, bias_HL)
    assert (got - want).abs().max() < 0.02
    assert torch.nn.functional.cosine_similarity(got.float().flatten(), want.flatten(), 0) > 0.9999
    for start, length in zip(starts_B1.tolist(), lengths, strict=False):
        row = slice(start, start + length)
        alone = kernel(
            q_THD[row], k_TKD[row], v_TKD[row], torch.tensor([0, length]), 0.2, window, bias_HL
        )
        assert torch.equal(alone, got[row])
