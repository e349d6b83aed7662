"""Tiny random checkpoints of models that hear, with a tokenizer, a chat template and a feature extractor; and sound.

Knows configurations of Transformers. Does not know Quire.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import vision_checkpoints
from vision_checkpoints import AT, TEMPLATE, TEXT, VOCAB

RATE = 16_000
MELS = 24
WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": MELS,
}  # fmt: skip
NAMES = {"audio_token": "<|audio|>", "audio_bos_token": "<|image_start|>", "audio_eos_token": "<|image_end|>"}  # fmt: skip
AROUND = "<|image_start|><|audio|><|image_end|>"
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS}
GEMMA4 = vision_checkpoints.GEMMA4
OMNI_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "patch_size": 14,
}  # fmt: skip
OMNI_TOKENS = {
    end: {f"image_token_{end}": 5, f"video_token_{end}": 7, f"audio_token_{end}": AT["<|audio|>"], "vision_start_token_id": 4,
          "audio_start_token_id": AT["<|image_start|>"], "audio_end_token_id": AT["<|image_end|>"]}
    for end in ("index", "id")
}  # fmt: skip
OMNI_NAMES = {
    **NAMES, "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
OMNI_PIXELS = {"image_processor_type": "Qwen2VLImageProcessor", **vision_checkpoints.QWEN_PIXELS}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "config": {
            "text_config": {"model_type": "qwen2", **TEXT}, "audio_token_index": AT["<|audio|>"],
            "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER, "max_source_positions": 100},
        },
        "architecture": "Qwen2AudioForConditionalGeneration",
        "processor": {"processor_class": "Qwen2AudioProcessor"},
        "preprocessor": {**EXTRACTOR, "chunk_length": 2},
        "tokens": NAMES,
        "placeholder": AROUND,
    },
    "voxtral": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT, "head_dim": 16, "max_position_embeddings": 2048}, "audio_token_id": 24,
            "audio_config": {
                "model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_mel_bins": MELS, "max_source_positions": 1500,
            },
        },
        "architecture": "VoxtralForConditionalGeneration",
        "processor": {"processor_class": "VoxtralProcessor"},
        "preprocessor": EXTRACTOR,
        "placeholder": vision_checkpoints.SPECIAL[24],
        "engine": {"max_model_len": 2048, "max_num_batched_tokens": 256},
    },
    "qwen2_5_omni": {
        "model_type": "qwen2_5_omni_thinker",
        "config": {
            "text_config": {"model_type": "qwen2_5_omni_text", **TEXT, "rope_parameters": vision_checkpoints.QWEN_ROPE},
            "vision_config": OMNI_VISION | {"window_size": 56, "fullatt_block_indexes": [1]},
            "audio_config": {**WHISPER, "n_window": 20, "output_dim": 64, "max_source_positions": 100},
            **OMNI_TOKENS["index"],
        },
        "outer": "qwen2_5_omni",
        "architecture": "Qwen2_5OmniThinkerForConditionalGeneration",
        "processor": {"processor_class": "Qwen2_5OmniProcessor"},
        "preprocessor": {**EXTRACTOR, "chunk_length": 4, **OMNI_PIXELS},
        "tokens": OMNI_NAMES,
        "placeholder": AROUND,
    },
    "qwen3_omni": {
        "model_type": "qwen3_omni_moe_thinker",
        "config": {
            "text_config": {
                "model_type": "qwen3_omni_moe_text", **TEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "rope_parameters": {**vision_checkpoints.QWEN_ROPE, "mrope_interleaved": True},
            },
            "vision_config": OMNI_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "depth": 3, "patch_size": 16},
            "audio_config": {
                **WHISPER, "n_window": 50, "n_window_infer": 200, "output_dim": 64, "max_source_positions": 100, "downsample_hidden_size": 8,
            },
            **OMNI_TOKENS["id"],
        },
        "outer": "qwen3_omni_moe",
        "architecture": "Qwen3OmniMoeThinkerForConditionalGeneration",
        "processor": {"processor_class": "Qwen3OmniMoeProcessor"},
        "preprocessor": {**EXTRACTOR, **OMNI_PIXELS, "patch_size": 16},
        "tokens": OMNI_NAMES,
        "placeholder": AROUND,
    },
    "granite_speech": {
        "config": {
            "text_config": {
                "model_type": "granite", **TEXT, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2,
            },
            "encoder_config": {
                "input_dim": 2 * MELS, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 2, "dim_head": 16, "output_dim": 8,
                "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 5,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                "encoder_hidden_size": 32, "cross_attention_frequency": 1,
            },
            "audio_token_index": AT["<|audio|>"], "has_lora_adapter": False, "downsample_rate": 5, "window_size": 15,
        },
        "architecture": "GraniteSpeechForConditionalGeneration",
        "processor": {"processor_class": "GraniteSpeechProcessor"},
        "preprocessor": {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "n_mels": MELS},
        "placeholder": "<|audio|>",
    },
    "gemma3n": {
        "config": {
            "text_config": {
                "model_type": "gemma3n_text", **TEXT, "head_dim": 16, "sliding_window": 24, "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB - 8, "laurel_rank": 8,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            },
            "vision_config": {"hidden_size": 24, "vocab_size": 4, "vocab_offset": VOCAB - 8},
            "audio_config": {
                "hidden_size": 32, "vocab_size": 4, "vocab_offset": VOCAB - 4, "input_feat_size": 128, "conf_num_hidden_layers": 2,
                "conf_num_attention_heads": 2, "sscp_conv_channel_size": [16, 4], "conf_attention_chunk_size": 6,
                "conf_attention_context_left": 7,
            },
            "audio_token_id": VOCAB - 3, "eoa_token_id": VOCAB - 4, "boa_token_id": AT["<|image_start|>"], "image_token_id": VOCAB - 7,
            "eoi_token_id": VOCAB - 8, "boi_token_id": AT["<start_of_image>"], "audio_soft_tokens_per_image": 188,
        },
        "architecture": "Gemma3nForConditionalGeneration",
        "processor": {"processor_class": "Gemma3nProcessor"},
        "preprocessor": {"feature_extractor_type": "Gemma3nAudioFeatureExtractor"},
        "tokens": {
            "boi_token": "<start_of_image>", "eoi_token": "<hard_0>", "image_token": "<hard_1>", "boa_token": "<|image_start|>",
            "eoa_token": "<hard_4>", "audio_token": "<hard_5>",
        },
        "last_tokens": [f"<hard_{number}>" for number in range(8)],
        "placeholder": "<hard_5>",
        "engine": {"max_num_batched_tokens": 256},
    },
    "gemma4_audio": {
        **GEMMA4,
        "model_type": "gemma4",
        "config": {
            **GEMMA4["config"],
            "audio_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4],
                "output_proj_dims": 24,
            },
        },
        "architecture": "Gemma4ForConditionalGeneration",
        "preprocessor": {**GEMMA4["preprocessor"], "feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "placeholder": "<|audio|>",
    },
}  # fmt: skip


SPEECH = CHECKPOINTS["granite_speech"]
CHECKPOINTS["granite_speech_3"] = SPEECH | {
    "model_type": "granite_speech", "config": SPEECH["config"] | {"has_lora_adapter": True}, "adapted": ["q_proj", "v_proj"],
}  # fmt: skip


def make_checkpoint(kind: str, folder: Path) -> str:
    made = CHECKPOINTS[kind]
    config = transformers.AutoConfig.for_model(made.get("model_type", kind), **made["config"])
    with without_timm():
        model = getattr(transformers, made["architecture"])(config)
    vision_checkpoints.draw_weights(model, len(kind))
    model.save_pretrained(folder)
    if adapted := made.get("adapted"):
        save_adapter(model, adapted, folder)
    if outer := made.get("outer"):
        inside_a_model_that_speaks(folder, outer)
    return vision_checkpoints.save_processor(made, folder, TEMPLATE)


@contextmanager
def without_timm() -> Iterator[None]:
    """Inside, Transformers makes Gemma 3n without its vision tower, which needs timm and torchvision."""
    module: Any = transformers.models.gemma3n.modeling_gemma3n
    auto = module.AutoModel

    def made(config: Any) -> Any:
        return torch.nn.Identity() if config.model_type == "gemma3n_vision" else auto.from_config(config)  # fmt: skip

    module.AutoModel = SimpleNamespace(from_config=made)
    try:
        yield
    finally:
        module.AutoModel = auto


def save_adapter(model: Any, modules: list[str], folder: Path) -> None:
    """A random LoRA adapter for these modules of the language model, in the form of PEFT, beside the weights of the model."""
    from safetensors.torch import save_file

    torch.manual_seed(3)
    rank, found = 6, {}
    for name, module in model.named_modules():
        if "language_model" in name and name.rpartition(".")[2] in modules:
            found[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(
                rank, module.in_features
            )
            found[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(
                module.out_features, rank
            )
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "base_model_name_or_path": str(folder)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def inside_a_model_that_speaks(folder: Path, kind: str) -> None:
    """Rewrite the checkpoint in the form of published Omni models: config and weights below "thinker", in a wrapper with `model_type` kind."""
    from safetensors.torch import load_file, save_file

    config, file = folder / "config.json", folder / "model.safetensors"
    thinker = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": kind, "architectures": ["OmniModel"], "thinker_config": thinker}))  # fmt: skip
    weights = {f"thinker.{name}": weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def kinds_of(path: str) -> list[str]:
    """Kinds of media for which a checkpoint has a processor."""
    file = json.loads((Path(path) / "preprocessor_config.json").read_text())
    sees, hears = "image_processor_type" in file, "feature_extractor_type" in file
    return ["image"] * sees + ["audio"] * hears


def engine_options(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {**vision_checkpoints.CHECKPOINTS, **CHECKPOINTS}[kind].get("engine", {})  # fmt: skip
    return found


@cache
def transformers_model(path: str, architecture: str) -> Any:
    """With the adapter of the folder, if it has one, by PEFT."""
    kind = getattr(transformers, architecture)
    with without_timm():
        found = kind.from_pretrained(path, dtype=torch.float32, adapter_kwargs={"subfolder": "none"})  # fmt: skip
    if (Path(path) / "adapter_config.json").is_file():
        from peft import PeftModel

        found = PeftModel.from_pretrained(found, path)
    return found.eval()


def sound(number: int = 0, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """Samples of a few tones and noise, between -1 and 1."""
    draw = np.random.default_rng(number)
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * hertz * times) for hertz in draw.uniform(100, 4000, 3))
    return (0.2 * tones + 0.05 * draw.standard_normal(len(times))).astype(np.float32)
