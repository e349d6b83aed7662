"""Encoders against Transformers, from the same files; and against themselves, alone and in company."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.context_length import model_length
from quire.config.engine import EngineConfig, ModelSpec
from quire.forward_context import forward_context
from quire.models.encoder import EncoderModel
from quire.models.hf_config import read_config
from quire.models.load import build_model
from quire.ops.packed_attention import packed_attention
from quire.platforms.cpu import CpuPlatform
from tests.models.cases import VOCAB
from tests.models.encoder_cases import ENCODERS, Encoder, write
from tests.models.harness import make_batch

CLOSE = 1e-5


def build(folder: Path, architecture: str, dtype: str = "float32", **asked: Any) -> EncoderModel:
    options = EngineConfig.from_keywords(model=str(folder), **asked)
    spec = ModelSpec(
        path=str(folder), architecture=architecture, hf_config=read_config(str(folder)), dtype=dtype, max_model_len=64,
        max_step_tokens=512, quantization=None, options=options.model, load=options.load,
    )  # fmt: skip
    found = build_model(spec, CpuPlatform())
    assert isinstance(found, EncoderModel)
    return found


@torch.inference_mode()
def hidden(
    model: nn.Module, texts: Sequence[list[int]], seconds: Sequence[int] = ()
) -> list[Tensor]:
    """Hidden states of all texts in one step; `seconds`: where the second text of each begins."""
    batch = make_batch(
        [(row, 0, text) for row, text in enumerate(texts)], [[0] * 99] * len(texts), 16
    )
    if seconds:
        pairs = zip(texts, seconds, strict=True)
        types = [int(i >= second) for text, second in pairs for i in range(len(text))]
        batch.extras["token_types_T"] = torch.tensor(types)
    with forward_context(batch):
        found = model(model.embed(batch.token_ids_T), batch.positions_T)
    return list(found.split([len(text) for text in texts]))


def texts(lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(5, VOCAB) for _ in range(n)] for n in lengths]


LENGTHS = (61, 1, 9, 34, 5, 6, 7, 11)  # windows of 5 and 3 to each side end inside, at and beyond


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name.replace(" ", "-")) for c in ENCODERS])
def test_hidden_states_equal_transformers(case: Encoder, tmp_path: Path) -> None:
    theirs = write(case, tmp_path)
    ours = build(tmp_path, type(theirs).__name__)
    assert not ours.attention_layers()
    lines = texts(LENGTHS)
    together = hidden(ours, lines)
    for line, got in zip(lines, together, strict=True):
        with torch.inference_mode():
            wanted = theirs(input_ids=torch.tensor([line])).last_hidden_state[0]
        assert wanted.std() > 0.1
        assert (got - wanted).abs().max() < CLOSE
        assert torch.equal(hidden(ours, [line])[0], got)


def test_token_types_equal_transformers(tmp_path: Path) -> None:
    """The second text of a pair has type 1."""
    theirs = write(ENCODERS[0], tmp_path)
    ours = build(tmp_path, "BertModel")
    lines, seconds = texts((20, 7)), (8, 7)
    for line, second, got in zip(lines, seconds, hidden(ours, lines, seconds), strict=True):
        types = torch.tensor([[int(i >= second) for i in range(len(line))]])
        with torch.inference_mode():
            wanted = theirs(input_ids=torch.tensor([line]), token_type_ids=types)
        assert (got - wanted.last_hidden_state[0]).abs().max() < CLOSE
    assert not torch.equal(hidden(ours, lines)[0], hidden(ours, lines, seconds)[0])


def test_older_spellings_of_published_files(tmp_path: Path) -> None:
    """Prefixes, gamma and beta, packed weights and the keys of config.json that remote code reads."""
    case = next(case for case in ENCODERS if case.name == "nomic")
    write(case, tmp_path)
    want = hidden(build(tmp_path, "NomicBertModel"), texts((12,)))[0]
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    found = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in stored.items()
    }
    save_file(found, path, metadata={"format": "pt"})
    config = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_inner": 72,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 66,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-3,
        "rotary_emb_base": 300.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(hidden(build(tmp_path, "NomicBertModel"), texts((12,)))[0], want)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "bert"])
def test_all_positions_are_used(kind: str) -> None:
    """RoBERTa's table of 514 rows serves 512 tokens."""
    config = {"model_type": kind, "max_position_embeddings": 514, "pad_token_id": 1}
    assert model_length(config)[0] == (514 if kind == "bert" else 512)


def test_packed_attention_equals_attention_by_hand() -> None:
    """Windows to both sides, a bias by distance, and heads that share keys and values."""
    torch.manual_seed(1)
    starts_B1, heads, kv_heads = torch.tensor([0, 1, 12]), 4, 2
    q_THD, k_TKD, v_TKD = (torch.randn(12, n, 8) for n in (heads, kv_heads, kv_heads))
    for window in (None, 1, 3, 11, 12):
        bias_HL = torch.randn(heads, 2 * 16 - 1)
        got = packed_attention(q_THD, k_TKD, v_TKD, starts_B1, 0.3, window, bias_HL)
        assert torch.allclose(got[0], v_TKD[0].repeat_interleave(2, 0), atol=1e-6)
        for i in range(1, 12):
            for head in range(heads):
                seen = [j for j in range(1, 12) if window is None or abs(i - j) < window]
                k, v = k_TKD[seen, head // 2], v_TKD[seen, head // 2]
                bias = torch.stack([bias_HL[head, 15 + j - i] for j in seen])
                weights = (k @ q_THD[i, head] * 0.3 + bias).softmax(0)
                assert torch.allclose(got[i, head], weights @ v, atol=1e-5)
