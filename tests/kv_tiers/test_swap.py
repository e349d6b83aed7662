"""A preempted request goes on from its saved blocks with the same tokens and log-probabilities, `==`, as one that nobody preempted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from kv_tiers.kept import COMMON, SIZE, count, fail_first_copies, gate_of
from kv_tiers.test_kept_tokens import answers, computed, flat
from lora.adapters import run as run_adapters
from lora.adapters import write as write_adapter

from quire.kvcache.block_pool import NULL_BLOCK
from quire.ops.cpu.bindings import best
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler import preemption_warning
from tests.broken_rule import broken
from tests.models.state_models import register, to_memory

FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (12, {}),  # GQA
    "mistral": (8, {}),  # windows
    "gemma3_text": (34, {}),  # windows and full attention: several blocks for the same tokens
    # recurrent states and attention: it goes on from the last copy of the states
    "hybrid": (8, {"mamba_block_size": SIZE, "prefix_cache_retention_interval": SIZE}),
    "llama": (12, {"kv_cache_dtype": "int8"}),
    "wide": (12, {"dtype": "bfloat16"}),
    "wide ": (12, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
}
"""By kind: blocks of the cache, which are too few, and settings."""
PROMPTS = prompts(6, seed=4, longest=60)


@contextmanager
def swapping(path: str, depth: int, num_blocks: int, **more: Any) -> Iterator[Engine]:
    """An engine with swap space and few blocks. Each block that a plan takes is overwritten after the plan's copies."""
    few = {"num_gpu_blocks_override": num_blocks, "max_model_len": 96, "swap_space": 64 / 1024}
    with engine(path, depth, **{**COMMON, **few, **more}) as one:
        worker: Any = one.client.core.executor.worker  # type: ignore[attr-defined]
        hook: Any = next(hook for hook in worker.hooks if hook.name == "kv_tiers")
        before = hook.before

        def before_and_overwrite(plan: Any, batch: Any) -> None:
            before(plan, batch)
            taken = {b for item in plan.work for column in item.new_blocks for b in column}
            for new in plan.entered:
                first = new.num_computed_tokens // SIZE
                taken |= {b for column in new.blocks for b in column[first:]}
            for layer in worker.models[0].attention_layers():
                for part in layer.spec.cache:
                    part[sorted(taken - {NULL_BLOCK})] = torch.nan if part.is_floating_point() else 77  # fmt: skip

        hook.before = before_and_overwrite
        yield one


def swapped(one: Engine) -> float:
    """Bytes that came back from the swap space, when all is checked that must be so at the end."""
    scheduler, swap = one.client.core.scheduler, gate_of(one).swap
    assert scheduler.count.preemptions
    scheduler.check()
    assert not any([swap.swapped, swap.leaving, swap.pool.usage])
    return count(one, "kv_load_bytes:host")


