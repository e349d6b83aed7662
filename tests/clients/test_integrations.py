"""The blocks of docs/integrations.md, as they are, with the libraries that are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/integrations.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def library_of(block: str) -> str:
    return re.findall(r"^(?:from|import) (\w+)", block, re.M)[0]


@pytest.mark.parametrize("block", BLOCKS, ids=library_of)
def test_a_block_prints_an_answer(block: str, url: str, capsys: pytest.CaptureFixture[str]):
    for module in re.findall(r"^(?:from|import) ([\w.]+)", block, re.M):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    exec(
        compile(block.replace("http://127.0.0.1:8000", url), library_of(block), "exec"),
        {"__name__": "page"},
    )
    assert len(capsys.readouterr().out.split()) >= 2
