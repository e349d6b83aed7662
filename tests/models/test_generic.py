"""Every row of `archs.py` through the generic backend, against Transformers' own plain forward."""

from __future__ import annotations

import random

import pytest
import torch

from quire.models.transformers.model import TransformersModel
from tests.models.archs import ARCHS, PAGED, VOCAB, Arch, make_model
from tests.models.harness import Runner

CLOSE = 1e-4  # float32, on logits of magnitude ~2
PROMPTS = (23, 9, 14)
COUNT = (
    10  # greedy tokens: every text reaches a further block of 16; 64 where `BLOCKS` has the model
)
BLOCKS = {"gemma2": (32, 128), "qwen3": (32, 128), "gpt_oss": (32,), "deepseek_v3": (128,)}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def prompts(seed: int = 7) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(n)] for n in PROMPTS]


def plain_logits(model, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def in_awkward_pieces(runner: Runner, texts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """All logits of all texts, computed side by side in pieces of 1 to 7 tokens, rows in any order.

    Half-way, each row is set back once: it leaves, and is computed again on other blocks.
    """
    draw = random.Random(seed)
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    whole = set(range(len(texts)))
    for row, text in enumerate(texts):
        runner.add(row, text)
    while left := [r for r, text in enumerate(texts) if runner.computed[r] < len(text)]:
        rows = draw.sample(left, draw.randint(1, len(left)))
        work = [(r, min(draw.randint(1, 7), len(texts[r]) - runner.computed[r])) for r in rows]
        for (row, _), logits in zip(work, runner.step(work), strict=True):
            got[row].append(logits)
            if row in whole and runner.computed[row] > len(texts[row]) // 2:
                whole.remove(row)
                runner.leave(row)
                runner.add(row, texts[row])
                got[row] = []
    for row in range(len(texts)):
        runner.leave(row)
    return [torch.cat(parts) for parts in got]


def params(archs: list[Arch]) -> list:
    return [
        pytest.param(a, id=a.label.replace(" ", "-"), marks=[pytest.mark.slow] if a.slow else [])
        for a in archs
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", params(ARCHS))
def test_logits_equal_transformers(arch: Arch) -> None:
    model = make_model(arch)
    texts = prompts()
    wanted = [plain_logits(model, text) for text in texts]
    assert wanted[0].std() > 0.05, "logits without a range prove nothing"
    after_a_prefix = texts[0][:21] + texts[1]
    wanted_after = plain_logits(model, after_a_prefix)
    ours = TransformersModel(model, max_model_len=256)
    assert ours.mode == arch.mode, ours.description
    assert bool(ours.attention_layers()) == (arch.mode == PAGED)

    for block_size in (16, *BLOCKS.get(arch.label, ())):
        runner = Runner(ours, block_size=block_size, num_tokens=1024)
        for want, got in zip(
            wanted, in_awkward_pieces(runner, texts, seed=block_size), strict=True
        ):
            assert (want - got).abs().max() < CLOSE

    if ours.supports_prefix_caching:
        runner = Runner(ours, block_size=4, num_tokens=256)
        runner.prefill(0, texts[0], chunk=9)
        assert runner.share(1, donor=0, tokens=after_a_prefix) == 20
        got = runner.step([(1, len(after_a_prefix) - 20)])[0]
        assert (wanted_after[20:] - got).abs().max() < CLOSE

    runner = Runner(ours, num_tokens=1024)
    outputs = runner.greedy(texts, 64 if arch.label in BLOCKS else COUNT, chunk=5)
    _restore(ours)
    for text, output in zip(texts, outputs, strict=True):
        # Equal to greedy decoding without any cache: by induction, from one pass over the whole.
        assert output == plain_logits(model, text + output)[len(text) - 1 : -1].argmax(-1).tolist()


def _restore(ours: TransformersModel) -> None:
    """Give the wrapped model its own attention back."""
    if ours.mode == PAGED:
        ours.model.set_attn_implementation("eager")
