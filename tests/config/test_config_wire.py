"""A configuration as bytes and back: equal in every field, functions by name, and no pickle."""

from __future__ import annotations

from dataclasses import fields

import pytest

from quire.config import wire
from quire.config.engine import EngineConfig
from quire.config.options import options
from quire.errors import ConfigError

OTHER = {
    "flag": True,
    "int": 7,
    "float": 0.5,
    "text": "word",
    "json": {"a": {"b": [1, 2.5, None, "x"]}},
    "list": ["one", "two"],
    "maybe": "token",
}


def shift(config):
    """A function that another process can import."""
    return {**config, "hidden_size": config["hidden_size"] + 1}


def test_every_field_survives():
    asked = EngineConfig.from_keywords(
        **{name: OTHER[option.kind] for name, option in options().items()}
    )
    assert wire.config_from_wire(wire.config_to_wire(asked)) == asked
    assert wire.config_from_wire(wire.config_to_wire(EngineConfig())) == EngineConfig()


def test_a_resolved_configuration_survives(settle):
    resolved = settle(max_num_seqs=3, hf_overrides={"a": {"b": 1}}, max_model_len="auto")
    back = wire.from_wire(wire.to_wire(resolved))
    assert back == resolved
    assert {f.name: type(getattr(back, f.name)) for f in fields(back)} == {
        f.name: type(getattr(resolved, f.name)) for f in fields(resolved)
    }


def test_functions_and_classes_travel_by_name():
    asked = EngineConfig.from_keywords(
        hf_overrides=shift, logits_processors=["a.b:C", EngineConfig]
    )
    back = wire.config_from_wire(wire.config_to_wire(asked))
    assert back.model.hf_overrides is shift
    assert back.model.logits_processors == ["a.b:C", EngineConfig]


def test_what_cannot_be_found_again_is_refused():
    def inner(config):
        return config

    for function in (lambda config: config, inner):
        asked = EngineConfig.from_keywords(hf_overrides=function)
        with pytest.raises(
            ConfigError, match=r"cannot be found .*distributed_executor_backend=uni"
        ):
            wire.config_to_wire(asked)
    with pytest.raises(ConfigError, match="cannot go to another process"):
        wire.config_to_wire(EngineConfig.from_keywords(override_generation_config={"a": object()}))


@pytest.mark.parametrize("name", ["nowhere.at.all:X", "json:nothing", "json"])
def test_a_name_that_is_not_here(name):
    with pytest.raises(ConfigError, match="cannot be imported"):
        wire.by_name(name)
