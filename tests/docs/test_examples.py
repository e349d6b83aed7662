"""Each file of examples/ runs as it is, and prints what its model answers greedily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "batch.py": ["fox: Once upon a time", "frog: Once upon a time"],
    "structured.py": ["name='", "age=3", "age=7"],
    "agent.py": ["call: get_weather {'city': 'Oslo'}", "with 7 degrees"],
    "rag.py": ["answer: Anna lives in Oslo."],
    "lora.py": ["quire-tiny: I am quire-tiny", "pirate: Arr!"],
}


def test_each_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in page for name in SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, cwd=tmp_path, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for words in SAYS[name]:
        assert words in done.stdout
