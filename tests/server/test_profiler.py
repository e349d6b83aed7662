"""`--profiler-config`: /start_profile and /stop_profile write traces of the workers' steps, within bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import ask, browser
from scripted import ScriptedEngine, make_state

from quire.api.async_engine import AsyncEngine
from quire.api.llm import LLM
from quire.config.engine import EngineConfig
from quire.config.profiler import profiler_options
from quire.engine.build import make_client
from quire.errors import ConfigError, Unsupported, ValidationError
from quire.features.profiler.recorder import StepRecorder
from quire.protocol.plan import StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.server.state import ServerState

START, STOP, TEXT = "/start_profile", "/stop_profile", "/v1/completions"
SAY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module", params=["in the process", "in a process of its own"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerState, Path]]:  # fmt: skip
    folder = tmp_path_factory.mktemp("traces")
    keys: dict[str, Any] = {
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(folder)}
    }
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=2, kv_cache_memory_bytes=16 << 20, max_model_len=256, **keys,
    )  # fmt: skip
    made = make_state(None, **keys)
    client = make_client(config, process=True) if "own" in request.param else make_client(config)
    made.attach(engine := AsyncEngine(client, config))
    yield made, folder
    engine.shutdown()


def post(state: ServerState, *requests: tuple[str, Any]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with browser(state) as client:
            return [
                await asyncio.wait_for(client.post(path, json=body), 60) for path, body in requests
            ]

    return asyncio.run(main())


def steps_of(path: Path) -> int:
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return sum(1 for one in events if one.get("name", "").startswith("step "))


def test_a_trace_has_the_steps_between_start_and_stop(served: tuple[ServerState, Path]):
    state, folder = served
    before = {*folder.iterdir()}
    plain, start, second, said, stop, _, again = post(
        state, (TEXT, SAY), (START, {"profile_prefix": "mine"}), (START, None), (TEXT, SAY), (STOP, None),
        (TEXT, SAY), (STOP, None),
    )  # fmt: skip
    assert (start.status_code, second.status_code, stop.status_code) == (200, 409, 200), start.text
    assert second.json()["error"]["type"] == "Conflict"
    assert said.json()["choices"] == plain.json()["choices"]
    (trace,) = {*folder.iterdir()} - before
    assert trace.name.startswith("mine-rank0")
    # in the server's process the next step writes the file
    assert stop.json()["files"] in ([trace.name], [])
    assert steps_of(trace) == 8  # a prompt and 7 tokens
    assert again.json()["files"] == []


def test_a_recording_ends_by_itself(served: tuple[ServerState, Path]):
    state, folder = served
    before = {*folder.iterdir()}
    asked = {"delay_iterations": 2, "max_iterations": 3}
    start, _, stop, again = post(state, (START, asked), (TEXT, SAY), (STOP, None), (START, None))
    assert start.status_code == 200
    assert stop.json()["files"] == []  # it has been written
    (trace,) = {*folder.iterdir()} - before
    assert steps_of(trace) == 3
    assert again.status_code == 200
    post(state, (STOP, None), (TEXT, SAY))


@pytest.mark.parametrize("profile_prefix", [None, "offline"])
def test_python_has_the_same_calls(tmp_path: Path, profile_prefix: str | None):
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    llm = LLM("quire-tiny", max_model_len=256, profiler_config=config)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.start_profile(profile_prefix)
    llm.generate(["Once"], params, use_tqdm=False)
    llm.stop_profile()
    llm.generate(["Once"], params, use_tqdm=False)
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith(profile_prefix or "rank0")
    assert steps_of(trace) == 4


def test_python_without_the_option_says_that_there_is_no_such_function():
    llm = LLM("quire-tiny", max_model_len=256)
    with pytest.raises(ValidationError, match="start_profile"):
        llm.start_profile()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"profile_prefix": "../../etc/x"}, "profile_prefix"),
        ({"profile_prefix": "x" * 200}, "profile_prefix"),
        ({"profile_prefix": ""}, "profile_prefix"),
        ({"profile_prefix": ["a"]}, "profile_prefix"),
        ({"max_iterations": -1}, "max_iterations"),
        ({"max_iterations": 10**9}, "max_iterations"),
        ({"delay_iterations": "soon"}, "delay_iterations"),
        ([], "body"),
    ],
)
def test_a_wrong_request_is_refused_by_name(body: Any, named: str):
    state = make_state(engine := ScriptedEngine(), profiler_config={"profiler": "torch"})
    found = ask(engine, "POST", START, body, state=state)
    assert (found.status_code, named in found.text) == (400, True), found.text
    assert engine.called == []


def test_the_routes_are_off_without_the_option_and_need_the_key():
    for path in (START, STOP):
        found = ask(ScriptedEngine(), "POST", path)
        assert (found.status_code, "--profiler-config" in found.text) == (404, True)
    state = make_state(ScriptedEngine(), profiler_config={"profiler": "torch"}, api_key=["k"])
    assert ask(None, "POST", START, state=state).status_code == 401


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"profiler": "proton"}, Unsupported),
        ({"profiler": "torch"}, ConfigError),
        ({"profiler": "torch", "torch_profiler_dir": "traces"}, ConfigError),
        ({"profiler": "torch", "torch_profiler_dir": "/a", "max_iterations": -1}, ConfigError),
        ({"profiler": "torch", "torch_profiler_dir": "/a", "max_iterations": "all"}, ConfigError),
        ({"profiles": "torch"}, ConfigError),
    ],
)
def test_a_wrong_option_is_refused(config: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match="profiler_config"):
        profiler_options(config)


def test_a_recording_that_takes_much_memory_ends(tmp_path: Path):
    taken = iter([0, 1 << 20, 1 << 40])
    options = profiler_options({"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False})  # fmt: skip
    recorder = StepRecorder(options, "rank0", lambda: next(taken))
    recorder.start()
    for number in range(5):
        recorder.before(StepPlan(number, [], [], []), None)
        recorder.after(StepPlan(number, [], [], []))
    (trace,) = tmp_path.iterdir()
    assert steps_of(trace) == 2
    assert recorder.stop() is None


def test_a_full_folder_takes_no_further_trace(tmp_path: Path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    recorder = StepRecorder(profiler_options({"profiler": "torch", "torch_profiler_dir": str(tmp_path)}), "rank0")  # fmt: skip
    with pytest.raises(ValueError, match="100 files"):
        recorder.start()
