"""Models with recurrent states through the whole engine: a request's tokens do not depend on what its row did before.

The reference computes each token from scratch: the whole text in one pass, from zeros.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.cli import doctor
from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, NotEnoughMemory
from quire.models.load import build_model
from quire.platforms.base import platform_of
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.worker.graphs import GraphModelInput
from quire.worker.model_input import TokenModelInput
from quire.worker.row_states import RowStates
from quire.worker.worker import Worker
from tests.equality.engines import engine, greedy, make_checkpoint, prompts
from tests.models.harness import Runner
from tests.models.state_models import MODELS, Memory, register, to_memory

COUNT = 8
HYBRID = pytest.mark.parametrize("model", ["MemoryForCausalLM"], indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(path, reference tokens of prompts)"""
    patch = pytest.MonkeyPatch()
    register(patch)
    folder: Path = tmp_path_factory.mktemp(request.param)
    path = make_checkpoint("llama", folder, tie_word_embeddings=True)
    to_memory(folder, request.param)
    yield path, from_scratch(path, prompts(6, seed=3), COUNT)
    patch.undo()


def from_scratch(path: str, texts: list[list[int]], count: int) -> list[list[int]]:
    resolved = resolve_config(
        EngineConfig.from_keywords(model=path, dtype="float32", max_model_len=256)
    )
    run = Runner(build_model(resolved.spec, platform_of("cpu")))
    out = []
    for text in texts:
        tokens = list(text)
        for _ in range(count):
            run.add(0, tokens)
            tokens.append(int(run.step([(0, len(tokens))])[0][-1].argmax()))
            run.leave(0)
        out.append(tokens[len(text) :])
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        (1, {"max_num_seqs": 8}),
        (2, {"max_num_seqs": 2, "max_num_batched_tokens": 7}),
        (3, {"max_num_seqs": 3, "max_num_batched_tokens": 16, "enable_prefix_caching": False}),
        (1, {"max_num_seqs": 1, "long_prefill_token_threshold": 5}),
    ],
)
def test_tokens_do_not_depend_on_chunks_rows_and_depth(model, depth, settings):
    path, expected = model
    with engine(path, depth, block_size=16, **settings) as run:
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected


def worker_of(run) -> Worker:
    return run.client.core.executor.worker


def test_a_preempted_request_starts_again_from_zeros(model):
    path, expected = model
    with engine(
        path, 2, block_size=4, num_gpu_blocks_override=24, max_num_batched_tokens=32
    ) as run:
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected
        assert run.stats()["preemptions"]


@HYBRID
def test_the_state_of_an_aborted_prompt_does_not_reach_the_next_request(model):
    path, expected = model
    texts = prompts(6, seed=3)
    with engine(path, 2, max_num_seqs=1, max_num_batched_tokens=5) as run:
        for index in (4, 5):
            run.client.submit(EngineRequest(f"a{index}", texts[index], greedy(COUNT)))
        for _ in range(3):
            run.client.core.turn()  # in the middle of the first prompt
        run.client.abort(["a4"])
        run.client.core.turn()
        run.client.abort(["a5"])
        assert [output.id for output in run.client.core.turn()] == ["a5"]
        assert run.tokens(texts[:1], greedy(COUNT)) == expected[:1]


@HYBRID
def test_a_failed_step_leaves_no_half_updated_state(model, monkeypatch):
    """Its requests end; those after it start from zeros, in the same rows."""
    path, expected = model
    calls = []
    forward = Memory.forward

    def failing(self, x_TD, angles):
        calls.append(self)
        out_TD = forward(self, x_TD, angles)
        if len(calls) == 6:  # the state of some layers has the step's tokens
            raise RuntimeError("out of memory")
        return out_TD

    with engine(path, 2, max_num_seqs=2) as run:
        monkeypatch.setattr(Memory, "forward", failing)
        with pytest.raises(RuntimeError, match="the step failed"):
            run.tokens(prompts(6, seed=3)[:2], greedy(COUNT))
        while run.client.core.scheduler.has_work:
            run.client.core.turn()
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected


