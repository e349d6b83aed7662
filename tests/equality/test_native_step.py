"""A step in one call draws the tokens that it draws by input batch, model input and sampler, and leaves the rows in the same state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire.errors import PlanMismatch
from quire.native.step import NativeStep
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "min_p": 0.1},
]
PARTICULAR: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def wishes(kinds: list[dict[str, Any]], count: int) -> list[SamplingParams]:
    dice = random.Random(3)
    return [
        SamplingParams(seed=number % 3, max_tokens=dice.randint(1, 30), ignore_eos=True, **kinds[number % len(kinds)])
        for number in range(count)
    ]  # fmt: skip


class Counted:
    """How many steps went in one call (`fast`), and how many by parts."""

    def __init__(self, worker: Any):
        self.fast = self.by_parts = 0
        run, build = worker.fast_step.run, worker.batcher.build

        def counting_run(plan: Any) -> Any:
            self.fast += 1
            return run(plan)

        def counting_build(plan: Any) -> Any:
            self.by_parts += 1
            return build(plan)

        worker.fast_step.run, worker.batcher.build = counting_run, counting_build


def worker_of(one: Any) -> Any:
    return one.client.core.executor.worker


def rows_of(worker: Any) -> list[Any]:
    rows = worker.rows
    return [
        rows.token_ids_RL.tolist(),
        rows.num_computed_tokens.tolist(),
        *(b.tolist() for b in rows.blocks),
    ]


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("qwen3", None), ("mistral", None), ("qwen2", "int8"), ("llama", "int4")],
)
def test_both_ways_draw_the_same(kind: str, quantization: str | None, tmp_path: Path) -> None:
    """Tied tables and own ones, windows (two groups of blocks), chunks, rows that come and go."""
    path = make_checkpoint(kind, tmp_path, intermediate_size=128, head_dim=32)
    settings = {"dtype": "bfloat16", "quantization": quantization, "max_num_batched_tokens": 50}
    found = []
    for fast in (True, False):
        with engine(path, **settings) as one:
            worker = worker_of(one)
            if not fast:
                worker.fast_step = None
            else:
                count = Counted(worker)
            texts = [one.tokens(prompts(17), wishes(kinds, 17)) for kinds in (PLAIN, [PLAIN[0]])]
            found.append((texts, rows_of(worker)))
    assert found[0] == found[1]
    assert count.fast > 30
    assert count.by_parts == 0


WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    "gemma3_text": WINDOWS,  # two rotary tables
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "cohere2": {**WINDOWS, "logit_scale": 0.5},
    "exaone4": WINDOWS,
    "phi3": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_dense_families_run_in_the_native_step(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(
        kind, tmp_path, **{"intermediate_size": 128, "head_dim": 32, **FAMILIES[kind]}
    )
    with engine(path, dtype="bfloat16", max_num_batched_tokens=50) as one:
        worker = worker_of(one)
        count = Counted(worker)
        found = one.tokens(prompts(4), wishes(PLAIN, 4))
        assert (count.fast > 10, count.by_parts) == (True, 0)
        worker.unfuse("test")
        worker.fast_step = None
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(4), wishes(PLAIN, 4)) == found
        assert count.by_parts > 10


def test_a_row_with_special_sampling_leaves_the_native_step(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    kinds = [(30, wish) for wish in PLAIN] + [(3, wish) for wish in PARTICULAR]
    params = [
        SamplingParams(seed=2, max_tokens=count, ignore_eos=True, **wish) for count, wish in kinds
    ]
    asked = prompts(16), params * 2
    found = []
    for fast in (True, False):
        with engine(path, dtype="bfloat16") as one:
            worker = worker_of(one)
            if fast:
                count = Counted(worker)
            else:
                worker.fast_step = None
            found.append(
                [
                    [(out.tokens, out.logprobs, out.prompt_logprobs) for out in outs]
                    for outs in one.run(*asked)
                ]
            )
    assert found[0] == found[1]
    assert min(count.fast, count.by_parts) > 5


def test_a_long_row_leaves_the_native_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles are kept of the first positions only."""
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    with engine(path, dtype="bfloat16") as one:
        wanted = one.tokens(prompts(2), greedy(60))
    monkeypatch.setattr("quire.layers.rotary.TABLE_LENGTH", 80)
    with engine(path, dtype="bfloat16") as one:
        count = Counted(worker_of(one))
        assert one.tokens(prompts(2), greedy(60)) == wanted
        assert min(count.fast, count.by_parts) > 5
        before = count.by_parts
        one.tokens([[5]], greedy(20))
        assert count.by_parts == before


def test_nan_fails_its_row_alone(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, intermediate_size=128)
    errors = []
    for fast in (True, False):
        with engine(path, dtype="bfloat16") as one:
            worker = worker_of(one)
            worker.model.model.embed_tokens.weight[7] = torch.nan
            worker.fast_step = worker.fast_step if fast else None
            with pytest.raises(RuntimeError, match="not a number") as why:
                one.run([[3, 7]], greedy(4))
            errors.append(str(why.value))
            assert len(one.tokens([[3, 4]], greedy(4))[0]) == 4
    assert errors[0] == errors[1]


def test_a_partly_fused_model_has_no_native_step(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)  # 96 is not a whole number of panels, twice
    with engine(path, dtype="float32") as one:
        count = Counted(worker_of(one))
        one.tokens(prompts(2), greedy(3))
        assert (count.fast, count.by_parts > 0) == (0, True)


def test_an_oversized_plan_is_refused(tmp_path: Path) -> None:
    from quire.protocol.plan import StepPlan, WorkItem

    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    with engine(path, dtype="bfloat16") as one:
        worker = worker_of(one)
        assert isinstance(worker.fast_step, NativeStep)
        with pytest.raises(PlanMismatch, match="lacks the tokens"):
            worker.run(StepPlan(1, [], [WorkItem(0, 1)], []))


def test_an_error_in_the_native_step_fails_only_its_requests(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    with engine(path, dtype="bfloat16") as one:
        worker = worker_of(one)
        wanted, run = one.tokens([[5, 6]], greedy(4)), worker.fast_step.run
        worker.fast_step.run = lambda plan: 1 / 0
        with pytest.raises(RuntimeError, match="the step failed"):
            one.run([[5, 6]], greedy(4))
        worker.fast_step.run = run
        assert one.tokens([[5, 6]], greedy(4)) == wanted
