"""The engine as built for CUDA, on the CPU: kernels in Triton's interpreter, staged rows, captured graphs.

The tokens equal Transformers', in any batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton_interpreter  # noqa: F401
from engines import engine, greedy, make_checkpoint, plain, prompts
from worker.test_graphs import Capturer

from quire.ops.dispatch import OPS
from quire.platforms.cpu import CpuPlatform
from quire.protocol.sampling_params import SamplingParams

COUNT = 3


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "mistral"])
def test_tokens_equal_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "kernels", ("triton", "reference"))
    for op in OPS.values():
        monkeypatch.setattr(op, "run", op.run)  # so that it comes back
    capturer = Capturer()
    monkeypatch.setattr(CpuPlatform, "graph_capturer", lambda self: capturer)
    path, asked = make_checkpoint(kind, tmp_path, num_hidden_layers=2), prompts(3, longest=30)
    settings = {"block_size": 16, "max_num_batched_tokens": 32, "attention_backend": "triton_attn"}
    settings["cudagraph_capture_sizes"] = ["3", 8, 900]
    drawn = SamplingParams(temperature=0.8, max_tokens=COUNT, ignore_eos=True, seed=4)
    with np.errstate(all="ignore"), engine(path, depth=2, **settings) as one:
        assert OPS["rms_norm"].run is OPS["rms_norm"].implementations["triton"]
        together = one.tokens(asked, [greedy(COUNT), greedy(COUNT), drawn])
        assert together[:2] == [plain(path, prompt, COUNT) for prompt in asked[:2]]
        assert one.tokens(asked[2:], drawn) == together[2:]
        assert capturer.sizes, "no step of single tokens was replayed"
        assert set(capturer.sizes) <= {3, 8}