@HYBRID
def test_a_nan_stays_in_its_row(model):
    """It fails its request, not the requests beside it or after it in the row."""
    path, expected = model
    texts = prompts(6, seed=3)
    with engine(path, 1, max_num_seqs=3) as run:
        hook = worker_of(run).hooks[0]
        enter = hook.enter

        def spoil(new):
            enter(new)
            if new.tokens == texts[1]:
                hook.states.storage[new.row] = 255

        hook.enter = spoil
        for index, text in enumerate(texts):
            run.client.submit(EngineRequest(f"n{index}", text, greedy(COUNT)))
        got = {f"n{index}": [] for index in range(6)}
        errors = {}
        while len(errors) < 6:
            for output in run.client.outputs():
                got[output.id] += output.tokens
                if output.finish:
                    errors[output.id] = output.error
        assert "finite" in errors.pop("n1")
        assert set(errors.values()) == {None}
        assert [got[f"n{i}"] for i in (0, 2, 3, 4, 5)] == [expected[i] for i in (0, 2, 3, 4, 5)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_after_sleep(model, level):
    path, expected = model
    with engine(path, 2) as run:
        run.client.call("sleep", level)
        run.client.call("wake_up")
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected


@HYBRID
def test_the_plan_counts_the_states_of_every_row(model):
    path, _ = model
    with engine(path, max_num_seqs=3, kv_cache_memory_bytes=1 << 20) as run:
        states = worker_of(run).hooks[0].states
        each = len(states.layers) * (64 * 4 + 2 * 64 * 2)
        assert states.storage.shape == (4 + states.num_checkpoints, each)
        assert (
            states.num_checkpoints == 3 * 256 // 64
        )  # one for each boundary of three longest requests
        assert states.storage.data_ptr() % 64 == 0
    with (
        pytest.raises(NotEnoughMemory, match="Set max_num_seqs="),
        engine(path, max_num_seqs=90, kv_cache_memory_bytes=80 << 10, max_model_len=16),
    ):
        pass


HEAD = list(range(3, 40))
TURNS = [
    [*HEAD, *range(50, 61)],
    [*HEAD, *range(90, 99)],
    [*HEAD, *range(50, 61)],
    [*HEAD, *range(70, 79)],
]


@cache
def turns(path: str) -> list[list[int]]:
    return from_scratch(path, TURNS, 4)


@pytest.mark.parametrize(
    ("settings", "hits"),
    [
        # the second prompt finds blocks of the first, and no state; the third the end of the first; the fourth the junction
        ({}, [0, 0, 44, 36]),
        ({"prefix_cache_retention_interval": 16}, [0, 32, 44, 36]),
        ({"mamba_cache_mode": "all"}, [0, 36, 44, 36]),
        ({"enable_mamba_shared_prefix_checkpoint": False, "prefix_cache_retention_interval": 0}, [0, 0, 44, 0]),
        ({"mamba_block_size": 12}, [0, 36, 36, 36]),
        ({"mamba_cache_mode": "none"}, [0] * 4),
        ({"enable_prefix_caching": False}, [0] * 4),
        ({"enable_chunked_prefill": False}, [0] * 4),
    ],
)  # fmt: skip
def test_a_prefix_is_cached_up_to_its_last_checkpoint(model, settings, hits):
    """A hit gives the same bits as a miss, since the recurrence is computed token by token."""
    path, _ = model
    settings = {"block_size": 4, "mamba_block_size": 4, **settings}
    if not any(hits):
        del settings["mamba_block_size"]
    expected = turns(path)
    with engine(path, 2, **settings) as run:
        found = []
        for prompt, tokens in zip(TURNS, expected, strict=True):
            outputs = run.run([prompt], greedy(4))[0]
            assert [token for output in outputs for token in output.tokens] == tokens
            found.append(outputs[0].num_cached_tokens)
        assert found == hits
        counts = run.client.core.counts
        if any(hits):
            assert counts["prefix_state_hits"] == sum(hits)
            assert counts["prefix_kv_hits"] == 0 + 36 + 44 + 36


@HYBRID
def test_a_hit_gives_the_bits_of_a_miss(model):
    path, _ = model
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0, logprobs=5)
    found = []
    for settings in ({"mamba_block_size": 4}, {"enable_prefix_caching": False}):
        with engine(path, 2, block_size=4, **settings) as run:
            outputs = [run.run([prompt], params)[0] for prompt in TURNS]
        found.append([[output.logprobs for output in each] for each in outputs])
    assert found[0] == found[1]


