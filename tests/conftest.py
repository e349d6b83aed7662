"""For every test: nothing is fetched, and one compute thread, so that a run is the same anywhere.

Set before anything is imported, since some libraries read the environment once.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
