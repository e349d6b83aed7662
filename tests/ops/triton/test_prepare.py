"""Norm, rotation and cache write in one pass: what the three give one after the other."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES

from quire.attention.base import QKNormRope
from quire.attention.triton import TritonAttention
from quire.layers.attention import Attention
from quire.ops.reference import rms_norm, rotate
from quire.ops.triton.qk_norm_rope_kv import Norms, prepare

torch.set_num_threads(1)
CLOSE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_one_after_the_other(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for trial in range(8):
        torch.manual_seed(trial)
        tokens, heads, kv_heads = rng.choice([1, 6]), rng.choice([3, 4]), rng.choice([1, 3])
        size, size_v = rng.choice([8, 24, 40]), rng.choice([8, 20])
        pairs = rng.choice([size // 2, size // 4])
        both = torch.randn(tokens, heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
        q, k = both[:, :heads], both[:, heads : heads + kv_heads]  # as the parts of a product lie
        v = torch.randn(tokens, kv_heads, size_v, device=DEVICE).to(dtype)
        angle = torch.randn(tokens, pairs, device=DEVICE)
        turn = (angle.cos(), angle.sin())
        weights = (torch.randn(2, size, device=DEVICE)).to(dtype)
        norms = rng.choice([None, Norms(*weights, 1e-5, rng.random() < 0.5)])
        interleaved = rng.random() < 0.5
        slots = torch.randperm(48, device=DEVICE)[:tokens]
        slots[tokens // 2 :][:1] = -1 if tokens > 1 else 7
        cache = tuple(
            torch.full((3, kv_heads, 16, d), torch.nan, device=DEVICE).to(dtype)
            for d in (size, size_v)
        )
        got = prepare(q, k, v, turn, interleaved, norms, cache, slots)
        if norms is not None:
            q = rms_norm.reference(q, norms.q_weight_D, norms.eps, norms.plus_one)
            k = rms_norm.reference(k, norms.k_weight_D, norms.eps, norms.plus_one)
        close = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}
        torch.testing.assert_close(got, rotate.reference(q, *turn, interleaved), **close)
        k = rotate.reference(k, *turn, interleaved)
        written = 0
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, at = divmod(slot, 16)
                torch.testing.assert_close(cache[0][block, :, at], k[token], **close)
                assert torch.equal(cache[1][block, :, at], v[token])
                written += v[token].numel()
        assert int((~cache[1].isnan()).sum()) == written


def test_an_attention_layer_uses_its_backends_fused_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer finds the method of the Triton backend by its name: a renamed one would be passed over in silence."""
    layer = Attention(2, 1, 8)
    layer.backend = TritonAttention.__new__(TritonAttention)
    answer = torch.ones(3, 2, 8)
    monkeypatch.setattr(TritonAttention, "attend_fused_rope", lambda *_: answer)
    monkeypatch.setattr(layer, "step_metadata", lambda: None)
    monkeypatch.setattr(
        "quire.layers.attention.current_batch", lambda: SimpleNamespace(needs_modules=False)
    )
    q, k = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8)
    assert layer.fused_rope(q, k, k, QKNormRope(False), (q, q)) is answer
