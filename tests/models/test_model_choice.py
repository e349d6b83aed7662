"""Which implementation runs a checkpoint, where it is stored, and which part of it is the text model."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.models import hf_config, registry
from quire.models.llama import Qwen3
from quire.models.load import build_model
from quire.models.transformers.model import TransformersModel
from quire.platforms.cpu import CpuPlatform
from tests.models.cases import edit_config
from tests.models.test_load import rewrite, same, weights
from tests.models.test_native import build

# ------------------------------------------------------------------------------------ wrappers


PREFIXES = {
    "new": ("model.language_model.", "lm_head."),
    "old": ("language_model.model.", "language_model.lm_head."),
    "thinker": ("thinker.model.", "thinker.lm_head."),
}


@pytest.mark.parametrize("names", PREFIXES)
def test_the_text_model_in_a_wrapper_runs_alone(original, copy: Path, names: str, caplog) -> None:
    inner = json.loads((copy / "config.json").read_text())
    inner.update(model_type="qwen3_vl_text", architectures=None)
    outer = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": False,
    }
    (copy / "config.json").write_text(json.dumps(outer))
    body, head = PREFIXES[names]
    found = {
        re.sub(r"^lm_head\.", head, re.sub(r"^model\.", body, name)): tensor
        for name, tensor in weights(copy).items()
    }
    found["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 3)
    found["vision_tower.layers.0.mlp.fc1.weight"] = torch.ones(3, 3)
    rewrite(copy, found)
    with caplog.at_level(logging.INFO):
        model = build(copy)
    assert isinstance(model, Qwen3)
    assert "2 tensors of the checkpoint are not used" in caplog.text
    assert same(model, build(original[0]))


# ------------------------------------------------------------------------------------ whose code


def test_the_log_names_the_model_implementation(original, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(build(original[0]), Qwen3)
        assert isinstance(build(original[0], model_impl="transformers"), TransformersModel)
    assert "Qwen3ForCausalLM runs as native" in caplog.text
    assert "runs as transformers: selected by model_impl" in caplog.text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_unknown_architectures_use_transformers(config: dict[str, Any], said: str) -> None:
    impl, reason = registry.choose_impl("Qwen3ForCausalLM", config)
    assert impl == "transformers"
    assert said in reason
    with pytest.raises(ConfigError, match="use auto"):
        registry.choose_impl("Qwen3ForCausalLM", config, "quire")


def test_a_registered_model_is_used(original, monkeypatch) -> None:
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    registry.register("Qwen3ForCausalLM", "tests.models.test_model_choice:Mine")
    assert type(build(original[0])).__name__ == "Mine"
    registry.register("Qwen3ForCausalLM", "tests.models.test_load:Nobody")
    with pytest.raises(ConfigError, match=r"test_load:Nobody cannot be loaded"):
        build(original[0])
    with pytest.raises(ConfigError, match="module:Class"):
        registry.register("Qwen3ForCausalLM", "Mine")


class Mine(Qwen3):
    pass


# ------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "a list, not an object"),
        (
            '{"rope_scaling": "yarn"}',
            "rope_scaling='yarn' in config.json or hf_overrides: this is an object",
        ),
    ],
)
def test_an_invalid_config_is_named(copy: Path, text: str, said: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        hf_config.read_config(str(copy))


def test_a_field_that_is_needed_is_named(copy: Path) -> None:
    edit_config(copy, intermediate_size=None)
    config = EngineConfig.from_keywords(model=str(copy), dtype="float32")
    with pytest.raises(ConfigError, match="intermediate_size"):
        build_model(resolve_config(config).spec, CpuPlatform())
