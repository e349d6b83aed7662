"""torchrun starts a process for each rank, and each is an engine of its own: all get the outputs of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError

MODEL = "quire-tiny"
LIMIT_S = 240
PROGRAM = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_torchrun import outputs

found = outputs({size}_parallel_size=2, distributed_executor_backend="external_launcher")
Path({folder!r}, os.environ["RANK"]).write_text(json.dumps(found))
"""


def outputs(**options: Any) -> list[Any]:
    """Of greedy, sampled and structured requests, more than run at once."""
    llm = LLM(MODEL, max_model_len=256, max_num_seqs=3, max_num_batched_tokens=32, **options)
    chosen = {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=12, n=2),
        SamplingParams(temperature=0.0, max_tokens=8, **chosen),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, stop=[" "]),
    ]
    prompts = ["The quick brown fox", "1 2 3 4 5", "def add(a, b):", "Once upon a time"]
    try:
        return [
            [one.token_ids, one.text, one.finish_reason, str(one.logprobs)]
            for request in llm.generate(prompts, params)
            for one in request.outputs
        ]
    finally:
        llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_every_rank_gets_the_outputs_of_one_process(size: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    tests, folder = str(Path(__file__).parent), str(tmp_path)
    program.write_text(PROGRAM.format(size=size, tests=tests, folder=folder))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run([*command, str(program)], capture_output=True, timeout=LIMIT_S, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert found[0] == found[1] == json.loads(json.dumps(outputs()))


def test_without_torchrun_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    with pytest.raises(ConfigError, match=r"RANK is not set: .*torchrun --nproc-per-node 2"):
        LLM(MODEL, **options)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4.* 2 ranks.*nproc-per-node"):
        LLM(MODEL, **options)
