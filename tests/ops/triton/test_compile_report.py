"""Every kernel compiles for cards that are not here, without spilling what it holds and with the matrix units' instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MOST_SHARED = {90: 227 << 10, 80: 163 << 10}
MOST_STACK = {
    90: 64,
    80: 320,
}  # bytes: a few registers at the edges of a loop; sizes are made for Hopper
E4M3 = {
    "code_groups_kernel"
}  # for 8-bit floats alone, which cards before Ada have no instructions for
TMA = {
    "wide_kernel"
}  # of a benchmark; before Hopper, Triton emulates its tensor descriptors and spills


@pytest.mark.slow
@pytest.mark.parametrize("capability", MOST_SHARED)
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, HERE / "compile_report.py", str(capability)],
        capture_output=True, text=True, env=env, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in found if "anew" in line] == []
    kernels = {line["kernel"] for line in found}
    written = {
        line.split("(")[0].removeprefix("def ")
        for file in [
            *(HERE.parents[2] / "src/quire/ops/triton").glob("*.py"),
            HERE.parents[2] / "benchmarks/gpu/fp8_gemm_tma.py",
        ]
        for line in file.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    if capability < 89:
        written -= E4M3
    assert kernels == written, "a kernel is not in compile_report.py"
    # What is exact stays so: no product and sum became one, with one rounding less.
    assert all(line["fma"] == 0 for line in found if line["what"] == "int8 products")
    for line in found:
        assert line["shared"] <= MOST_SHARED[capability], line
        # Products in float32 are a mode for comparing, and spill.
        spills = "float32" in line["what"] or (capability < 90 and line["kernel"] in TMA)
        assert line["stack"] <= MOST_STACK[capability] or spills, line
    names = ("attend_kernel", "product_kernel", "wide_kernel", "few_bits_kernel")
    products = [x for x in found if x["kernel"] in names and "float32" not in x["what"]]
    assert all(x["wgmma"] + x["mma"] for x in products)
    if capability == 90:
        assert any(x["wgmma"] for x in products)