@HYBRID
def test_a_checkpoint_is_found_again_after_others_were_evicted(model):
    """Two checkpoints: the one at the junction stays, the ends of prompts come and go."""
    path, _ = model
    expected = turns(path)
    with engine(
        path,
        1,
        block_size=4,
        mamba_block_size=4,
        prefix_cache_retention_interval=0,
        num_gpu_blocks_override=64,
    ) as run:
        gate = run.client.core.scheduler.kv.limits[0]
        gate.pool.size = 2
        gate.pool.reset()
        for _ in range(2):
            for prompt, tokens in zip(TURNS, expected, strict=True):
                outputs = run.run([prompt], greedy(4))[0]
                assert [token for output in outputs for token in output.tokens] == tokens
        assert outputs[0].num_cached_tokens == 36
        assert (len(gate.pool.ends), len(gate.pool.junctions)) == (1, 1)
        assert run.client.call("reset_prefix_cache", False)
        assert len(gate.pool) == 0
        assert run.run([TURNS[0]], greedy(4))[0][0].num_cached_tokens == 0


@HYBRID
def test_preemption_continues_from_a_checkpoint(model):
    path, expected = model
    with engine(
        path,
        2,
        block_size=4,
        mamba_block_size=4,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=32,
    ) as run:
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected
        assert run.stats()["preemptions"]


@HYBRID
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mamba_block_size": 10}, "mamba_block_size=10 is not a multiple of block_size=4: set it to 12"),
        ({"mamba_block_size": 8, "enable_prefix_caching": False}, "leave mamba_block_size out"),
        ({"mamba_block_size": 8, "mamba_cache_mode": "none"}, "leave mamba_block_size out"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(model, settings, says):
    with pytest.raises(ConfigError, match=says), engine(model[0], block_size=4, **settings):
        pass


def test_a_worker_moves_its_states_with_its_model():
    """A device drops them in sleep, and allocates others."""
    states, layers = RowStates(2), [Memory(16), Memory(8)]
    states.allocate(layers)
    for layer in layers:
        assert [part.shape[0] for part in layer.state] == [3, 3]
        for part in layer.state:
            part.fill_(1)
    assert states.storage.view(torch.float32).isfinite().all()
    states.clear(1)
    assert [bool(part[1].any()) for layer in layers for part in layer.state] == [False] * 4
    assert all(part[row].all() for layer in layers for part in layer.state for row in (0, 2))
    states.drop()
    assert [layer.state for layer in layers] == [(), ()]


class Captured:
    """As a device keeps a graph: it runs again on the same tensors."""

    def __init__(self, run):
        self.run, self.output = run, run()

    def replay(self) -> None:
        self.output.copy_(self.run())


class Capturer:
    def capture(self, run) -> Captured:
        return Captured(run)


def test_captured_steps_use_the_states_of_their_rows(model):
    """Steps of 1 to 5 rows in a graph of 8: padding and capture write to the null row alone."""
    path, expected = model
    with engine(path, 2, max_num_seqs=8) as run:
        worker = worker_of(run)
        plain = TokenModelInput(worker.model)
        graphs = GraphModelInput(plain, Capturer(), [8], 256, 256, null_row=8)
        worker.model_input, worker.fast_step = graphs, None
        params = [greedy(COUNT - index % 3) for index in range(6)]
        got = run.tokens(prompts(6, seed=3), params)
        assert got == [tokens[: COUNT - index % 3] for index, tokens in enumerate(expected)]
        assert graphs.replays >= COUNT - 1
        assert worker.hooks[0].states.storage[8].any()


@HYBRID
def test_the_plan_is_known_before_anything_is_loaded(model, capsys):
    doctor.main(["--model", model[0], "--max-num-seqs", "3", "--dtype", "float32"])
    text = capsys.readouterr().out
    assert re.search(
        r"recurrent states +28.00 KiB = 1.00 KiB for each of 3 \+ 1 rows and 24 checkpoints\n", text
    )
