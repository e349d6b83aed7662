"""torchrun starts a process for each rank, and each is an engine of its own: all get the outputs of one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.from_keywords import engine_config
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
    found = launched(PROGRAM, tmp_path, size=size)
    assert found[0] == found[1] == json.loads(json.dumps(outputs()))


ASKS_TORCH = """
import json, os
from pathlib import Path
import torch.distributed as dist
from quire import LLM

if {first!r} == "the program":
    dist.init_process_group("gloo")
llm = LLM("quire-tiny", max_model_len=64, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
total = [None, None]
dist.all_gather_object(total, dist.get_rank())
Path({folder!r}, os.environ["RANK"]).write_text(json.dumps([dist.get_rank(), dist.get_world_size(), total]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the program", "the engine"])
def test_programs_use_torchs_default_group(first: str, tmp_path: Path) -> None:
    """Whoever initializes it."""
    found = launched(ASKS_TORCH, tmp_path, first=first)
    assert found == [[0, 2, [0, 1]], [1, 2, [0, 1]]]


DATA_PARALLEL = """
import json, os
from pathlib import Path
from quire import LLM, SamplingParams

llm = LLM(
    "quire-tiny", max_model_len=64, tensor_parallel_size={tensor}, data_parallel_size=2,
    distributed_executor_backend="external_launcher",
)
number = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
prompts = ["Once upon a time", "def add(a, b):", "1 2 3 4 5"][number::2]
params = SamplingParams(temperature=0, max_tokens=8)
found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
llm.shutdown()
Path({folder!r}, os.environ["RANK"]).write_text(json.dumps([number, found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_each_engine_of_several_has_its_own_prompts(tensor: int, tmp_path: Path) -> None:
    """As vLLM's example torchrun_dp_example: each engine gets every second prompt."""
    prompts = ["Once upon a time", "def add(a, b):", "1 2 3 4 5"]
    with LLM(MODEL, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        tokens = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    found = launched(DATA_PARALLEL, tmp_path, count=2 * tensor, tensor=str(tensor))
    expected = [[0, tokens[::2]], [1, tokens[1::2]]]
    assert found == [expected[rank // tensor] for rank in range(2 * tensor)]


def launched(text: str, folder: Path, count: int = 2, **fields: str) -> list[Any]:
    """Run a program in two ranks, or `count`. Returns what each wrote into the folder; None: it wrote nothing."""
    program, tests = folder / "program.py", str(Path(__file__).parent)
    program.write_text(text.format(tests=tests, folder=str(folder), **fields))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    done = subprocess.run([*launcher, program], capture_output=True, timeout=LIMIT_S, text=True)
    files = [folder / str(rank) for rank in range(count)]
    assert any(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


FAULTY_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_rank_faults as faults
from quire import LLM

rank, folder = int(os.environ["RANK"]), Path({folder!r})
(folder / f"process {{rank}}").write_text(str(os.getpid()))
if "far" in {where!r}:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as on two machines
if "every rank" in {where!r}:
    faults.FAULTY = rank
llm = LLM("quire-tiny", max_model_len=256, {size}_parallel_size=2, distributed_executor_backend="external_launcher")
hooks = llm.client.core.executor.worker.hooks

def outcome():
    try:
        return [len(one.outputs[0].token_ids) for one in llm.generate(["The quick"] * 3, faults.LONG, use_tqdm=False)]
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

before = outcome()
hooks.append(faults.Fault(rank, {how!r}, "before"))
began = time.monotonic()
found, seconds = outcome(), time.monotonic() - began
hooks.pop()
(folder / str(rank)).write_text(json.dumps([before, found, seconds, outcome()]))
if {how!r} == "stop":
    os.kill(int((folder / "process 1").read_text()), signal.SIGKILL)
while not (folder / "0").exists() and time.monotonic() < began + 60:
    time.sleep(0.1)  # while this rank lives, its connections do
"""
WHOLE = [64] * 3
ALONE = (
    "EngineDeadError: the engine stopped: RankLost: only rank 1 failed a step: .*a fault of a test"
)
FOLLOWS = "EngineDeadError: the engine stopped: RankLost: .*the engine of rank 1 has ended: only rank 1 failed"


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor", "pipeline"])
@pytest.mark.parametrize("where", ["here", "far"])
def test_a_stopped_rank_ends_the_engines_of_the_others(
    size: str, where: str, tmp_path: Path
) -> None:
    first, _ = launched(FAULTY_PROGRAM, tmp_path, size=size, where=where, how="stop")
    before, found, seconds, again = first
    assert before == WHOLE
    why = {"here": r"rank 1 is stopped \(SIGSTOP", "far": "rank 1 was silent for 20 s"}[where]
    assert re.search(f"EngineDeadError: the engine stopped: RankLost: .*{why}", found)
    assert seconds < 30
    assert again.startswith("EngineDeadError")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_a_step_that_fails_in_one_rank_ends_all_engines(size: str, tmp_path: Path) -> None:
    found = launched(FAULTY_PROGRAM, tmp_path, size=size, where="here", how="raise")
    for (before, outcome, seconds, again), why in zip(found, [FOLLOWS, ALONE], strict=True):
        assert before == WHOLE
        assert re.search(why, outcome)
        assert seconds < 30
        assert again.startswith("EngineDeadError")


@pytest.mark.slow
def test_a_step_that_fails_in_all_ranks_ends_its_requests_only(tmp_path: Path) -> None:
    found = launched(FAULTY_PROGRAM, tmp_path, size="tensor", where="every rank", how="raise")
    for before, outcome, _, again in found:
        assert before == again == WHOLE
        assert outcome == [0] * 3


def test_without_torchrun_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    with pytest.raises(ConfigError, match=r"RANK is not set: .*torchrun --nproc-per-node 2"):
        LLM(MODEL, **options)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4.* 2 ranks.*nproc-per-node"):
        LLM(MODEL, **options)


def test_engines_are_neighbouring_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torchrun's ranks on two machines, each with two engines of two ranks."""
    options = {"tensor_parallel_size": 2, "data_parallel_size": 4, "distributed_executor_backend": "external_launcher"}  # fmt: skip
    places = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "7", "LOCAL_RANK": "3"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    parallel = engine_config({"model": MODEL, **options}).parallel
    assert parallel.ranks == range(3, 4)
    assert parallel.share == (1, 2)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8: the parallel sizes make 16 ranks"):
        engine_config({"model": MODEL, **options, "data_parallel_size": 8})
