"""Checkpoints that cannot be served at all are refused by name, with what to serve, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.from_keywords import engine_config
from quire.engine.resolve import resolve_without_weights
from quire.errors import Unsupported
from quire.models.supported import check_model

LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
ULTRAVOX = {
    "model_type": "ultravox", "architectures": ["UltravoxModel"], "audio_model_id": "openai/whisper-large-v3-turbo",
    "audio_config": {"model_type": "whisper", "d_model": 64}, "auto_map": {"AutoModel": "ultravox_model.UltravoxModel"},
}  # fmt: skip


@pytest.mark.parametrize("text", [{"text_config": LLAMA}, {"text_model_id": "org/llama", "vocab_size": 320, "hidden_size": 64}], ids=["a text_config", "the name of a model"])  # fmt: skip
@pytest.mark.parametrize("trust", [False, True])
def test_ultravox(text: dict[str, object], trust: bool, tmp_path: Path):
    """Published checkpoints have the projector only."""
    (tmp_path / "config.json").write_text(json.dumps(ULTRAVOX | text))
    config = {"model": str(tmp_path), "skip_tokenizer_init": True, "trust_remote_code": trust}
    resolved, _ = resolve_without_weights(engine_config(config))
    with pytest.raises(
        Unsupported,
        match=r"ultravox \(its language model and its sound .* are in other .*serve Voxtral",
    ):
        check_model(resolved)
