"""Small weights: the same request gives the same tokens alone, beside others, in chunks, and layer by layer.

Exactly, in bfloat16 too: the kernels sum integers, and floats in one order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire.ops.cpu.bindings import best

COMPANY: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},
]
DTYPES = ["float32", *(["bfloat16"] if best() is not None else [])]


@pytest.mark.sampled(3)  # int8 in float32, int4 in bfloat16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_batching_changes_no_token(scheme: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    settings = {"dtype": dtype, "quantization": scheme}
    with engine(path, **settings) as one:
        alone = [one.tokens([prompt], greedy(16))[0] for prompt in prompts(6)]
    assert len({tuple(tokens) for tokens in alone}) > 1
    for company in COMPANY:
        with engine(path, **settings, **company) as one:
            assert one.tokens(prompts(6), greedy(16)) == alone
