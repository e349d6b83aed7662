"""Tiny checkpoints of wrappers: a language model with a picture or sound tower around it, of which text runs alone.

One row is one test of `test_generic_files.py` and one line of docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.models.archs import randomise

VOCAB = 199
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 14,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


@dataclass(frozen=True)
class Wrapper:
    """`kind` is Transformers' model_type of the wrapper.

    Attributes:
        architecture: in config.json.
        runs_as: what a request of text alone is served by: "native ..." or the way of the generic backend.
        config: of the wrapper.
        dropped: a part of it that must not be in memory, where the whole wrapper is loaded first.
    """

    kind: str
    architecture: str
    runs_as: str
    config: Callable[[], dict[str, Any]]
    dropped: str = ""


WRAPPERS = [
    Wrapper(
        "llava",
        "LlavaForConditionalGeneration",
        "native `Llama`, or the family of its text model",
        lambda: {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **SIGLIP},
            "image_token_index": 9,
        },
    ),
    Wrapper(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "native `Qwen2`",
        lambda: {"text_config": {**TEXT, **MROPE}, "vision_config": QWEN_TOWER},
        dropped="visual",
    ),
    Wrapper(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "native `Qwen3`",
        lambda: {
            "text_config": {**TEXT, **MROPE},
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        },
        dropped="visual",
    ),
    Wrapper(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "native `Mistral`",
        lambda: {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {"model_type": "pixtral", **SIGLIP},
        },
    ),
    Wrapper(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "native `Gemma3`",
        lambda: {
            "text_config": {**TEXT, "sliding_window": 5},
            "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
            "mm_tokens_per_image": 4,
        },
    ),
    Wrapper(
        "llama4",
        "Llama4ForConditionalGeneration",
        "native `Llama4`",
        lambda: {
            "text_config": {
                **TEXT,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
            },
            "vision_config": {**SIGLIP, "vision_output_dim": 32, "projector_input_dim": 32},
        },
    ),
    Wrapper(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "native `Qwen3Moe`",
        lambda: {
            "text_config": {
                **TEXT,
                **MROPE,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        },
        dropped="visual",
    ),
    Wrapper(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        "native; through Transformers per request",
        lambda: {
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            "vision_config": QWEN_TOWER,
        },
    ),
    Wrapper(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "native `Qwen2`",
        lambda: {
            "text_config": {**TEXT, **MROPE},
            "vision_config": {**QWEN_TOWER, "hidden_size": 64},
        },
        dropped="visual",
    ),
    Wrapper(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        "native `Llama`",
        lambda: {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": SIGLIP,
            "scale_factor": 2,
        },
    ),
    Wrapper(
        "internvl",
        "InternVLForConditionalGeneration",
        "native `Qwen2` or `Qwen3`",
        lambda: {
            "text_config": {"model_type": "qwen3", **TEXT},
            "vision_config": {**SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]},
        },
    ),
    Wrapper(
        "glm4v",
        "Glm4vForConditionalGeneration",
        "paged",
        lambda: {
            "text_config": {**TEXT, **MROPE},
            "vision_config": {**QWEN_TOWER, "image_size": 28},
        },
        dropped="visual",
    ),
    Wrapper(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        "native `Gemma4`",
        lambda: {
            "text_config": {
                **TEXT,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
            },
            "vision_config": {**SIGLIP, "head_dim": 16, "num_key_value_heads": 2},
            "audio_config": None,
        },
    ),
    Wrapper(
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        "native `Qwen2`",
        lambda: {
            "text_config": {"model_type": "qwen2", **TEXT},
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "max_source_positions": 16,
            },
        },
    ),
]


def make_wrapper(wrapper: Wrapper, seed: int = 0, config: Any = None) -> Any:
    """The whole wrapper, towers included, random everywhere, float32, in eval mode; `config`: another than the row's."""
    import transformers

    config = transformers.CONFIG_MAPPING[wrapper.kind](**(config or wrapper.config()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, wrapper.architecture)._from_config(
            config, dtype=torch.float32
        )
        randomise(model)
    return model.eval()
