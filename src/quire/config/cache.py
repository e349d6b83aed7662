"""CacheConfig: the size and the format of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.number_types import Amount, AtLeast0, AtLeast1, Fraction, Positive

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

SAME_HASHES = {
    "builtin": "blake2b",
    "sha256_cbor": "sha256",
    "xxhash": "blake2b",
    "xxhash_cbor": "blake2b",
}
"""vLLM's names of prefix_caching_hash_algo -> the algorithm here, which is as fast and lets no client choose a collision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV cache."""

    block_size: AtLeast1 | None = None
    """Tokens per KV block; unset: the platform's default."""
    gpu_memory_utilization: Fraction = 0.9
    """Fraction of the device's memory for weights, activations and KV cache; on a CPU, of the memory that is free in this cgroup at start."""
    kv_cache_memory_bytes: AtLeast1 | None = None
    """Size of the KV cache in bytes; replaces gpu_memory_utilization. What running requests do not need holds prefixes of others."""
    num_gpu_blocks_override: AtLeast1 | None = None
    """Number of KV blocks, without regard to free memory (for tests of preemption)."""
    kv_cache_dtype: str = "auto"
    """auto (the model's dtype), float32, bfloat16, float16; int8, fp8 (fp8_e4m3) or fp8_e5m2 with one scale per token and head."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV blocks of equal prompt prefixes; unset: on if the model supports it."""
    prefix_caching_hash_algo: Literal[
        "blake2b", "builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"
    ] = "blake2b"
    """The keyed hash by which blocks are found: blake2b, or sha256 (HMAC-SHA-256). The other names of vLLM mean one of these two: sha256_cbor is sha256; builtin, xxhash and xxhash_cbor are blake2b."""
    kv_disk_dir: str | None = None
    """Folder for KV blocks of prompts: a restarted server, or another one, finds them there (docs: kv-cache.md). It holds what users wrote: keep it closed."""
    kv_disk_size: Positive = 20
    """GiB of kv_disk_dir, over all models; the least recently used blocks are deleted."""
    kv_disk_write: Literal["auto", "second-use", "always"] = "auto"
    """Which blocks are written to kv_disk_dir: auto (all, but in 24 hours at most kv_disk_size of blocks that only one request has used), second-use (those that a second request uses) or always (all)."""
    kv_remote_url: str | None = None
    """Server that keeps KV blocks for several engines: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH; needs kv_key_file, the same for all engines (docs: kv-cache.md)."""
    kv_remote_ttl: AtLeast1 = 86_400
    """Seconds after its last use until the server of kv_remote_url forgets a block."""
    kv_key_file: str | None = None
    """File with 32 random bytes that key the names of KV blocks, so that processes agree on them (`quire kv key FILE` makes one); unset: a key in kv_disk_dir, or of the process."""
    kv_transfer_config: dict[str, Any] = field(default_factory=dict)
    """vLLM's JSON that names a connector: those that keep blocks on a disk or in redis set kv_disk_dir, kv_disk_size and kv_remote_url (LMCacheConnectorV1, SharedStorageConnector, tiers with a root_dir or disk_path); others are refused by name."""
    swap_space: Amount = 0
    """GiB of host memory for KV blocks of preempted requests, which go on from there (docs: kv-cache.md); 0: they are computed again, unless preemption_mode is swap."""
    cpu_offload_gb: Amount = 0
    """GiB of weights that stay in host memory and are copied to the GPU for each step (a CPU ignores it)."""
    mamba_cache_mode: Literal["auto", "align", "all", "none"] = "auto"
    """Prefix caching of models with recurrent states: auto or align (copies of the states at the end of a prompt, where prompts part, and at intervals), all (at every mamba_block_size tokens) or none."""
    mamba_block_size: AtLeast1 | None = None
    """Copies of recurrent states are kept at multiples of this number of tokens, a multiple of block_size; unset: block_size, but at least 64."""
    prefix_cache_retention_interval: AtLeast0 | None = None
    """Copies of recurrent states are kept at multiples of this number of tokens of a prompt; 0: only at its end and where prompts part; unset: max_num_batched_tokens."""
    enable_mamba_shared_prefix_checkpoint: bool = True
    """Keep a copy of the recurrent states where the cached part of a prompt ends, for other prompts with the same beginning."""

    @property
    def hash_algorithm(self) -> Literal["blake2b", "sha256"]:
        """The algorithm that prefix_caching_hash_algo names."""
        name = SAME_HASHES.get(self.prefix_caching_hash_algo, self.prefix_caching_hash_algo)
        return "sha256" if name == "sha256" else "blake2b"
