"""Blocks that were kept on disk give the same tokens and log-probabilities as computed ones, `==`: for every family, format,
schedule and place where the kept part of a prompt ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, prompts
from kv_tiers.kept import COMMON, SIZE, hits, kept, save_all, spoil

from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

COUNT = 10
Answer = list[tuple[list[int], list[Any]]]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},  # GQA
    "deepseek_v2": {},  # MLA and a mixture of experts
    "mistral": {},  # windows
    "gemma3_text": {},  # windows and full attention
    "gemma4_text": {},  # layers that share a cache, and heads of two sizes
    "mixtral": {},
    "llama": {"kv_cache_dtype": "int8"},
    "wide": {"dtype": "bfloat16"},
    "wide ": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "one step at a time": {"depth": 1},
    "two": {"depth": 2},
    "three": {"depth": 3},
    "chunks": {"depth": 2, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    "few blocks": {"depth": 2, "num_gpu_blocks_override": 12, "max_model_len": 96},
}
BEGINNING = [9, 8, 7] * 15
PROMPTS = [BEGINNING + prompt for prompt in prompts(5, longest=40)]


def answers(one: Engine, asked: list[list[int]], **fields: Any) -> Answer:
    params = SamplingParams(temperature=0.8, max_tokens=COUNT, ignore_eos=True, seed=3, logprobs=2)
    runs = one.run(asked, params, **fields)
    return [
        ([t for out in outs for t in out.tokens], [out.logprobs.values for out in outs if out.logprobs])
        for outs in runs
    ]  # fmt: skip


def computed(path: str, asked: list[list[int]], **more: Any) -> Answer:
    with engine(path, 2, **COMMON, **more) as one:
        return answers(one, asked)


def flat(found: Answer) -> Answer:
    return [(tokens, [v for values in logprobs for v in values]) for tokens, logprobs in found]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_tokens_after_a_restart(
    family: str, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    settings = FAMILIES[family]
    if settings.get("dtype") == "bfloat16" and best() is None:
        pytest.skip("in bfloat16 only the kernels keep bits apart")
    path = checkpoint(family.strip())
    expected = flat(computed(path, PROMPTS, **settings))
    with kept(path, tmp_path / "kv", **settings) as one:
        assert flat(answers(one, PROMPTS)) == expected
        assert hits(one) == 0
    with kept(path, tmp_path / "kv", **settings) as one:
        assert flat(answers(one, PROMPTS)) == expected
        assert hits(one) >= len(PROMPTS) * len(BEGINNING) // SIZE * SIZE
        one.client.core.scheduler.check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_every_schedule_has_the_same_tokens(
    family: str, schedule: str, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    path, settings = checkpoint(family), dict(SCHEDULES[schedule])
    if "num_gpu_blocks_override" in settings and family == "gemma3_text":
        settings["num_gpu_blocks_override"] = 40  # several groups share the blocks
    expected = flat(computed(path, PROMPTS))
    for number in range(2):
        with kept(path, tmp_path / "kv", **settings) as one:
            for _ in range(2):
                assert flat(answers(one, PROMPTS)) == expected
                save_all(one)
                spoil(one)
            assert hits(one) >= (number + 1) * len(BEGINNING) // SIZE * SIZE
            one.client.core.scheduler.check()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_the_kept_part_may_end_anywhere(
    family: str, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    """At every block edge, beside it and in the middle of a block; the rest of the prompt is another."""
    path, whole = checkpoint(family), [*BEGINNING, *range(20, 60)]
    lengths = [n * SIZE + d for n in range(1, 5) for d in (-1, 0, 1, SIZE // 2)]
    asked = [[*whole[:length], 150 + n, 3, 5] for n, length in enumerate(lengths)]
    asked += [whole[:length] for length in lengths]
    expected = flat(computed(path, asked))
    with kept(path, tmp_path / "kv") as one:
        answers(one, [whole])
    with kept(path, tmp_path / "kv", kv_disk_write="second-use") as one:
        for prompt, each in zip(asked, expected, strict=True):
            spoil(one)
            before = hits(one)
            assert flat(answers(one, [prompt])) == [each]
            shared = next(
                (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b),
                len(prompt),
            )
            assert hits(one) - before == min(shared, len(prompt) - 1) // SIZE * SIZE
