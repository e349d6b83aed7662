"""Adapters on quantized bases: logprobs near those on the floats that the base stands for, and each row's bits are its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality.engines import Engine, engine
from lora.adapters import PREFIX, collect, lora_engine, run, submit, write
from safetensors.torch import load_file

from quire.protocol.sampling_params import SamplingParams
from tests.quantization.test_quantized_formats import quantized
from tests.quantization.writers import FORMS

MODULES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
TEXT = [7, 3, 9, 12, 40, 41, 77, 5, 99, 8, 60, 61, 3, 100, 4, 17, 6]
GIVEN = [TEXT, TEXT[3:9], [5, 6, 7]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, seed=0, logprobs=2)


def write_adapter(dense: Path, folder: Path) -> str:
    draw, made = torch.Generator().manual_seed(3), {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in MODULES)):
            start = PREFIX + name.removesuffix("weight") + "lora_"
            made[start + "A.weight"] = torch.randn(4, weight.shape[1], generator=draw) * 0.3
            made[start + "B.weight"] = torch.randn(weight.shape[0], 4, generator=draw) * 0.2
    return write(folder, 4, made=made)


def logprobs(one: Engine, adapter: str | None) -> torch.Tensor:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (outputs,) = collect(one, [submit(one, TEXT, params, adapter)]).values()
    parts = [out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None]
    return torch.tensor([values[0] for part in parts for values in part.values])


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
def test_adapters_on_quantized_checkpoints(name: str, plain: Path, tmp_path: Path) -> None:
    (form,) = [form for form in FORMS if form.name == name]
    stored, dense, _ = quantized(plain, tmp_path, form)
    path = write_adapter(dense, tmp_path / "adapter")
    with engine(str(stored)) as one:
        base = run(one, GIVEN, [None] * len(GIVEN), PARAMS)
    with lora_engine(str(dense)) as one:
        one.client.call("load_lora", "a", path)
        want, without = logprobs(one, "a"), logprobs(one, None)
    with lora_engine(str(stored)) as one:
        one.client.call("load_lora", "a", path)
        mixed = run(one, GIVEN * 2, ["a"] * len(GIVEN) + [None] * len(GIVEN), PARAMS)
        assert mixed[len(GIVEN) :] == base
        assert mixed[: len(GIVEN)] == [run(one, [each], ["a"], PARAMS)[0] for each in GIVEN]
        got = logprobs(one, "a")
    # What is left is the rounding of activations and weights to 8 bits: small beside what the adapter does.
    noise, change = ((got - want).square().mean().sqrt(), (want - without).square().mean().sqrt())
    assert noise < 0.1 * change
