"""Where a checkpoint is found, and names that are none: GGUF files, URLs, incomplete downloads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, ModelNotFound, QuireError, Unsupported
from quire.models import checkpoint_locator, hf_config
from quire.models.checkpoint_files import stored_tensors, weight_files

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7680720\n"


def test_a_hub_id_without_network_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        checkpoint_locator.locate(
            ModelConfig(model="some/where"), LoadConfig(download_dir=str(tmp_path))
        )
    said = str(caught.value)
    assert "\n" not in said
    assert "'some/where'" in said
    assert str(tmp_path) in said
    assert "name one that comes with Quire: quire-tiny, " in said
    with pytest.raises(ModelNotFound, match="comes with Quire: quire-tiny-pirate-lora"):
        checkpoint_locator.find_adapter("some/where", LoadConfig(download_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/nowhere/at/all", "does not exist"),
        ("./nowhere", "does not exist"),
        ("{}", "has no config.json"),
        ("{}/file", "is a file"),
        (" ", "does not exist"),
    ],
)
def test_a_path_that_is_no_directory_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=said) as caught:
        checkpoint_locator.locate(ModelConfig(model=name.format(tmp_path)), LoadConfig())
    assert not str(caught.value).startswith("the directory")  # it may be the name of a file


def test_a_fetched_snapshot_is_found_without_network(original, tmp_path: Path) -> None:
    """The hub client's own layout of its cache."""
    root = tmp_path / "models--some--where"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    shutil.copytree(original[0], root / "snapshots" / "abc")
    load = LoadConfig(download_dir=str(tmp_path))
    found = checkpoint_locator.locate(ModelConfig(model="some/where"), load)
    assert Path(found) == root / "snapshots" / "abc"
    assert hf_config.read_config(found)["model_type"] == "qwen3"


# ------------------------------------------------------------------------------------ what is none


@pytest.mark.parametrize("name", ["{}", "{}/model-Q4_K_M.gguf", "{}/renamed"])
def test_a_damaged_gguf_file_is_named(tmp_path: Path, name: str) -> None:
    for file in ("model-Q4_K_M.gguf", "renamed"):
        (tmp_path / file).write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        checkpoint_locator.locate(ModelConfig(model=name.format(tmp_path)), LoadConfig())


@pytest.mark.parametrize("name", ["some/model:Q4_K_M", "some/model/file-Q8_0.gguf"])
def test_gguf_of_the_hub_without_network(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ModelNotFound, match=rf"'{name}' was not found.*the hub cannot be reached.*pass its path"
    ) as caught:
        checkpoint_locator.locate(ModelConfig(model=name), LoadConfig(download_dir=str(tmp_path)))
    assert "local_files" not in str(caught.value)  # a keyword of the hub's client


def test_a_name_of_ollama_shows_how_names_of_the_hub_look(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="on the hub look like meta-llama/"):
        checkpoint_locator.locate(
            ModelConfig(model="llama3.2"), LoadConfig(download_dir=str(tmp_path))
        )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("http://bucket/path", "download it, and pass a directory"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "pass Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "pass Qwen/Qwen3-0.6B"),
    ],
)
def test_a_url_is_named(name: str, remedy: str) -> None:
    """(It said "there is no directory /cwd/http:/bucket/path".)"""
    with pytest.raises(Unsupported, match="URL") as caught:
        checkpoint_locator.locate(ModelConfig(model=name), LoadConfig())
    assert remedy in str(caught.value)
    with pytest.raises(Unsupported, match=r"tokenizer=.*URL"):
        checkpoint_locator.locate_tokenizer("/here", ModelConfig(tokenizer=name), LoadConfig())


@pytest.mark.parametrize("name", ["nope/nope", "/nope", "./nope"])
def test_a_missing_tokenizer_is_called_a_tokenizer(tmp_path: Path, name: str) -> None:
    load = LoadConfig(download_dir=str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"^tokenizer.*directory with tokenizer.json") as caught:
        checkpoint_locator.locate_tokenizer("/here", ModelConfig(tokenizer=name), load)
    assert "weights" not in str(caught.value)


