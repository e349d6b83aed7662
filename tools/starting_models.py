"""Models to start with: how much memory each takes, by the arithmetic of `quire doctor`.

The shapes are those of the published config.json files. Nothing is downloaded, and no weights are made.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.models.checkpoint_files import in_memory, stored_tensors
from quire.worker.memory_forecast import specs_of

CONTEXT = 8192
REST_GIB = 0.7  # the processes, their libraries, and the activations of a step
MEMORY_GIB = (4, 8, 16, 24, 32, 48, 64, 96, 128)  # of machines
QWEN, LLAMA = {"model_type": "qwen3", "vocab_size": 151936}, {"model_type": "llama", "vocab_size": 128256}  # fmt: skip


def shape(
    hidden: int, layers: int, heads: int, inner: int, kv_heads: int = 8, head: int = 128
) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": inner, "num_key_value_heads": kv_heads, "head_dim": head}  # fmt: skip


TIED = {"tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": QWEN | shape(1024, 28, 16, 3072) | TIED,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA | shape(2048, 16, 32, 8192, head=64) | TIED,
    "Qwen/Qwen3-1.7B": QWEN | shape(2048, 28, 16, 6144) | TIED,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA | shape(3072, 28, 24, 8192) | TIED,
    "Qwen/Qwen3-4B": QWEN | shape(2560, 36, 32, 9728) | TIED,
    "mistralai/Mistral-7B-Instruct-v0.3": {"model_type": "mistral", "vocab_size": 32768} | shape(4096, 32, 32, 14336),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA | shape(4096, 32, 32, 14336),
    "Qwen/Qwen3-8B": QWEN | shape(4096, 36, 32, 12288),
    "Qwen/Qwen3-14B": QWEN | shape(5120, 40, 40, 17408),
    "Qwen/Qwen3-32B": QWEN | shape(5120, 64, 64, 25600),
}  # fmt: skip


def weights(config: dict[str, Any], scheme: str | None) -> float:
    """GiB of the loaded weights in 16 bits, or quantized."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return in_memory(stored_tensors(folder, config, "dummy"), 2, scheme) / 2**30


def kv_cache(config: dict[str, Any]) -> float:
    """GiB of the keys and values of one full context."""
    return CONTEXT * sum(spec.bytes_per_token for spec in specs_of(config, "bfloat16")) / 2**30


def rows() -> Iterator[str]:
    yield f"| model | weights in 16 bits | int8 | int4 | KV cache of {CONTEXT:,} tokens | machine with (16 bits / int8 / int4) |"
    yield "|---|---|---|---|---|---|"
    for name, config in CONFIGS.items():
        sizes, cache = [weights(config, scheme) for scheme in (None, "int8", "int4")], kv_cache(config)  # fmt: skip
        needed = [(size + cache + REST_GIB) / 0.9 for size in sizes]
        machines = " / ".join(str(next(gib for gib in MEMORY_GIB if gib >= one)) for one in needed)
        columns = " | ".join(f"{size:.1f} GiB" for size in (*sizes, cache))
        yield f"| `{name}` | {columns} | {machines} GiB |"
