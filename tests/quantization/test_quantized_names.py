"""What `--quantization` takes, what config.json may say, and which layers it speaks of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.quantization import LATER, ONLINE, SAME, fitting, online_schemes
from quire.config.quantization_config import METHODS, stored_quantization
from quire.errors import ConfigError, Unsupported
from quire.quantization import apply, dequantize_on_load
from tests.quantization.writers import (
    FORMS,
    auto_round,
    compressed,
    gptq_config,
    modelopt,
    torchao_config,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8"}
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}


def read(says: dict[str, Any]) -> CheckpointQuantization:
    found = stored_quantization({"quantization_config": says})
    assert found is not None
    return found


def test_every_name_has_one_meaning() -> None:
    names = [*ONLINE, *METHODS[:3], "fbgemm_fp8", *SAME, *LATER]
    assert len(names) == len(set(names))
    assert set(SAME.values()) <= {*ONLINE, *METHODS}
    assert set(apply.MAKERS) == set(ONLINE)
    assert set(online_schemes()) == set(ONLINE) - {"fp8"}
    schemes = {scheme for form in FORMS for scheme in read(form.config).schemes()}
    assert {scheme.kind for scheme in schemes} == {*apply.FORMATS, "decoded"}
    assert {scheme.reader for scheme in schemes} == {*dequantize_on_load.READERS, ""} - {
        "mxfp4-experts"
    }


@pytest.mark.parametrize(
    ("asked", "says", "want"),
    [
        (None, None, None),
        ("none", GPTQ, None),
        ("int8", None, "int8"),
        ("int4", None, "int4"),
        ("fp8", None, "fp8"),
        ("fp8_per_tensor", None, "fp8"),
        ("gptq", GPTQ, None),
        ("gptq_marlin", GPTQ, None),
        ("fp8", FP8, None),
        ("int8", FP8, "int8"),
        ("int4", FP8, "int4"),
        ("bitsandbytes", None, "nf4"),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ("awq_marlin", {"quant_method": "awq", "bits": 4}, None),
        ("compressed-tensors", compressed("int-quantized", **INT8), None),
    ],
)
def test_methods_that_quantize_while_loading(
    asked: str | None, says: Any, want: str | None
) -> None:
    assert fitting(asked, None if says is None else read(says)) == want


@pytest.mark.parametrize(
    ("asked", "says", "error", "match"),
    [
        ("quark", None, Unsupported, "quantization=quark .*int8, int4, .*gptq, awq"),
        ("hqq", None, ConfigError, "quantization=hqq: the checkpoint is not quantized"),
        ("int5", None, ConfigError, "quantization='int5' is unknown"),
        ("gptq", None, ConfigError, "quantization=gptq: the checkpoint is not quantized"),
        ("int8", GPTQ, ConfigError, r"quantization=int8: .*already quantized \(gptq\); leave the flag out"),
        ("awq", GPTQ, ConfigError, "quantization=awq: .*config.json says gptq"),
        (None, {"quant_method": "quark"}, Unsupported, "a checkpoint quantized with quark"),
        (None, {"quant_method": "gptq"}, ConfigError, "quantization_config of gptq: KeyError.'bits'"),
        (None, {**GPTQ, "bits": 5}, Unsupported, "a GPTQ checkpoint with bits=5"),
        (None, {**GPTQ, "checkpoint_format": "marlin"}, Unsupported, "checkpoint_format=marlin"),
        (None, {"quant_method": "awq", "bits": 4, "version": "gemv"}, Unsupported, "version=gemv"),
        (None, compressed("marlin-24"), Unsupported, "format=marlin-24.*serve its bfloat16"),
        (None, {**compressed("dense"), "sparsity_config": {"format": "sparse-24-bitmask"}}, Unsupported,
         "with sparsity sparse-24-bitmask.*serve its bfloat16"),
        (None, compressed("int-quantized", **{**INT8, "symmetric": False}), Unsupported, "symmetric=False"),
        (None, compressed("pack-quantized", **{**INT8, "num_bits": 9}), Unsupported, "num_bits=9"),
        (None, torchao_config("Int4WeightOnlyConfig"), Unsupported, "a TorchAO checkpoint with Int4WeightOnlyConfig"),
        (None, auto_round("auto_round:llm_compressor"), Unsupported, "packing_format=auto_round:llm_compressor"),
        (None, modelopt("W4A8_AWQ"), Unsupported, "a ModelOpt checkpoint with quant_algo=W4A8_AWQ"),
        (None, {**compressed("dense"), "config_groups": {}}, ConfigError, "has no config_groups"),
    ],
)  # fmt: skip
def test_refusals_name_the_method(
    asked: str | None, says: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fitting(asked, None if says is None else read(says))


def quantized_names(says: dict[str, Any]) -> set[str]:
    names = {
        f"model.layers.{i}.{part}"
        for i in (0, 1, 10)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    }
    return {name for name in {*names, "lm_head"} if read(says).scheme_of(name) is not None}


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        (["lm_head"], {"0 q", "1 q", "10 q", "0 up", "1 up", "10 up"}),
        (["model.layers.1"], {"0 q", "10 q", "0 up", "10 up", "head"}),
        (["up_proj", "lm_head"], {"0 q", "1 q", "10 q"}),
        (["model.language_model.layers.0.mlp.up_proj"], {"0 q", "1 q", "10 q", "1 up", "10 up", "head"}),
        (["re:.*layers.1\\..*", "re:lm_head"], {"0 q", "10 q", "0 up", "10 up"}),
        (["re:model.language_model.*q_proj"], {"0 up", "1 up", "10 up", "head"}),
    ],
)  # fmt: skip
def test_excluded_layers_stay_unquantized(entries: list[str], left: set[str]) -> None:
    says = {**compressed("int-quantized", **INT8), "ignore": entries}
    long = {"q": "self_attn.q_proj", "up": "mlp.up_proj"}
    want = {
        "lm_head"
        if short == "head"
        else f"model.layers.{short.split()[0]}.{long[short.split()[1]]}"
        for short in left
    }
    assert quantized_names(says) == want


def test_the_gptq_head_is_unquantized_by_default() -> None:
    assert "lm_head" not in quantized_names(gptq_config())
    assert "lm_head" in quantized_names(gptq_config(lm_head=True))


def test_layers_with_numbers_of_their_own() -> None:
    dynamic = {"-:.*layers\\.0\\..*": {}, "+:.*up_proj": {"bits": 8, "group_size": 64}}
    found = read(gptq_config(dynamic=dynamic))
    assert found.scheme_of("model.layers.0.mlp.up_proj") is None
    own, other = (
        found.scheme_of(f"model.layers.1.{name}") for name in ("mlp.up_proj", "self_attn.q_proj")
    )
    assert own is not None
    assert other is not None
    assert (own.bits, own.group, other.bits, other.group) == (8, 64, 4, 32)
    only = gptq_config(modules_in_block_to_quantize=[["self_attn.q_proj"]])
    assert quantized_names(only) == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 10)}


def test_a_group_that_names_a_layer_has_priority() -> None:
    says = compressed("int-quantized", **INT8)
    four = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 64}
    says["config_groups"]["group_1"] = {
        "targets": ["re:.*up_proj"],
        "weights": four,
        "format": "pack-quantized",
    }
    says["config_groups"]["group_0"]["format"] = "int-quantized"
    says["format"] = "mixed-precision"
    found = read(says)
    bits = [
        getattr(found.scheme_of(f"model.layers.0.{name}"), "bits", None)
        for name in ("mlp.up_proj", "mlp.down_proj")
    ]
    assert bits == [4, 8]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("re:.*lm_head", "model.lm_head", "model.layers.0.mlp.up_proj"),
        (r"re:.*\.layers\.([0-9]|1[0-9])\..*", "model.layers.12.mlp.up_proj", "model.layers.22.mlp.up_proj"),
        ("re:.*self_attn.(k|q|o|v)_proj$", "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.z_proj"),
        (r"re:^model\.layers\.(?!0\.)\d+\..*", "model.layers.7.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        (r"re:.*\.(?:gate|up).*", "model.layers.7.mlp.up_proj", "model.layers.7.mlp.down_proj"),
        ("re:vision_tower.*", "vision_tower.a-b", "model.layers.7.mlp.up_proj"),
    ],
)  # fmt: skip
def test_patterns_of_real_checkpoints_are_accepted(pattern: str, yes: str, no: str) -> None:
    found = read({**compressed("int-quantized", **INT8), "ignore": [pattern]})
    assert found.scheme_of(yes) is None
    assert found.scheme_of(no) is not None


def test_names_of_modelopt_have_the_signs_of_a_shell() -> None:
    found = read({**modelopt("FP8"), "ignore": ["*.layers.[0-3].mlp*", "model.layers.?0.*"]})
    assert found.scheme_of("model.layers.2.mlp.up_proj") is None
    assert found.scheme_of("model.layers.10.self_attn.q_proj") is None
    assert found.scheme_of("model.layers.5.mlp.up_proj") is not None


def _bombs() -> list[dict[str, Any]]:
    ints, bomb = compressed("int-quantized", **INT8), "(?:(?:(?:a|b){500}){500}){500}"
    group = ints["config_groups"]["group_0"]
    return [
        {**ints, "ignore": [f"re:{bomb}"]},
        {**ints, "config_groups": {"group_0": {**group, "targets": [f"re:{bomb}"]}}},
        {**GPTQ, "dynamic": {f"-:{bomb}": {}}},
        {**GPTQ, "modules_in_block_to_quantize": [f"re:{bomb}"]},
        {**ints, "ignore": [f"re:a{number}" for number in range(4097)]},
        {**ints, "ignore": ["re:" + "a" * 257]},
        {**ints, "ignore": ["re:("]},
        {**ints, "ignore": ["re:(.+)+!", "re:(.|.)*[YZ]"]},
        {**GPTQ, "dynamic": {"-:(.|.)*[YZ]": {}}},
    ]


@pytest.mark.parametrize("says", _bombs(), ids=range(len(_bombs())))
def test_patterns_that_take_time_or_memory_are_refused_at_once(says: dict[str, Any]) -> None:
    began = time.thread_time()
    with pytest.raises(ConfigError, match=r"quantization_config.*pattern|no regular expression"):
        read(says).scheme_of("model.layers.0.mlp.up_proj")
    assert time.thread_time() - began < 0.5


def test_all_patterns_of_a_checkpoint_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.checkpoint_quantization.MATCH_SECONDS", 1e-4)
    says = {**GPTQ, "dynamic": {f"-:.*{number}.*": {} for number in range(99)}}
    with pytest.raises(ConfigError, match="too long to match"):
        read(says).scheme_of("model.layers.0.self_attn.q_proj")
