"""Recurrent layers, split among ranks: the same logits with the same bits, and smaller states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.cases import Case, write
from tests.models.harness import Runner
from tests.models.recurrent_cases import CASES
from tests.models.test_native import build, texts
from tests.parallel.thread_ranks import ThreadRanks, load_on, on_ranks

EVERY = {case.name: case for case in CASES}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDER = {"mamba_d_head": 32}
WIDE_ZAMBA = {"n_mamba_heads": 8, "attention_head_dim": 64}
MORE = {
    **dict.fromkeys(("bamba", "granite 4 h", "granite 4 h dense"), WIDER),
    **dict.fromkeys(("zamba2", "zamba2 plain"), WIDE_ZAMBA),
    "mamba2": {"num_heads": 16},
}
WHOLE = {"recurrent gemma wide", "qwen3_5 odd"}  # head sizes that are no multiple of 16
QUICK = {"qwen3_5", "mamba2", "mamba", "granite 4 h", "lfm2 moe"}
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(EVERY)
]


def state_bytes(model: nn.Module) -> int:
    return sum(layer.state_spec().num_bytes for layer in model.state_layers())


def pieces(model: nn.Module) -> list[Tensor]:
    """The logits of a prompt in one chunk, of another in chunks of 5, and of a short one."""
    long, short, least = texts(lengths=(23, 17, 2))
    runner = Runner(model)
    return [runner.prefill(0, long), runner.prefill(1, short, chunk=5), runner.prefill(2, least)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_have_the_same_bits(name: str, tmp_path: Path) -> None:
    case: Case = EVERY[name]
    sizes = {key: size for key, size in SIZES.items() if case.config.get(key, 0) is not None}
    write(replace(case, config={**case.config, **sizes, **MORE.get(name, {})}), tmp_path)
    whole = build(tmp_path, model_impl="quire")
    wanted, size_of_all = pieces(whole), state_bytes(whole)

    def run(ranks: ThreadRanks) -> tuple[list[Tensor], int]:
        model = load_on(ranks, lambda: build(tmp_path, model_impl="quire"))
        return pieces(model), state_bytes(model)

    for size in (2, 4):
        for found, num_bytes in on_ranks(size, run):
            assert all(map(torch.equal, found, wanted))
            if size == 2 and name not in WHOLE:
                assert num_bytes <= 0.7 * size_of_all
