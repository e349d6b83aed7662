"""The GPU's one call, on the CPU in Triton's interpreter: every section runs, and one that fails does not take the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")
import interpreted  # noqa: F401

from quire.bench import gpu, gpu_checks
from quire.bench.gpu_shapes import CONFIGS, kv_of, weights_of


def ran(tmp_path: Path, *only: str) -> tuple[int, dict]:
    with np.errstate(all="ignore"):
        words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--only", *only]
        code = gpu.main(words)
    return code, json.loads(next(tmp_path.glob("*-gpu.json")).read_text())


def test_sections_that_need_no_kernels(tmp_path: Path) -> None:
    code, found = ran(tmp_path, "machine", "engine", "steps", "serving")
    assert code == 0
    assert found["machine"]["copy_bytes_per_second"] > 0
    assert found["engine"]["depth 2, graphs"] == "6 of 6 texts are the CPU's"
    assert found["steps"]["decode of 3 rows"]["tokens a second"] > 0
    assert found["steps"]["decode of 1 rows"]["microseconds of the host"] > 0
    assert found["serving"]["at a rate"]["ITL"]["p99 ms"] > 0


def test_one_that_fails_does_not_take_the_rest(tmp_path: Path, monkeypatch) -> None:
    def broken(run, found) -> None:
        raise RuntimeError("no such instruction")

    for name in ("rows", "attention", "sampling"):
        monkeypatch.setattr(gpu_checks, name, broken)
    monkeypatch.setattr(gpu, "machine", lambda run: 1 / 0)
    code, found = ran(tmp_path, "machine", "kernels")
    assert code == 1
    assert found["machine"]["failed"] == "ZeroDivisionError: division by zero"
    assert found["kernels"]["wrong"][0] == "rows: RuntimeError: no such instruction"
    assert found["kernels"]["bits"]["torch.float32: one program a row or three"] is True


def test_floors_are_those_of_the_published_sizes() -> None:
    """8.03 billion weights, of which the embedding's 0.53 are not read; 128 KiB of keys and values a token."""
    assert weights_of("llama-8b") == pytest.approx(2 * (8.03e9 - 0.525e9), rel=0.01)
    assert kv_of("llama-8b") == 128 << 10
    assert {"tiny", "llama-8b", "qwen3-0.6b"} == set(CONFIGS)
