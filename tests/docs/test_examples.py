"""Each file of examples/ runs as it is, and prints what its model answers greedily."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "batch.py": ["fox: Once upon a time", "frog: Once upon a time"],
    "structured.py": [
        "name='Mira Stone' age=34 city='Oslo'",
        "name='Ben Hill' age=41 city='Madrid'",
    ],
    "agent.py": [
        "call: get_weather {'city': 'Oslo'}",
        "answer: The weather in Oslo is rainy with 7 degrees.",
    ],
    "rag.py": ["answer: Anna lives in Oslo."],
    "lora.py": ["quire-tiny: I am quire-tiny", "pirate: Arr!"],
}
OTHERS = {"vision.py", "ray_cluster.py"}
"""They need more than the package: tests of their own, below."""


def output_of(name: str, folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, cwd=folder, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_each_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys() | OTHERS
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in page for name in SAYS.keys() | OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path):
    said = output_of(name, tmp_path)
    for words in SAYS[name]:
        assert words in said


@pytest.mark.slow
def test_the_example_of_pictures_runs(tmp_path: Path):
    """quire-tiny sees the ball. With a tiny random model: another picture gets another answer, and as many tokens."""
    pillow = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    assert "red circle" in output_of("vision.py", tmp_path)
    from tests.media.vision_checkpoints import make_checkpoint

    model = make_checkpoint("llava", tmp_path / "model")
    said = output_of("vision.py", tmp_path, model)
    tokens = int(re.findall(r"(\d+) tokens of prompt", said)[0])
    assert tokens > len("What is in this picture?")
    pillow.new("RGB", (224, 224), "white").save(tmp_path / "white.png")
    other = output_of("vision.py", tmp_path, model, "white.png")
    assert other.partition("\n")[0] == said.partition("\n")[0]
    assert other != said, "the model sees the picture"


@pytest.mark.slow
def test_the_example_of_ray_runs(tmp_path: Path):
    pytest.importorskip("ray", reason="pip install quire[ray]")
    said = output_of("ray_cluster.py", tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0)
    with LLM("quire-tiny", max_model_len=256) as llm:
        for one in llm.generate(["Once upon a time", "The quick brown fox"], params):
            assert f"{one.prompt} -> {one.outputs[0].text}" in said
