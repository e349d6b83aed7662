"""Adapters that PEFT saved compute what PEFT computes: one test for each field of adapter_config.json that changes something."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality.engines import VOCAB, Engine, make_checkpoint
from lora.adapters import collect, lora_engine, submit

from quire.protocol.sampling_params import SamplingParams

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "null": {"target_modules": None},
    "regex": {"target_modules": r".*\.[02]\..*(q|up)_proj"},
    "layers": {
        "target_modules": LINEARS,
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "excluded": {"target_modules": LINEARS, "exclude_modules": ["k_proj", "gate_proj"]},
    "patterns": {
        "rank_pattern": {r"layers\.1\..*_proj": 7, "q_proj": 2, "v_proj": 3},
        "alpha_pattern": {"(k|v)_proj": 3, "model.layers.0.mlp.down_proj": 31},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"down_proj": 2}},
    "all biases": {"bias": "all"},
    "biases of adapted layers": {"bias": "lora_only", "target_modules": ["q_proj", "up_proj"]},
    "bias of B": {"lora_bias": True},
    "DoRA": {"use_dora": True, "rank_pattern": {"q_proj": 2}},
    "DoRA, rslora and biases": {"use_dora": True, "use_rslora": True, "bias": "all"},
    "table": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
    "dropout": {"lora_dropout": 0.5},
}
TEXT = [
    int(number)
    for number in torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(2))
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("peft"), attention_bias=True, mlp_bias=True
    )


@pytest.fixture(scope="module")
def base(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def one(path: str) -> Iterator[Engine]:
    with lora_engine(path) as found:
        yield found


def trained(base: Any, folder: Path, **options: Any) -> Any:
    """A model of PEFT with a random adapter, which is saved."""
    torch.manual_seed(7)
    config = peft.LoraConfig(**{"r": 5, "lora_alpha": 8, "target_modules": LINEARS, **options})
    tuned = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, each in tuned.named_parameters():
            if "magnitude" in name:
                each.mul_(1 + 0.2 * torch.randn_like(each))
            elif each.requires_grad:
                each.copy_(0.2 * torch.randn_like(each))
    tuned.save_pretrained(folder)
    return tuned


def logprobs(model: Any) -> torch.Tensor:
    """Of each token of the text after the first."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]


def served(one: Engine, adapter: str | None) -> torch.Tensor:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (outputs,) = collect(one, [submit(one, TEXT, params, adapter)]).values()
    assert outputs[-1].finish == "length", outputs[-1].error
    parts = [out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None]
    return torch.tensor([values[0] for part in parts for values in part.values])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logprobs_are_those_of_peft(
    options: dict[str, Any], base: Any, one: Engine, tmp_path: Path
) -> None:
    tuned = trained(base, tmp_path, **options)
    one.client.call("load_lora", "x", str(tmp_path), True)
    want = logprobs(tuned)
    assert (want - logprobs(base)).abs().max() > 0.05
    torch.testing.assert_close(served(one, "x"), want, rtol=3e-4, atol=3e-4)
    torch.testing.assert_close(served(one, None), logprobs(base), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(("kind", "options"), [
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ("qwen2", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("qwen2", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "ensure_weight_tying": True}),
])  # fmt: skip
def test_other_bases(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A table that is the head; a model that runs through Transformers."""
    path = make_checkpoint(kind, tmp_path / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tuned = trained(base, tmp_path / "adapter", **options)
    with lora_engine(path) as one:
        one.client.call("load_lora", "x", str(tmp_path / "adapter"))
        assert (logprobs(tuned) - logprobs(base)).abs().max() > 0.05
        torch.testing.assert_close(served(one, "x"), logprobs(tuned), rtol=3e-4, atol=3e-4)
        torch.testing.assert_close(served(one, None), logprobs(base), rtol=3e-4, atol=3e-4)


def test_the_head_of_a_whole_module_is_refused_with_its_size(
    base: Any, one: Engine, tmp_path: Path
) -> None:
    trained(base, tmp_path, modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"modules_to_save.*'lm_head'.*MB"):
        one.client.call("load_lora", "whole", str(tmp_path))


def test_a_start_that_changes_the_base_is_refused(base: Any, one: Engine, tmp_path: Path) -> None:
    trained(base, tmp_path, init_lora_weights="pissa")
    with pytest.raises(ValueError, match="init_lora_weights='pissa'"):
        one.client.call("load_lora", "pissa", str(tmp_path))
