"""A hook that the core does not name reads the residual stream after some layers, as EAGLE-3 drafters do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.errors import Unsupported
from quire.forward_context import ForwardBatch
from quire.layers.decoder_layer import DecoderLayer
from quire.ops.cpu.bindings import best
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook

AFTER = [0, 1, 3]  # of three layers
LAST = 4  # the output of the last norm
COUNT = 10


class Reading(Hook):
    """Keeps the hidden states of each step; says nothing of the fast path, so the base class refuses it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
        self.batch: ForwardBatch | None = None
        self.ids: dict[int, str] = {}  # by row
        self.by_request: dict[tuple[str, int, int], Tensor] = {}  # (id, position, number of layers)

    def enter(self, new: EnteredRow) -> None:
        self.ids[new.row] = new.id

    def of_request(self, id: str, after: int) -> Tensor:
        found = {
            at: state
            for (of, at, count), state in self.by_request.items()
            if (of, count) == (id, after)
        }
        return torch.stack([found[at] for at in sorted(found)])

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.batch = batch

    def after(self, plan: StepPlan) -> None:
        if plan.work:
            assert self.batch is not None, "the step ran on the fast path"
            states = {after: state.clone() for after, state in self.batch.hidden_states.items()}
            self.steps.append((self.batch.token_ids_T, self.batch.positions_T, states))
            rows = [item.row for item in plan.work for _ in range(item.num_tokens)]
            for number, state in states.items():
                for row, at, one in zip(rows, self.batch.positions_T.tolist(), state, strict=True):
                    self.by_request[self.ids[row], at, number] = one


def worker_of(one: Engine) -> Any:
    return one.client.core.executor.worker


def read(one: Engine, after: Sequence[int] = AFTER) -> Reading:
    worker, hook = worker_of(one), Reading()
    worker.model.record_hidden_states(after)
    worker.hooks.append(hook)
    return hook


def of_transformers(path: str, tokens: list[int]) -> dict[int, Tensor]:
    """By number of layers: inputs of layers, and the output of the last, in one pass of Transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[int, Tensor] = {}

    def keep(number: int, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        seen.update({number: args[0][0], number + 1: output[0]})

    trunk = model.transformer.h if hasattr(model, "transformer") else model.base_model.layers
    for number, layer in enumerate(trunk):
        layer.register_forward_hook(lambda _, args, out, number=number: keep(number, args, out))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "more", "mode"),
    [("llama", {}, None), ("llama", {"model_impl": "transformers"}, "paged"), ("gpt2", {}, "paged"), ("mamba", {}, None), ("mamba", {"model_impl": "transformers"}, "per request")],
)  # fmt: skip
def test_hidden_states_equal_transformers(
    kind: str, more: dict[str, Any], mode: str | None, depth: int, tmp_path: Path
) -> None:
    """Of each request in a batch: rows in chunks, and beside rows in decode."""
    path = make_checkpoint(kind, tmp_path)
    given = prompts(4, seed=4)
    after = AFTER if kind == "llama" else [0, 1, 2 if kind == "gpt2" else 3]
    with engine(path, depth, max_num_batched_tokens=16, **more) as one:
        assert getattr(worker_of(one).model, "mode", None) == mode
        hook = read(one, after)
        texts = one.tokens(given, greedy(COUNT))
        assert {len(state) for *_, states in hook.steps for state in states.values()} != {1}
    for number, (prompt, text) in enumerate(zip(given, texts, strict=True)):
        expected = of_transformers(path, prompt + text)
        for count in after:
            got = hook.of_request(str(number), count)
            assert len(got) == len(prompt) + COUNT - 1
            torch.testing.assert_close(got, expected[count][: len(got)], atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fused_layers_produce_the_same_bits(depth: int, tmp_path: Path) -> None:
    """Against the modules one by one, read by hooks of PyTorch; and the fast path gives the same tokens."""
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
            layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_unavailable_layers_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(make_checkpoint(kind, tmp_path)) as one:
        model = worker_of(one).model
        with pytest.raises(ValueError, match=r"after \[5\] layers: the model has [23]"):
            model.record_hidden_states([1, 5])
        if kind == "gpt2":
            monkeypatch.setattr(model.config, "n_layer", 5)
            with pytest.raises(Unsupported, match="it has no list of 5 decoder layers"):
                model.record_hidden_states([1])


def test_recording_can_stop_and_leaves_no_hook(tmp_path: Path) -> None:
    with engine(make_checkpoint("gpt2", tmp_path)) as one:
        model = worker_of(one).model
        hook = read(one, [1])
        texts = one.tokens(prompts(2), greedy(3))
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        model.record_hidden_states([])
        steps = len(hook.steps)
        assert one.tokens(prompts(2), greedy(3)) == texts
        assert [states for *_, states in hook.steps[steps:]] == [{}] * (len(hook.steps) - steps)


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("numbers", [[LAST], [0, 1, 3, LAST]], ids=str)
def test_the_fast_path_records_the_same_bits(numbers: list[int], tmp_path: Path) -> None:
    class Fast(Hook):
        def accepts_fast_step(self, plan: StepPlan) -> bool:
            return True

        def after(self, plan: StepPlan) -> None:
            if plan.work:
                assert set(model.fast_states) == set(numbers)
                count = sum(item.num_tokens for item in plan.work)
                for number in numbers:
                    seen[number].append(model.fast_states[number][:count].clone())

    path, asked = make_checkpoint("qwen3", tmp_path, intermediate_size=128), prompts(5)
    seen: dict[int, list[Tensor]] = {number: [] for number in numbers}
    with engine(path, dtype="bfloat16", max_num_batched_tokens=24) as one:
        hook = read(one, numbers)
        tokens = one.tokens(asked, greedy(COUNT))
        expected = {n: torch.cat([states[n] for *_, states in hook.steps]) for n in numbers}
    with engine(path, dtype="bfloat16", max_num_batched_tokens=24) as one:
        model = worker_of(one).model
        model.record_hidden_states(numbers)
        worker_of(one).hooks.append(Fast())
        assert one.tokens(asked, greedy(COUNT)) == tokens
    for number in numbers:
        assert torch.equal(torch.cat(seen[number]), expected[number])


def test_the_output_of_the_last_norm(tmp_path: Path) -> None:
    """The native model and the Transformers backend, whose norm is another module."""
    path, given = make_checkpoint("llama", tmp_path), prompts(2, seed=4)
    found = []
    for more in ({}, {"model_impl": "transformers"}):
        with engine(path, **more) as one:
            hook = read(one, [3, LAST])
            one.tokens(given, greedy(3))
            found.append([hook.of_request(id, after) for id in "01" for after in (3, LAST)])
    for native, through in zip(*found, strict=True):
        torch.testing.assert_close(native, through, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found[0][0], found[0][1], atol=0.1)
