"""Rows with adapters draw the same tokens in one call, by fused layers and by modules; rows without draw the tokens of a
server that takes no adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from equality.test_native_step import Counted
from speculation.test_speculation import config, hook_of
from worker.known_answers import KnownAnswers

from quire.forward_context import ForwardBatch
from quire.layers.lora import AdapterTable, LoraWeights, lora_targets
from quire.ops.cpu.bindings import best
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.worker.hooks import Hook

pytestmark = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")

RANKS = (4, 16, 33)
SIZES = {"intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
MIXTURE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 2,
}
DRAWN = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)


def number_of(prompt: list[int]) -> int:
    return sum(prompt) % 4 - 1


class Adapters(Hook):
    """Each prompt has an adapter of its own."""

    def __init__(self, table: AdapterTable):
        self.table = table

    def enter(self, new: EnteredRow) -> None:
        self.table.number_of_row[new.row] = number_of(new.tokens[: new.num_prompt])

    def leave(self, row: int) -> None:
        self.table.number_of_row[row] = -1

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.table.accepts_fast_step(plan)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is not None:
            self.table.put(plan, batch)


def adapter(
    model: Any, rank: int, seed: int, skipped: str = "embed_tokens"
) -> dict[str, LoraWeights]:
    """Random, of all modules except packed ones."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, (ins, outs) in lora_targets(model).items():
        if not name.endswith(("qkv_proj", "gate_up_proj", skipped)):
            a = torch.randn(rank, ins, generator=generator) * ins**-0.5
            made[name] = LoraWeights(
                a, torch.randn(outs, rank, generator=generator) * 0.4, 0.5,
                is_embedding=name.endswith("embed_tokens"),
            )  # fmt: skip
    return made


def with_adapters(one: Engine, skipped: str = "embed_tokens") -> Any:
    worker: Any = one.client.core.executor.worker  # type: ignore[attr-defined]
    table = AdapterTable(worker.model, len(RANKS), worker.rows.max_rows)
    for number, rank in enumerate(RANKS):
        table.add(number, table.prepare(adapter(worker.model, rank, number, skipped)))
    worker.hooks.append(Adapters(table))
    worker.fuse("adapters")  # the kernels take the address of the table
    return worker


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("qwen3", None), ("mistral", "int8"), ("qwen2", "int4"), ("gemma2", None), ("qwen2_moe", None)],
)  # fmt: skip
def test_all_ways_draw_the_same_tokens(kind: str, quantization: str | None, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, **SIZES, **(MIXTURE if "moe" in kind else {}))
    settings = {"dtype": "bfloat16", "quantization": quantization, "max_num_batched_tokens": 50}
    settings["enable_prefix_caching"] = False  # nothing here says that adapters' blocks differ
    texts = prompts(7)
    assert {number_of(text) for text in texts} == {-1, 0, 1, 2}
    found = []
    for way in ("step", "layers", "modules"):
        with engine(path, **settings) as one:
            if way == "step":
                plain = one.tokens(texts, greedy(8))
            worker = with_adapters(one)
            count = Counted(worker)
            if way != "step":
                worker.fast_step.accepts_fast_step = lambda plan: False
            if way == "modules":
                worker.unfuse("test")
            assert (worker.model.model.layers.fused is None) == (way == "modules")
            found.append((one.tokens(texts, greedy(8)), one.tokens(texts, DRAWN)))
            assert (count.by_parts == 0) == (way == "step")
    assert found[0] == found[1] == found[2]
    adapted = found[0][0]
    for text, base, tokens in zip(texts, plain, adapted, strict=True):
        assert tokens == base or number_of(text) >= 0
    assert adapted != plain


def test_rows_with_an_adapter_of_the_table_run_by_parts(tmp_path: Path) -> None:
    """And a row alone draws what it draws in company."""
    path = make_checkpoint("qwen3", tmp_path, **SIZES)
    texts = prompts(7)
    with engine(path, dtype="bfloat16", enable_prefix_caching=False) as one:
        count = Counted(with_adapters(one, skipped="nothing"))
        together = one.tokens(texts, greedy(8))
        assert count.by_parts
        assert [one.tokens([text], greedy(8))[0] for text in texts] == together


def test_draft_tokens_of_rows_with_and_without_adapters(tmp_path: Path) -> None:
    """They are verified in the native step, each with its row's adapter."""
    path, texts = make_checkpoint("qwen3", tmp_path, **SIZES), prompts(7)
    settings = {"dtype": "bfloat16", "enable_prefix_caching": False}
    with engine(path, **settings) as one:
        with_adapters(one)
        expected = one.tokens(texts, greedy(16)), one.tokens(texts, DRAWN)
    for right, params, answers in (
        (0.0, DRAWN, expected[1]),
        (0.8, greedy(16), expected[0]),
        (0.8, DRAWN, expected[1]),
    ):
        known = {tuple(text): answer for text, answer in zip(texts, answers, strict=True)}
        with engine(path, **settings, speculative_config=config(3, adaptive=False)) as one:
            count = Counted(with_adapters(one))
            hook_of(one).drafter = KnownAnswers(known, right)
            assert one.tokens(texts, params) == answers
            assert not count.by_parts
            accepted = one.stats()["counts"]["spec_decode_num_accepted_tokens"]
            assert (accepted > 20) == (right > 0)
