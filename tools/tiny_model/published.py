"""The language model of a published folder, with or without a tower beside it.

Knows the names that tensors have in both. Knows nothing of pictures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

INSIDE = "language_model."
"""Begins the names of the language model's tensors in a folder with a tower."""


def text_config(folder: Path) -> dict[str, Any]:
    """config.json of the language model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return dict(config.get("text_config", config))


def text_weights(folder: Path) -> dict[str, Tensor]:
    """With the names of a checkpoint of the language model alone."""
    found = load_file(folder / "model.safetensors")
    inside = {name.removeprefix(INSIDE): w for name, w in found.items() if name.startswith(INSIDE)}
    return inside or found


def language_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """In Transformers, which loads a folder with a tower as another class."""
    config = text_config(folder)
    kind = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(kind, dtype=dtype)
    model.load_state_dict(
        {name: w.to(dtype) for name, w in text_weights(folder).items()}, strict=False
    )
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
