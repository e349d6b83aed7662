"""A configuration as bytes and back: equal in every field, functions by name, and no pickle."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from quire.config import serialize
from quire.config.checkpoint_quantization import CheckpointQuantization, QuantizationScheme
from quire.config.engine import EngineConfig, Resolved
from quire.config.options import options
from quire.config.speculation import DraftModel
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


@pytest.fixture
def sent(settle):
    """What arrives of a configuration in another process."""
    resolved = settle()

    def send(**keywords) -> Resolved:
        asked = EngineConfig.from_keywords(**keywords)
        return serialize.resolved_from_bytes(
            serialize.resolved_to_bytes(replace(resolved, config=asked))
        )

    return send


def test_every_field_survives(sent):
    keywords = {name: OTHER[option.kind] for name, option in options().items()}
    assert sent(**keywords).config == EngineConfig.from_keywords(**keywords)
    assert sent().config == EngineConfig()


def test_a_resolved_configuration_survives(settle):
    resolved = settle(max_num_seqs=3, hf_overrides={"a": {"b": 1}}, max_model_len="auto")
    back = serialize.resolved_from_bytes(serialize.resolved_to_bytes(resolved))
    assert back == resolved
    assert {f.name: type(getattr(back, f.name)) for f in fields(back)} == {
        f.name: type(getattr(resolved, f.name)) for f in fields(resolved)
    }


def test_the_quantization_of_a_checkpoint_survives(settle):
    int4 = QuantizationScheme("ct-packed", 4, group=32)
    stored = CheckpointQuantization(
        "compressed-tensors", ((("Linear", "re:.*mlp.*"), int4),), ("lm_head",), (), (("x", None),), of_towers=True
    )  # fmt: skip
    draft = DraftModel(
        path="d", hf_config={}, architecture="A", dtype="float32", max_model_len=8, quantization=None, stored=stored
    )  # fmt: skip
    resolved = replace(settle(), stored=stored, draft=draft)
    back = serialize.resolved_from_bytes(serialize.resolved_to_bytes(resolved))
    assert (back.stored, back.draft) == (stored, draft)
    assert back.stored.scheme_of("model.layers.0.mlp.up_proj") == int4


def test_functions_and_classes_travel_by_name(sent):
    back = sent(hf_overrides=shift, logits_processors=["a.b:C", EngineConfig]).config
    assert back.model.hf_overrides is shift
    assert back.model.logits_processors == ["a.b:C", EngineConfig]


def test_functions_that_cannot_be_imported_by_name_are_refused(sent):
    def inner(config):
        return config

    for function in (lambda config: config, inner):
        with pytest.raises(
            ConfigError, match=r"cannot be imported .*distributed_executor_backend=uni"
        ):
            sent(hf_overrides=function)
    for value in (object(), shift, 1 << 64, "\ud800"):
        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            sent(override_generation_config={"a": value})


@pytest.mark.parametrize("names", ["a flag", "hf_config"])
def test_received_data_cannot_name_imports(settle, sent, names, tmp_path, monkeypatch):
    """C3b: {"__by_name__": "module:Name"} in a checkpoint's config.json was imported and put in its place."""
    (tmp_path / "evil_of_a_checkpoint.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    mark = {"__by_name__": "evil_of_a_checkpoint:x"}
    data = {"zz": mark, "hidden_act": {"__by_name__": "os:system"}, "deep": [{"a": [mark]}]}
    if names == "hf_config":
        resolved = settle()
        resolved = replace(resolved, hf_config={**resolved.hf_config, **data})
        assert serialize.resolved_from_bytes(serialize.resolved_to_bytes(resolved)) == resolved
    else:
        for field in ("hf_overrides", "override_generation_config", "default_chat_template_kwargs"):
            back = sent(**{field: data}).config
            assert back == EngineConfig.from_keywords(**{field: data})
    assert "evil_of_a_checkpoint" not in sys.modules


@pytest.mark.parametrize("name", ["nowhere.at.all:X", "json:nothing", "json"])
def test_a_name_that_is_not_here(name):
    with pytest.raises(ConfigError, match=r"cannot be imported|not of the form"):
        serialize.by_name(name)


def path_in(monkeypatch, main: ModuleType, safe: bool = False, path: str = "") -> list[str]:
    """What a child may search, of a program whose __main__ is `main` and whose sys.path holds its working directory."""
    monkeypatch.setattr(sys, "path", ["", os.getcwd(), "/elsewhere"])
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(serialize.sys, "flags", SimpleNamespace(safe_path=safe))
    monkeypatch.setenv("PYTHONPATH", path)
    return serialize.import_path()


def test_a_child_does_not_search_the_working_directory(monkeypatch):
    script, module, terminal = (
        ModuleType("__main__"),
        ModuleType("__main__"),
        ModuleType("__main__"),
    )
    script.__file__ = "script.py"
    module.__file__, module.__spec__ = "module.py", ModuleSpec("module", None)
    here = os.getcwd()
    for main in (module, terminal):
        assert path_in(monkeypatch, main) == ["/elsewhere"]
        assert path_in(monkeypatch, main, path="/y::/x") == ["/elsewhere"]
        assert path_in(monkeypatch, main, path="/x:.") == [here, "/elsewhere"]  # asked for
        assert path_in(monkeypatch, main, safe=True) == [here, "/elsewhere"]  # Python added nothing
    assert path_in(monkeypatch, script) == [here, "/elsewhere"]


def test_a_path_travels_only_with_something_to_import(settle, monkeypatch):
    monkeypatch.setattr(serialize, "import_path", lambda: ["/mine"])
    for keywords, path in (({}, []), ({"logits_processors": ["a:B"]}, ["/mine"])):
        data = msgspec.msgpack.decode(serialize.resolved_to_bytes(settle(**keywords)))
        assert data["path"] == path
