"""Writes a tiny vision-language checkpoint as llama.cpp has it: a language model's GGUF file, and one of the vision tower.

Names and quantization are those of the `gguf` package.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from tests.models.gguf_files import GgufCopy, tensors_of

PROJECTORS = {"llava": "mlp", "llava_next": "mlp", "gemma3": "gemma3", "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger"}  # fmt: skip
LLAVA = {"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2"}
"""Written by a script of llama.cpp's own, which the package does not know."""


OF_TOWER = re.compile(r"^(?:model\.)?(?:vision_tower|visual|multi_modal_projector|image_newline)")
"""What the names of a tower's tensors begin with."""


class LanguageFile(GgufCopy):
    def _metadata(self, w: Any) -> None:
        super()._metadata(w)
        if sections := self.config["rope_parameters"].get("mrope_section"):
            w.add_rope_dimension_sections([*sections, 0])


def write_language_model(folder: Path, file: Path) -> Path:
    """The language model of the checkpoint in `folder`."""
    own = file.parent / f"{file.stem}-language"
    own.mkdir()
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    (own / "config.json").write_text(json.dumps(text))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            shutil.copy(folder / name, own)
    language = {
        re.sub(r"^(model\.)?language_model\.(?:model\.)?(lm_head)?", lambda m: m[2] or "model.", name): values
        for name, values in tensors_of(folder).items() if not OF_TOWER.search(name)
    }  # fmt: skip
    save_file(language, own / "model.safetensors")
    return LanguageFile(own).write(file)


def write_mmproj(folder: Path, file: Path, kind: Kind = Kind.F32) -> Path:
    """Its vision tower and projector. `kind`: of the matrices."""
    config = json.loads((folder / "config.json").read_text())
    tower, text = config["vision_config"], config["text_config"]
    model_type = config["model_type"]
    depth = tower.get("num_hidden_layers") or tower["depth"]
    own = dict(_tower_tensors(folder, model_type, depth))
    w = gguf.GGUFWriter(file, "clip")
    w.add_clip_has_vision_encoder(True)
    w.add_clip_projector_type(PROJECTORS[model_type])
    w.add_vision_projection_dim(text["hidden_size"])
    w.add_vision_image_size(tower.get("image_size", 560))
    w.add_vision_patch_size(tower["patch_size"])
    w.add_vision_embedding_length(tower.get("embed_dim") or tower["hidden_size"])
    w.add_vision_feed_forward_length(tower.get("intermediate_size", 0))
    w.add_vision_block_count(depth - (PROJECTORS[model_type] == "mlp"))
    w.add_vision_head_count(tower.get("num_attention_heads") or tower["num_heads"])
    w.add_vision_attention_layernorm_eps(tower.get("layer_norm_eps", 1e-6))
    pictures = json.loads((folder / "preprocessor_config.json").read_text())
    w.add_vision_image_mean(pictures.get("image_mean", MEANS[PROJECTORS[model_type] == "gemma3"]))
    w.add_vision_image_std(pictures.get("image_std", DEVIATIONS[PROJECTORS[model_type] == "gemma3"]))  # fmt: skip
    _own_metadata(w, model_type, config, pictures)
    for name, values in own.items():
        quantized = values.ndim == 2 and not (name.startswith("v.position") or values.shape[1] % 32)
        stored = kind if quantized else Kind.F32
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values, np.float32), stored), raw_dtype=stored)  # fmt: skip
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file


MEANS = ([0.48145466, 0.4578275, 0.40821073], [0.5, 0.5, 0.5])
DEVIATIONS = ([0.26862954, 0.26130258, 0.27577711], [0.5, 0.5, 0.5])
"""Of CLIP and of SigLIP."""


def _own_metadata(w: Any, model_type: str, config: dict[str, Any], pictures: dict[str, Any]) -> None:  # fmt: skip
    tower = config["vision_config"]
    if model_type == "gemma3":
        w.add_vision_use_gelu(True)
        side = tower["image_size"] // tower["patch_size"]
        w.add_vision_projector_scale_factor(side // int(config["mm_tokens_per_image"] ** 0.5))
    if model_type == "llava_next":
        w.add_array("clip.vision.image_grid_pinpoints", [n for pair in config["image_grid_pinpoints"] for n in pair])  # fmt: skip
    if model_type == "qwen2_5_vl":
        w.add_vision_use_silu(True)
        w.add_vision_n_wa_pattern(tower["fullatt_block_indexes"][0] + 1)
        w.add_uint32("clip.vision.window_size", tower["window_size"])
    if "qwen" in model_type:
        w.add_vision_min_pixels(pictures["size"]["shortest_edge"])
        w.add_vision_max_pixels(pictures["size"]["longest_edge"])


def _tower_tensors(folder: Path, model_type: str, depth: int) -> Iterator[tuple[str, np.ndarray]]:
    names, llava = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 4)), PROJECTORS[model_type] == "mlp"  # fmt: skip
    for full, values in tensors_of(folder).items():
        name = full.removeprefix("model.")
        if not OF_TOWER.search(name):
            continue
        if name == "image_newline":
            yield "model.image_newline", values
            continue
        name = re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
        name = name.replace("_projection_weight", "_projection.weight")
        if llava and (f".layers.{depth - 1}." in name or "post_layernorm" in name):
            continue  # unused, and left out by the converter
        if "soft_emb_norm" in name:
            values = values + 1
        if ".qkv." in name:
            for part, own in zip("qkv", np.split(values, 3), strict=True):
                yield _called(names, name.replace("qkv", part)), own
        elif values.ndim == 5:
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif (base := name.rpartition("."))[0] in LLAVA and llava:
            yield f"{LLAVA[base[0]]}.{base[2]}", values
        else:
            called = _called(names, name)
            if llava:  # the names of its script
                called = re.sub("ffn_(up|down)", lambda m: {"up": "ffn_down", "down": "ffn_up"}[m[1]], called)  # fmt: skip
            yield called, values


def _called(names: Any, name: str) -> str:
    if (found := names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
        raise KeyError(name)
    return str(found)
