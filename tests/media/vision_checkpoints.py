"""Tiny random vision-language checkpoints, with a tokenizer, a chat template and an image processor; and pictures.

Knows configurations of Transformers. Does not know Quire.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

VOCAB = 340
SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<img>", "</img>", "<video>", *[f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)], "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|audio|>", "<|video|>"]  # fmt: skip
AT = {token: number for number, token in enumerate(SPECIAL)}
NEW_LINES = ["ĊĊ", "ĊĊĊ"]
"""Tokens of several new lines: what replaces a placeholder joins its neighbours."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "projection_dim": 32,
}  # fmt: skip
CROP = {"height": 28, "width": 28}
PREPROCESS_CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": CROP,
}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 16, "image_size": 56, "patch_size": 7,
}  # fmt: skip
QWEN = {
    "image_token_id": 5, "video_token_id": 7, "vision_start_token_id": 4, "vision_end_token_id": 6,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_PIXELS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "config": {
        "text_config": {
            "model_type": "gemma4_text", **TEXT, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24,
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True,
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 256,
        },
        "audio_config": None, "image_token_id": AT["<|image|>"], "boi_token_id": AT["<start_of_image>"],
        "eoi_token_id": AT["<end_of_image>"], "audio_token_id": AT["<|audio|>"], "video_token_id": AT["<|video|>"],
    },
    "processor": {"processor_class": "Gemma4Processor"},
    "tokens": {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<|image|>",
        "audio_token": "<|audio|>", "boa_token": "<|image_start|>", "eoa_token": "<|image_end|>",
    },
    "preprocessor": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70,
    },
    "placeholder": "<|image|>",
    "video": "<|video|>",
    "engine": {"max_num_batched_tokens": 320},
}  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama4": {
        "config": {
            "text_config": {
                "model_type": "llama4_text", **TEXT, "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4,
                "num_experts_per_tok": 1, "attention_chunk_size": 256, "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0],
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
                "patch_size": 7, "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48,
            },
            "image_token_index": AT["<|patch|>"], "boi_token_index": AT["<|image_start|>"], "eoi_token_index": AT["<|image_end|>"],
        },
        "processor": {"processor_class": "Llama4Processor", "patch_size": 7},
        "preprocessor": {"image_processor_type": "Llama4ImageProcessor", "size": CROP, "max_patches": 4},
        "placeholder": "<|image|>",
    },
    "llava": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "image_token_index": 3,
            "image_seq_length": 16, "vision_feature_layer": -2,
        },
        "processor": {
            "processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
            "image_token": "<image>", "num_additional_image_tokens": 1,
        },
        "preprocessor": PREPROCESS_CLIP,
        "placeholder": "<image>",
    },
    "llava_next": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "image_token_index": 3,
            "image_seq_length": 16, "vision_feature_layer": -2, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        "processor": {
            "processor_class": "LlavaNextProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
            "image_token": "<image>", "num_additional_image_tokens": 1,
        },
        "preprocessor": {
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28}, "crop_size": CROP,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        "placeholder": "<image>",
    },
    "llava_onevision": {
        "config": {
            "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SIGLIP, "image_token_index": 3,
            "image_seq_length": 16, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        "processor": {
            "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full",
            "image_token": "<image>",
        },
        "preprocessor": {
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": CROP, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        "placeholder": "<image>",
    },
    "internvl": {
        "config": {
            "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": 3, "image_seq_length": 4, "downsample_ratio": 0.5,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": [28, 28], "patch_size": [7, 7],
            },
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "tokens": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>", "video_token": "<video>",
        },
        "preprocessor": {
            "image_processor_type": "GotOcr2ImageProcessor", "size": CROP, "crop_to_patches": True, "min_patches": 1,
            "max_patches": 4,
        },
        "placeholder": "<image>",
    },
    "idefics3": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT}, "image_token_id": 3, "scale_factor": 2,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 7,
            },
        },
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "preprocessor": {
            "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28},
        },
        "placeholder": "<image>",
    },
    "smolvlm": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT}, "image_token_id": 3, "scale_factor": 2,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 7,
            },
        },
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "preprocessor": {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28},
        },
        "placeholder": "<image>",
    },
    "qwen2_vl": {
        "config": {
            **QWEN,
            "text_config": {"model_type": "qwen2_vl_text", "rope_parameters": QWEN_ROPE, **TEXT},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        },
        "processor": {"processor_class": "Qwen2VLProcessor"},
        "preprocessor": {"image_processor_type": "Qwen2VLImageProcessor", **QWEN_PIXELS},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen2_5_vl": {
        "config": {
            **QWEN,
            "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": QWEN_ROPE, **TEXT},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
            },
        },
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
        "preprocessor": {"image_processor_type": "Qwen2VLImageProcessor", **QWEN_PIXELS},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen3_5": {
        "config": {
            **QWEN,
            "text_config": {
                "model_type": "qwen3_5_text", **TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True, "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 16, "num_position_embeddings": 64,
            },
        },
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor", **QWEN_PIXELS, "patch_size": 16,
            "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40},
        },
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen3_vl": {
        "config": {
            **QWEN,
            "text_config": {
                "model_type": "qwen3_vl_text", **TEXT, "head_dim": 16,
                "rope_parameters": {**QWEN_ROPE, "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
            },
        },
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor", **QWEN_PIXELS, "patch_size": 16,
            "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40},
        },
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "gemma3": {
        "config": {
            "text_config": {
                "model_type": "gemma3_text", **TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**SIGLIP, "image_size": 56, "patch_size": 7, "vision_use_head": False},
            "mm_tokens_per_image": 16, "image_token_index": AT["<image_soft_token>"], "boi_token_index": AT["<start_of_image>"],
            "eoi_token_index": AT["<end_of_image>"],
        },
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        "tokens": {
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        },
        "preprocessor": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        "placeholder": "<start_of_image>",
    },
    "gemma4": {"model_type": "gemma4", **GEMMA4},
    "gemma4_both_ways": {
        "model_type": "gemma4", **GEMMA4, "config": {**GEMMA4["config"], "text_config": {
            **GEMMA4["config"]["text_config"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        }},
    },
    "mistral3": {
        "config": {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16}, "image_token_index": AT["[IMG]"],
            "spatial_merge_size": 2, "vision_feature_layer": -1,
            "vision_config": {**PIXTRAL},
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2},
        "preprocessor": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}},
        "placeholder": "[IMG]",
    },
    "pixtral": {
        "model_type": "llava",
        "config": {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16}, "image_token_index": AT["[IMG]"],
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_config": {**PIXTRAL},
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 7},
        "preprocessor": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}},
        "placeholder": "[IMG]",
    },
    "glm4v": {
        "config": {
            "image_token_id": 3, "video_token_id": 7, "image_start_token_id": 4, "image_end_token_id": 6,
            "video_start_token_id": 1, "video_end_token_id": 2, "tie_word_embeddings": False,
            "text_config": {
                "model_type": "glm4v_text", **TEXT, "rope_parameters": {**QWEN_ROPE, "partial_rotary_factor": 1.0},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 14, "image_size": 112,
            },
        },
        "processor": {"processor_class": "Glm4vProcessor"},
        "preprocessor": {
            "image_processor_type": "Glm4vImageProcessor", **QWEN_PIXELS,
            "size": {"shortest_edge": 56 * 56 * 2, "longest_edge": 28 * 28 * 80},
        },
        "tokens": {"image_token": "<image>", "video_token": "<|video_pad|>"},
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "placeholder": "<|vision_start|><image><|vision_end|>",
    },
    "paligemma": {
        "config": {
            "text_config": {"model_type": "gemma2", **TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
            "vision_config": {**SIGLIP, "vision_use_head": False}, "image_token_index": AT["<image>"], "projection_dim": 64,
            "vocab_size": VOCAB, "hidden_size": 64,
        },
        "processor": {"processor_class": "PaliGemmaProcessor"},
        "tokens": {"image_token": "<image>"},
        "preprocessor": {"image_processor_type": "SiglipImageProcessor", "size": CROP, "image_seq_length": 16},
        "placeholder": "<image>",
    },
    "vipllava": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "image_token_index": 3,
            "image_seq_length": 16, "vision_feature_layers": [-2, -3],
        },
        "processor": {
            "processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
            "image_token": "<image>", "num_additional_image_tokens": 1,
        },
        "preprocessor": PREPROCESS_CLIP,
        "placeholder": "<image>",
    },
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in"
    " m.content %}{% if p.type in ('image', 'audio') %}PLACEHOLDER{% elif p.type == 'video' %}VIDEO{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(
    named: dict[str, str], last: Sequence[str] = ()
) -> transformers.PreTrainedTokenizerFast:
    """Bytes, after the special tokens. `named`: attributes of the tokenizer. `last`: special tokens with the last ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet, *NEW_LINES])}
    vocabulary |= {token: VOCAB - len(last) + number for number, token in enumerate(last)}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    backend.add_special_tokens([*SPECIAL, *last])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        **({"extra_special_tokens": named} if named else {}),
    )  # fmt: skip


def make_checkpoint(kind: str | dict[str, Any], folder: Path, template: str = TEMPLATE) -> str:
    """A model that does not repeat itself, and whose answers depend on the picture. `kind`: of CHECKPOINTS, or such an entry."""
    made = CHECKPOINTS[kind] if isinstance(kind, str) else kind
    model_type = made.get("model_type", kind)
    config = transformers.AutoConfig.for_model(model_type, **made["config"])
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw_weights(model, len(kind if isinstance(kind, str) else model_type))
    model.save_pretrained(folder)
    return save_processor(made, folder, template)


def draw_weights(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.normal_(std=0.2)


def save_processor(made: dict[str, Any], folder: Path, template: str) -> str:
    """The tokenizer and the processor's files. Returns the folder."""
    own = tokenizer(made.get("tokens", {}), made.get("last_tokens", ()))
    video = video_placeholder(made)
    own.chat_template = template.replace("PLACEHOLDER", made["placeholder"]).replace("VIDEO", video)
    own.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {**made["preprocessor"], "processor_class": made["processor"]["processor_class"]}
        )
    )
    (folder / "processor_config.json").write_text(json.dumps(made["processor"]))
    return str(folder)


