"""A GGUF model: the same request gives the same tokens alone, beside others, in chunks, and without the fast path."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import engine, greedy, prompts
from equality.test_quantized import COMPANY
from msgspec.structs import replace

from quire.ops.cpu.bindings import best
from tests.models.gguf_files import TINY, GgufCopy, mixed


@pytest.mark.skipif(best() is None, reason="no kernels")
def test_batching_changes_no_token(tmp_path: Path) -> None:
    path = str(GgufCopy(TINY, mixed).write(tmp_path / "m.gguf"))
    with engine(path, dtype="bfloat16") as one:
        alone = [one.tokens([prompt], greedy(16))[0] for prompt in prompts(6)]
    assert len({tuple(tokens) for tokens in alone}) > 1
    for company in COMPANY:
        with engine(path, dtype="bfloat16", **company) as one:
            assert one.tokens(prompts(6), greedy(16)) == alone
    with engine(path, dtype="bfloat16") as one:  # log-probabilities are not for the fast path
        assert one.tokens(prompts(6), replace(greedy(16), logprobs=0)) == alone
