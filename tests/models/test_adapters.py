"""LoRA in models: logits like PEFT's, rows alone like rows in company, base rows untouched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import ValidationError
from quire.forward_context import ADAPTERS
from quire.layers.lora import AdapterTable, LoraWeights
from tests.models.cases import MOE, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, plain, texts

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BIASED = Case("llama", "llama", {"attention_bias": True, "mlp_bias": True})


def trained(model: nn.Module, **options: Any) -> tuple[nn.Module, dict[str, LoraWeights]]:
    """The model with a random adapter of PEFT, and the same adapter for ours."""
    config = peft.LoraConfig(
        **{"r": 5, "lora_alpha": 8, "target_modules": list(PROJECTIONS), **options}
    )
    found = peft.get_peft_model(model, config).eval()
    made: dict[str, LoraWeights] = {}
    generator = torch.Generator().manual_seed(5)
    for name, parameter in found.named_parameters():
        if "lora_" in name or (options.get("bias") == "all" and name.endswith(".bias")):
            size = parameter.abs() if "magnitude" in name else 0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = size * (1 + 0.2 * noise) if "magnitude" in name else 0.2 * noise
    for path, module in found.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        name = path.removeprefix("base_model.model.")
        scale = module.scaling["default"]
        if module.lora_embedding_A:
            pair = (
                module.lora_embedding_A["default"].data,
                module.lora_embedding_B["default"].data,
            )
            made[name] = LoraWeights(*pair, scale, is_embedding=True)
            continue
        a, b = module.lora_A["default"], module.lora_B["default"]
        made[name] = LoraWeights(a.weight.data, b.weight.data, scale)
        if b.bias is not None:
            made[name].bias_O = b.bias.data * scale
        if options.get("bias") == "all" and module.base_layer.bias is not None:
            made[name].base_bias_O = module.base_layer.bias.data.clone()
        if module.lora_magnitude_vector:
            made[name].magnitude_O = module.lora_magnitude_vector["default"].weight.data
    return found, made


def logits(
    model: Any, rows: Sequence[tuple[list[int], int]], splits: int = 1, **how: Any
) -> list[Tensor]:
    """Logits of all tokens of each (text, adapter), computed together in `splits` steps."""
    runner = AdapterRunner(model, **how)
    for row, (text, number) in enumerate(rows):
        runner.add(row, text)
        runner.numbers[row] = number
    parts: list[list[Tensor]] = [[] for _ in rows]
    for split in range(splits):
        work = []
        for row, (text, _) in enumerate(rows):
            work.append((row, len(text) * (split + 1) // splits - len(text) * split // splits))
        work = [each for each in work if each[1]]
        for (row, _), found in zip(work, runner.step(work), strict=True):
            parts[row].append(found)
    return [torch.cat(each) for each in parts]


class AdapterRunner(Runner):
    """A runner whose rows have adapters."""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        self.numbers: dict[int, int] = {}

    def extras(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, Tensor]:
        numbers = [self.numbers[row] for row, _, tokens in chunks for _ in tokens]
        return {} if max(numbers) < 0 else {ADAPTERS: torch.tensor(numbers)}


OPTIONS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "some projections, ranks and alphas by pattern": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 3, "layers.1.*up_proj": 17},
        "alpha_pattern": {"v_proj": 3},
    },
    "biases": {"bias": "all"},
    "bias of B": {"lora_bias": True},
    "DoRA": {"use_dora": True},
    "DoRA and biases": {"use_dora": True, "bias": "all"},
    "table and head": {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = write(BIASED, tmp_path)
    ours = build(tmp_path)
    text = texts()[0]
    base = plain(theirs, text)
    table = AdapterTable(ours, 3, 4)
    tuned, modules = trained(theirs, **options)
    table.add(2, table.prepare(modules))
    want = plain(tuned, text)
    assert (want - base).abs().max() > 0.1
    got, untouched = logits(ours, [(text, 2), (text, -1)])
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(untouched, base, rtol=2e-4, atol=2e-4)


GENERIC: dict[str, tuple[Case, dict[str, Any]]] = {
    "paged": (BIASED, {"target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"]}),
    "DoRA": (BIASED, {"use_dora": True, "bias": "all"}),
    "stored as inputs": (
        Case("gpt2", "gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}),
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "one cache per request": (
        Case("bloom", "bloom", {"n_layer": 2, "n_head": 4}),
        {"target_modules": ["query_key_value", "dense"]},
    ),
}


@pytest.mark.parametrize("name", GENERIC)
def test_models_of_transformers_take_adapters(name: str, tmp_path: Path) -> None:
    case, options = GENERIC[name]
    theirs = write(case, tmp_path)
    ours = build(tmp_path, model_impl="transformers")
    text, other = texts()[:2]
    base = plain(theirs, other)
    table = AdapterTable(ours, 3, 4)
    tuned, modules = trained(theirs, **options)
    table.add(2, table.prepare(modules))
    got, untouched = logits(ours, [(text, 2), (other, -1)], splits=3)
    torch.testing.assert_close(got, plain(tuned, text), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(untouched, base, rtol=1e-3, atol=1e-3)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    write(BIASED, tmp_path)
    table = AdapterTable(build(tmp_path), 1, 1)
    name = "model.layers.0.self_attn.k_proj"
    a_RI, b_OR = torch.zeros(4, 48), torch.zeros(32, 4)
    assert table.prepare({name: LoraWeights(a_RI, b_OR)}).rank == 4
    with pytest.raises(ValidationError, match=r"layers\.7\.self_attn\.k_proj"):
        table.prepare({name.replace("0", "7"): LoraWeights(a_RI, b_OR)})
    for weights, what in (
        (LoraWeights(torch.zeros(4, 49), b_OR), r"A of .*k_proj has shape \[4, 49\].*\[4, 48\]"),
        (LoraWeights(a_RI, torch.zeros(64, 4)), r"B of .*k_proj has shape \[64, 4\].*\[32, 4\]"),
        (LoraWeights(a_RI, torch.zeros(32, 5)), r"B of .*k_proj"),
        (LoraWeights(a_RI, None), "only one of the two factors"),
        (LoraWeights(a_RI, b_OR, bias_O=torch.zeros(31)), "bias"),
        (LoraWeights(a_RI, b_OR, is_embedding=True), "linear layer"),
    ):
        with pytest.raises(ValidationError, match=what):
            table.prepare({name: weights})


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(Case("moe", "qwen3_moe", MOE), tmp_path)
    table = AdapterTable(build(tmp_path), 1, 1)
    name = "model.layers.0.mlp.experts.3.down_proj"
    with pytest.raises(ValidationError, match=re.escape(name)):
        table.prepare({name: LoraWeights(torch.zeros(4, 24), torch.zeros(48, 4))})
