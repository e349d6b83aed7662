"""Adapters in every form in which they can be named: flags, JSON, YAML, keywords; and combinations that are refused."""

from __future__ import annotations

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.lora import MAX_NAME
from quire.config.validate import check_lora
from quire.errors import ConfigError


def module(name: str, path: str, base: str | None = None) -> dict[str, str | None]:
    return {"name": name, "path": path, "base_model_name": base}


A, B = module("a", "/x"), module("b", "org/y", "base")


@pytest.mark.parametrize(
    "words",
    [
        ["a=/x", '{"name": "b", "path": "org/y", "base_model_name": "base"}'],
        ['[{"name": "a", "path": "/x"}, {"name": "b", "path": "org/y", "base_model_name": "base"}]'],
        ['{"a": "/x", "b": {"path": "org/y", "base_model_name": "base"}}'],
        ['{"name": "a", "path": "/x", "is_3d_lora_weight": false}', '{"b": {"path": "org/y", "base_model_name": "base"}}'],
    ],
    ids=lambda words: words[0][:20],
)  # fmt: skip
def test_each_form_of_the_flag(words):
    assert parse(["m", "--enable-lora", "--lora-modules", *words]).lora.lora_modules == [A, B]


@pytest.mark.parametrize(
    "text",
    [
        "lora-modules:\n  - a=/x\n  - name: b\n    path: org/y\n    base_model_name: base\n",
        "lora-modules:\n  a: /x\n  b: {path: org/y, base_model_name: base}\n",
        'lora_modules: ["a=/x", \'{"name": "b", "path": "org/y", "base_model_name": "base"}\']\n',
    ],
)
def test_each_form_in_yaml(text, tmp_path):
    (tmp_path / "a.yaml").write_text(f"enable-lora: true\n{text}", encoding="utf-8")
    assert parse(["--config", str(tmp_path / "a.yaml")]).lora.lora_modules == [A, B]


@pytest.mark.parametrize(
    "value", [{"a": "/x", "b": {"path": "org/y", "base_model_name": "base"}}, ["a=/x", B], (A, B)]
)
def test_each_form_as_a_keyword(value):
    lora = engine_config({"enable_lora": True, "lora_modules": value, "max_loras": 4}).lora
    assert lora.lora_modules == [A, B]
    assert lora.capacity == 4
    made = EngineArgs("m", enable_lora=True, lora_modules=value).create_engine_config().lora
    assert made.lora_modules == [A, B]
    assert made.capacity == 2


def test_a_path_may_contain_an_equals_sign():
    assert parse(["--lora-modules", "a=/x=y"]).lora.lora_modules == [module("a", "/x=y")]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("/x", "'/x' has no path; write NAME=PATH"),
        ("=x", "the name of an adapter is empty"),
        ("a=", "the adapter 'a' has no path"),
        ('{"name": "a"', "is not JSON"),
        ({"name": "a", "path": "/x", "rank": 3}, "unknown key 'rank'"),
        ({"a": 3}, "the adapter 'a' has no path"),
        (["a=/x", "a=/y"], "'a' is given twice"),
        (f"{'n' * (MAX_NAME + 1)}=/x", "has 257 characters; the limit is 256"),
        ("a\x07=/x", "cannot be printed"),
        (7, "7 names no adapter"),
        ("[" * 100_000, "is not JSON"),
        ({"name": "a", "path": "/x", "base_model_name": 3}, "base_model_name=3"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_form_is_refused(value, says):
    with pytest.raises(ConfigError, match=r"^lora_modules=") as refused:
        engine_config({"lora_modules": value})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"lora_modules": {"a": "/x"}}, "enable_lora is off; add --enable-lora"),
        ({"default_mm_loras": {"audio": "/x"}}, "default_mm_loras names adapters, but enable_lora is off"),
        ({"enable_lora": True, "lora_modules": {"audio": "/x"}, "default_mm_loras": {"audio": "/y"}}, "is the name of an adapter of default_mm"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras=2 is less than max_loras=4"),
        ({"enable_lora": True, "lora_modules": {"m": "/x"}, "served_model_name": ["b", "m"]}, "'m' is a name of the model"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_contradict_each_other(keywords, says):
    with pytest.raises(ConfigError, match=says):
        check_lora(engine_config(keywords))


def test_adapters_of_kinds_of_media():
    given = parse(["m", "--enable-lora", "--default-mm-loras", '{"audio": "/x", "image": "org/y"}'])
    assert given.lora.default_mm_loras == {"audio": "/x", "image": "org/y"}
    assert given.lora.adapters == [module("audio", "/x"), module("image", "org/y")]
    assert given.lora.capacity == 2


@pytest.mark.parametrize("value", ["[]", '{"sound": "/x"}', '{"audio": 3}', '{"audio": ""}', 7])
def test_other_forms_of_them_are_refused(value):
    with pytest.raises(ConfigError, match="must be a JSON object of image, video, audio and paths"):
        engine_config({"default_mm_loras": value})


@pytest.mark.parametrize("rank", [1, 8, 16, 32, 64, 128, 256, 320, 512])
def test_every_rank_of_vllm(rank):
    assert parse(["--max-lora-rank", str(rank)]).lora.max_lora_rank == rank


@pytest.mark.parametrize(
    "words", [["--max-lora-rank", "0"], ["--max-lora-rank", "513"], ["--lora-dtype", "int8"], ["--max-loras", "0"]], ids=str
)  # fmt: skip
def test_values_out_of_range(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0][2:].replace("-", "_") in capsys.readouterr().err
