"""Adapters on pooling models: vectors like PEFT's, rows alone like rows in company, base rows untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, prompts
from equality.pooling_models import array, make_pooling_checkpoint, run
from lora.adapters import collect, lora_engine
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import ValidationError
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
GIVEN = [[*prompt, 7] for prompt in prompts(4, longest=40)]
EMBED = PoolingParams(task="embed")


def together(one: Any, adapters: list[str | None], given: list[list[int]] = GIVEN) -> list[Any]:
    ids = [str(next(one.numbers)) for _ in given]
    for id, prompt, adapter in zip(ids, given, adapters, strict=True):
        one.client.submit(EngineRequest(id, prompt, EMBED, adapter=adapter))
    return [array(outputs[-1]) for outputs in collect(one, ids).values()]


def check_llm(path: str, adapter: str, want: list[Any]) -> None:
    """The same through LLM.embed: an adapter by name, and none."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_lora_rank": 8}
    with LLM(
        path, runner="pooling", enable_lora=True, lora_modules={"a": adapter}, **settings
    ) as llm:
        outputs = llm.embed(GIVEN[:2], lora_request=["a", None], use_tqdm=False)
        for output, vector in zip(outputs, want, strict=True):
            assert output.outputs.embedding == pytest.approx(vector.tolist(), abs=1e-5)
        with pytest.raises(ValidationError, match="no adapter is called 'b'"):
            llm.embed(GIVEN[0], lora_request="b", use_tqdm=False)


@pytest.mark.parametrize(("kind", "modules"), [
    ("qwen3", ["q_proj", "v_proj", "down_proj"]),
    ("bert", ["query", "value", "output.dense"]),
    ("modernbert", ["Wqkv", "Wo", "Wi"]),
])  # fmt: skip
def test_vectors_are_those_of_peft(kind: str, modules: list[str], tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint(kind, tmp_path / "model")
    with engine(path, runner="pooling") as one:
        base = run(one, GIVEN, EMBED)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    tuned = peft.get_peft_model(model, options).eval()
    draw = torch.Generator().manual_seed(1)
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=draw)
    tuned.save_pretrained(tmp_path / "adapter")
    at = -1 if kind == "qwen3" else 0
    with torch.inference_mode():
        states = [tuned(torch.tensor([prompt])).last_hidden_state[0, at] for prompt in GIVEN]
    want = [torch.nn.functional.normalize(state, dim=0) for state in states]
    with lora_engine(path, runner="pooling") as one:
        one.client.call("load_lora", "a", str(tmp_path / "adapter"))
        found = together(one, ["a", None, "a", None])
        for number in (1, 3):
            assert found[number].tobytes() == base[number].tobytes()
        for number in (0, 2):
            torch.testing.assert_close(torch.from_numpy(found[number].copy()), want[number], atol=2e-4, rtol=1e-3)  # fmt: skip
            assert abs(found[number] - base[number]).max() > 0.01
            (alone,) = together(one, ["a"], [GIVEN[number]])
            assert alone.tobytes() == found[number].tobytes()
        if kind == "qwen3":
            check_llm(path, str(tmp_path / "adapter"), found[:2])
        if kind == "bert":  # as PEFT names modules of a model with a head
            file = tmp_path / "adapter" / "adapter_model.safetensors"
            stored = load_file(file)
            save_file(
                {name.replace("model.enc", "model.bert.enc"): one for name, one in stored.items()},
                file,
            )
            one.client.call("load_lora", "headed", str(tmp_path / "adapter"))
            again = together(one, ["headed"] * 4)
            assert [again[number].tobytes() for number in (0, 2)] == [
                found[number].tobytes() for number in (0, 2)
            ]
