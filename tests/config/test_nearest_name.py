"""Errors for values suggest the nearest known one."""

from __future__ import annotations

import pytest

from quire.config.nearest_name import choose_from
from quire.config.options import coerce, options
from quire.config.quantization import quantization_method
from quire.errors import ConfigError
from quire.frontend.parsers import plugins


def test_the_nearest_name_comes_first():
    assert choose_from("fp9", ["int4", "fp8"]) == "did you mean fp8? Choose from int4, fp8"
    assert choose_from("zzz", ["int4", "fp8"]) == "choose from int4, fp8"


@pytest.mark.parametrize(("wrong", "near"), [("q4", "int4"), ("q4_k_m", "int4"), ("8bit", "int8"), ("int44", "int4"), ("agptq", "gptq")])  # fmt: skip
def test_a_quantization(wrong: str, near: str):
    with pytest.raises(ConfigError, match=f"did you mean {near}[?]"):
        quantization_method(wrong)


@pytest.mark.parametrize(("wrong", "near"), [("lama", "llama3_json|llama4_json"), ("qwen", "qwen3|qwen2"), ("hermess", "hermes")])  # fmt: skip
def test_a_parser_of_tool_calls(wrong: str, near: str):
    with pytest.raises(ConfigError, match=f"did you mean ({near}).*Choose from auto, none"):
        plugins.registry(()).choose_tools(wrong, "")


def test_a_choice_of_an_option():
    with pytest.raises(
        ConfigError, match=r"dtype='bf16': did you mean bfloat16[?] Choose from auto"
    ):
        coerce(options()["dtype"], "bf16")
