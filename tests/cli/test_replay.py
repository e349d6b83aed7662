"""`quire replay`: the recording of a real engine, run again by the command."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.msgpack import Ext

from quire.cli.replay import main
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.parallel.parallel_config import ParallelConfig
from quire.config.recording import config_of, for_recording, from_recording
from quire.config.serialize import resolved_to_bytes
from quire.engine.build import build_core
from quire.engine.flight_recorder import FlightRecorder, read_recording
from quire.engine.resolve import resolve_config
from quire.engine.supervisor import CONFIG
from quire.protocol.plan import StepPlan
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from tests.tiny_llama import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recorded(model: str, tmp_path_factory) -> Path:
    """A folder as a dead engine leaves it."""
    path = model
    folder = tmp_path_factory.mktemp("1")
    config = EngineConfig.from_keywords(
        model=path, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory_bytes=8 << 20
    )
    resolved = resolve_config(config)
    (folder / CONFIG).write_bytes(for_recording(resolved_to_bytes(resolved)))
    core, _ = build_core(resolved)
    recorder = FlightRecorder(folder)
    core.observers.add(recorder)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    for number in range(3):
        core.inbox.put(EngineRequest(str(number), [5 + number] * (9 + number), params))
    core.receive(block=True)
    while core.scheduler.has_requests:
        core.step()
    recorder.close()
    return folder


def test_a_recording_runs_again_to_the_same_tokens(recorded: Path, model: str, capsys):
    recording = read_recording(recorded)
    assert recording is not None
    assert len(recording.frames) > 20
    assert main([str(recorded), "--model", model]) == 0
    assert "step 1: " in capsys.readouterr().out


def test_a_replay_with_another_seed_reports_a_difference(
    recorded: Path, model: str, tmp_path: Path, capsys
):
    """A recording whose results are of other draws: the command says so."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in recorded.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    recording = read_recording(recorded)
    assert recording is not None
    recorder = FlightRecorder(folder)
    for frame in recording.frames:
        for new in getattr(frame, "entered", ()):
            new.params.seed = 6
        if isinstance(frame, StepPlan):
            recorder.launched(frame)
        else:
            recorder.finished(frame.step, frame)
    recorder.close()
    assert main([str(folder), "--model", model]) == 1
    assert "step" in capsys.readouterr().out


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(recorded, folder)
    return folder


def test_a_recording_selects_neither_model_nor_code(
    copied: Path, model: str, tmp_path: Path, capsys, monkeypatch
):
    """C3c: the folder's own path and trust_remote_code were taken, and what it named was imported."""
    (tmp_path / "evil_of_a_folder.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([str(copied)])
    assert stopped.value.code == 2
    assert "--model" in capsys.readouterr().err
    kept = json.loads((copied / CONFIG).read_bytes())
    assert kept["path"] == model
    mark = {"__by_name__": "evil_of_a_folder:x"}
    kept |= {"path": "/nowhere", "left_out": ["evil_of_a_folder:x"], "trust_remote_code": True}
    kept["model"] |= {"trust_remote_code": True, "hf_overrides": {"a": mark}, "model": "/nowhere"}
    (copied / CONFIG).write_bytes(json.dumps(kept).encode())
    assert config_of(from_recording((copied / CONFIG).read_bytes()), model).model == ModelConfig(
        model=model, hf_overrides={"a": mark}, dtype="auto", trust_remote_code=False
    )
    assert main([str(copied), "--model", model]) == 0
    old = {"resolved": {"path": model, "hf_config": mark}, "config": {}, "path": [str(tmp_path)]}
    names = Ext(1, b"evil_of_a_folder:x")
    for data in (old, {**old, "config": {"model": {"hf_overrides": names}}}, [names]):
        (copied / CONFIG).write_bytes(msgspec.msgpack.encode(data))
        assert main([str(copied), "--model", model]) == 2
        assert "not a recorded configuration" in capsys.readouterr().err
    assert "evil_of_a_folder" not in sys.modules


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("settled", "max_num_seqs"), "many", "Expected `int`, got `str`"),
        (("cache", "block_size"), [1], "cache.block_size"),
        (("model", "hf_overrides"), "x", "Expected `object`, got `str`"),
        (("settled", "executor"), "ray", "Invalid enum value 'ray'"),
        (("architecture",), "Other", "--model is a .*, but the recorded engine had a Other"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(copied, model, capsys, place, value, says):
    kept = json.loads((copied / CONFIG).read_bytes())
    inner = kept
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (copied / CONFIG).write_bytes(json.dumps(kept).encode())
    assert main([str(copied), "--model", model]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err)
    assert "Traceback" not in err


def test_a_recording_names_no_machine_and_no_class(copied, model):
    kept = json.loads((copied / CONFIG).read_bytes())
    assert not {"master_addr", "data_parallel_address", "worker_extension_cls"} & set(
        kept["parallel"]
    )
    kept["parallel"] |= {
        "worker_extension_cls": "evil.Class", "nnodes": 2, "master_addr": "10.0.0.1", "data_parallel_address": "10.0.0.1",
        "distributed_executor_backend": "ray", "tensor_parallel_size": 2,
    }  # fmt: skip
    replayed = config_of(from_recording(json.dumps(kept).encode()), model).parallel
    assert replayed == ParallelConfig(tensor_parallel_size=2)


def test_a_recording_contains_no_secret(settle_secrets: bytes):
    """M1: the recording's configuration held --api-key and --hf-token in clear."""
    assert b"sesame" in settle_secrets
    kept = for_recording(settle_secrets)
    assert b"sesame" not in kept
    assert from_recording(kept).settled.max_num_seqs == 4


@pytest.fixture
def settle_secrets(model: str) -> bytes:
    secret = dict.fromkeys(
        (
            "api_key",
            "hf_token",
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "otlp_traces_endpoint",
        ),
        "sesame",
    )
    config = EngineConfig.from_keywords(
        model=model, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory_bytes=8 << 20,
        model_loader_extra_config={"token": "sesame"}, **secret,
    )  # fmt: skip
    return resolved_to_bytes(resolve_config(config))


def test_a_folder_without_a_recording_is_named(tmp_path: Path, capsys):
    assert main([str(tmp_path), "--model", "none"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
