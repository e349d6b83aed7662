"""docs/python.md: every block runs, in one program, and says what the page says.

The program has no `__main__` guard, and ends by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 4
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    environment = {**os.environ, "QUIRE_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Once upon a time -> ")
    assert lines[0].endswith(" length")
    assert len(lines) == 2 + 1 + 2 + 1 + 1 + 3 + 1
    assert "True" in lines
    assert "2/2" in done.stderr  # the progress of the first block; nothing of it is in the output
