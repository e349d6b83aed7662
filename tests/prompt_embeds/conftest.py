"""Its tests of HTTP use the server's helpers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))  # scripted, asgi
