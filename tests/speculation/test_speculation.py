"""Speculative decoding: whatever a drafter proposes, tokens, log-probabilities and ends are those without it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from worker.known_answers import KnownAnswers

from quire.errors import ConfigError
from quire.features.speculation.hook import SpeculationHook
from quire.ops.cpu.bindings import best
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.logits_processors import Processor

DTYPES = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")),
]  # fmt: skip
PROMPTS = prompts(8)
PARAMS = [
    greedy(40),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logprobs=0, prompt_logprobs=1),
    SamplingParams(seed=2, temperature=0.7, max_tokens=33, ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(seed=3, temperature=1.5, max_tokens=40, ignore_eos=True, top_p=0.9, top_k=50, logprobs=1),
    SamplingParams(seed=4, temperature=0.3, max_tokens=40, ignore_eos=True, min_p=0.1, repetition_penalty=1.2),
    SamplingParams(seed=5, max_tokens=40, ignore_eos=True, logit_bias={7: 3.0, 9: -4.0}, min_tokens=5, stop_token_ids=[11]),
    SamplingParams(seed=6, max_tokens=40, ignore_eos=True, allowed_token_ids=list(range(3, 60))),
]  # fmt: skip


def answers(one: Engine, params: Any = PARAMS, texts: list[list[int]] = PROMPTS) -> list[Any]:
    """Tokens, end, and scores of each request."""
    found = []
    for outputs in one.run(texts, params):
        tokens = [token for output in outputs for token in output.tokens]
        scores = [
            (scored.token_ids, scored.values, scored.ranks)
            for output in outputs
            if (scored := output.logprobs)
        ]
        joined = [list(itertools.chain(*column)) for column in zip(*scores, strict=True)]
        last = outputs[-1]
        found.append((tokens, last.finish, last.stopped_by, joined, outputs[0].prompt_logprobs))
    return found


def config(num_drafts: int, **more: Any) -> dict[str, Any]:
    return {
        "method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3, **more,
    }  # fmt: skip


def hook_of(one: Engine) -> SpeculationHook:
    hooks = one.client.core.executor.worker.hooks
    return next(hook for hook in hooks if isinstance(hook, SpeculationHook))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shape that the native kernels run, with a window."""
    folder: Path = tmp_path_factory.mktemp("mistral")
    return make_checkpoint("mistral", folder, head_dim=32, intermediate_size=128)


@pytest.mark.sampled(5)  # float32 at depth 1, bfloat16 at depth 3
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_never_change_an_answer(checkpoint: str, dtype: str, depth: int) -> None:
    with engine(checkpoint, dtype=dtype) as one:
        expected = answers(one)
    known = {tuple(prompt): answer[0] for prompt, answer in zip(PROMPTS, expected, strict=True)}
    for num_drafts, right, more in (
        (1, 0.8, {}),
        (3, 0.8, {"max_num_batched_tokens": 24, "block_size": 16}),
        (5, 1.0, {"max_num_seqs": 3}),
        (5, 0.0, {"kv_cache_memory_bytes": 640 << 10, "block_size": 16}),
    ):
        settings = {
            "dtype": dtype,
            "speculative_config": config(num_drafts, adaptive=False),
            **more,
        }
        with engine(checkpoint, depth=depth, **settings) as one:
            hook_of(one).drafter = KnownAnswers(known, right)
            assert answers(one) == expected
            counts = one.stats()["counts"]
            accepted = counts["spec_decode_num_accepted_tokens"]
            drafted = counts["spec_decode_num_draft_tokens"]
            assert drafted > 50
            assert accepted == drafted if right == 1.0 else accepted < drafted
            assert (accepted > drafted / 4) == (right > 0)
            places = [value for name, value in counts.items() if "per_pos" in name]
            assert len(places) == num_drafts
            assert sum(places) == accepted


def test_ngrams_are_found_in_a_prompt_that_repeats(checkpoint: str) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, allowed_token_ids=[5, 6]
    )
    with engine(checkpoint) as one:
        expected, steps = one.tokens(PROMPTS, params), one.stats()["steps"]
    with engine(checkpoint, speculative_config=config(4, adaptive=False)) as one:
        assert one.tokens(PROMPTS, params) == expected
        stats = one.stats()
        assert stats["counts"]["spec_decode_num_accepted_tokens"] > 60
        assert stats["steps"] < steps


