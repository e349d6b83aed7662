"""A hook that the core does not name reads the residual stream after some layers, as EAGLE-3 drafters do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.errors import Unsupported
from quire.forward_context import ForwardBatch
from quire.layers.decoder_layer import PreNormLayer
from quire.ops.cpu.bindings import best
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

AFTER = [0, 1, 3]  # of three layers
COUNT = 10


class Reading(Hook):
    """Keeps the hidden states of each step; says nothing of the fast path, so the base class refuses it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
        self.batch: ForwardBatch | None = None

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.batch = batch

    def after(self, plan: StepPlan) -> None:
        if plan.work:
            assert self.batch is not None, "the step ran on the fast path"
            states = {after: state.clone() for after, state in self.batch.hidden_states.items()}
            self.steps.append((self.batch.token_ids_T, self.batch.positions_T, states))


def worker_of(one: Engine) -> Any:
    return one.client.core.executor.worker


def read(one: Engine) -> Reading:
    worker, hook = worker_of(one), Reading()
    worker.model.record_hidden_states(AFTER)
    worker.hooks.append(hook)
    return hook


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_they_are_those_of_transformers(depth: int, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    (prompt,) = prompts(1, seed=4)
    with engine(path, depth, max_num_batched_tokens=16) as one:
        hook = read(one)
        (text,) = one.tokens([prompt], greedy(COUNT))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, args, out, number=number: seen.update({number: args[0], number + 1: out})
        )
    tokens = torch.tensor([prompt + text])
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=False)
    for after in AFTER:
        got = torch.cat([states[after] for _, _, states in hook.steps])[: tokens.shape[1] - 1]
        torch.testing.assert_close(got, seen[after][0, : len(got)], atol=2e-4, rtol=1e-4)
        assert len(got) == len(prompt) + COUNT - 1


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fused_layers_give_the_same_bits(depth: int, tmp_path: Path) -> None:
    """Against the modules one by one, read by hooks of PyTorch; and the tokens are those of the fast path."""
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    asked, found = prompts(5), []
    seen: dict[int, list[Tensor]] = {after: [] for after in range(4)}

    def keep(number: int, out: tuple[Tensor, Tensor]) -> None:
        seen[number + 1].append(out[0] + out[1])

    with engine(path, depth, dtype="bfloat16") as one:
        plain = one.tokens(asked, greedy(COUNT))
    for fused in (True, False):
        with engine(path, depth, dtype="bfloat16") as one:
            hook, model = read(one), worker_of(one).model
            layers = [module for module in model.modules() if isinstance(module, PreNormLayer)]
            if not fused:
                worker_of(one).unfuse("test")
                for number, layer in enumerate(layers):
                    layer.register_forward_hook(lambda _, args, out, at=number: keep(at, out))
            assert one.tokens(asked, greedy(COUNT)) == plain
            assert (worker_of(one).model.model.layers.fused is not None) == fused
            found.append({a: torch.cat([s[a] for _, _, s in hook.steps]) for a in AFTER})
    for after in AFTER:
        assert torch.equal(found[0][after], found[1][after])
        if after:
            assert torch.equal(found[1][after], torch.cat(seen[after]))


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with (
        engine(make_checkpoint("llama", tmp_path)) as one,
        pytest.raises(ValueError, match=r"after \[4\] layers: the model has 3"),
    ):
        worker_of(one).model.record_hidden_states([1, 4])
    with (
        engine(make_checkpoint("mamba", tmp_path / "other")) as one,
        pytest.raises(Unsupported, match="hidden states"),
    ):
        worker_of(one).model.record_hidden_states([1])
