"""Attention by the FlashAttention package, version 3 or 2, where it is installed.

Knows the package's two functions and their cache layout. Does not know kernels. Not batch-invariant: the package splits
contexts by the number of rows. Not yet run with the real package on any device: the tests check the arguments.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size, B rows.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from quire.attention import kv_quantization
from quire.attention.base import AttentionBackend, AttentionSpec, Capabilities
from quire.forward_context import ForwardBatch
from quire.kvcache.specs import CacheSpec

BLOCK = 256
"""Version 2 needs block sizes that are multiples of this."""


class FlashAttention(AttentionBackend):
    """Cache: keys and values [blocks, block_size, K, D].

    Raises:
        ImportError: neither version is installed.
    """

    def __init__(self) -> None:
        try:
            self.version, module = 3, importlib.import_module("flash_attn_interface")
        except ImportError:
            self.version, module = 2, importlib.import_module("flash_attn")
        self.module: Any = module
        self.can = Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"bfloat16", "float16"}),
            head_dims=range(8, 257, 8),
            block_sizes=None if self.version == 3 else range(BLOCK, 4097, BLOCK),
            kv_dtypes=frozenset({"auto", "bfloat16", "float16"}),
            windows=True,
            softcap=True,
        )

    def cache_parts(
        self, spec: CacheSpec, num_blocks: int, block_size: int
    ) -> tuple[kv_quantization.Part, ...]:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        return (kv_quantization.Part(shape, kv_quantization.DTYPES[spec.dtype]),) * 2

    def plan(self, batch: ForwardBatch, kv_group: int) -> dict[str, Any]:
        """The arguments that all layers of the KV group share."""
        lengths_B, starts_B1 = batch.lengths_B.int(), batch.query_start_B1.int()
        table_BN = batch.block_tables[kv_group].int().contiguous()
        if self.version == 3:
            arguments = {
                "cache_seqlens": lengths_B, "page_table": table_BN, "cu_seqlens_q": starts_B1,
                "max_seqlen_q": batch.max_query,
            }  # fmt: skip
        else:
            ends_B1 = torch.nn.functional.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
            arguments = {
                "cu_seqlens_q": starts_B1, "cu_seqlens_k": ends_B1, "max_seqlen_q": batch.max_query,
                "max_seqlen_k": batch.max_length, "block_table": table_BN,
            }  # fmt: skip
        return {"slots_T": batch.slots[kv_group], "given": arguments}

    def attend(
        self, spec: AttentionSpec, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None, meta: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        keys, values = spec.cache
        for cache, new in ((keys, k_TKD), (values, v_TKD)):
            if new is None:
                continue
            cache.view(-1, *cache.shape[2:])[meta["slots_T"]] = new.to(cache.dtype)
        run = "flash_attn_with_kvcache" if self.version == 3 else "flash_attn_varlen_func"
        o_THD: Tensor = getattr(self.module, run)(
            q_THD, keys, values, **meta["given"], softmax_scale=spec.scale, causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.softcap or 0.0,
        )  # fmt: skip
        return o_THD
