"""Tiny checkpoints of the encoder families, in every variation that config.json can ask for; see `cases.py`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.archs import randomise
from tests.models.cases import VOCAB, save

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "layer_norm_eps": 1e-3,
}
ROPE = {"rope_type": "default", "rope_theta": 300.0}


@dataclass(frozen=True)
class Encoder:
    """`kind` is Transformers' model_type; `config` goes over BASE."""

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)


ENCODERS = [
    Encoder("bert", "bert"),
    Encoder("bert act", "bert", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    Encoder("roberta", "roberta", {"pad_token_id": 3, "type_vocab_size": 1}),
    Encoder("xlm-r", "xlm-roberta", {"pad_token_id": 1}),
    Encoder(
        "distilbert", "distilbert",
        {"dim": 48, "hidden_dim": 72, "n_layers": 3, "n_heads": 4, "activation": "relu"},
    ),
    Encoder("mpnet", "mpnet", {"max_position_embeddings": 300, "hidden_act": "relu"}),
    Encoder("modernbert", "modernbert", {"local_attention": 10, "norm_eps": 1e-3, "num_hidden_layers": 4, "pad_token_id": 0}),
    Encoder(
        "modernbert biases", "modernbert",
        {
            "local_attention": 6, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
            "pad_token_id": 0,
        },
    ),
    Encoder("nomic", "nomic_bert", {"rope_parameters": ROPE}),
    Encoder("gte", "gte", {"rope_parameters": ROPE, "type_vocab_size": 0, "pad_token_id": 0}),
    Encoder("jina v3", "jina_embeddings_v3", {"rope_parameters": ROPE}),
]  # fmt: skip


def write(case: Encoder, folder: Path) -> nn.Module:
    """Save the case's checkpoint; returns Transformers' model of it, float32, in eval mode."""
    from transformers import CONFIG_MAPPING, AutoModel

    config = CONFIG_MAPPING[case.kind](**copy.deepcopy({**BASE, **case.config}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, dtype=torch.float32).eval()
        randomise(model)
    save(model, folder)
    return model
