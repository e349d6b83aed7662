"""`quire doctor` says what pictures cost: bytes of the tower, tokens of a picture, and why a model takes none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import vision_checkpoints

from quire.cli.doctor import main


def said(path: str, capsys: Any, *flags: str) -> str:
    main([path, "--max-model-len", "512", *flags])
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(("kind", "tokens"), [("llava", 16), ("qwen2_vl", 36), ("gemma3", 16)])
def test_tokens_of_a_picture_and_bytes_of_the_tower(kind, tokens, checkpoint, capsys):
    text = said(checkpoint(kind), capsys)
    assert f"picture of 1024x1024  {tokens} tokens" in " ".join(text.replace("\n", " | ").split(" ")).replace("   ", "  ") or f"{tokens} tokens" in text  # fmt: skip
    model = vision_checkpoints.transformers_model(checkpoint(kind))
    own = [p.numel() * 4 for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n]  # fmt: skip
    assert "vision tower" in text
    assert f"{sum(own) / 2**20:.1f} MiB" in text or f"{sum(own) >> 10}" in text.replace(",", "")


def test_why_a_model_takes_no_pictures(tmp_path: Path, checkpoint, capsys):
    shutil.copytree(checkpoint("llava"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "phi4_multimodal"}))
    assert "an adapter of its language model" in said(str(tmp_path), capsys)
    assert "--language-model-only" in said(checkpoint("llava"), capsys, "--language-model-only")
