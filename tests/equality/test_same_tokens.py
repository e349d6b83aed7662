"""The engine equals Transformers and itself, whatever the batch, chunking, cache state, depth and executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from engines import KINDS, engine, greedy, plain, prompts

from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

Checkpoint = Callable[[str], str]
COUNT = 64

SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunked by threshold": {"long_prefill_token_threshold": 5},
    "blocks of 16": {"block_size": 16},
    "blocks of 128": {"block_size": 128},
    "depth 2": {"async_scheduling": True},
    "depth 3, chunked": {"depth": 3, "max_num_batched_tokens": 11},
    "no prefix cache": {"enable_prefix_caching": False},
}


@cache
def reference(path: str) -> list[list[int]]:
    return [plain(path, prompt, COUNT) for prompt in prompts(6)]


@pytest.mark.slow
def test_the_reference_does_not_repeat_itself(checkpoint: Checkpoint) -> None:
    """Else it could not tell one place in a text from another."""
    for kind in KINDS:
        assert min(len(set(tokens)) for tokens in reference(checkpoint(kind))) > 12, kind


def same(got: list[list[int]], want: list[list[int]]) -> None:
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine == theirs, f"prompt {index}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(kind)
    with engine(path, block_size=32) as one:
        alone = [one.tokens([prompt], greedy(COUNT))[0] for prompt in prompts(6)]
        same(alone, reference(path))
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))  # batched, and prefix-cached


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, each) for kind in ("qwen3", "mistral") for each in SETTINGS],
)
def test_no_setting_changes_a_token(kind: str, setting: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(kind)
    with engine(path, **SETTINGS[setting]) as one:
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("depth", "kind"),
    [(1, "qwen3"), (1, "gemma4_text"), *((2, kind) for kind in ("qwen3", "mistral", "cwm", "mamba"))],
)  # fmt: skip
def test_preemption_changes_no_token(kind: str, depth: int, checkpoint: Checkpoint) -> None:
    path = checkpoint(kind)
    blocks = {"gemma4_text": 36, "cwm": 36}.get(kind, 14)
    tight = {"block_size": 16, "num_gpu_blocks_override": blocks, "max_model_len": 128}
    with engine(path, depth, **tight) as one:
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))
        assert one.stats()["preemptions"] > 0


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_cached_prefix_changes_no_token(kind: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(kind)
    with engine(path, block_size=16) as one:
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))
        before = one.stats()["prefix_hits"]
        again = one.run(prompts(6), greedy(COUNT))
        same([[t for out in outs for t in out.tokens] for outs in again], reference(path))
        assert one.stats()["prefix_hits"] > before
        assert (
            sum(outs[-1].num_cached_tokens for outs in again) == one.stats()["prefix_hits"] - before
        )


def mixed() -> list[SamplingParams]:
    """One of each way to choose a token."""
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    return [
        SamplingParams(temperature=1.0, seed=1, **common),
        SamplingParams(temperature=0.7, seed=1, top_k=12, **common),
        SamplingParams(temperature=1.3, seed=2, top_p=0.8, logprobs=3, **common),
        SamplingParams(temperature=0.9, seed=3, min_p=0.1, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0.0, seed=0, presence_penalty=0.5, prompt_logprobs=2, **common),
        SamplingParams(temperature=1.0, seed=4, logit_bias={7: 3.0}, bad_word_ids=[[5]], **common),
    ]


@pytest.fixture(scope="module")
def sampled_alone(checkpoint: Checkpoint) -> list[list[int]]:
    """The tokens of `mixed` on qwen3, one request at a time."""
    with engine(checkpoint("qwen3")) as one:
        alone = [one.tokens([p], m)[0] for p, m in zip(prompts(6), mixed(), strict=True)]
    assert len({tuple(tokens) for tokens in alone}) == 6
    return alone


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_sampled_token(
    setting: str, checkpoint: Checkpoint, sampled_alone: list[list[int]]
) -> None:
    with engine(checkpoint("qwen3"), **SETTINGS[setting]) as one:
        same(one.tokens(prompts(6), mixed()), sampled_alone)


@pytest.mark.slow
def test_another_process_changes_no_token(
    checkpoint: Checkpoint, sampled_alone: list[list[int]]
) -> None:
    path = checkpoint("qwen3")
    with engine(path, distributed_executor_backend="mp") as one:
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))
        same(one.tokens(prompts(6), mixed()), sampled_alone)


def test_equal_seeds_give_equal_texts(checkpoint: Checkpoint) -> None:
    prompt = prompts(1)[0]
    with engine(checkpoint("qwen2")) as one:
        seeds = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in (1, 1, 2)]
        first, second, third = one.tokens([prompt] * 3, seeds)
    assert first == second != third


def test_an_abort_does_not_affect_other_requests(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen3")
    with engine(path) as one:
        one.client.submit(EngineRequest("doomed", prompts(6)[0], greedy(60)))
        for _ in range(5):
            one.client.outputs()
        one.client.abort(["doomed"])
        [last] = [out for out in one.client.outputs() if out.finish]
        assert (last.id, last.finish) == ("doomed", "abort")
        same(one.tokens(prompts(6), greedy(COUNT)), reference(path))
