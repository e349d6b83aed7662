"""Features of an engine whose model ranks split: the same tokens, scores and vectors, bit for bit, as in one process."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from equality.engines import engine, greedy, make_checkpoint, prompts
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, QuireError
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.hook import SpeculationHook
from quire.frontend.request_manager import RequestManager
from quire.models.checkpoint_locator import EMBEDDED
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams
from quire.worker.hooks import Hook
from tests.equality.pooling_models import make_pooling_checkpoint, run
from tests.parallel.thread_engine import split_engine
from tests.speculation.test_speculation import PARAMS, PROMPTS, answers, config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
FEW_BLOCKS = {"num_gpu_blocks_override": 18, "block_size": 16, "max_num_batched_tokens": 24}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With windows; heads, MLP and LM head are split."""
    return make_checkpoint("mistral", tmp_path_factory.mktemp("split"), vocab_size=256, **SIZES)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[Any]:
    with engine(checkpoint) as one:
        return answers(one)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_chunks_preemption_and_cached_prefixes(
    checkpoint: str, expected: list[Any], depth: int
) -> None:
    with split_engine(checkpoint, depth=depth, **FEW_BLOCKS) as one:
        assert answers(one) == expected
        assert one.stats()["preemptions"]
    with split_engine(checkpoint, depth=depth, block_size=16) as one:
        assert [answers(one), answers(one)] == [expected, expected]
        assert one.stats()["prefix_hits"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("suffix", 1),
        *(pytest.param(*case, marks=SLOW) for case in (("suffix", 2), ("ngram", 1), ("ngram", 2))),
    ],
)
def test_drafters_of_each_rank(
    checkpoint: str, expected: list[Any], method: str, depth: int
) -> None:
    drafts = config(3) if method == "ngram" else {"method": method, "num_speculative_tokens": 4}
    with split_engine(checkpoint, depth=depth, speculative_config=drafts, **FEW_BLOCKS) as one:
        assert answers(one) == expected
        assert one.stats()["counts"]["spec_decode_num_draft_tokens"]


class Late(Hook):
    """One rank begins its steps later than the others."""

    def accepts_fast_step(self, plan: Any) -> bool:
        return True

    def before(self, plan: Any, batch: Any) -> None:
        time.sleep(0.004 * (plan.step % 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "late"),
    [({}, 1), ({"size": 1, "pipeline": 2}, 0), ({"size": 1, "pipeline": 2}, 1)],
    ids=["rank", "first stage", "last stage"],
)
def test_a_slow_rank_changes_nothing(
    checkpoint: str, expected: list[Any], layout: dict[str, int], late: int
) -> None:
    with split_engine(checkpoint, **layout, block_size=16) as one:  # type: ignore[arg-type]
        one.client.core.executor.workers[late].hooks.append(Late())  # type: ignore[attr-defined]
        assert answers(one, PARAMS[:4], PROMPTS[:4]) == expected[:4]


class Guess(Drafter):
    """Draft tokens of one rank; from time to time it fails."""

    def __init__(self, rank: int):
        self.chance = random.Random(rank)

    def propose(self, row: int, limit: int) -> list[int]:
        if self.chance.random() < 0.1:
            raise RuntimeError("no guess")
        return [self.chance.randrange(4) for _ in range(limit)]


def test_drafters_that_differ_by_rank(checkpoint: str, expected: list[Any]) -> None:
    with split_engine(checkpoint, speculative_config=config(3, adaptive=False)) as one:
        for rank, worker in enumerate(one.client.core.executor.workers):  # type: ignore[attr-defined]
            hook = next(each for each in worker.hooks if isinstance(each, SpeculationHook))
            hook.drafter.drafters = [Guess(rank)]  # type: ignore[attr-defined]
        assert answers(one) == expected
        assert one.stats()["counts"]["spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", pytest.param("mtp", marks=SLOW)])
