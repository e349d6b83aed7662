"""How much memory the KV cache takes and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass


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
    """auto (the model's), float32, bfloat16, float16; fp8 and int8 forms come with their kernels."""
    enable_prefix_caching: bool | None = None
    """Share the KV of equal prefixes; unset: on where the model allows it."""
    prefix_caching_hash_algo: str = "blake2b"
    """blake2b; sha256 and xxhash names are accepted and mean the same keyed hash."""
    swap_space: float = 0
    """GiB of host memory for preempted requests (accepted; nothing is swapped, it is recomputed)."""
    cpu_offload_gb: float = 0
    """GiB of weights kept on the host (0 until the CUDA platform has it)."""
