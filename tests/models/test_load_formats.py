"""Load formats: what vLLM reads by other libraries loads by mapping the files; object stores need the streamer's library."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.load import SAME_LOAD_FORMATS
from quire.errors import ModelNotFound, Unsupported
from quire.layers.linear import Linear
from quire.quantization.int4 import Int4Weight
from tests.models.cases import Case, write
from tests.models.harness import Runner
from tests.models.test_native import build
from tools.save_sharded_state import main as save_sharded_state

TEXT = list(range(20))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write(Case("qwen3", "qwen3", {"hidden_size": 64, "intermediate_size": 128}), folder)
    return folder


@pytest.fixture(scope="module")
def wanted(plain: Path) -> torch.Tensor:
    return answer(plain)


def answer(path: Path | str, **asked: Any) -> torch.Tensor:
    return Runner(build(path, **asked)).prefill(0, TEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fastsafetensors", "runai_streamer"])
def test_other_readers_of_safetensors(name: str, plain: Path, wanted: torch.Tensor) -> None:
    assert SAME_LOAD_FORMATS[name] == "safetensors"
    extra = {"concurrency": 4, "memory_limit": 0}
    assert torch.equal(answer(plain, load_format=name, model_loader_extra_config=extra), wanted)


@pytest.mark.parametrize("name", ["sharded_state", "runai_streamer_sharded"])
def test_sharded_state(name: str, plain: Path, tmp_path: Path, wanted: torch.Tensor) -> None:
    save_sharded_state([str(plain), str(tmp_path), "--max-file-size", "50000"])
    assert len(list(tmp_path.glob("model-rank-0-part-*.safetensors"))) > 2
    assert torch.equal(answer(tmp_path, load_format=name), wanted)


def test_sharded_state_of_vllm(plain: Path, tmp_path: Path, wanted: torch.Tensor) -> None:
    """It has the parts of a weight joined."""
    found = load_file(plain / "model.safetensors")
    for layer in (0, 1):
        for joined, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            at, own = f"model.layers.{layer}.{joined.split('.')[0]}", []
            own = [found.pop(f"{at}.{part}_proj.weight") for part in parts]
            found[f"model.layers.{layer}.{joined}_proj.weight"] = torch.cat(own)
    shutil.copyfile(plain / "config.json", tmp_path / "config.json")
    save_file(found, tmp_path / "model-rank-0-part-0.safetensors")
    assert torch.equal(answer(tmp_path, load_format="sharded_state"), wanted)
    save_file(found, tmp_path / "model-rank-1-part-0.safetensors")
    with pytest.raises(Unsupported, match="split over several ranks"):
        answer(tmp_path, load_format="sharded_state")


def test_sharded_state_needs_its_files(plain: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no weights \(model-rank-0-part-\*\.safetensors\)"):
        answer(plain, load_format="sharded_state")


def test_bitsandbytes_quantizes_while_loading(plain: Path) -> None:
    model = build(plain, load_format="bitsandbytes")
    prepared = [each.ref.prepared for each in model.modules() if isinstance(each, Linear)]
    assert len(prepared) == 8
    assert all(isinstance(one, Int4Weight) and one.group == 64 for one in prepared)


def test_an_object_store(
    plain: Path, tmp_path: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = []

    def pull_files(
        url: str, folder: str, allow_pattern: list[str], ignore_pattern: list[str]
    ) -> None:
        if "missing" in url:
            raise OSError("no such bucket")
        pulls.append(allow_pattern)
        for file in plain.iterdir():
            if any(file.match(pattern) for pattern in allow_pattern):
                shutil.copyfile(file, Path(folder) / file.name)

    with pytest.raises(Unsupported, match=r"model=s3://bucket/model .*extra `runai`"):
        answer("s3://bucket/model")
    library = SimpleNamespace(pull_files=pull_files, __spec__=SimpleNamespace(name="any"))
    monkeypatch.setitem(sys.modules, "runai_model_streamer", library)
    got = answer("s3://bucket/model", download_dir=str(tmp_path), load_format="runai_streamer")
    assert torch.equal(got, wanted)
    assert pulls[-1] == ["*.safetensors"]
    assert "*.safetensors" not in pulls[0]
    with pytest.raises(
        ModelNotFound, match=r"gs://missing could not be downloaded .no such bucket"
    ):
        answer("gs://missing", download_dir=str(tmp_path))
