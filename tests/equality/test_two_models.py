"""A worker with two models: both have a cache, both are counted, and each computes what it computes alone.

A small feature, which no module of Quire names, runs a second model on every step's tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import Engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.config.engine import EngineConfig, ModelSpec, Resolved
from quire.engine import build
from quire.engine.client import InlineClient
from quire.engine.feature import Feature
from quire.engine.resolve import resolve_config
from quire.executor.inline import InlineExecutor
from quire.forward_context import ForwardBatch
from quire.models.hf_config import read_config
from quire.ops.cpu.bindings import best
from quire.platforms.detect import facts
from quire.protocol.plan import StepPlan
from quire.worker.build import WorkerParts, build_worker
from quire.worker.memory_forecast import plan_memory
from quire.worker.model_input import ModelInput, TokenModelInput

SIZES = {"intermediate_size": 128, "head_dim": 32, "tie_word_embeddings": False}
SECOND: dict[str, dict[str, Any]] = {
    "another architecture": {
        "kind": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "another rope": {"kind": "qwen3", "num_hidden_layers": 2, "rope_theta": 100.0},
    "windows": {"kind": "mistral", "num_hidden_layers": 2},
}
COUNT = 12


class RunsLast(ModelInput):
    """Runs every model on the step's tokens, and records the last one's logits by the tokens that they follow."""

    def __init__(self, inner: ModelInput, models: list[Any], fast: bool):
        self.inner, self.models, self.fast = inner, models, fast
        self.texts: dict[int, list[int]] = {}
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def set_fused(self, fused: bool) -> None:
        self.inner.set_fused(fused)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.fast

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.inner.model = self.models[0]
        hidden_TD, last = self.inner.forward(batch), self.models[-1]
        if last is not self.models[0]:
            logits_TV = last.logits(TokenModelInput(last).forward(batch))
        else:
            logits_TV = last.logits(hidden_TD)
        at = 0
        for row, count in zip(batch.rows_B.tolist(), batch.query_lens, strict=False):
            for i in range(at, at + count):
                position = int(batch.positions_T[i])
                text = [*self.texts.get(row, [])[:position], int(batch.token_ids_T[i])]
                self.texts[row] = text
                self.seen[tuple(text)] = logits_TV[i].clone()
            at += count
        return hidden_TD


class SecondModel(Feature):
    """The models of a run, and what runs them."""

    name = "second_model"

    def __init__(self, resolved: Resolved, run: Run):
        super().__init__(resolved)
        self.run = run

    def models(self) -> list[ModelSpec]:
        return self.run.others

    def plug_into_worker(self, parts: WorkerParts) -> None:
        self.run.input = RunsLast(parts.model_input, parts.models, self.run.fast)
        parts.model_input = self.run.input


class Run:
    """An engine whose worker has the models of `paths`."""

    def __init__(self, paths: list[str], depth: int = 1, fast: bool = False, **settings: Any):
        keywords = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
        keywords |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 8 << 20}
        config = EngineConfig.from_keywords(model=paths[0], **keywords, **settings)
        self.resolved = replace(resolve_config(config), depth=depth)
        self.others = [self.spec(path) for path in paths[1:]]
        self.fast = fast
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(build, "build_executor", self.executor)
            core, ready = build.build_core(self.resolved)
        self.engine = Engine(InlineClient(core, self.resolved, ready, core.executor.close))
        self.num_layers = len(core.executor.call("info")[0]["specs"])

    def spec(self, path: str) -> ModelSpec:
        config = read_config(path, {})
        return replace(
            self.resolved.spec,
            path=path,
            hf_config=config,
            architecture=config["architectures"][0],
        )

    def executor(self, resolved: Resolved, features: list[Feature], report: Any) -> InlineExecutor:
        self.worker = build_worker(resolved, [*features, SecondModel(resolved, self)])
        return InlineExecutor(self.worker)

    def tokens(self, asked: list[list[int]], count: int = COUNT) -> list[list[int]]:
        self.input.texts.clear()
        return self.engine.tokens(asked, greedy(count))


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("main"), **SIZES)


@pytest.fixture(scope="module", params=SECOND, ids=lambda name: name.replace(" ", "-"))
def second(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    more = {**SIZES, **SECOND[request.param]}
    return make_checkpoint(more.pop("kind"), tmp_path_factory.mktemp("second"), **more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("depth", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")]
)
def test_each_model_computes_as_alone(main: str, second: str, depth: int, dtype: str) -> None:
    """bfloat16: on a CPU with kernels the layers of both models are fused; float32: they run module by module."""
    asked = prompts(3, longest=30)
    run = Run([main, second], depth, dtype=dtype)
    fused = [model.model.layers.fused is not None for model in run.worker.models]
    assert fused == [dtype == "bfloat16" and best() is not None] * 2
    tokens = run.tokens(asked)
    assert tokens == Run([main], dtype=dtype).tokens(asked)
    alone = Run([second], dtype=dtype)
    texts = [prompt + answer for prompt, answer in zip(asked, tokens, strict=True)]
    alone.tokens(texts, 1)
    assert {len(text) - 1 for text in texts} <= {len(text) for text in run.input.seen}
    for text, logits_V in run.input.seen.items():
        assert torch.equal(logits_V, alone.input.seen[text]), len(text)


def test_the_fast_step_of_the_main_model_is_right(main: str, second: str) -> None:
    asked = prompts(3, longest=30)
    run = Run([main, second], fast=True, dtype="bfloat16")
    assert run.tokens(asked) == Run([main], dtype="bfloat16").tokens(asked)


def test_both_models_are_counted(main: str, second: str) -> None:
    run = Run([main, second], dtype="float32")
    layers = [len(model.attention_layers()) for model in run.worker.models]
    assert run.num_layers == sum(layers)
    assert all(
        layer.spec.cache is not None
        for model in run.worker.models
        for layer in model.attention_layers()
    )
    both, alone = plan_memory(run.resolved, run.others), plan_memory(run.resolved)
    parameters = sum(p.numel() for p in run.worker.models[1].parameters())
    assert both.weights - alone.weights == 4 * parameters
    assert both.layout.bytes_per_block > alone.layout.bytes_per_block
    assert both.activations >= alone.activations
    assert facts().total_bytes == both.total


@pytest.mark.parametrize("second", ["another architecture"], indirect=True)
def test_both_models_wake_up_from_sleep(main: str, second: str) -> None:
    asked = prompts(2, longest=30)
    run = Run([main, second], dtype="bfloat16")
    want = run.tokens(asked)
    before = dict(run.input.seen)
    for level in (1, 2):
        run.input.seen.clear()
        run.engine.client.call("sleep", level)
        run.engine.client.call("wake_up")
        assert run.tokens(asked) == want
        assert all(torch.equal(run.input.seen[text], before[text]) for text in before)
