"""Quantized checkpoints as tools leave them: with heads, biases and scales of other things, and with mistakes."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, greedy, prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ConfigError, Unsupported
from quire.layers.linear import Linear
from quire.ops.cpu.bindings import best
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from tests.models.cases import Case, edit_config, write
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.quantization.test_quantized_formats import floats_of, quantized
from tests.quantization.writers import FORMS, SMALL, Form

BY_NAME = {form.name: form for form in FORMS}
WIDE = Case("qwen3", "qwen3", {**SMALL.config, "head_dim": 32})  # heads that a fused layer takes
Tensors = dict[str, Tensor]


@pytest.fixture
def made(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: quantized(plain, tmp_path, BY_NAME[name])[0]


def change(path: Path, how: Callable[[Tensors], None]) -> None:
    found = load_file(path / "model.safetensors")
    how(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})


def says(path: Path, **more: Any) -> None:
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config={**config, **more})


def answer(path: Path, **asked: Any) -> Tensor:
    return Runner(build(path, **asked)).prefill(0, texts()[1])


# ------------------------------------------------------------------------------------ what tools leave


def test_unused_tensors_are_skipped(made: Callable[[str], Path], caplog: Any) -> None:
    """Biases of zeros for layers without one, scales of a cache, scales of activations."""
    path = made("ct int8")
    want = answer(path)

    def add(found: Tensors) -> None:
        at = "model.layers.0"
        found[f"{at}.mlp.down_proj.bias"] = torch.zeros(64)
        found[f"{at}.self_attn.k_scale"] = torch.tensor(0.1)
        found[f"{at}.self_attn.v_proj.output_scale"] = torch.tensor(0.1)
        found[f"{at}.self_attn.v_proj.v_scale"] = torch.tensor(0.1)
        found[f"{at}.self_attn.kv_scale"] = torch.tensor(0.1)
        found[f"{at}.self_attn.qkv_proj.k_scale"] = torch.ones(2)
        found[f"{at}.mlp.experts.0.w1.input_scale"] = torch.tensor(0.1)
        found[f"{at}.self_attn.q_proj.input_scale"] = torch.tensor([0.1])
        found[f"{at}.mlp.up_proj.input_zero_point"] = torch.zeros(1)

    def spoil(found: Tensors) -> None:
        found["model.layers.0.mlp.down_proj.bias"][3] = 1

    change(path, add)
    with caplog.at_level(logging.INFO):
        assert torch.equal(answer(path), want)
    assert (
        "8 scales of activations or keys and values are not used: they are dynamic" in caplog.text
    )
    change(path, spoil)
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.0\.mlp\.down_proj\.bias"):
        build(path)


def test_a_quantized_head(made: Callable[[str], Path]) -> None:
    path = made("gptq")
    says(path, lm_head=True)
    means: list[Tensor] = []

    def quantize_head(found: Tensors) -> None:
        table = found.pop("lm_head.weight")[:128]  # words of 8 outputs
        parts, floats = BY_NAME["gptq"].write(table.numpy(), "lm_head")
        means.append(torch.from_numpy(floats))
        found.update({f"lm_head.{name}": part.contiguous() for name, part in parts.items()})
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"][:128].clone()

    change(path, quantize_head)
    edit_config(path, vocab_size=128)
    model: Any = build(path)
    assert torch.equal(floats_of(model.lm_head), means[0])
    text = [token % 128 for token in texts()[1]]
    assert Runner(model).prefill(0, text).shape[1] == 128


def test_zero_points_are_unpacked_at_word_boundaries(tmp_path: Path) -> None:
    """Keys of 12 outputs: each part's last word of zero points is its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 12, "num_attention_heads": 8}
    write(Case("qwen3", "qwen3", {**sizes, "num_key_value_heads": 1}), tmp_path / "plain")
    form = BY_NAME["ct int4 asymmetric"]
    stored, _, means = quantized(tmp_path / "plain", tmp_path, form)
    layer = build(stored).get_submodule("model.layers.0.self_attn.qkv")
    want = [means[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(floats_of(layer), torch.cat(want))


def test_a_wrapped_model(made: Callable[[str], Path], plain: Path) -> None:
    path = made("ct int4")
    want = answer(path)

    def wrap(found: Tensors) -> None:
        for name in [name for name in found if name.startswith("model.")]:
            found[f"model.language_model.{name[6:]}"] = found.pop(name)

    change(path, wrap)
    inner = json.loads((path / "config.json").read_text())
    stored = inner.pop("quantization_config")
    names = [
        name.replace("model.layers", "model.language_model.layers") for name in stored["ignore"]
    ]
    outer = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**inner, "model_type": "qwen3_vl_text", "architectures": None},
        "quantization_config": {**stored, "ignore": [*names, "re:.*visual.*"]},
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(outer))
    assert torch.equal(answer(path), want)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt nvfp4"),
    ],
)
def test_older_writers_leave_a_file_of_their_own(
    name: str, form: str, made: Callable[[str], Path]
) -> None:
    path = made(form)
    want = answer(path)
    config = json.loads((path / "config.json").read_text())
    stored = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    del stored["quant_method"]
    nested = {"producer": {"name": "modelopt"}, "quantization": stored}
    (path / name).write_text(json.dumps(nested if name.startswith("hf_") else stored))
    assert torch.equal(answer(path), want)
    (path / name).write_text("{")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read"):
        build(path)