def test_drafters_with_a_model(method: str, whole: bool) -> None:
    """With the weights of quire-tiny; each rank has its part of the drafter, or all of it."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "quire-tiny" / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in ("1, 2, 3, 4, 5,", "Once upon a time")]
    params = [greedy(16), SamplingParams(seed=1, max_tokens=16, ignore_eos=True)]
    settings = {"dtype": "bfloat16", "max_model_len": 128}
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    with engine("quire-tiny", speculative_config=drafts, **settings) as one:
        wanted, counts = answers(one, params, texts), one.stats()["counts"]
        (drafter,) = one.client.core.executor.worker.models[1:]  # type: ignore[attr-defined]
        size = sum(each.numel() for each in drafter.parameters())
    assert counts["spec_decode_num_accepted_tokens"]
    drafts |= {"draft_tensor_parallel_size": 1} if whole else {}
    with split_engine("quire-tiny", speculative_config=drafts, **settings) as one:
        assert answers(one, params, texts) == wanted
        found = one.stats()["counts"]
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
            assert found[name] == counts[name]
        for worker in one.client.core.executor.workers:  # type: ignore[attr-defined]
            own = sum(each.numel() for each in worker.models[1].parameters())
            assert (own == size) == whole


FORM = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["colour", "age"],
    "additionalProperties": False,
}


def formed(size: int, **settings: Any) -> list[Any]:
    form = StructuredOutputsParams(json=FORM)
    asked = [
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=form),
        SamplingParams(seed=3, max_tokens=40, structured_outputs=form, logprobs=1),
        SamplingParams(seed=4, max_tokens=40),
    ]
    with split_engine("quire-tiny", size, max_model_len=128, **settings) as one:
        front = RequestManager(one.client)
        requests = [front.accept("Once upon a time", each, id="x").children[0] for each in asked]
        return one.tokens([each.tokens for each in requests], [each.params for each in requests])


@pytest.mark.parametrize(
    "drafts", [pytest.param({}, marks=SLOW), {"speculative_config": config(3)}]
)
def test_grammars(drafts: dict[str, Any]) -> None:
    assert formed(2, **drafts) == formed(1, async_scheduling=True)


@pytest.mark.slow
def test_vectors_and_scores(tmp_path: Path) -> None:
    path, _ = make_pooling_checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=256)
    texts, found = prompts(5, longest=50), []
    for size in (1, 2):
        with split_engine(path, size, runner="pooling", max_num_batched_tokens=32) as one:
            tasks = ("embed", "token_embed")
            found.append([run(one, texts, PoolingParams(task=task)) for task in tasks])
    for whole, split in zip(*found, strict=True):
        assert [one.tobytes() for one in split] == [one.tobytes() for one in whole]


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantization", ["int8", *(pytest.param(name, marks=SLOW) for name in ("int4_g32", "nf4"))]
)
def test_quantized_while_loading(checkpoint: str, quantization: str) -> None:
    settings = {"dtype": "bfloat16", "quantization": quantization}
    with engine(checkpoint, **settings) as one:
        wanted = answers(one)
    with split_engine(checkpoint, **settings) as one:
        assert answers(one) == wanted


def rank_of(worker: Any) -> tuple[int, int]:
    return worker.rank, sum(each.numel() for each in worker.get_model().parameters())


def test_sleep_and_calls_of_all_ranks(checkpoint: str) -> None:
    with split_engine(checkpoint) as one:
        before = one.tokens(PROMPTS[:2], greedy(6))
        one.client.call("sleep", 2)
        assert one.client.call("wake_up") == []
        assert one.tokens(PROMPTS[:2], greedy(6)) == before
        executor = one.client.core.executor
        found = executor.call("collective_rpc", "call_function", [rank_of], {})
        assert [rank for rank, _ in found] == [0, 1]
        assert (
            found[0][1]
            == found[1][1]
            == one.client.call("collective_rpc", "num_parameters", [], {})[0]
        )


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "released"), [
    pytest.param({}, True, id="ranks, released"),
    pytest.param({}, False, id="ranks", marks=pytest.mark.slow),
    pytest.param({"size": 1, "pipeline": 2}, True, id="stages, released", marks=pytest.mark.slow),
    pytest.param({"size": 1, "pipeline": 2}, False, id="stages"),
])  # fmt: skip
def test_every_rank_reloads_weights(
    checkpoint: str, layout: dict[str, int], released: bool, tmp_path: Path
) -> None:
    """From a checkpoint that was replaced; as vLLM's users do between two calls of `wake_up`, or in a pause."""
    path = shutil.copytree(checkpoint, tmp_path / "model")
    with split_engine(str(path), **layout) as one:  # type: ignore[arg-type]
        before, call = one.tokens(PROMPTS[:2], greedy(6)), one.client.call
        reload = ("collective_rpc", "reload_weights", [], {})
        call("sleep", 0)
        with pytest.raises(QuireError, match=r"call it between sleep\(level=2\) and wake_up"):
            call(*reload)
        call("wake_up")
        assert call(*reload) == [None, None]
        assert one.tokens(PROMPTS[:2], greedy(6)) == before
        call("sleep", 0 if released else 2)
        call(*(["release_kv_cache"] if released else ["wake_up", ["weights"]]))
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
        save_file(weights, path / "new", {"format": "pt"})
        (path / "new").rename(path / "model.safetensors")
        assert call(*reload) == [None, None]
        assert call("wake_up") == []
        found = one.tokens(PROMPTS[:2], greedy(6))
    with engine(str(path)) as whole:
        assert found == whole.tokens(PROMPTS[:2], greedy(6))
    assert found != before


@pytest.mark.parametrize(("ranks", "fits"), [(1, "1$"), (4, "1 or 4")])
def test_a_drafter_that_is_split_otherwise_is_refused(ranks: int, fits: str) -> None:
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    asked = EngineConfig.from_keywords(
        model="quire-tiny", tensor_parallel_size=ranks, speculative_config=drafts
    )
    with pytest.raises(ConfigError, match=f"draft_tensor_parallel_size=2: must be {fits}"):
        resolve_config(asked)
