"""Writes quire-tiny with the eyes of a run, as a folder that Transformers' LlavaForConditionalGeneration and LlavaProcessor load.

    python -m tools.tiny_vision.export RUN OUT --language src/quire/embedded/quire-tiny

A language model that did not learn is copied bit for bit. What goes out of the run is the moving average of the weights in bfloat16, or
with `--last` the weights of its last step, for a run that is shorter than the average's 500 steps. The same run gives the same bytes.
The card has no figures of pictures until `evaluate.py` has written them.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import chat
from tools.tiny_model.export import write_json, write_weights
from tools.tiny_model.published import INSIDE, text_config, text_weights
from tools.tiny_vision.network import Eyes
from tools.tiny_vision.prompt_files import IMAGE, IMAGE_ID, with_image_token, with_pictures
from tools.tiny_vision.questions import KINDS

CARD = Path(__file__).with_name("card.md")
PART = re.compile(r"<!-- pictures -->.*?<!-- end of pictures -->", re.S)
BEFORE = "## How it was made"
COPIED = ("generation_config.json", "tokenizer_config.json", "README.md")


def config(eyes: Eyes, text: dict[str, Any]) -> dict[str, Any]:
    """config.json of a LLaVA."""
    shared = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text,
        "vision_config": eyes.hf_config(), "image_token_index": IMAGE_ID, "image_seq_length": eyes.rows,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True, "tie_word_embeddings": True, "dtype": "bfloat16", **{key: text.get(key) for key in shared},
    }  # fmt: skip


def image_processor(eyes: Eyes) -> dict[str, Any]:
    """preprocessor_config.json: a picture is resized to the tower's size, whatever its own."""
    return {
        "image_processor_type": "SiglipImageProcessor", "processor_class": "LlavaProcessor", "do_convert_rgb": True,
        "do_resize": True, "size": {"height": eyes.image_size, "width": eyes.image_size}, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip


def processor(eyes: Eyes) -> dict[str, Any]:
    """processor_config.json"""
    return {
        "processor_class": "LlavaProcessor", "patch_size": eyes.patch_size, "vision_feature_select_strategy": "full",
        "image_token": IMAGE, "num_additional_image_tokens": 0,
    }  # fmt: skip


def weights(learnt: dict[str, Tensor], eyes: Eyes, language: Path) -> dict[str, Tensor]:
    """With the names of LLaVA's published checkpoints."""
    made = {INSIDE + name: tensor for name, tensor in text_weights(language).items()}
    for name, tensor in learnt.items():
        part, _, rest = name.partition(".")
        if part == "language":
            made[INSIDE + rest] = tensor
        elif part == "tower":
            made[f"vision_tower.vision_model.{rest}"] = tensor
        elif part == "projector":
            made[f"multi_modal_projector.{rest}"] = tensor
    kernel = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    made[kernel] = made[kernel].unflatten(1, (3, eyes.patch_size, eyes.patch_size))
    # The form has a last norm, which LLaVA does not use.
    made["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(eyes.hidden_size)
    made["vision_tower.vision_model.post_layernorm.bias"] = torch.zeros(eyes.hidden_size)
    return made


def card(state: dict[str, Any], eyes: Eyes, numbers: int) -> str:
    """The part of quire-tiny's card that is about pictures."""
    facts = {
        "parameters": f"{numbers / 1e6:.2f} million", "layers": eyes.num_hidden_layers, "width": eyes.hidden_size,
        "side": eyes.image_size, "patch": eyes.patch_size, "rows": eyes.rows, "pictures": f"{state['pictures']:,}",
        "steps": f"{state['optimizer']['steps']:,}",
    }  # fmt: skip
    text = CARD.read_text()
    for slot, value in facts.items():
        text = text.replace("{{" + slot + "}}", str(value))
    return f"<!-- pictures -->\n{text}<!-- end of pictures -->"


def with_part(readme: str, part: str) -> str:
    """A card with this part about pictures, in the place of an earlier one."""
    if PART.search(readme):
        return PART.sub(lambda _: part, readme)
    return readme.replace(BEFORE, f"{part}\n\n{BEFORE}", 1)


def export(run: Path, language: Path, out: Path, kept: str = "average") -> None:
    """Write the published folder of a run."""
    state = torch.load(run / "state.pt", weights_only=True)
    eyes = Eyes(**state["eyes"])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = with_image_token((language / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(tokenizer)
    made, text = weights(state["optimizer"][kept], eyes, language), text_config(language)
    for name in COPIED:
        if out.resolve() != language.resolve():
            shutil.copyfile(language / name, out / name)
    (out / chat.TEMPLATE.name).write_text(with_pictures(chat.TEMPLATE.read_text()))
    write_json(out / "config.json", config(eyes, text))
    write_json(out / "preprocessor_config.json", image_processor(eyes))
    write_json(out / "processor_config.json", processor(eyes))
    write_weights(out / "model.safetensors", made, {})
    numbers = sum(tensor.numel() for name, tensor in made.items() if not name.startswith(INSIDE))
    readme = out / "README.md"
    readme.write_text(with_part(readme.read_text(), card(state, eyes, numbers)))
    print(
        f"{out}: {len(KINDS)} kinds of questions after {state['pictures']} pictures; the tower has {2 * numbers / 1e6:.2f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--language", type=Path, default=EMBEDDED / "quire-tiny")
    parser.add_argument("--last", action="store_true", help="not the average: the weights of the last step")  # fmt: skip
    asked = parser.parse_args()
    export(asked.run, asked.language, asked.out, "master" if asked.last else "average")


if __name__ == "__main__":
    main()
