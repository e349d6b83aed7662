"""Every native model, split among ranks: the same logits, with the same bits, and less memory for each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quire.parallel.ranks import split_among
from tests.models.cases import CASES, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.parallel.thread_ranks import ThreadRanks, on_ranks


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


QUICK = {
    *("llama one kv head", "llama tied", "qwen3", "mistral window", "qwen3 moe", "gpt-oss", "phi3"),
    *("gemma2", "gemma4", "glm4", "olmo2", "cohere", "deepseek v3"),
}
PARAMETERS = [
    pytest.param(c, id=c.name.replace(" ", "-"), marks=() if c.name in QUICK else pytest.mark.slow)
    for c in CASES
]


def test_quick_cases_exist() -> None:
    assert {case.name for case in CASES} >= QUICK


@pytest.mark.parametrize("case", PARAMETERS)
def test_logits_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    sizes = {"vocab_size": 256}  # of which the ranks have parts
    if "longrope" not in case.name:
        sizes |= {"hidden_size": 128, "intermediate_size": 256}
    config = {**sizes, **case.config}
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    write(replace(case, config=config), tmp_path)
    asked = {"model_impl": "quire", "max_model_len": 64 if "longrope" in case.name else None}
    whole = build(tmp_path, **asked)
    wanted = [Runner(whole).prefill(0, text) for text in texts()]

    def run(ranks: ThreadRanks) -> tuple[list[Tensor], int]:
        with split_among(ranks):
            model = build(tmp_path, **asked)
        return [Runner(model).prefill(0, text) for text in texts()], size_of(model)

    for size in (2, 4):
        for found, parameters in on_ranks(size, run):
            assert parameters < size_of(whole)
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got, want)
