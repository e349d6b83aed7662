"""Short names of models: what they stand for, and what wins over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.config.from_keywords import engine_config
from quire.config.quantization import ONLINE
from quire.config.short_names import short_names
from quire.errors import ConfigError


def made(**keywords: object) -> EngineConfig:
    return engine_config(keywords, "flag")


def test_a_short_name_is_a_model_of_the_hub():
    model = made(model="qwen3:0.6b").model
    assert (model.model, model.quantization) == ("Qwen/Qwen3-0.6B", "int8")
    assert model.served_names == ["qwen3:0.6b", "Qwen/Qwen3-0.6B"]
    assert made(model="Qwen3:4B").model.model == "Qwen/Qwen3-4B"
    assert made(model="llama3.2").model.model == made(model="llama3.2:latest").model.model == "meta-llama/Llama-3.2-3B-Instruct"  # fmt: skip


def test_given_fields_win():
    model = made(model="qwen3:0.6b", quantization="none", served_model_name=["m"]).model
    assert (model.quantization, model.served_names) == ("none", ["m"])


@pytest.mark.parametrize("name", ["quire-tiny", "Qwen/Qwen3-0.6B", "owner/repo:Q4_K_M", "./qwen3", "qwen9:1b", "x" * 5000, "a\0b"])  # fmt: skip
def test_other_names_stay(name: str):
    assert made(model=name).model.model == name


def test_a_directory_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert made(model="qwen3").model.model == "qwen3"


def test_an_unknown_size_is_refused_with_the_sizes():
    with pytest.raises(ConfigError, match=r"did you mean qwen3:0.6b\? qwen3 has qwen3:8b, "):
        made(model="qwen3:0.5b")


def test_every_line_is_a_hub_id_with_a_way_to_quantize():
    for model, quantization in short_names().values():
        assert model.count("/") == 1
        assert quantization in ONLINE
