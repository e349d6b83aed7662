"""A GGUF file whose weights stay in their blocks, split among ranks: the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.attention.cpu import CpuAttention
from quire.ops.cpu.bindings import best
from quire.parallel.ranks import split_among
from quire.quantization.apply import weight_bytes
from tests.models.gguf_files import mixed
from tests.models.harness import Runner
from tests.models.test_gguf import PROMPT, TINY, GgufCopy, Kind, build
from tests.parallel.thread_engine import LOCK
from tests.parallel.thread_ranks import ThreadRanks, on_ranks


@pytest.mark.skipif(best() is None, reason="no kernels")
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_of_ranks_have_the_bits_of_one_process(tied: bool, tmp_path: Path) -> None:
    copy = GgufCopy(TINY, mixed)
    file = copy.write(tmp_path / "m.gguf", head=None if tied else Kind.Q4_K)

    def run(ranks: ThreadRanks | None) -> tuple[Tensor, int]:
        with LOCK, split_among(ranks):
            model = build(file, dtype="bfloat16")
        runner = Runner(model, dtype=torch.bfloat16, backend=CpuAttention())
        return runner.prefill(0, PROMPT * 2), weight_bytes(model)

    wanted, whole = run(None)
    for got, own in on_ranks(2, run):
        assert torch.equal(got, wanted)
        assert own < 0.7 * whole
