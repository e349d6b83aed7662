"""`quire replay` of a recording whose requests have adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import make_checkpoint
from lora.adapters import lora_engine, run, write

from quire.cli.replay import main
from quire.config.recording import for_recording, from_recording
from quire.config.serialize import resolved_to_bytes
from quire.engine.flight_recorder import FlightRecorder
from quire.engine.supervisor import CONFIG
from quire.protocol.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)


def test_a_recording_with_adapters_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    paths = [write(tmp_path / name, rank, rank) for name, rank in (("a", 4), ("b", 2))]
    folder = tmp_path / "1"
    folder.mkdir()
    modules = [{"name": "a", "path": paths[0], "base_model_name": None}]
    with lora_engine(model, max_num_batched_tokens=24, lora_modules=modules) as one:
        (folder / CONFIG).write_bytes(for_recording(resolved_to_bytes(one.client.resolved)))
        one.client.call("load_lora", "b", paths[1])
        recorder = FlightRecorder(folder)
        one.client.core.observers.add(recorder)
        given = [[5, 6, 7, 8] * 6, [9, 10, 11], [5, 6, 7], [70]]
        run(one, given, ["a", None, "b", "a"], PARAMS)
        recorder.close()
    kept = (folder / CONFIG).read_bytes()
    assert paths[0].encode() not in kept
    assert from_recording(kept).lora.enable_lora
    command = [str(folder), "--model", model]
    assert main([*command, "--lora-path", *paths]) == 0
    assert ", 0 failed or different" in capsys.readouterr().out
    for some in ([], ["--lora-path", paths[0]]):
        assert main([*command, *some]) == 2
        assert "--lora-path" in capsys.readouterr().err
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"")
    assert main([*command, "--lora-path", *paths]) == 2
    assert f"the adapter in {paths[1]} cannot be loaded" in capsys.readouterr().err
