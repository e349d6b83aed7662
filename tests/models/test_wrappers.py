"""Models for pictures, as Transformers writes them, run as the text models inside them: to the same logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.hf_config import TextConfig, read_config
from tests.models.archs import randomise
from tests.models.cases import BASE, save
from tests.models.harness import Runner
from tests.models.test_native import build, plain, texts

TEXT = {**BASE, "bos_token_id": 1, "eos_token_id": 2}
SQUARE = {key: value for key, value in TEXT.items() if key != "head_dim"}  # 48 / 4 features a head
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 2}


def mrope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections)}


WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2",
        {
            "text_config": {**SQUARE, "rope_parameters": mrope(2, 2, 2)},
            "vision_config": {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 48},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2",
        {
            "text_config": {**SQUARE, "rope_parameters": mrope(2, 2, 2)},
            "vision_config": {
                **QWEN_TOWER,
                "hidden_size": 16,
                "out_hidden_size": 48,
                "intermediate_size": 16,
                "fullatt_block_indexes": [0],
            },
        },
    ),
    "qwen3_vl": (
        "Qwen3",
        {
            "text_config": {**TEXT, "rope_parameters": mrope(4, 2, 2)},
            "vision_config": {
                **QWEN_TOWER,
                "hidden_size": 16,
                "out_hidden_size": 48,
                "intermediate_size": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "llava": (
        "Llama",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model"},
            "image_token_index": 130,
        },
    ),
    "mistral3": (
        "Mistral",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": 130,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "sliding_window": 5, "num_hidden_layers": 3},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
            "image_token_id": 130,
        },
    ),
    "internvl": (
        "Qwen2",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
            "image_token_id": 130,
        },
    ),
}


def test_sizes_that_a_wrapper_leaves_out(tmp_path: Path) -> None:
    """Gemma 3's published config.json."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {**inner, "model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": rope}
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**names, "text_config": text}))
    found = read_config(str(tmp_path))
    assert (found["num_attention_heads"], found["head_dim"]) == (8, 256)
    assert (found["vocab_size"], found["max_position_embeddings"]) == (262208, 131072)
    cfg = TextConfig(found)
    assert [cfg.window(i) for i in range(4, 7)] == [1024, None, 1024]
    assert (cfg.rope(5)["rope_theta"], cfg.rope(5)["factor"]) == (1e6, 8.0)
    assert (cfg.rope(4)["rope_theta"], cfg.rope(4)["rope_type"]) == (1e4, "default")


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_without_a_nest_is_read_alike(kind: str, tmp_path: Path) -> None:
    """Qwen's published config.json. (It ran through Transformers.)"""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    family, values = copy.deepcopy(WRAPPERS[kind])
    values["text_config"]["tie_word_embeddings"] = True
    config = CONFIG_MAPPING[kind](**values, tie_word_embeddings=True)
    theirs = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(theirs)
    save(theirs, tmp_path)
    file = tmp_path / "config.json"
    nested = json.loads(file.read_text())
    inner = nested.pop("text_config")
    rope = inner.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**inner, **nested, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    file.write_text(json.dumps(flat))
    text = [token % 128 for token in texts()[0]]  # no token of pictures
    ours = build(tmp_path, model_impl="quire")
    assert type(ours).__name__ == family
    assert "lm_head.weight" not in dict(ours.named_parameters())
    assert (Runner(ours).prefill(0, text, chunk=7) - plain(theirs, text)).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_inner_text_model_equals_the_wrapper(kind: str, tied: bool, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    family, values = copy.deepcopy(WRAPPERS[kind])
    values["text_config"]["tie_word_embeddings"] = tied
    config = CONFIG_MAPPING[kind](**values, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        randomise(theirs)
    save(theirs, tmp_path)
    text = [token % 128 for token in texts()[0]]  # no token of pictures
    want = plain(theirs, text)
    assert want.std() > 0.1, "logits without a range prove nothing"
    ours = build(tmp_path, model_impl="quire")
    assert type(ours).__name__ == family
    assert ("lm_head.weight" not in dict(ours.named_parameters())) == tied
    assert read_config(str(tmp_path))["vocab_size"] == 131
    assert (Runner(ours).prefill(0, text, chunk=7) - want).abs().max() < 1e-4
