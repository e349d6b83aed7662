"""A hook that the core does not name replaces embeddings and rotary positions of some tokens, as media will."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality.engines import VOCAB, Engine, engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.ops.cpu.bindings import best
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook
from quire.worker.model_input import ROPE_POSITIONS

STAND_IN = VOCAB - 1  # the token whose embedding the hook replaces
COUNT = 24


def meant(position: int) -> int:
    """The token that a stand-in at this position means."""
    return 3 + (position * 13) % 150


class Replacing(Hook):
    """Gives stand-ins of prompts the embedding of the token that is meant; refuses the fast path for their plans."""

    def __init__(self, worker: Any):
        self.worker, self.rows = worker, worker.rows
        self.num_prompt: dict[int, int] = {}
        self.refused = self.accepted = 0

    def enter(self, new: EnteredRow) -> None:
        self.num_prompt[new.row] = new.num_prompt

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        found = False
        for item in plan.work:
            start = int(self.rows.num_computed_tokens[item.row])
            end = min(start + item.num_tokens, self.num_prompt[item.row])
            found |= STAND_IN in self.rows.token_ids_RL[item.row, start:end].tolist()
        self.refused, self.accepted = self.refused + found, self.accepted + (not found)
        return not found

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None:
            return
        rows_T = batch.rows_B.repeat_interleave(batch.query_start_B1.diff()).tolist()
        tokens = zip(batch.token_ids_T.tolist(), batch.positions_T.tolist(), rows_T, strict=True)
        found = {
            at: meant(position)
            for at, (token, position, row) in enumerate(tokens)
            if token == STAND_IN and position < self.num_prompt[row]
        }
        ids_N = torch.tensor(list(found.values())).long()
        batch.embeddings.append((torch.tensor(list(found)).long(), self.worker.model.embed(ids_N)))


def with_stand_ins() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts with stand-ins, and the same with what they mean."""
    asked = [[STAND_IN if at % 5 in (1, 2) else t for at, t in enumerate(p)] for p in prompts(6)]
    means = [[meant(at) if t == STAND_IN else t for at, t in enumerate(p)] for p in asked]
    return asked, means


def worker_of(one: Engine) -> Any:
    return one.client.core.executor.worker


def check_replaced(path: str, depth: int, **settings: Any) -> Replacing:
    asked, means = with_stand_ins()
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 50, **settings}
    with engine(path, depth, **settings) as one:
        wanted = one.tokens(means, greedy(COUNT))
        hook = Replacing(worker_of(one))
        worker_of(one).hooks.append(hook)
        assert one.tokens(asked, greedy(COUNT)) == wanted
        worker_of(one).hooks.remove(hook)
        assert one.tokens(asked, greedy(COUNT)) != wanted
    return hook


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_embeddings_as_input_equal_token_ids_by_parts(depth: int, tmp_path: Path) -> None:
    check_replaced(make_checkpoint("llama", tmp_path), depth)


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_embeddings_leave_the_fast_path(depth: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    hook = check_replaced(path, depth, dtype="bfloat16")
    assert hook.refused > 2
    assert hook.accepted > COUNT // 2


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "mamba"])
def test_embeddings_through_transformers(kind: str, tmp_path: Path) -> None:
    """A scaled embedding; positions that are added to it; one cache for each request."""
    check_replaced(make_checkpoint(kind, tmp_path), depth=2, model_impl="transformers")


# ------------------------------------------------------------------------------------------- rotary positions

SECTIONS = [4, 6, 6]


def grid(positions_T: Tensor) -> Tensor:
    """Three components for each token: [T, 3]."""
    return torch.stack((positions_T, positions_T // 3, positions_T % 7), -1)


class OnAGrid(Hook):
    """Gives every token a position of three components. The base class refuses the fast path."""

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is not None:
            batch.extras[ROPE_POSITIONS] = grid(batch.positions_T)


def with_sections(folder: Path) -> str:
    path = make_checkpoint("qwen3", folder, intermediate_size=128)
    file = Path(path) / "config.json"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    return path


def on_a_grid(path: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by Transformers' Qwen 3; a hook gives its layers the angles of the grid."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def angles(_: Any, args: Any, options: dict[str, Any]) -> Any:
        size = model.config.head_dim
        frequencies = 1e4 ** (-torch.arange(0, size, 2).float() / size)
        by_component = grid(options["position_ids"][0])[:, :, None] * frequencies
        parts = by_component.split(SECTIONS, -1)
        one = torch.cat([part[:, number] for number, part in enumerate(parts)], -1)
        both = torch.cat((one, one), -1)[None]
        return args, {**options, "position_embeddings": (both.cos(), both.sin())}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(angles, with_kwargs=True)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_positions_of_several_components(depth: int, tmp_path: Path) -> None:
    path, asked = with_sections(tmp_path), prompts(4)
    with engine(path, depth, max_num_batched_tokens=50, model_impl="quire") as one:
        plain = one.tokens(asked, greedy(12))
        worker_of(one).hooks.append(OnAGrid())
        one.client.call("reset_prefix_cache")
        got = one.tokens(asked, greedy(12))
    assert got == [on_a_grid(path, prompt, 12) for prompt in asked]
    assert got != plain


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_positions_of_several_components_in_fused_layers(depth: int, tmp_path: Path) -> None:
    path, asked, found = with_sections(tmp_path), prompts(6), []
    for fused in (True, False):
        with engine(path, depth, dtype="bfloat16", max_num_batched_tokens=50) as one:
            worker_of(one).hooks.append(OnAGrid())
            if not fused:
                worker_of(one).unfuse("test")
            found.append(one.tokens(asked, greedy(COUNT)))
            decoder = worker_of(one).model.model.layers.fused
            assert (decoder is not None) == fused
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------- offsets of rows


class Offset(Hook):
    """Prompts have their own positions; positions of later tokens are `offset` further, by the rows or by the batch."""

    def __init__(self, worker: Any, offset: int, by_rows: bool):
        self.rows, self.offset, self.by_rows = worker.rows, offset, by_rows
        self.fast = 0

    def enter(self, new: EnteredRow) -> None:
        if self.by_rows:
            self.rows.rope_offset[new.row] = self.offset

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        rows = [item.row for item in plan.work]
        decodes = self.rows.num_computed_tokens[rows] >= self.rows.num_prompt[rows]
        return self.by_rows and bool(decodes.all())

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None:
            self.fast += 1
            return
        rows_T = batch.rows_B.repeat_interleave(batch.query_start_B1.diff())
        is_prompt_T = batch.positions_T < torch.from_numpy(self.rows.num_prompt)[rows_T]
        if self.by_rows and not is_prompt_T.any():
            return
        shifted_T = batch.positions_T + self.offset
        batch.extras[ROPE_POSITIONS] = torch.where(is_prompt_T, batch.positions_T, shifted_T)


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("offset", [-1, 7])
def test_rows_with_an_offset_decode_on_the_fast_path(
    depth: int, offset: int, tmp_path: Path
) -> None:
    path, asked, found = make_checkpoint("qwen3", tmp_path, intermediate_size=128), prompts(6), []
    with engine(path, depth, dtype="bfloat16", enable_prefix_caching=False) as one:
        plain = one.tokens(asked, greedy(COUNT))
        for by_rows in (True, False):
            worker_of(one).hooks.append(hook := Offset(worker_of(one), offset, by_rows))
            found.append(one.tokens(asked, greedy(COUNT)))
            worker_of(one).hooks.remove(hook)
            assert (hook.fast > COUNT // 2) == by_rows
        assert found[0] == found[1] != plain
        assert one.tokens(asked, greedy(COUNT)) == plain
