"""Settings of the small engines of these tests."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
    "seed": 0,
}  # fmt: skip