def test_the_tokenizer_of_an_embedded_model() -> None:
    found = checkpoint_locator.locate_tokenizer("/here", ModelConfig(tokenizer="quire-tiny-draft"), LoadConfig())  # fmt: skip
    assert found == str(checkpoint_locator.EMBEDDED / "quire-tiny-draft")


# ------------------------------------------------------------------------------------ the hub


class Hub:
    """A hub with these files; notes what is downloaded."""

    def __init__(self, folder: Path, files: list[str]):
        self.folder, self.files, self.ignored = folder, files, list[list[str]]()
        self.allowed = list[list[str]]()

    def HfApi(self, token: str | None = None) -> Any:
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        info = SimpleNamespace(siblings=siblings)
        return SimpleNamespace(model_info=lambda name, **about: info)

    def snapshot_download(self, name: str, **about: Any) -> str:
        self.ignored.append(about.get("ignore_patterns", []))
        self.allowed.append(about.get("allow_patterns", []))
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    import huggingface_hub

    found = Hub(tmp_path, ["config.json", "model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "HfApi", found.HfApi)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    return found


def test_weights_are_downloaded_after_the_checks(hub: Hub, original) -> None:
    """(They were first; a model that cannot be served was refused after an hour.)"""
    shutil.copytree(original[0], hub.folder, dirs_exist_ok=True)
    config = EngineConfig.from_keywords(model="some/model", skip_tokenizer_init=True)

    def refuse(resolved: Any) -> None:
        raise ConfigError(f"not {resolved.architecture}")

    with pytest.raises(ConfigError, match="not Qwen3ForCausalLM"):
        resolve_config(config, refuse)
    assert ["*.safetensors" in each for each in hub.ignored] == [True]
    resolve_config(config)
    assert ["*.safetensors" in each for each in hub.ignored] == [True, True, False]


@pytest.mark.parametrize("name", ["some/model", "some/model:q4_0", "some/model/model-Q4_0.gguf"])
def test_one_gguf_file_is_downloaded(hub: Hub, name: str) -> None:
    hub.files = ["README.md", "model-Q8_0.gguf", "model-Q4_0.gguf"]
    (hub.folder / "model-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model-Q4_0.gguf is not a GGUF file: it has 4 bytes"):
        checkpoint_locator.locate(ModelConfig(model=name), LoadConfig())
    assert hub.allowed == [["model-Q4_0.gguf"]]


def test_a_download_that_breaks_can_be_continued(hub: Hub, monkeypatch) -> None:
    _, fetch = checkpoint_locator.find(ModelConfig(model="some/model"), LoadConfig())
    import huggingface_hub

    def broken(*args: Any, **about: Any) -> str:
        raise OSError("connection reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ModelNotFound, match=r"connection reset.*start again"):
        fetch()


# ------------------------------------------------------------------------------------ half a download


def test_missing_files_of_an_index_are_named(tmp_path: Path) -> None:
    names = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (tmp_path / names["w1"]).write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"refers to 3 files, but 2 are missing.*00002.*00003.*again"):  # fmt: skip
        weight_files(str(tmp_path))


def test_missing_files_without_an_index_are_counted(tmp_path: Path) -> None:
    """(What was there was loaded; then tensors were missing.)"""
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00004.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"has 2 of 4 weight files \(model-00001-of-00004"):
        weight_files(str(tmp_path))
    for number in (2, 4):
        (tmp_path / f"model-0000{number}-of-00004.safetensors").write_bytes(b"")
    assert len(weight_files(str(tmp_path))[1]) == 4


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """(It was "not a complete safetensors file".)"""
    (tmp_path / "model.safetensors").write_text(LFS)
    with pytest.raises(ConfigError, match=r"model.safetensors is a Git LFS pointer.*git lfs pull"):
        stored_tensors(str(tmp_path))


def test_incomplete_weights_are_refused_before_the_engine_starts(original, tmp_path: Path) -> None:
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(QuireError, match="is truncated"):
        resolve_config(EngineConfig.from_keywords(model=str(tmp_path), skip_tokenizer_init=True))
