"""The doubles of the rooms whose work the page shows."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("engine", "server", "processes"):
    sys.path.append(str(Path(__file__).parents[1] / room))
