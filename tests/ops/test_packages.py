"""FlashAttention and FlashInfer as backends: the arguments of the packages, checked by stand-ins that compute the documented result.

The stand-ins read their arguments as the packages' own documentation says, one query at a time; the answers must equal
the reference's.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models.harness import make_batch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton_interpreter  # noqa: F401

from quire.attention import base, kv_quantization
from quire.attention.base import Needs, load_backend
from quire.attention.reference import ReferenceAttention
from quire.errors import ConfigError
from quire.forward_context import forward_context
from quire.layers.attention import Attention


def answer(q_HD, keys_NKD, values_NKD, window: int, softcap: float, scale: float):
    """The last of N tokens over itself and those before; window: how many of these, -1 all."""
    low = 0 if window < 0 else max(0, len(keys_NKD) - 1 - window)
    group = q_HD.shape[0] // keys_NKD.shape[1]
    k, v = (x[low:].repeat_interleave(group, 1) for x in (keys_NKD, values_NKD))
    s = torch.einsum("hd,nhd->hn", q_HD, k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    return torch.einsum("hn,nhd->hd", s.softmax(1), v)


def each(q_THD, starts, contexts, **how):
    """contexts: keys and values [N, K, D] of each row, the new tokens last."""
    out = torch.empty_like(q_THD)
    for row, (keys, values) in enumerate(contexts):
        for at in range(starts[row], starts[row + 1]):
            n = len(keys) - (int(starts[row + 1]) - 1 - at)
            out[at] = answer(q_THD[at], keys[:n], values[:n], **how)
    return out


def paged(cache, pages, length):
    """Of [blocks, block_size, K, D]."""
    return cache[pages.long()].flatten(0, 1)[:length]


def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
                 softmax_scale, causal, window_size, softcap):  # fmt: skip
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    lengths = cache_seqlens.tolist()
    contexts = [
        (paged(k_cache, page_table[row], n), paged(v_cache, page_table[row], n))
        for row, n in enumerate(lengths)
    ]
    return each(
        q, cu_seqlens_q, contexts, window=window_size[0], softcap=softcap, scale=softmax_scale
    )


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
           softmax_scale, causal, window_size, softcap):  # fmt: skip
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k == int(lengths.max())
    return with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip


class Wrapper:
    plans = 0

    def __init__(self, workspace, layout):
        assert layout == "HND"
        assert workspace.dtype == torch.uint8

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap,
             q_data_type, kv_data_type):  # fmt: skip
        assert causal
        assert q_data_type == kv_data_type
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        Wrapper.plans += 1
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})

    def run(self, q, kv):
        contexts = []
        for row in range(len(self.paged_kv_last_page_len)):
            pages = self.paged_kv_indices[self.paged_kv_indptr[row] : self.paged_kv_indptr[row + 1]]
            n = (len(pages) - 1) * self.page_size + int(self.paged_kv_last_page_len[row])
            contexts.append(tuple(paged(x.transpose(1, 2), pages, n) for x in kv))
        how = {"window": self.window_left, "softcap": self.logits_soft_cap, "scale": self.sm_scale}
        return each(q, self.qo_indptr, contexts, **how)


PACKAGES = {
    "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=with_kvcache),
    "flash_attn": SimpleNamespace(flash_attn_varlen_func=varlen),
    "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
}
LAYERS = {
    "plain": lambda: Attention(4, 2, 64),
    "window": lambda: Attention(4, 2, 64, window=5),
    "softcap": lambda: Attention(6, 2, 64, softcap=1.5, scale=0.3),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_compute_the_reference_result(package, kind, monkeypatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, PACKAGES[name] if name == package else None)
    layer = LAYERS[kind]()
    name = "FLASHINFER" if package == "flashinfer" else "FLASH_ATTN"
    size = 256 if package == "flash_attn" else 16
    torch.manual_seed(1)
    step = [(0, 0, [1] * 20), (1, 0, [2] * 3)], [(1, 3, [3]), (0, 20, [4] * 15)]
    tables = {0: [3, 1, 6], 1: [2]}
    found = []
    torch.set_num_threads(1)
    for backend in (load_backend(name), ReferenceAttention()):
        made = torch.Generator().manual_seed(2)
        parts = backend.cache_parts(layer.spec.cache_spec("float32"), 7, size)
        layer.bind(backend, tuple(torch.zeros(p.shape, dtype=p.dtype) for p in parts))
        outs = []
        for chunks in step:
            batch = make_batch(chunks, [tables[row] for row, _, _ in chunks], size)
            q, k, v = (
                torch.randn(batch.num_tokens, heads, 64, generator=made)
                for heads in (layer.spec.num_heads, 2, 2)
            )
            with forward_context(batch), np.errstate(all="ignore"):
                outs.append(layer(q, k, v))
                before = Wrapper.plans
                layer(q, k, v)  # a second layer of the group needs no second plan
                assert Wrapper.plans == before
        found.append(torch.cat(outs))
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-5)


def test_unsupported_calls_of_packages_are_reported(monkeypatch) -> None:
    needs = Needs(
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        head_dims=frozenset({128}),
        block_size=16,
    )
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("FLASH_ATTN", "FLASHINFER"):
        with pytest.raises(ConfigError, match=f"{name} cannot be loaded"):
            load_backend(name)
    monkeypatch.setitem(sys.modules, "flash_attn", PACKAGES["flash_attn"])
    assert load_backend("FLASH_ATTN").can.lacking(needs) == ["blocks of 16"]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", PACKAGES["flash_attn_interface"])
    assert load_backend("FLASH_ATTN").can.lacking(needs) == []
    assert kv_quantization.DTYPES.keys() - load_backend("FLASH_ATTN").can.kv_dtypes == {
        "float32",
        "int8",
        "fp8_e4m3",
        "fp8_e5m2",
    }
    assert set(base.BACKENDS) == {
        "TORCH_SDPA",
        "CPU_ATTN",
        "TRITON_ATTN",
        "FLASH_ATTN",
        "FLASHINFER",
    }
