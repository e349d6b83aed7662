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
from quire.platforms.base import platform_of
from quire.platforms.detect import facts

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
def platform():
    return "made_up_device.Device"
def no_device():
    return None
"""
DEVICE = """
from quire.platforms import detect
from quire.platforms.cpu import CpuPlatform
class Device(CpuPlatform):
    name = "mine"
    attention = ("TORCH_SDPA",)
    kernels = ("reference",)
    @staticmethod
    def facts():
        return detect.cpu_facts()
"""
ENTRY_POINTS = """
[quire.general_plugins]
good = made_up:register
bad = made_up:broken
[vllm.general_plugins]
theirs = made_up:foreign
[quire.platform_plugins]
mine = made_up:platform
absent = made_up:no_device
broken = made_up:broken
[vllm.platform_plugins]
second = made_up:platform
[quire.logits_processors]
bias = made_up:Processor
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with plugins."""
    (tmp_path / "made_up.py").write_text(PLUGIN)
    (tmp_path / "made_up_device.py").write_text(DEVICE)
    described = tmp_path / "made_up-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins._Once, "done", False)
    before = dict(MODELS)
    plugins.platform_plugins.cache_clear()
    yield tmp_path
    plugins.platform_plugins.cache_clear()
    MODELS.clear()
    MODELS.update(before)
    sys.modules.pop("made_up", None)
    sys.modules.pop("made_up_device", None)


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


def test_plugins_run_before_the_model_is_chosen(package):
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
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "model code      native (MadeUpForCausalLM has a native model)" in done.stdout, (
        done.stdout + done.stderr
    )


# Devices


def test_a_plugins_device_has_precedence(package, monkeypatch, warnings):
    assert facts().device == "mine"
    assert platform_of("mine").attention == ("TORCH_SDPA",)
    assert [text.split(" failed")[0] for text in warnings] == ["platform plugin broken"]
    monkeypatch.setenv("QUIRE_DEVICE", "cpu")
    assert facts().device == "cpu"
    monkeypatch.setenv("QUIRE_DEVICE", "mine")
    assert facts().device == "mine"
    monkeypatch.setenv("QUIRE_DEVICE", "absent")
    with pytest.raises(
        ConfigError, match="QUIRE_DEVICE=absent: choose from cpu, cuda, mine; unset it"
    ):
        facts()


def test_two_devices_of_plugins(package, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine,second")  # vLLM's group runs when it is named
    with pytest.raises(
        ConfigError, match="several devices: set QUIRE_DEVICE to one of mine, second"
    ):
        facts()
    monkeypatch.setenv("QUIRE_DEVICE", "second")
    assert facts().device == "second"


def test_a_class_that_is_no_platform(package, monkeypatch, warnings):
    (package / "made_up_device.py").write_text("class Device: ...")
    assert facts().device == "cpu"
    assert warnings[0].startswith("platform plugin mine failed and is ignored")


def test_an_engine_on_a_plugins_device(package):
    program = "import quire; llm = quire.LLM('quire-tiny', max_model_len=64, enforce_eager=True);"
    program += "out = llm.generate('Once upon', quire.SamplingParams(max_tokens=3, temperature=0));"
    program += "print(llm.client.resolved.device, len(out[0].outputs[0].token_ids))"
    path = f"{Path(plugins.__file__).parents[1]}:{package}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "QUIRE_PLUGINS": "mine"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split() == ["mine", "3"], done.stderr


def test_a_class_must_be_found_by_every_process():
    class Inner: ...

    with pytest.raises(ConfigError, match="register a class of an importable module"):
        plugins.ModelRegistry.register_model("XForCausalLM", Inner)
