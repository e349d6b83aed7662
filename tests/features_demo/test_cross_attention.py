"""A model with cross attention: each request attends to the encoder's states of its own source, whatever else runs."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cross_model import ARCHITECTURE, MAX_ENCODER_LEN, add_cross_attention, reference
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from parallel.thread_engine import split_engine

from quire.errors import ConfigError, ValidationError
from quire.frontend.request_manager import RequestManager
from quire.kvcache.layout import layout
from quire.kvcache.specs import CacheSpec, CrossAttentionSpec
from quire.models import registry
from quire.ops.cpu.bindings import best
from quire.protocol.output import EngineOutput
from quire.protocol.sampling_params import SamplingParams
from quire.worker.kv_cache import choose_attention

HERE = Path(__file__).parent
SIZES = {"head_dim": 32, "rope_scaling": None, "tie_word_embeddings": False}
PROMPTS = prompts(6, longest=60)
LENGTHS = [1, 16, 17, 300, 90, 5]
SOURCES = [[random.Random(n).randrange(211) for _ in range(n)] for n in LENGTHS]
COUNT = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("cross"), **SIZES)
    add_cross_attention(path)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    pairs = zip(SOURCES, PROMPTS, strict=True)
    return [reference(checkpoint, source, prompt, COUNT) for source, prompt in pairs]


@pytest.fixture
def path(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a model whose feature is installed."""
    described = tmp_path / "cross_feature-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: cross\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[quire.features]\nsource = cross_feature:CrossFeature\n"
    )
    for folder in (HERE, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(tmp_path)]))
    monkeypatch.setitem(registry.MODELS, ARCHITECTURE, "cross_model:CrossDecoder")
    return checkpoint


def asking(source: Any, count: int = COUNT) -> SamplingParams:
    params = greedy(count)
    params.extra_args = {"source": source}
    return params


def run(one: Engine, numbers: list[int]) -> list[list[int]]:
    """The tokens of these requests, together in one batch."""
    front = RequestManager(one.client)  # type: ignore[arg-type]
    collectors = [
        front.submit(front.accept_generation(PROMPTS[n], asking(SOURCES[n]), id=str(next(one.numbers))))
        for n in numbers
    ]  # fmt: skip
    while not all(each.finished for each in collectors):
        front.process_outputs(one.client.outputs())
    answers = [each.take().outputs[0] for each in collectors]  # type: ignore[union-attr]
    assert not any(answer.error for answer in answers), answers
    return [answer.token_ids for answer in answers]


def cross_engine(path: str, depth: int = 2, **settings: Any) -> Any:
    return engine(path, depth, skip_tokenizer_init=True, block_size=16, **settings)


def encoded(one: Engine) -> int:
    """How many requests' sources were encoded."""
    (count,) = one.client.core.executor.call("encoded")
    return int(count)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_those_of_plain_torch(path: str, expected: list[list[int]], depth: int) -> None:
    with cross_engine(path, depth) as one:
        everyone = list(range(len(SOURCES)))
        assert run(one, everyone) == expected
        assert encoded(one) == len(everyone)  # once for each request
        for number in everyone:
            assert run(one, [number]) == [expected[number]]
        one.client.core.scheduler.check()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_prompt_in_chunks_beside_others(path: str, expected: list[list[int]], depth: int) -> None:
    with cross_engine(path, depth, max_num_batched_tokens=16, max_num_seqs=3) as one:
        assert run(one, [0, 1, 2, 3, 4, 5]) == expected
        assert encoded(one) == len(SOURCES)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_request_writes_its_states_again(
    path: str, expected: list[list[int]], depth: int
) -> None:
    blocks = -(-MAX_ENCODER_LEN // 16) + 12
    with cross_engine(path, depth, max_model_len=128, num_gpu_blocks_override=blocks) as one:
        scheduler = one.client.core.scheduler
        numbers = [4, 1, 2, 5, 0, 2, 1, 3]
        assert run(one, numbers) == [expected[number] for number in numbers]
        assert scheduler.count.preemptions > 0
        assert encoded(one) == len(numbers) + scheduler.count.preemptions
        assert len(scheduler.kv.pool.free) == blocks


def test_nobody_finds_the_blocks_of_another_source(path: str, expected: list[list[int]]) -> None:
    """The same prompt has other keys and values, in layers above the first cross attention, with another source."""
    with cross_engine(path) as one:
        front = RequestManager(one.client)  # type: ignore[arg-type]
        prompt = PROMPTS[2] + PROMPTS[3]
        for source in (SOURCES[1], SOURCES[2], SOURCES[1]):
            collector = front.submit(
                front.accept_generation(prompt, asking(source), id=str(next(one.numbers)))
            )
            while not collector.finished:
                front.process_outputs(one.client.outputs())
            answer = collector.take().outputs[0]  # type: ignore[union-attr]
            assert answer.token_ids == reference(path, source, prompt, COUNT)
        assert one.client.core.scheduler.count.prefix_hits == 0


@pytest.mark.slow
def test_they_sleep_and_wake_up(path: str, expected: list[list[int]]) -> None:
    with cross_engine(path) as one:
        for level in (1, 2):
            assert run(one, [3, 2]) == [expected[3], expected[2]]
            one.client.call("sleep", level)
            one.client.call("wake_up")
        assert run(one, [2, 3]) == [expected[2], expected[3]]


@pytest.mark.parametrize(("size", "pipeline"), [(2, 1), (1, 2)])
def test_ranks_split_its_heads_or_layers(
    path: str, expected: list[list[int]], size: int, pipeline: int
) -> None:
    with split_engine(path, size, 2, pipeline, skip_tokenizer_init=True, block_size=16) as one:
        assert run(one, [0, 1, 2, 3, 4, 5]) == expected


@pytest.mark.skipif(best() is None, reason="needs the CPU kernels")
def test_the_kernels_give_each_request_the_same_tokens_alone_and_batched(path: str) -> None:
    """bf16 runs in a causal backend, which sees each token as a row."""
    with cross_engine(path, dtype="bfloat16") as one:
        (model,) = one.client.core.executor.worker.models
        assert not any(layer.backend.can.non_causal for layer in model.attention_layers())
        together = run(one, [0, 1, 2, 3, 4, 5])
        assert [run(one, [number])[0] for number in range(6)] == together
    with cross_engine(path, dtype="bfloat16", max_num_batched_tokens=16) as one:
        assert run(one, [0, 1, 2, 3, 4, 5]) == together


def test_requests_that_cannot_run_are_refused(path: str) -> None:
    with cross_engine(path) as one:
        front = RequestManager(one.client)  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match="source: must be a list"):
            front.accept_generation([1, 2], greedy(2), id="a")
        longer = front.accept_generation([1, 2], asking([1] * (MAX_ENCODER_LEN + 1)), id="b")
        (error,) = refusals(one, longer.children)
        assert "makes 301 states" in error
        assert "300 at most" in error
        longer.children[0].num_encoder_tokens = 0
        (error,) = refusals(one, longer.children)
        assert "has no input for the encoder" in error


