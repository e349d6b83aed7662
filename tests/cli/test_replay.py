"""`quire replay`: the recording of a real engine, run again by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.replay import main
from quire.config.engine import EngineConfig
from quire.config.wire import to_wire
from quire.engine.assemble import build_core, resolve_config
from quire.engine.flight import Recorded, Recorder, read
from quire.engine.host import CONFIG
from quire.protocol.params import SamplingParams
from quire.protocol.request import EngineRequest
from tests.tiny_llama import make_checkpoint


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A folder as a dead engine leaves it."""
    path = make_checkpoint(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("1")
    config = EngineConfig.from_keywords(
        model=path, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory_bytes=8 << 20
    )
    resolved = resolve_config(config)
    (folder / CONFIG).write_bytes(to_wire(resolved))
    core, _ = build_core(resolved)
    recorder = Recorder(folder)
    core.executor = Recorded(core.executor, recorder)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    for number in range(3):
        core.inbox.put(EngineRequest(str(number), [5 + number] * (9 + number), params))
    core.receive(block=True)
    while core.scheduler.has_requests:
        core.step()
    recorder.close()
    return folder


def test_a_recording_runs_again_to_the_same_tokens(recorded: Path, capsys):
    recording = read(recorded)
    assert recording is not None
    assert len(recording.frames) > 20
    assert main([str(recorded)]) == 0
    assert "step 1: " in capsys.readouterr().out


def test_another_seed_is_seen(recorded: Path, tmp_path: Path, capsys):
    """A recording whose results are of other draws: the command says so."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in recorded.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    recording = read(recorded)
    assert recording is not None
    recorder = Recorder(folder)
    for frame in recording.frames:
        for new in getattr(frame, "entered", ()):
            new.params.seed = 6
        (recorder.plan if hasattr(frame, "work") else recorder.result)(frame)
    recorder.close()
    assert main([str(folder)]) == 1
    assert "step" in capsys.readouterr().out


def test_a_folder_without_a_recording_is_named(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
