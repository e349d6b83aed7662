"""Tiny random checkpoints for pooling, as Transformers and sentence-transformers write them, and engines on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from equality.engines import BASE, KINDS, VOCAB, Engine
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from quire.protocol.output import EngineOutput


def make_pooling_checkpoint(
    kind: str, folder: Path, auto: str = "AutoModel", **more: Any
) -> tuple[str, Any]:
    """A checkpoint of a class of Transformers, with a tokenizer of the words w3 to w210; and its model."""
    torch.manual_seed(len(kind) + len(auto))
    settings = {**BASE, **KINDS.get(kind, {}), "num_hidden_layers": 2, **more}
    if kind not in KINDS:  # an encoder
        del settings["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    words = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    inner = Tokenizer(tokenizer_models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=300
    )
    tokenizer.save_pretrained(folder)
    return str(folder), model


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def array(output: EngineOutput) -> np.ndarray:
    assert output.finish == "stop", output
    assert output.tensor is not None
    found: np.ndarray = np.frombuffer(output.tensor.data, np.float32).reshape(output.tensor.shape)
    return found


def run(one: Engine, prompts: list[list[int]], params: Any) -> list[np.ndarray]:
    """The tensor of each prompt, all in one batch."""
    return [array(outputs[-1]) for outputs in one.run(prompts, params)]


def edit_config(folder: str, **values: Any) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
