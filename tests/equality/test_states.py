"""Models with recurrent states through the whole engine: a request's tokens do not depend on what its row did before.

The reference computes each token from scratch: the whole text in one pass, from zeros.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.build import resolve_config
from quire.errors import NotEnoughMemory
from quire.models.load import build_model
from quire.platforms.base import platform_of
from quire.protocol.request import EngineRequest
from quire.worker.row_states import RowStates
from quire.worker.worker import Worker
from tests.equality.engines import engine, greedy, make_checkpoint, prompts
from tests.models.harness import Runner
from tests.models.state_models import MODELS, Memory, register, to_memory

COUNT = 8


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


def test_a_nan_stays_in_its_row(model):
    """It fails its request, not the requests beside it or after it in the row."""
    path, expected = model
    texts = prompts(6, seed=3)
    with engine(path, 1, max_num_seqs=3) as run:
        worker, states = worker_of(run), worker_of(run).hooks[0]
        enter = states.enter

        def spoil(new):
            enter(new)
            if new.tokens == texts[1]:
                states.storage[new.row] = 255

        states.enter = spoil
        for index, text in enumerate(texts):
            run.client.submit(EngineRequest(f"n{index}", text, greedy(COUNT)))
        got = {f"n{index}": [] for index in range(6)}
        errors = {}
        while worker and len(errors) < 6:
            for output in run.client.outputs():
                got[output.id] += output.tokens
                if output.finish:
                    errors[output.id] = output.error
        assert "finite" in errors.pop("n1")
        assert set(errors.values()) == {None}
        assert [got[f"n{i}"] for i in (0, 2, 3, 4, 5)] == [expected[i] for i in (0, 2, 3, 4, 5)]


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_after_sleep(model, level):
    path, expected = model
    with engine(path, 2) as run:
        run.client.call("sleep", level)
        run.client.call("wake_up")
        assert run.tokens(prompts(6, seed=3), greedy(COUNT)) == expected


def test_the_plan_counts_the_states_of_every_row(model):
    path, _ = model
    with engine(path, max_num_seqs=3, kv_cache_memory_bytes=8 << 20) as run:
        states = worker_of(run).hooks[0]
        layers = worker_of(run).model.state_layers()
        assert states.storage.shape == (4, len(layers) * (64 * 4 + 2 * 64 * 2))
        assert states.storage.data_ptr() % 64 == 0
    with (
        pytest.raises(NotEnoughMemory, match="Set max_num_seqs="),
        engine(path, max_num_seqs=90, kv_cache_memory_bytes=80 << 10, max_model_len=16),
    ):
        pass


def test_a_worker_moves_its_states_with_its_model(model):
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