def test_one_group_is_a_scale_a_row(made: Callable[[str], Path], caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        build(made("gptq one group"))
    assert "quantized: gptq, 4 bits with one scale per output channel; activations" in caplog.text


def test_the_log_names_the_quantization_method(made: Callable[[str], Path], caplog: Any) -> None:
    path = made("fp8 blocks")
    with caplog.at_level(logging.INFO):
        build(path)
    assert "7 weights are quantized: fp8, 8-bit floats, converted to int8" in caplog.text


@pytest.mark.parametrize(("scheme", "kind"), [("int4", Int4Weight), ("int8", Int8Weight)])
def test_an_fp8_checkpoint_can_be_quantized_further(
    made: Callable[[str], Path], scheme: str, kind: type, caplog: Any
) -> None:
    with caplog.at_level(logging.INFO):
        model = build(made("fp8"), quantization=scheme)
    assert (
        f"7 weights are quantized: fp8, 8-bit floats with one scale per tensor, quantized to {scheme}\n"
        in caplog.text
    )
    converted = [m.ref.prepared for m in model.modules() if isinstance(m, Linear)]
    assert len(converted) == 8
    assert all(isinstance(one, kind) for one in converted)


def test_dummy_weights_of_a_quantized_checkpoint(made: Callable[[str], Path]) -> None:
    path = made("gptq")
    for name in ("gptq", "ct int8", "fp8"):
        edit_config(path, quantization_config=BY_NAME[name].config)
        assert answer(path, load_format="dummy").isfinite().all()


# ------------------------------------------------------------------------------------ in an engine


@pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")
@pytest.mark.parametrize("name", ["gptq v2 asymmetric ordered", "awq", "ct int8", "gptq"])
def test_the_engine_produces_the_tokens_of_its_parts(name: str, tmp_path: Path) -> None:
    """By whole layers alone, and by their parts in chunks beside others."""
    form = copy.deepcopy(BY_NAME[name])
    for key in ("modules_to_not_convert", "ignore"):
        if key in form.config:
            form.config[key] = ["lm_head"]
    write(WIDE, tmp_path / "wide")
    path = str(everything(tmp_path / "wide", tmp_path, form))
    texts = [[token % 131 for token in prompt] for prompt in prompts(5)]
    settings = {"dtype": "bfloat16", "max_model_len": 128}
    with engine(path, **settings) as one:
        model = one.client.core.executor.worker.model
        assert model.model.layers.fused.whole is not None
        alone = [one.tokens([text], greedy(12))[0] for text in texts]
    with engine(path, **settings, max_num_batched_tokens=17) as one:
        one.client.core.executor.worker.unfuse("test")
        assert one.tokens(texts, greedy(12)) == alone


def everything(plain: Path, folder: Path, form: Form) -> Path:
    """A checkpoint whose layers are all quantized."""
    stored, _, _ = quantized(plain, folder, form)
    name = "model.layers.1.mlp.down_proj"

    def quantize(found: Tensors) -> None:
        parts, _ = form.write(found.pop(f"{name}.weight").numpy(), "down_proj", **form.how)
        found.update({f"{name}.{last}": part.contiguous() for last, part in parts.items()})

    change(stored, quantize)
    return stored


# ------------------------------------------------------------------------------------ mistakes


def not_quantized(path: Path) -> str:
    def plain(found: Tensors) -> None:
        found["model.layers.0.mlp.up_proj.weight"] = torch.ones(128, 64)

    change(path, plain)
    return r"model\.layers\.0\.mlp\.up_proj\.weight is stored as float32, but config.json requires int8"


def quantized_all_the_same(path: Path) -> str:
    says(path, ignore=["lm_head", "down_proj"])
    return r"layers\.0\.mlp\.down_proj\.weight is stored as int8, but config.json requires float32"


def one_part_alone(path: Path) -> str:
    says(path, ignore=["lm_head", "model.layers.1.mlp.down_proj", "k_proj"])
    return r"whose .*q_proj, .*k_proj, .*v_proj are quantized in different ways"


def no_scales(path: Path) -> str:
    def drop(found: Tensors) -> None:
        del found["model.layers.1.self_attn.v_proj.weight_scale"]

    change(path, drop)
    return r"lacks 1 .* model\.layers\.1\.self_attn\.v_proj\.weight_scale"


@pytest.mark.parametrize(
    "spoil", [not_quantized, quantized_all_the_same, one_part_alone, no_scales]
)
def test_mistakes_are_named(spoil: Callable[[Path], str], made: Callable[[str], Path]) -> None:
    path = made("ct int8")
    match = spoil(path)
    with pytest.raises((ConfigError, Unsupported), match=match):
        build(path)


def test_the_transformers_backend_refuses_quantized_weights(made: Callable[[str], Path]) -> None:
    with pytest.raises(
        Unsupported, match="quantized weights of Qwen3ForCausalLM, which runs through"
    ):
        build(made("ct int8"), model_impl="transformers")