def test_a_model_without_cross_attention_refuses_a_source(tmp_path: Path) -> None:
    with engine(make_checkpoint("llama", tmp_path), skip_tokenizer_init=True) as one:
        front = RequestManager(one.client)  # type: ignore[arg-type]
        request = front.accept_generation([1, 2], greedy(2), id="a").children[0]
        request.num_encoder_tokens = 4
        (error,) = refusals(one, [request])
        assert "no cross attention" in error


def refusals(one: Engine, requests: list[Any]) -> list[str]:
    outputs: list[EngineOutput] = []
    for request in requests:
        one.client.submit(request)
    while len(outputs) < len(requests):
        outputs += one.client.outputs()
    assert all(output.error_kind == "invalid" for output in outputs)
    return [output.error or "" for output in outputs]


def test_ranks_cannot_share_its_context(path: str) -> None:
    with cross_engine(path) as one:
        (model,) = one.client.core.executor.worker.models
        config = one.client.resolved.config
        parallel = replace(config.parallel, decode_context_parallel_size=2)
        resolved = replace(one.client.resolved, config=replace(config, parallel=parallel))
        with pytest.raises(ConfigError, match="cannot share the context of a model with cross"):
            choose_attention(resolved, None, "float32", model.attention_layers())


def test_a_missing_encoder_output_fails_the_step_alone(
    path: str, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with cross_engine(path) as one:
        hooks = one.client.core.executor.worker.hooks
        (hook,) = [each for each in hooks if each.name == "source"]
        hook.before, before = lambda plan, batch: None, hook.before
        front = RequestManager(one.client)  # type: ignore[arg-type]
        accepted = front.accept_generation(PROMPTS[1], asking(SOURCES[1]), id="a")
        one.client.submit(accepted.children[0])
        outputs: list[EngineOutput] = []
        while not outputs:
            outputs += one.client.outputs()
        assert outputs[0].finish == "error"
        assert "16 encoder states, and the batch has none" in caplog.text
        hook.before = before
        assert run(one, [1, 2]) == expected[1:3]


def test_blocks_of_both_lengths_are_planned() -> None:
    tokens, states = CacheSpec(2, 32, 32, "float32"), CrossAttentionSpec(2, 32, 32, "float32", 300)
    found = layout([tokens, states] * 3, 16, 128)
    assert [group.layers for group in found.groups] == [(0, 2, 4), (1, 3, 5)]
    assert found.bytes_per_block == 3 * 16 * tokens.bytes_per_token  # the groups share storage
    assert found.blocks_for(128, 64) == 8 + 19
    alone = layout([states] * 3, 16, 128)
    assert [group.layers for group in alone.groups] == [(), (0, 1, 2)]
    assert alone.blocks_for(128, 64) == 8 + 19
