"""Triton kernels: compiled where there is a GPU, else in the interpreter (see tests/conftest.py)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # it has builds for Linux alone
    collect_ignore_glob.append("test_*.py")
else:
    import triton_interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _lanes_beyond_the_end():
    """A kernel computes on masked lanes too and throws that away; NumPy would warn of 0 / 0 there."""
    with np.errstate(all="ignore"):
        yield
