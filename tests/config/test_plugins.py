"""Installed packages that add to us: found by entry point, run once in a process, allowed by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import plugins
from quire.errors import ConfigError
from quire.models.registry import MODELS, choose_impl

PLUGIN = """
from quire import ModelRegistry
calls = []
def register():
    calls.append(1)
    ModelRegistry.register_model("MadeUpForCausalLM", "made_up:Model")
def broken():
    raise RuntimeError("cannot")
def foreign():
    calls.append(2)
class Processor: ...
"""
ENTRY_POINTS = """
[quire.general_plugins]
good = made_up:register
bad = made_up:broken
[vllm.general_plugins]
theirs = made_up:foreign
[quire.logits_processors]
bias = made_up:Processor
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with plugins."""
    (tmp_path / "made_up.py").write_text(PLUGIN)
    described = tmp_path / "made_up-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins._Once, "done", False)
    before = dict(MODELS)
    yield tmp_path
    MODELS.clear()
    MODELS.update(before)
    sys.modules.pop("made_up", None)


def test_our_plugins_run_once(package, warnings):
    assert plugins.load_plugins() == ["good"]
    assert plugins.load_plugins() == []
    import made_up

    assert made_up.calls == [1]
    assert choose_impl("MadeUpForCausalLM", {})[0] == "native"
    assert "MadeUpForCausalLM" in plugins.ModelRegistry.get_supported_archs()
    assert len(warnings) == 1
    assert warnings[0].startswith("plugin bad (made_up:broken) failed and is ignored")


@pytest.mark.parametrize(
    ("allowed", "ran", "missing"),
    [("", [], []), ("good", ["good"], []), ("theirs, bias", ["theirs"], []), ("good,nobody", ["good"], ["nobody"])],
)  # fmt: skip
def test_a_list_of_allowed_names(package, monkeypatch, warnings, allowed, ran, missing):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert plugins.load_plugins() == ran
    assert warnings == [
        f"plugin {name} is named in QUIRE_PLUGINS but not installed" for name in missing
    ]


def test_a_plugin_is_there_before_a_model_is_chosen(package):
    """In the command that only reads, and so in each process that loads."""
    config = {"architectures": ["MadeUpForCausalLM"], "model_type": "made_up", "hidden_size": 64}
    (package / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    words = [
        "-m",
        "quire",
        "doctor",
        str(package),
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
    ]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{Path(plugins.__file__).parents[1]}:{package}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "model code      native (MadeUpForCausalLM has a native model)" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_class_must_be_found_by_every_process():
    class Inner: ...

    with pytest.raises(ConfigError, match="register a class of an importable module"):
        plugins.ModelRegistry.register_model("XForCausalLM", Inner)
