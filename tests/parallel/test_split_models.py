"""Every native model, split among ranks: the same logits, with the same bits, and less memory for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quire.layers import weight_slots
from quire.layers.weight_slots import WeightSlot, slots_of
from quire.parallel.ranks import OutputSlice, split_among
from tests.models.cases import CASES, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.parallel.thread_ranks import ThreadRanks, load_on, on_ranks


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


QUICK = {
    *("llama one kv head", "llama tied", "qwen3", "mistral window", "qwen3 moe", "gpt-oss", "phi3"),
    *("gemma2", "gemma4", "glm4", "olmo2", "cohere", "deepseek v3"),
}
PARAMETERS = [
    pytest.param(c, id=c.name.replace(" ", "-"), marks=() if c.name in QUICK else pytest.mark.slow)
    for c in CASES
]


def test_quick_cases_exist() -> None:
    assert {case.name for case in CASES} >= QUICK


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PARAMETERS)
def test_logits_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    sizes = {"vocab_size": 256}  # of which the ranks have parts
    if "longrope" not in case.name:
        sizes |= {"hidden_size": 128, "intermediate_size": 256}
    config = {**sizes, **case.config}
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    write(replace(case, config=config), tmp_path)
    asked = {"model_impl": "quire", "max_model_len": 64 if "longrope" in case.name else None}
    whole = build(tmp_path, **asked)
    wanted = [Runner(whole).prefill(0, text) for text in texts()]

    def run(ranks: ThreadRanks) -> tuple[list[Tensor], int]:
        with split_among(ranks):
            model = build(tmp_path, **asked)
        return [Runner(model).prefill(0, text) for text in texts()], size_of(model)

    for size in (2, 4):
        for found, parameters in on_ranks(size, run):
            assert parameters < size_of(whole)
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got, want)


def test_widths_that_do_not_divide_stay_whole(tmp_path: Path) -> None:
    """A vocabulary of 131, hidden states of 48 and an MLP of 72, on 2 and 4 ranks, which divide the heads."""
    write(next(case for case in CASES if case.name == "llama one kv head"), tmp_path)
    whole = build(tmp_path, model_impl="quire")
    wanted = [Runner(whole).prefill(0, text) for text in texts()]

    def run(ranks: ThreadRanks) -> list[Tensor]:
        model = load_on(ranks, lambda: build(tmp_path, model_impl="quire"))
        for part, of in ((model, whole), (model.model.layers[0], whole.model.layers[0])):
            assert size_of(part) < size_of(of)
        assert size_of(model.model.embed_tokens) == size_of(whole.model.embed_tokens)
        assert size_of(model.model.layers[0].mlp) == size_of(whole.model.layers[0].mlp)
        return [Runner(model).prefill(0, text) for text in texts()]

    for size in (2, 4):
        for found in on_ranks(size, run):
            assert all(map(torch.equal, found, wanted))


def parts_of(model: nn.Module) -> dict[str, tuple[WeightSlot, Tensor]]:
    """By checkpoint name: the slot, and what it was filled with."""
    found = {}
    for name, slot in slots_of(model).items():
        assert isinstance(slot, WeightSlot)
        tensor = slot.layer.get_parameter(slot.name)
        dim = slot.dim
        found[name] = slot, tensor if dim is None else tensor.narrow(dim, slot.start, slot.length)
    return found


@pytest.mark.parametrize("name", ["llama one kv head", "phi3"])
def test_the_parts_of_ranks_are_the_file_and_no_more_of_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors with one part for a rank, and with several (queries, keys and values of phi3)."""
    case = next(case for case in CASES if case.name == name)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
    write(replace(case, config={**sizes, **case.config}), tmp_path)
    copied: list[int] = []

    def own_part(tensor: Tensor, shares: Sequence[OutputSlice], dim: int = 0) -> Tensor:
        found = original(tensor, shares, dim)
        if found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            copied.append(len(shares))  # the others are views of the mapped file
        return found

    original = weight_slots.own_part
    monkeypatch.setattr(weight_slots, "own_part", own_part)
    ranks = on_ranks(2, lambda own: parts_of(load_on(own, lambda: build(tmp_path, model_impl="quire"))))  # fmt: skip
    assert set(copied) == ({2, 3} if name == "phi3" else set())
    stored, read = load_file(tmp_path / "model.safetensors"), 0
    for called, tensor in stored.items():
        joined = torch.full_like(tensor, torch.nan)
        for parts in ranks:
            slot, part = parts[called]
            read += part.numel()
            width = part.shape[slot.cut]
            shares, begin, at = slot.shares or [OutputSlice(0, width, width)], 0, 0
            for share in shares:
                into = joined.narrow(slot.cut, begin + share.start, share.length)
                into.copy_(part.narrow(slot.cut, at, share.length))
                begin, at = begin + share.total, at + share.length
        assert torch.equal(joined, tensor), called
    assert read < 1.2 * sum(tensor.numel() for tensor in stored.values())
