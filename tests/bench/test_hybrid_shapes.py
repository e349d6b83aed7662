"""Random checkpoints of hybrids: equal in Quire, in Transformers and as the GGUF file that llama.cpp is measured with."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.roofline import FLOOR, Probe, seconds
from benchmarks.shapes import SHAPES, Workload, checkpoint
from quire import env
from quire.layers.state import StateLayer
from tests.models.harness import Runner
from tests.models.test_native import CLOSE, build, plain

ROOT = Path(__file__).parents[2]
PROMPT = [7 * place % 512 for place in range(40)]


@pytest.fixture(scope="module", params=["tiny-granite", "tiny-nemotron"])
def made(request, tmp_path_factory):
    """(shape, its checkpoint, our model, logits of PROMPT)."""
    shape = SHAPES[request.param]
    path = checkpoint(shape, "bfloat16", tmp_path_factory.mktemp("hybrid"))
    ours = build(path, model_impl="quire")
    return shape, path, ours, Runner(ours).prefill(0, PROMPT)


def test_checkpoint_loads_and_equals_transformers(made):
    _, path, _, logits = made
    theirs, told = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] | told["unexpected_keys"]
    wanted = plain(theirs.eval(), PROMPT)
    assert wanted.std() > 0.05, "logits without a range prove nothing"
    assert (logits - wanted).abs().max() < CLOSE


def test_gguf_file_equals_its_checkpoint(made, tmp_path):
    """llama.cpp itself only quantizes files, so an empty module replaces its binding here."""
    _, path, _, logits = made
    (tmp_path / "llama_cpp.py").write_text("")
    file = tmp_path / f"{path.name}.gguf"
    words = [
        sys.executable,
        str(ROOT / "benchmarks/peers/to_gguf.py"),
        str(path),
        str(file),
        "bf16",
    ]
    subprocess.run(words, check=True, env=env.for_a_child(PYTHONPATH=str(tmp_path)))
    assert (Runner(build(file)).prefill(0, PROMPT) - logits).abs().max() < CLOSE


def test_counts_are_those_of_the_model(made):
    shape, _, ours, _ = made
    states = [layer.state_spec() for layer in ours.modules() if isinstance(layer, StateLayer)]
    recurrences = [
        max(spec.shapes, key=len) for spec in states
    ]  # a convolution has a dimension less
    assert shape.state_elements == sum(prod(sizes) for sizes in recurrences)
    assert shape.attention_layers + len(states) + shape.more.get("hybrid_override_pattern", "").count("-") == shape.layers  # fmt: skip


def test_states_neither_vanish_nor_stay(made):
    """What a state keeps of itself from a token to the next, for an input of 0."""
    weights = load_file(made[1] / "model.safetensors")
    for name, steps in weights.items():
        if name.endswith(".dt_bias"):
            decays = weights[name.replace("dt_bias", "A_log")].float().exp()
            kept = torch.exp(-decays * torch.nn.functional.softplus(steps.float()))
            assert 0.15 < kept.min() < kept.max() < 1
            assert 0.2 < weights[name.replace("dt_bias", "conv1d.weight")].std() < 0.4


def test_floor_reads_and_writes_states():
    shape = SHAPES["tiny-granite"]
    endless = Probe(bytes_per_s=float("inf"), flops_per_s=1.0)
    attention = 2 * 1 * 4 * 16 * 5 * 5
    matrices = 2 * (shape.layer_parameters * 5 + shape.head_parameters)
    states = 4 * 2 * 8 * 16 * 16 * 5  # 2 layers, 8 heads of 16 by 16, 5 tokens
    assert seconds(shape, Workload(1, 5, 1), 2, endless, FLOOR) == attention + matrices + states
