"""A kept block is found only by an engine that would compute the same bits, with the same key."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, greedy
from kv_tiers.kept import COMMON, hits, kept
from safetensors.torch import load_file, save_file

from quire.engine.enabled_features import enabled_features
from quire.errors import ConfigError
from quire.features.kv_tiers.weights_digest import weights_digest
from quire.kvstore.key_file import make_key, read_key
from quire.ops.cpu.bindings import best

PROMPT = [5, 6, 7, 8] * 20


def one_weight(path: Path) -> dict[str, Any]:
    """A bit of one weight, in the middle of a file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    found = tensors["model.layers.1.mlp.up_proj.weight"]
    found.view(torch.int32)[3, 5] ^= 1
    save_file(tensors, file, {"format": "pt"})
    return {}


def rope(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            config[key]["rope_theta"] = 20000.0
    (path / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    return {}


def key(path: Path) -> dict[str, Any]:
    make_key(path / "other-key")
    return {"kv_key_file": str(path / "other-key")}


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a weight": one_weight,
    "the rope": rope,
    "the rope, by a flag": lambda path: {"hf_overrides": {"rope_theta": 5000.0}},
    "the dtype": lambda path: {"dtype": "bfloat16"},
    "the KV format": lambda path: {"kv_cache_dtype": "int8"},
    "the block size": lambda path: {"block_size": 32},
    "the hash": lambda path: {"prefix_caching_hash_algo": "sha256"},
    "the backend": lambda path: {"attention_backend": "TORCH_SDPA"},
    "the key": key,
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the blocks of one prompt, which another engine has found."""
    folder = tmp_path_factory.mktemp("kept") / "kv"
    for number in range(2):
        with kept(checkpoint("qwen3"), folder) as one:
            one.tokens([PROMPT], greedy(2))
            assert (hits(one) > 0) == (number == 1)
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_bits_or_the_key_changes_names(
    change: str, folder: Path, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    path, own = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(checkpoint("qwen3"), path)
    shutil.copytree(folder, own)
    settings = CHANGES[change](path)
    with engine(str(path), 2, **{**COMMON, **settings}) as one:
        expected = one.tokens([PROMPT], greedy(6))
    with kept(str(path), own, **settings) as one:
        assert one.tokens([PROMPT], greedy(6)) == expected
        assert hits(one) == 0


PROGRAMS: dict[str, tuple[str, Any]] = {
    "another build of the kernels": ("file_name", lambda isa: "another.so"),
    "other instructions of the processor": ("isa.usable", list),
    "another version": ("__version__", "0.0.0"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_another_program_finds_nothing(
    program: str, folder: Path, checkpoint: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if best() is None:
        pytest.skip("this machine has no kernels")
    name, value = PROGRAMS[program]
    shutil.copytree(folder, tmp_path / "kv")
    monkeypatch.setattr(f"quire.engine.kv_identity.{name}", value)
    with kept(checkpoint("qwen3"), tmp_path / "kv") as one:
        one.tokens([PROMPT], greedy(2))
        assert hits(one) == 0


def test_the_path_and_the_sizes_of_steps_change_no_name(
    folder: Path, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path / "elsewhere")
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "max_model_len": 128}
    with kept(str(tmp_path / "elsewhere"), folder, **settings) as one:
        one.tokens([PROMPT], greedy(2))
        assert hits(one) > 0


def test_salts_do_not_share(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    with kept(path, tmp_path / "kv") as one:
        one.tokens([PROMPT], greedy(2), salt="a")
    with kept(path, tmp_path / "kv") as one:
        for salt in ("b", ""):
            one.tokens([PROMPT], greedy(2), salt=salt)
        assert hits(one) == 0
        one.tokens([PROMPT], greedy(2), salt="a")
        assert hits(one) == 64


def test_the_key_of_a_folder(tmp_path: Path, checkpoint: Callable[..., str], folder: Path) -> None:
    file = folder / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(read_key(file)) == 32


@pytest.mark.parametrize("fault", ["missing", "short", "long", "open to others", "a folder"])
def test_a_key_file_that_cannot_be_one_is_refused_with_the_remedy(
    fault: str, tmp_path: Path, checkpoint: Callable[..., str]
) -> None:
    file = tmp_path / "key"
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_bytes(bytes({"short": 31, "long": 33}.get(fault, 32)))
        file.chmod(0o644 if fault == "open to others" else 0o600)
    remedy = "chmod 600" if fault == "open to others" else "quire kv key"
    with (
        pytest.raises(ConfigError, match=remedy),
        engine(checkpoint("qwen3"), 2, **COMMON, kv_key_file=str(file)),
    ):
        pass


def test_two_engines_with_one_key_name_blocks_equally(
    tmp_path: Path, checkpoint: Callable[..., str]
) -> None:
    make_key(tmp_path / "key")
    roots = set()
    for settings in ({}, {}, {"kv_key_file": str(tmp_path / "key")}, {"kv_key_file": str(tmp_path / "key")}):  # fmt: skip
        with engine(checkpoint("qwen3"), 2, **COMMON, **settings) as one:
            roots.add(one.client.core.scheduler.kv.hasher.root("", None))
    assert len(roots) == 3


def test_the_digest_is_read_again_if_a_file_changes(
    tmp_path: Path, checkpoint: Callable[..., str]
) -> None:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), path)
    first = weights_digest(str(path), "auto", tmp_path)
    assert weights_digest(str(path), "auto", tmp_path) == first
    one_weight(path)
    assert weights_digest(str(path), "auto", tmp_path) != first
    (tmp_path / "weights.json").write_text("[1")
    assert weights_digest(str(checkpoint("qwen3")), "auto", tmp_path) == first


def test_without_a_folder_or_prefix_caching_the_feature_is_off(
    tmp_path: Path, checkpoint: Callable[..., str]
) -> None:
    for settings in ({}, {"kv_disk_dir": str(tmp_path / "kv"), "enable_prefix_caching": False}):
        with engine(checkpoint("qwen3"), 2, **COMMON, **settings) as one:
            names = [feature.name for feature in enabled_features(one.client.resolved)]
            assert "kv_tiers" not in names
            one.tokens([PROMPT], greedy(2))
