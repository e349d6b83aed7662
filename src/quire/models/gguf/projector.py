"""A file `mmproj*.gguf`: the vision tower and the projector that llama.cpp keeps beside a language model's file.

What it says about itself becomes the files of a wrapper: config.json, and those of the processor of pictures. Knows projectors.toml and
the keys clip.*. Does not know torch or blocks.

Sources: gguf-py/gguf/constants.py and tools/mtmd in ggml-org/llama.cpp.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ConfigError, ModelNotFound, Unsupported
from quire.models.gguf.header import GgufHeader, GgufTensor, read_header
from quire.models.gguf.tokenizer import GgufTokenizer

PROJECTOR = "mmproj"
"""What the names of such files contain."""
LINK = f"{PROJECTOR}.gguf"
"""Its name in the directory of a model."""
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""Of Qwen: the product with the first and with the second frame of a pair."""
PIXELS_OF_QWEN = (56 * 56, 28 * 28 * 16384)
"""The smallest and the largest picture, as released; few files say them."""


@functools.cache
def table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("projectors.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Projector:
    """A read file. `about`: its table."""

    file: Path
    header: GgufHeader
    kind: str
    about: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of clip.vision.*."""
        return self.header.get(f"vision.{key}", default)

    def number(self, key: str) -> int:
        """Raises ConfigError: clip.vision.KEY is missing, or no positive number."""
        value = self.get(key)
        if not isinstance(value, int) or not 0 < value < 1 << 20:
            raise ConfigError(f"{self.file}: clip.vision.{key} is {str(value)[:40]}")
        return value

    def check_sizes(self) -> None:
        """Raises ConfigError: the metadata claim other layers than the tensors are, or heads that do not divide them."""
        depth, size = self.number("block_count"), self.number("embedding_length")
        if f"v.blk.{depth - 1}.ffn_up.weight" not in self.shapes:
            raise ConfigError(
                f"{self.file}: it claims {depth} layers, and has no tensors of the last"
            )
        if size % (2 * self.number("attention.head_count")):
            raise ConfigError(
                f"{self.file}: {size} features for {self.number('attention.head_count')} heads"
            )
        if len({self.shapes[name] for name in PATCHES if name in self.shapes}) != 1:
            raise ConfigError(f"{self.file}: it has no patch embedding, or two of different shapes")

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.header.tensors}

    @property
    def swaps(self) -> bool:
        """Whether the names of the MLP's two products are exchanged, as in older files."""
        outs, ins = self._product("v.blk.0.ffn_up.weight")
        return ins != outs == self.number("embedding_length")

    @property
    def inner(self) -> int:
        """The inner size of the MLP. (Some files of Qwen have another number in clip.vision.feed_forward_length.)"""
        outs, ins = self._product("v.blk.0.ffn_up.weight")
        return ins if self.swaps else outs

    @property
    def width(self) -> int:
        """Features of a row: the language model's."""
        name = next((n for n in ("mm.2.weight", "mm.input_projection.weight") if n in self.shapes), "mm.2.weight")  # fmt: skip
        return self._product(name)[0 if name == "mm.2.weight" else 1]

    def _product(self, name: str) -> tuple[int, int]:
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise ConfigError(f"{self.file} has no matrix {name}: it is no complete vision tower")
        return shape[0], shape[1]


def read_projector(file: Path) -> Projector:
    """Raises:
    ConfigError: the file is damaged. ModelNotFound: there is none. Unsupported: Quire does not have its kind.
    """
    if not file.is_file():
        raise ModelNotFound(f"--mmproj {file} does not exist; pass the file with the vision tower")
    header = read_header(file, tokenizer=False)
    kind = str(header.get("vision.projector_type") or header.get("projector_type") or "mlp")
    if header.architecture != "clip" or not header.get("has_vision_encoder"):
        raise Unsupported(f"{file} (no vision tower of llama.cpp) for --mmproj", "pass the file mmproj*.gguf of the model")  # fmt: skip
    if kind not in table()["projectors"]:
        known = ", ".join(table()["projectors"])
        raise Unsupported(f"{file} (a vision tower of the kind {kind[:80]!r})", f"serve the model's safetensors checkpoint; Quire reads the kinds {known}")  # fmt: skip
    return Projector(file, header, kind, table()["projectors"][kind])


def projectors_in(folder: Path) -> list[Path]:
    """The files of this kind in a directory."""
    return [file for file in sorted(folder.glob("*.gguf")) if PROJECTOR in file.name.lower()]


# ------------------------------------------------------------------------------------ the wrapper's files


def wrapper_texts(
    projector: Projector,
    model: GgufHeader,
    config: Mapping[str, Any],
    tokenizer: GgufTokenizer,
) -> dict[str, object]:
    """config.json of the wrapper, and the files of its processor. `config`: of the language model in `model`.

    Raises:
        ConfigError: the file belongs to another model, or is not complete. Unsupported: as `GgufTokenizer.stand_for`.
    """
    about = projector.about
    if model.architecture not in about["languages"]:
        fitting = " or ".join(about["languages"])
        raise ConfigError(f"{projector.file} is for models of the architecture {fitting}; {model.files[0].name} is {model.architecture}")  # fmt: skip
    if projector.width != config["hidden_size"]:
        raise ConfigError(f"{projector.file} gives {projector.width} features; {model.files[0].name} takes {config['hidden_size']}")  # fmt: skip
    tokenizer.stand_for(about["token"])
    make = {"llava": _llava, "gemma3": _gemma3}.get(about["model_type"], _qwen)
    projector.check_sizes()
    try:
        outer, processor, pictures = make(projector, config, tokenizer)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{projector.file}: its metadata are not complete: {error!r}") from None
    inner = {**config, **outer.pop("text_config", {})}
    own = {"image_mean": projector.get("image_mean"), "image_std": projector.get("image_std")}
    pictures |= {key: value for key, value in own.items() if value is not None}
    whole = {
        "architectures": [about["architecture"]], "model_type": about["model_type"], "text_config": inner,
        "tie_word_embeddings": config["tie_word_embeddings"], **outer,
    }  # fmt: skip
    return {
        "config.json": whole,
        "processor_config.json": processor,
        "preprocessor_config.json": {**pictures, "processor_class": processor["processor_class"]},
    }


Made = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What config.json, processor_config.json and preprocessor_config.json have."""


def _siglip(projector: Projector, act: str) -> dict[str, Any]:
    return {
        "hidden_size": projector.number("embedding_length"), "intermediate_size": projector.inner,
        "num_hidden_layers": projector.number("block_count"), "num_attention_heads": projector.number("attention.head_count"),
        "image_size": projector.number("image_size"), "patch_size": projector.number("patch_size"),
        "layer_norm_eps": projector.get("attention.layer_norm_epsilon", 1e-5), "hidden_act": act,
    }  # fmt: skip


def _llava(projector: Projector, config: Mapping[str, Any], tokenizer: GgufTokenizer) -> Made:
    """LLaVA 1.5; and LLaVA-NeXT, whose files have the same kind of projector."""
    has_class, size = "v.class_embd" in projector.shapes, projector.number("image_size")
    plain = "gelu" if has_class else "gelu_pytorch_tanh"
    tower = _siglip(projector, plain if projector.header.get("use_gelu") else "quick_gelu")
    tower["model_type"] = "clip_vision_model" if has_class else "siglip_vision_model"
    chosen = projector.get("feature_layer") or [
        tower["num_hidden_layers"]
    ]  # later ones are left out
    select, patch = "default" if has_class else "full", tower["patch_size"]
    outer: dict[str, Any] = {
        "vision_config": tower, "image_token_index": tokenizer.ids["<image>"], "vision_feature_layer": chosen,
        "vision_feature_select_strategy": select, "image_seq_length": (size // patch) ** 2,
        "multimodal_projector_bias": "mm.0.bias" in projector.shapes, "projector_hidden_act": "gelu",
    }  # fmt: skip
    processor: dict[str, Any] = {
        "processor_class": "LlavaProcessor", "patch_size": patch, "vision_feature_select_strategy": select,
        "image_token": "<image>", "num_additional_image_tokens": int(has_class),
    }  # fmt: skip
    square = {"height": size, "width": size}
    pictures: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size}, "crop_size": square}  # fmt: skip
    if not has_class:
        pictures = {"image_processor_type": "SiglipImageProcessor", "size": square}
    if "model.image_newline" in projector.shapes:
        flat = projector.get("image_grid_pinpoints") or ()
        grids = {"image_grid_pinpoints": [list(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]}  # fmt: skip
        outer |= {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"], **grids}  # fmt: skip
        processor["processor_class"] = "LlavaNextProcessor"
        pictures |= {"image_processor_type": "LlavaNextImageProcessor", **grids}
    return outer, processor, pictures


def _gemma3(projector: Projector, config: Mapping[str, Any], tokenizer: GgufTokenizer) -> Made:
    tower, size = _siglip(projector, "gelu_pytorch_tanh"), projector.number("image_size")
    pool, side = projector.get("projector.scale_factor", 4), size // tower["patch_size"]
    if side < 1 or side % pool:
        raise ValueError(f"{side} patches of a side, by {pool}")
    count = (side // pool) ** 2
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}  # fmt: skip
    tokenizer.name_tokens(named)
    outer = {
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **tower}, "mm_tokens_per_image": count,
        **{f"{key}_index": tokenizer.ids[token] for key, token in named.items()},
    }  # fmt: skip
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": count}
    return outer, processor, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}  # fmt: skip


def _qwen(projector: Projector, config: Mapping[str, Any], tokenizer: GgufTokenizer) -> Made:
    """Qwen2-VL and Qwen2.5-VL."""
    newer = projector.about["model_type"] == "qwen2_5_vl"
    size, depth = projector.number("embedding_length"), projector.number("block_count")
    patch, merge = projector.number("patch_size"), projector.get("spatial_merge_size", 2)
    tower: dict[str, Any] = {
        "model_type": projector.about["model_type"], "depth": depth, "num_heads": projector.number("attention.head_count"),
        "patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": 2,
    }  # fmt: skip
    if newer:
        every = projector.number("n_wa_pattern") if projector.get("n_wa_pattern") else depth + 1
        tower |= {
            "hidden_size": size, "out_hidden_size": projector.width, "intermediate_size": projector.inner, "hidden_act": "silu",
            "window_size": projector.get("window_size", 112), "tokens_per_second": 2,
            "fullatt_block_indexes": list(range(every - 1, depth, every)),
        }  # fmt: skip
    else:
        tower |= {"embed_dim": size, "hidden_size": projector.width, "mlp_ratio": projector.inner // size, "hidden_act": "quick_gelu"}  # fmt: skip
    ids = {f"{key}_id": f"<|{text}|>" for key, text in (("image_token", "image_pad"), ("video_token", "video_pad"), ("vision_start_token", "vision_start"), ("vision_end_token", "vision_end"))}  # fmt: skip
    outer: dict[str, Any] = {
        "vision_config": tower, "text_config": {"model_type": f"{projector.about['model_type']}_text"},
        **{key: tokenizer.ids[token] for key, token in ids.items() if token in tokenizer.ids},
    }  # fmt: skip
    kind = "Qwen2_5_VLProcessor" if newer else "Qwen2VLProcessor"
    least, most = PIXELS_OF_QWEN
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": merge, "temporal_patch_size": 2,
        "size": {"shortest_edge": projector.get("image_min_pixels", least), "longest_edge": projector.get("image_max_pixels", most)},
    }  # fmt: skip
    return outer, {"processor_class": kind}, pictures


# ------------------------------------------------------------------------------------ tensors


class ProjectorTensor(NamedTuple):
    """A tensor and its name in checkpoints. `minus_one`: it is stored with 1 added. `also`: what is joined to it, as a second frame."""

    tensor: GgufTensor
    name: str
    minus_one: bool = False
    also: GgufTensor | None = None

    @property
    def shape(self) -> Sequence[int]:
        shape = self.tensor.shape
        return shape if self.also is None else (*shape[:2], 2, *shape[2:])


def projector_places(projector: Projector) -> list[ProjectorTensor]:
    """Each tensor of the tower and the projector; those that the wrapper does not have are left out."""
    about, layers = projector.about, table()["layers"][projector.about["layers"]]
    if projector.swaps:
        layers = {**layers, "ffn_up": layers["ffn_down"], "ffn_down": layers["ffn_up"]}
    by_name = {tensor.name: tensor for tensor in projector.header.tensors}
    second = by_name.pop(PATCHES[1], None)
    found = []
    for full, tensor in by_name.items():
        base, _, end = full.rpartition(".")
        if full in about["tensors"]:
            base, end = full, ""
        if base in about["tensors"]:
            name = about["tensors"][base]
        elif base.startswith("v.blk.") and (part := base.split(".", 3))[3:] and part[3] in layers:
            name = f"{about['under']}.{part[2]}.{layers[part[3]]}"
        else:
            continue
        name = name[:-1] if name.endswith(".") else f"{name}.{end}"
        found.append(ProjectorTensor(tensor, name, full == "mm.soft_emb_norm.weight", second if full == PATCHES[0] else None))  # fmt: skip
    return found


def stored_projector(folder: Path) -> list[tuple[str, str, Sequence[int]]]:
    """Checkpoint name, type and shape of each tensor of the tower beside a model; none, if there is no tower."""
    if not (folder / LINK).is_file():
        return []
    places = projector_places(read_projector(folder / LINK))
    kinds = {"F16": "F16", "BF16": "BF16", "F32": "F32"}
    return [(each.name, kinds.get(each.tensor.kind, "BF16"), each.shape) for each in places if math.prod(each.shape)]  # fmt: skip
