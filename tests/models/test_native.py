"""Our own models against Transformers, from the same files; and against themselves, however they are run."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.models.base import CausalLM
from quire.models.load import build_model
from quire.platforms.cpu import CpuPlatform
from tests.models.cases import CASES, VOCAB, Case, write
from tests.models.harness import Runner

CLOSE = 1e-4  # float32, on logits of magnitude 1
LENGTHS = (61, 9, 34)
BLOCKS = (16, 32, 128)


def build(folder: Path, **asked: Any) -> nn.Module:
    config = EngineConfig.from_keywords(model=str(folder), **{"dtype": "float32", **asked})
    return build_model(resolve_config(config).spec, CpuPlatform())


def texts(seed: int = 3, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]


@torch.inference_mode()
def plain(model: nn.Module, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def in_pieces(runner: Runner, texts: list[list[int]], seed: int, most: int) -> list[Tensor]:
    """All logits of all texts, side by side in pieces of 1 to `most` tokens, rows in any order."""
    draw = random.Random(seed)
    got: list[list[Tensor]] = [[] for _ in texts]
    for row, text in enumerate(texts):
        runner.add(row, text)
    while left := [r for r, text in enumerate(texts) if runner.computed[r] < len(text)]:
        rows = draw.sample(left, draw.randint(1, len(left)))
        work = [(r, min(draw.randint(1, most), len(texts[r]) - runner.computed[r])) for r in rows]
        for (row, _), logits in zip(work, runner.step(work), strict=True):
            got[row].append(logits)
    for row in range(len(texts)):
        runner.leave(row)
    return [torch.cat(parts) for parts in got]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name.replace(" ", "-")) for c in CASES])
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Whole, in pieces of any size, beside others, over scattered blocks; and all of these to the same bits."""
    theirs = write(case, tmp_path)
    ours = build(
        tmp_path, model_impl="quire", max_model_len=64 if "longrope" in case.name else None
    )
    assert isinstance(ours, CausalLM)
    wanted = [plain(theirs, text) for text in texts()]
    assert wanted[0].std() > 0.1, "logits without a range prove nothing"
    whole = [Runner(ours).prefill(0, text) for text in texts()]
    for got, want in zip(whole, wanted, strict=True):
        assert (got - want).abs().max() < CLOSE
    for block_size, most in zip(BLOCKS, (3, 17, 40), strict=True):
        runner = Runner(ours, block_size=block_size, num_tokens=768, seed=block_size)
        pieces = in_pieces(runner, texts(), seed=block_size, most=most)
        for got, alone in zip(pieces, whole, strict=True):
            assert torch.equal(got, alone)


def test_unused_keys_of_sharing_layers_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have them."""
    write(next(case for case in CASES if case.name == "gemma4"), tmp_path)
    extra = {f"model.layers.{i}.self_attn.k_norm.weight": torch.ones(16) for i in (4, 5)}
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len(build(tmp_path).attention_layers()) == 3
    wrong = {"model.layers.2.self_attn.v_norm.weight": torch.ones(16)}
    save_file({**stored, **wrong}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn\.v_norm"):
        build(tmp_path)


IN_16_BITS = ["llama llama3", "mistral window", "qwen2 tied", "qwen3", "olmo3"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in IN_16_BITS for dtype in (torch.bfloat16, torch.float16)),
        ("gemma4", torch.bfloat16),  # float16 is refused
    ],
)
def test_in_16_bits_as_near_the_truth_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rounding is not a mistake; more of it than Transformers has would be one."""

    theirs = write(next(case for case in CASES if case.name == name), tmp_path)
    text = texts()[0]
    truth = plain(copy.deepcopy(theirs).double(), text)
    rounded = plain(theirs.to(dtype), text).float()
    ours = build(tmp_path, dtype=str(dtype).removeprefix("torch."))
    runner = Runner(ours, dtype=dtype)
    whole, pieces = runner.prefill(0, text), runner.prefill(1, text, chunk=7)
    bound = (rounded - truth).square().mean().sqrt()
    for got in (whole, pieces):
        assert (got - truth).square().mean().sqrt() < 1.2 * bound
