"""Attention by Triton kernels: one launch for rows with few new tokens, one for the rest.

Knows how a step is split into work items. `ops/triton/attention.py` explains the computation, and why it is
batch-invariant. Runs on CUDA devices, and for tests on the CPU in Triton's interpreter.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E), B rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.attention import kv_quantization
from quire.attention.base import AttentionBackend, AttentionSpec, Capabilities, QKNormRope
from quire.forward_context import ForwardBatch
from quire.ops.triton.attention import (
    PagedAttentionStep,
    Scores,
    Sizes,
    attend,
    latent_group,
    sizes_for,
)
from quire.ops.triton.kv_write import write
from quire.ops.triton.launch import INTERPRETED
from quire.ops.triton.qk_norm_rope_kv import Norms, prepare


class TritonAttention(AttentionBackend):
    """Cache layout: `kv_quantization.parts`.

    Args:
        sizes: block sizes of the kernels; None: chosen by the layer's heads and the dtype.
    """

    can = Capabilities(
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        head_dims=(*range(8, 257), 320, 512, 576),
        block_sizes=(16, 32, 64, 128),
        kv_dtypes=frozenset({"auto", *kv_quantization.DTYPES}),
        differing_values=True,
        windows=True,
        softcap=True,
        sinks=True,
        latent=True,
        graphs=True,
    )

    def __init__(self, sizes: Sizes | None = None):
        self.sizes = sizes

    def plan(self, batch: ForwardBatch, kv_group: int) -> TritonStepMetadata:
        return TritonStepMetadata(batch, kv_group)

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKE: Tensor | None,
        meta: TritonStepMetadata,
    ) -> Tensor:
        """Write k and v to the batch's slots; return o_THE in q's dtype."""
        if k_TKD is None or v_TKE is None:
            return self.read(spec, q_THD, meta)
        dtype = spec.cache[0].dtype
        top, less = kv_quantization.MAX_CODE.get(dtype, 0.0), 1.0
        if dtype == torch.int8:
            k_TKD, less = (
                kv_quantization.hadamard(k_TKD),
                1 / kv_quantization.hadamard_size(spec.head_dim),
            )
        write(spec.cache, k_TKD, v_TKE, meta.slots_T, top, less)
        return self.read(spec, q_THD, meta)

    def attend_fused_rope(
        self, spec: AttentionSpec, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, how: QKNormRope,
        angles: tuple[Tensor, Tensor], meta: TritonStepMetadata,
    ) -> Tensor | None:  # fmt: skip
        """Norm, rotation and cache write in one pass; None: the cache is quantized, which this pass cannot write."""
        if kv_quantization.is_quantized(spec.cache):
            return None
        norms = None
        if how.q_weight_D is not None and how.k_weight_D is not None:
            norms = Norms(how.q_weight_D, how.k_weight_D, how.eps, how.plus_one)
        arguments = (q_THD, k_TKD, v_TKE, angles, how.interleaved, norms)
        return self.read(spec, prepare(*arguments, spec.cache, meta.slots_T), meta)

    def read(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        meta: TritonStepMetadata,
        lse_TH: Tensor | None = None,
    ) -> Tensor:
        """o_THE from the cache, which has this step's tokens already."""
        heads_each = spec.num_heads // spec.num_kv_heads
        if spec.latent:
            heads_each = latent_group(spec.num_heads)
        sizes = self.sizes or sizes_for(heads_each, spec.head_dim, q_THD.element_size())
        scores = Scores(spec.scale, spec.window or 0, spec.softcap or 0.0, spec.sinks)
        q_THD = kv_quantization.query(q_THD, spec.cache[0].dtype).to(q_THD.dtype)
        return attend(q_THD, spec.cache, meta.step(heads_each, sizes), scores, sizes, lse_TH)


class TritonStepMetadata:
    """Step metadata that the layers of a KV group share; the work items depend on the heads per program."""

    def __init__(self, batch: ForwardBatch, kv_group: int):
        self.slots_T = batch.slots[kv_group]
        self.table_BN = batch.block_tables[kv_group]
        self.starts_B1, self.lengths_B = batch.query_start_B1, batch.lengths_B
        self.rows, self.longest = batch.num_rows, batch.max_length
        # The new tokens of each row, if all rows have as many, as in plain decode: no work list is needed. Else 0.
        equal = batch.max_query * batch.num_rows == batch.num_tokens
        self.equal_queries = batch.max_query if equal else 0
        self.query_lens = batch.query_lens
        self.steps: dict[tuple[int, int, int], PagedAttentionStep] = {}

    def step(self, heads_each: int, sizes: Sizes) -> PagedAttentionStep:
        key = (heads_each, sizes.short, sizes.long)
        if (found := self.steps.get(key)) is None:
            found = self.steps[key] = self._split_work(heads_each, sizes)
        return found

    def _split_work(self, heads_each: int, sizes: Sizes) -> PagedAttentionStep:
        few, many = sizes.short // heads_each, sizes.long // heads_each
        parts: dict[str, Any] = {
            "table_BN": self.table_BN,
            "starts_B1": self.starts_B1,
            "lengths_B": self.lengths_B,
            "rows": self.rows,
            "longest": self.longest,
        }
        if 0 < self.equal_queries <= few:
            parts |= {"short_W2": None, "num_short": self.rows, "long_W2": None}
            return PagedAttentionStep(**parts, most=self.equal_queries)
        counts = self.query_lens or self.starts_B1.diff().tolist()
        short = [(row, 0) for row in range(self.rows) if counts[row] <= few]
        # The longest first, so that the item that starts last is not the one that takes longest.
        order = sorted(range(self.rows), key=lambda row: -counts[row])
        long = [
            (row, index)
            for row in order
            if counts[row] > few
            for index in range(0, counts[row], many)
        ]
        device = self.table_BN.device
        table = torch.tensor([*short, *long], dtype=torch.int32).to(device, non_blocking=True)
        return PagedAttentionStep(
            **parts,
            short_W2=table[: len(short)],
            num_short=len(short),
            long_W2=table[len(short) :] if long else None,
            most=max((counts[row] for row, _ in short), default=0),
        )
