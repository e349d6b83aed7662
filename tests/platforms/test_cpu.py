"""The CPU platform says what `detect.py` found out, and names only what there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quire.attention.base import BACKENDS
from quire.ops.dispatch import MODULES
from quire.platforms import detect
from quire.platforms.base import Platform
from quire.platforms.cpu import CpuPlatform


def test_the_platform_reports_the_device_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(detect, "cpu_name", lambda: "A processor")
    monkeypatch.setattr(detect, "memory", lambda: (100, 40))
    platform: Platform = CpuPlatform()
    about = detect.cpu_facts()
    assert (platform.name, platform.device) == ("cpu", torch.device("cpu"))
    assert platform.description == "A processor"
    assert platform.memory() == (100, 40)
    assert platform.memory().available == 40
    assert platform.supports("bfloat16")
    assert platform.supports("float32")
    assert not platform.supports("float16")
    for stored in ("float32", "bfloat16", "float16"):
        assert platform.preferred_dtype(stored) == about.preferred_dtype(stored)
    assert platform.default_depth == about.depth
    assert platform.default_block_size == about.block_size
    assert platform.default_num_batched_tokens == about.num_batched_tokens


def test_the_platform_lists_existing_backends_and_kernels() -> None:
    platform = CpuPlatform()
    assert set(platform.attention) <= set(BACKENDS)
    assert set(platform.kernels) <= {*MODULES, "native", "reference"}
    assert platform.kernels[-1] == "reference"


SAME_BITS = """
import torch
from quire.platforms.cpu import CpuPlatform
from quire.ops.reference import linear
CpuPlatform()
torch.set_num_threads(2)
x, weight = torch.randn(140, 1024), torch.randn(2048, 1024)
whole = linear(x, weight)
print([n for n in (1, 15, 16, 33, 128) if not torch.equal(linear(x[:n], weight), whole[:n])])
"""


def test_two_threads_do_not_split_a_rows_sum() -> None:
    """In float32 a row's bits depend on the row alone; in a process of its own, as MKL is set up once."""
    done = subprocess.run(
        [sys.executable, "-c", SAME_BITS], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]", done.stdout


def test_an_existing_mkl_setup_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    CpuPlatform()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
    monkeypatch.delenv("MKL_CBWR")
    CpuPlatform()
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
