"""CacheConfig: the size and the format of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

KV_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""The values of kv_cache_dtype besides auto -> the name of the element format (kvcache/specs.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV cache."""

    block_size: int | None = None
    """Tokens a block; unset: what the platform prefers."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, activations and KV; on CPU of what this cgroup has free at start."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; set, it replaces gpu_memory_utilization."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, whatever memory says (for testing preemption)."""
    kv_cache_dtype: str = "auto"
    """auto (the model's), float32, bfloat16, float16; int8, fp8 (fp8_e4m3) or fp8_e5m2 with a scale for each token and head."""
    enable_prefix_caching: bool | None = None
    """Share the KV of equal prefixes; unset: on where the model allows it."""
    prefix_caching_hash_algo: str = "blake2b"
    """blake2b; sha256 and xxhash names are accepted and mean the same keyed hash."""
    swap_space: float = 0
    """GiB of host memory for preempted requests (accepted; nothing is swapped, it is recomputed)."""
    cpu_offload_gb: float = 0
    """GiB of weights that a GPU is relieved of: they stay in the host's memory and are brought for each step (a CPU ignores it)."""
