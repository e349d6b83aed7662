"""Vision towers whose own weights are quantized in the checkpoint: the tokens of Transformers with the numbers that these stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_engine import SMALL
from test_picture_equality import given, peer, tokens
from vision_checkpoints import picture

from quire import LLM
from quire.frontend.media.prompt_reader import media_inputs
from tests.models.cases import edit_config
from tests.quantization.writers import FORMS

TEXT = "see @ here"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(("kind", "form"), [("llava", "ct int4"), ("vipllava", "ct int4"), pytest.param("qwen2_5_vl", "gptq", marks=SLOW)])  # fmt: skip
def test_tokens_of_a_quantized_tower(kind: str, form: str, checkpoint, same_process, tmp_path: Path) -> None:  # fmt: skip
    """Quire's own tower, and one that runs through Transformers."""
    made = next(each for each in FORMS if each.name == form)
    dense, stored = tmp_path / "dense", tmp_path / "stored"
    shutil.copytree(checkpoint(kind), dense)
    floats = load_file(dense / "model.safetensors")
    parts = dict(floats)
    count = 0
    for name, weight in floats.items():
        layer, _, last = name.rpartition(".")
        in_tower = ".layers." in name or ".blocks." in name
        if "vis" in name and in_tower and last == "weight" and weight.dim() == 2 and not weight.shape[1] % 32:  # fmt: skip
            found, means_OI = made.write(weight.numpy(), layer.rpartition(".")[2], **made.how)
            del parts[name]
            parts |= {f"{layer}.{part}": value.contiguous() for part, value in found.items()}
            floats[name] = torch.from_numpy(means_OI)
            count += 1
    assert count >= 8
    shutil.copytree(dense, stored)
    for folder, tensors in ((dense, floats), (stored, parts)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = ["lm_head", r"re:.*language_model.*", r"re:^model\.layers.*"]
    key = "modules_to_not_convert" if form == "gptq" else "ignore"
    edit_config(stored, quantization_config={**made.config, key: plain})
    expected = peer(str(dense), kind, TEXT, [picture(1)])[1]
    with LLM(str(stored), **SMALL) as llm:
        media_inputs(llm.front).processes = same_process(checkpoint(kind))
        assert tokens(llm, given(kind, TEXT, [picture(1)]))[0] == expected