def path_of(kind: str, checkpoint: Callable[..., str], folder: Path, patch: Any) -> str:
    if kind != "hybrid":
        return checkpoint(kind.strip())
    register(patch)
    path = make_checkpoint("llama", folder, tie_word_embeddings=True)
    to_memory(folder, "MemoryForCausalLM")
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_at_every_depth(
    kind: str, depth: int, checkpoint: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    num_blocks, settings = FAMILIES[kind]
    if settings.get("dtype") == "bfloat16" and best() is None:
        pytest.skip("in bfloat16 only the kernels keep bits apart")
    path = path_of(kind, checkpoint, tmp_path, monkeypatch)
    expected = flat(computed(path, PROMPTS, **settings))
    with swapping(path, depth, num_blocks, **settings) as one:
        assert flat(answers(one, PROMPTS)) == expected
        assert swapped(one) > 0


@pytest.mark.slow
def test_adapters(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """A request with an adapter never gets blocks of another one, though all have the same prompt."""
    adapters = [
        {"name": name, "path": write_adapter(tmp_path / name, 4, seed), "base_model_name": None}
        for seed, name in enumerate("ab")
    ]
    settings: dict[str, Any] = {
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_modules": adapters,
    }  # fmt: skip
    path, names = checkpoint("llama"), ["a", "b", None, "a", "b"]
    asked = [[9, 8, 7] * 16] * len(names)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)
    with engine(path, 2, **COMMON, **settings) as one:
        plain = run_adapters(one, asked, list(names), params)
    with swapping(path, 2, 12, **settings) as one:
        assert run_adapters(one, asked, list(names), params) == plain
        assert swapped(one) > 0


def test_no_flag_no_swap(checkpoint: Callable[..., str]) -> None:
    few: dict[str, Any] = {**COMMON, "num_gpu_blocks_override": 12, "max_model_len": 96}
    for more in ({}, {"swap_space": 1, "preemption_mode": "recompute"}):
        with engine(checkpoint("qwen3"), 2, **few, **more) as one:
            assert not any(gate.name == "kv_tiers" for gate in one.client.core.scheduler.gates)


def test_a_request_that_ends_while_it_is_swapped(
    checkpoint: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks lose their pins; the gauges say what is there meanwhile, and the warning what vLLM's said."""
    preemption_warning.log._last.clear()  # another test may have warned
    with swapping(checkpoint("qwen3"), 2, 12) as one, caplog.at_level(logging.WARNING):
        core, gate = one.client.core, gate_of(one)
        for number, prompt in enumerate(PROMPTS):
            one.client.submit(EngineRequest(f"x{number}", prompt, greedy(30)))
        core.receive(block=False)
        while not (gate.swap.swapped and gate.swap.pool.usage):
            core.step()
        counts = core.stats().counts
        assert counts["requests_swapped"] == len(gate.swap.swapped)
        assert 0 < counts["host_cache_usage"] <= 1
        assert counts["kv_tier_bytes:host"] == len(gate.swap.pool) * gate.staging.slot_bytes
        one.client.abort([request.id for request in gate.swap.swapped])
        core.receive(block=False)
        assert not any([gate.swap.swapped, gate.swap.pool.usage])
        assert core.stats().counts["requests_swapped"] == 0
        one.client.abort([f"x{number}" for number in range(len(PROMPTS))])
        core.receive(block=False)
        while core.in_flight:
            core.step()
        core.scheduler.check()
    assert "is preempted by PreemptionMode.SWAP mode because there is not enough KV cache" in caplog.text  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_that_fails_while_blocks_are_copied(depth: int, checkpoint: Callable[..., str]) -> None:  # fmt: skip
    """The requests of the failed step end with an error; no later request loads a block that the step should have copied."""
    path = checkpoint("qwen3")
    expected = flat(computed(path, PROMPTS))
    with swapping(path, depth, 12) as one:
        failures = fail_first_copies(one)
        with suppress(RuntimeError):
            answers(one, PROMPTS)
        core = one.client.core
        while core.in_flight or core.scheduler.requests:
            core.step()
        assert failures
        assert flat(answers(one, PROMPTS)) == expected
        assert swapped(one) > 0


@pytest.mark.slow
def test_a_reset_of_the_cache_forgets_what_is_swapped(checkpoint: Callable[..., str]) -> None:
    path = checkpoint("qwen3")
    expected = flat(computed(path, PROMPTS))
    with swapping(path, 2, 12) as one:
        assert flat(answers(one, PROMPTS)) == expected
        assert len(gate_of(one).swap.pool)
        one.client.call("sleep", 1)
        assert not len(gate_of(one).swap.pool)
        one.client.call("wake_up")
        assert flat(answers(one, PROMPTS)) == expected
        swapped(one)


FIRST, SECOND = [9, 8, 7, 6] * 4, [30, 31, 32, 33] * 4  # a block each


def answer_after_a_failed_step(path: str, depth: int) -> tuple[Any, float]:
    """What a prompt of two blocks and more is answered, and the bytes that it loads from the swap space, when a step has failed that
    should have written the second block: while it was in flight, its request was preempted, and the block was taken."""
    few: dict[str, Any] = {"num_gpu_blocks_override": 4, "max_model_len": 64}
    with swapping(path, depth, **{"num_blocks": 4, **few}) as one:
        core, worker = one.client.core, one.client.core.executor.worker  # type: ignore[attr-defined]
        scheduler, swap = core.scheduler, gate_of(one).swap
        hook: Any = next(hook for hook in worker.hooks if hook.name == "kv_tiers")
        before, failing, preempted = hook.before, list[int](), list[str]()

        def fill_and_fail(plan: Any, batch: Any) -> None:
            before(plan, batch)  # the block has the pattern now
            if plan.step in failing:
                raise RuntimeError("a fault of the device")
            if failing and failing[0] in scheduler.in_flight:
                preempted.extend(request.id for request in swap.swapped)

        hook.before = fill_and_fail
        one.tokens([[*FIRST, 5]], greedy(1))  # the first block is in the cache, and stays there
        one.client.submit(EngineRequest("a", [4] * (2 * SIZE - 2), greedy(9)))
        core.receive(block=False)
        begun = scheduler.steps
        while scheduler.steps < begun + 2:
            core.step()
        one.client.submit(EngineRequest("b", [*FIRST, *SECOND], greedy(9)))
        core.receive(block=False)
        failing.append(
            begun + 3
        )  # it computes the second block of b; the next one takes a third block for a
        while scheduler.steps < begun + 4:
            core.step()
        while core.in_flight or scheduler.has_requests:
            core.step()
        assert preempted[0] == "b"
        try:
            found: Any = flat(answers(one, [[*FIRST, *SECOND, *range(40, 50)]]))
        except RuntimeError as why:  # the pattern is not a number
            found = str(why)
        return found, count(one, "kv_load_bytes:host")


@pytest.mark.parametrize("depth", [2, 3])
def test_what_a_step_in_flight_writes_is_not_swapped(
    depth: int, checkpoint: Callable[..., str]
) -> None:
    """The step may fail, and nobody would take back what was copied after it."""
    path = checkpoint("qwen3")
    expected = flat(computed(path, [[*FIRST, *SECOND, *range(40, 50)]]))
    assert answer_after_a_failed_step(path, depth) == (expected, 0)


LATE = "leaving, self.leaving, self.late = getattr(self, 'late', {}), {}, self.leaving"


def test_the_tokens_notice_a_copy_after_the_plan_that_overwrites(
    checkpoint: Callable[..., str],
) -> None:
    path, late = checkpoint("qwen3"), ("leaving, self.leaving = self.leaving, {}", LATE)
    expected = flat(computed(path, PROMPTS))
    rule = broken("quire.features.kv_tiers.swap", "SwapSpace.take_leaving", *late)
    with rule, swapping(path, 2, 12) as one:
        try:
            found: Any = flat(answers(one, PROMPTS))
        except RuntimeError as why:  # the pattern is not a number
            found = str(why)
        assert count(one, "kv_load_bytes:host")
        assert found != expected
