"""Attention by the FlashInfer package, where it is installed.

Knows the package's wrapper and the arguments of its plan. Does not know kernels. Not batch-invariant: the package
splits contexts by the number of rows. Not yet run with the real package on any device: the tests check the arguments.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size, B rows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, Capabilities
from quire.forward_context import ForwardBatch
from quire.ops.triton.kv_write import write

WORKSPACE = 256 << 20  # bytes, for partial results

Kind = tuple[int, int, int, int, float, float]
"""Heads, KV heads, head size, window (-1: none), softcap (0: none), scale: what a plan depends on besides the step."""


@dataclass(slots=True)
class FlashInferStepMetadata:
    """Step metadata that the layers of a KV group share; `planned`: the kinds of layers with a plan for this step."""

    slots_T: Tensor
    starts_B1: Tensor
    block_tables: Tensor
    lengths: list[int]
    planned: set[Kind] = field(default_factory=set)


class FlashInfer(AttentionBackend):
    """Cache: keys and values [blocks, K, block_size, D], which the package calls HND.

    Raises:
        ImportError: the package is not installed.
    """

    can = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=(64, 128, 256),
        block_sizes=(16, 32, 64, 128),
        kv_dtypes=frozenset({"auto", "bfloat16", "float16"}),
        windows=True,
        softcap=True,
    )

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("flashinfer")
        self.workspace: Tensor | None = None
        self.wrappers: dict[Kind, Any] = {}

    def plan(self, batch: ForwardBatch, kv_group: int) -> FlashInferStepMetadata:
        lengths = batch.lengths or batch.lengths_B.tolist()
        tables = batch.block_tables[kv_group]
        return FlashInferStepMetadata(
            batch.slots[kv_group], batch.query_start_B1.int(), tables, lengths
        )

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        meta: FlashInferStepMetadata,
    ) -> Tensor:
        keys, values = spec.cache
        if k_TKD is not None and v_TKD is not None:
            write(spec.cache, k_TKD, v_TKD, meta.slots_T)
        wrapper = self._wrapper(spec, q_THD, keys, meta)
        o_THD: Tensor = wrapper.run(q_THD.contiguous(), (keys, values))
        return o_THD

    def _wrapper(
        self, spec: AttentionSpec, q_THD: Tensor, keys: Tensor, meta: FlashInferStepMetadata
    ) -> Any:
        """The wrapper for layers of this kind, planned for this step."""
        window = -1 if spec.window is None else spec.window - 1
        kind = (spec.num_heads, spec.num_kv_heads, spec.head_dim, window, spec.softcap or 0.0, spec.scale)  # fmt: skip
        if kind not in self.wrappers:
            if self.workspace is None:
                self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=keys.device)
            make = self.module.BatchPrefillWithPagedKVCacheWrapper
            self.wrappers[kind] = make(self.workspace, "HND")
        wrapper = self.wrappers[kind]
        if kind not in meta.planned:
            size = keys.shape[2]
            used = [-(-n // size) for n in meta.lengths]
            rows = torch.tensor([row for row, n in enumerate(used) for _ in range(n)])
            places = torch.tensor([place for n in used for place in range(n)])
            device = keys.device
            indices = meta.block_tables[rows.to(device), places.to(device)].int()
            first_B1 = torch.tensor([0, *used]).cumsum(0).int()
            last_B = torch.tensor([(n - 1) % size + 1 for n in meta.lengths], dtype=torch.int32)
            wrapper.plan(
                meta.starts_B1, first_B1.to(device), indices, last_B.to(device), spec.num_heads,
                spec.num_kv_heads, spec.head_dim, size, causal=True, sm_scale=spec.scale,
                window_left=window, logits_soft_cap=spec.softcap or 0.0, q_data_type=q_THD.dtype,
                kv_data_type=keys.dtype,
            )  # fmt: skip
            meta.planned.add(kind)
        return wrapper