def test_rows_whose_processors_count_tokens_get_no_drafts(checkpoint: str) -> None:
    """A grammar and a users' processor see each position once."""
    seen: list[tuple[int, ...]] = []

    class Counting(Processor):
        def enter(self, new: Any) -> bool:
            return new.sampling_params.seed == 77

        def apply(self, logits_SV: Any, selected: Any) -> Any:
            seen.append(tuple(selected.lengths.tolist()))
            return logits_SV

    params = [*PARAMS[:7], replace_seed(PARAMS[2], 77)]
    with engine(checkpoint, speculative_config=config(4, adaptive=False)) as one:
        worker = one.client.core.executor.worker
        pipeline = worker.model_output.pipeline
        pipeline.__init__(worker.rows, [Counting(), *pipeline.processors])
        hook_of(one).drafter = KnownAnswers({}, 0.0)
        found = answers(one, params)
    assert [length for lengths in seen for length in lengths] == list(
        range(len(PROMPTS[7]), len(PROMPTS[7]) + 40)
    )
    with engine(checkpoint) as one:
        assert answers(one, params) == found


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(params, seed=seed)


def test_stop_tokens_and_limits_inside_accepted_drafts(checkpoint: str) -> None:
    with engine(checkpoint) as one:
        tokens = one.tokens(PROMPTS, greedy(40))
    stops = [
        SamplingParams(temperature=0.0, max_tokens=40, min_tokens=least, logprobs=1, **{name: [own[17]]})
        for own, name, least in zip(
            tokens, ["stop_token_ids", "eos_token_ids"] * 4, [0] * 5 + [19] * 3, strict=True
        )
    ]  # fmt: skip
    known = {tuple(prompt): own for prompt, own in zip(PROMPTS, tokens, strict=True)}
    with engine(checkpoint) as one:
        expected = answers(one, stops)
    assert {(finish, stop is None) for _, finish, stop, _, _ in expected[:5]} == {
        ("stop", False), ("stop", True),
    }  # fmt: skip
    longest = max(len(prompt) + 40 for prompt in PROMPTS)  # it ends with the row's last place
    settings = {"max_model_len": longest, "speculative_config": config(7, adaptive=False)}
    with engine(checkpoint, **settings) as one:
        hook_of(one).drafter = KnownAnswers(known, 1.0)
        assert answers(one, stops) == expected
        assert one.stats()["counts"]["spec_decode_num_accepted_tokens"] > 60
        assert one.tokens(PROMPTS, greedy(40)) == tokens
        one.client.core.scheduler.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_beside_penalties_and_draft_tokens(checkpoint: str, depth: int) -> None:
    """The next requests in the rows have no counts and no draft tokens of those before (vLLM's CVE-2026-44223)."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    params = [
        SamplingParams(seed=seed, temperature=0.7, max_tokens=30, ignore_eos=True, **penalties)
        for seed in range(8)
    ]
    with engine(checkpoint) as one:
        expected = one.tokens(PROMPTS, params)
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    settings = {"max_num_seqs": 3, "speculative_config": config(5, adaptive=False)}
    with engine(checkpoint, depth, **settings) as one:
        hook_of(one).drafter = KnownAnswers(known, 0.8)
        for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
            one.client.submit(EngineRequest(str(number), prompt, each))
        got: dict[str, list[int]] = {str(number): [] for number in range(8)}
        ends: dict[str, str] = {}
        while len(ends) < 8:
            for output in one.client.outputs():
                assert not output.error
                got[output.id] += output.tokens
                if output.finish:
                    ends[output.id] = output.finish
                elif output.id in "0257" and len(got[output.id]) > 4:
                    one.client.abort([output.id])
        for id, answer in zip(got, expected, strict=True):
            assert ends[id] == ("abort" if id in "0257" else "length")
            assert got[id] == answer[: len(got[id])]
            assert len(got[id]) == 30 or id in "0257"
        assert one.stats()["counts"]["spec_decode_num_accepted_tokens"] > 30
        one.client.core.scheduler.check()


def test_more_requests_get_fewer_draft_tokens(checkpoint: str) -> None:
    """`num_speculative_tokens_per_batch_size`: none under load, and again some when the load is gone."""
    params = SamplingParams(
        temperature=0.0, max_tokens=9, ignore_eos=True, allowed_token_ids=list(range(60, 200))
    )
    with engine(checkpoint) as one:
        expected = one.tokens(PROMPTS, params)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 5, 1], [6, 8, 0]]}
    with engine(checkpoint, speculative_config=config(4, adaptive=False, **schedule)) as one:
        hook_of(one).drafter = KnownAnswers({}, 0.0)  # all wrong: of tokens that are not allowed
        for count, most in ((8, 0), (5, 1), (2, 4), (8, 0), (1, 4)):
            before = one.stats()["counts"]
            assert one.tokens(PROMPTS[:count], params) == expected[:count]
            after = one.stats()["counts"]
            steps, drafts = (
                after[name] - before[name]
                for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens")
            )
            # the last token is drawn without one, and those before it with as many as there is room for
            assert (steps, drafts) == (
                7 * count * (most > 0), count * sum(min(most, left) for left in range(1, 8)),
            )  # fmt: skip


def test_a_preempted_request_loses_its_drafts_only(checkpoint: str) -> None:
    settings = {"kv_cache_memory_bytes": 330 << 10, "block_size": 16, "max_model_len": 112}
    with engine(checkpoint) as one:
        expected = answers(one)
    with engine(checkpoint, **settings, speculative_config=config(3, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers({}, 0.0)
        assert answers(one) == expected
        assert one.stats()["preemptions"] > 0


def test_draft_tokens_get_only_blocks_that_are_free(tmp_path: Path) -> None:
    """The second request needs another block when the first has ended, but with draft tokens earlier."""
    path, asked = make_checkpoint("llama", tmp_path), [list(range(3, 11)), list(range(3, 13))]
    params = [greedy(5), greedy(20)]
    with engine(path) as one:
        expected = one.tokens(asked, params)
    settings = {"num_gpu_blocks_override": 2, "block_size": 16, "max_model_len": 32}
    with engine(path, **settings, speculative_config=config(5, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers({}, 0.0)
        assert one.tokens(asked, params) == expected
        stats = one.stats()
        assert stats["preemptions"] == 0
        assert stats["counts"]["spec_decode_num_draft_tokens"] > 40


def test_a_request_that_fills_the_cache_alone_is_served(checkpoint: str) -> None:
    """Draft tokens never go beyond its last one, so they need no room of their own."""
    prompt, settings = [list(range(3, 75))], {"max_model_len": 112, "block_size": 16}
    with engine(checkpoint, **settings) as one:
        expected = one.tokens(prompt, greedy(40))
    settings |= {"num_gpu_blocks_override": 7, "speculative_config": config(5, adaptive=False)}
    with engine(checkpoint, **settings) as one:
        hook_of(one).drafter = KnownAnswers({tuple(prompt[0]): expected[0]}, 0.8)
        assert one.tokens(prompt, greedy(40)) == expected
        assert one.stats()["counts"]["spec_decode_num_accepted_tokens"] > 10


def test_models_with_a_cache_of_their_own_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("mamba", tmp_path)
    with (
        pytest.raises(ConfigError, match="cannot take tokens back"),
        engine(path, model_impl="transformers", speculative_config=config(3)),
    ):
        pass


def test_the_number_of_drafts_follows_their_worth(checkpoint: str) -> None:
    with engine(checkpoint) as one:
        expected = answers(one)
    with engine(checkpoint, speculative_config=config(4)) as one:
        hook = hook_of(one)
        hook.drafter = KnownAnswers({}, 0.0)
        assert answers(one) == expected
        wrong = one.stats()["counts"]["spec_decode_num_draft_tokens"]
    with engine(checkpoint, speculative_config=config(4, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers({}, 0.0)
        assert answers(one) == expected
        assert one.stats()["counts"]["spec_decode_num_draft_tokens"] > 2 * wrong
