"""Models to start with, and models with short names: how much memory each takes, by the arithmetic of `quire doctor`.

The shapes come from the published config.json files. Nothing is downloaded, and no weights are made.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.config.short_names import short_names
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

QWEN2, SMOL = {"model_type": "qwen2", "vocab_size": 151936}, {"model_type": "llama", "vocab_size": 49152} | TIED  # fmt: skip
QWEN2_7B = QWEN2 | {"vocab_size": 152064} | shape(3584, 28, 28, 18944, 4)
QWEN2_1_5B = QWEN2 | shape(1536, 28, 12, 8960, 2)
SHORT_NAMES: dict[str, dict[str, Any]] = CONFIGS | {
    "Qwen/Qwen3-30B-A3B": QWEN | shape(2048, 48, 32, 128 * 768, 4),  # as many weights as its 128 experts have
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2 | shape(896, 24, 14, 4864, 2, 64) | TIED,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2_1_5B | TIED,
    "Qwen/Qwen2.5-3B-Instruct": QWEN2 | shape(2048, 36, 16, 11008, 2) | TIED,
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_7B,
    "Qwen/Qwen2.5-14B-Instruct": QWEN2 | {"vocab_size": 152064} | shape(5120, 48, 40, 13824),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": QWEN2_1_5B | TIED,
    "Qwen/Qwen2.5-Coder-7B-Instruct": QWEN2_7B,
    "google/gemma-3-1b-it": {"model_type": "gemma3_text", "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6} | shape(1152, 26, 4, 6912, 1, 256) | TIED,
    "microsoft/Phi-4-mini-instruct": {"model_type": "phi3", "vocab_size": 200064} | shape(3072, 32, 24, 8192) | TIED,
    "microsoft/phi-4": {"model_type": "phi3", "vocab_size": 100352} | shape(5120, 40, 40, 17920, 10),
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOL | shape(576, 30, 9, 1536, 3, 64),
    "HuggingFaceTB/SmolLM2-360M-Instruct": SMOL | shape(960, 32, 15, 2560, 5, 64),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": SMOL | shape(2048, 24, 32, 8192, 32, 64),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": CONFIGS["Qwen/Qwen3-8B"],
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": QWEN2_1_5B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": QWEN2_7B,
}  # fmt: skip


def weights(config: dict[str, Any], scheme: str | None) -> float:
    """GiB of the loaded weights in 16 bits, or quantized."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return in_memory(stored_tensors(folder, config, "dummy"), 2, scheme) / 2**30


def kv_cache(config: dict[str, Any]) -> float:
    """GiB of the keys and values of one full context."""
    return CONTEXT * sum(spec.bytes_per_token for spec in specs_of(config, "bfloat16")) / 2**30


def needed(weights_gib: float, cache_gib: float) -> int:
    """GiB of the smallest usual machine."""
    least = (weights_gib + cache_gib + REST_GIB) / 0.9
    return next(gib for gib in MEMORY_GIB if gib >= least)


def by_memory() -> Iterator[str]:
    """The models with short names, with their default quantization, the smallest first."""
    yield f"| memory | command | weights | KV cache of {CONTEXT:,} tokens |"
    yield "|---|---|---|---|"
    found = []
    for name, (model, scheme) in short_names().items():
        if ":" in name:
            size, cache = weights(SHORT_NAMES[model], scheme), kv_cache(SHORT_NAMES[model])
            found.append((needed(size, cache), size, cache, name, scheme))
    for machine, size, cache, name, scheme in sorted(found):
        yield f"| {machine} GiB | `quire serve {name}` | {size:.1f} GiB, {scheme} | {cache:.2f} GiB |"


def rows() -> Iterator[str]:
    yield f"| model | weights in 16 bits | int8 | int4 | KV cache of {CONTEXT:,} tokens | machine with (16 bits / int8 / int4) |"
    yield "|---|---|---|---|---|---|"
    for name, config in CONFIGS.items():
        sizes, cache = [weights(config, scheme) for scheme in (None, "int8", "int4")], kv_cache(config)  # fmt: skip
        machines = " / ".join(str(needed(size, cache)) for size in sizes)
        columns = " | ".join(f"{size:.1f} GiB" for size in (*sizes, cache))
        yield f"| `{name}` | {columns} | {machines} GiB |"