def video_placeholder(made: dict[str, Any]) -> str:
    """What stands for a video in a prompt. `made`: of CHECKPOINTS."""
    return str(made.get("video", made["placeholder"].replace("image", "video")))


@cache
def transformers_model(path: str) -> Any:
    # Llama 4 of Transformers 5.24 reads a field of its language model's output that this does not have.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    found = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return found.eval()


def encoder_passes(llm: Any) -> int:
    """How many pictures the tower of an engine has encoded."""
    return int(sum(m.value for m in llm.get_metrics() if m.name == "quire:encoder_passes"))


def picture(number: int = 0, width: int = 70, height: int = 50) -> Image.Image:
    """A picture with areas of different colours."""
    draw = np.random.default_rng(number)
    small = draw.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def damaged(file: bytes, draw: random.Random) -> bytes:
    """The file with some bytes changed, removed, repeated or added."""
    data = bytearray(file)
    for _ in range(draw.randint(1, 6)):
        at = (
            draw.randrange(len(data)) if draw.random() < 0.6 else draw.randrange(min(len(data), 64))
        )
        match draw.randrange(5):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                data[at : at + draw.randint(1, 30)] = b""
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 30)]
            case 3:
                data[at : at + 4] = draw.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
            case 4:
                del data[at:]
        if len(data) < 8:
            data += file[:16]
    return bytes(data)
