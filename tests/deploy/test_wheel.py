"""`make wheel`, and the words of the documents about installing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "deploy/docker/Dockerfile"]  # fmt: skip


def test_every_extra_that_a_page_names_exists():
    named = {
        extra
        for page in PAGES
        for extras in re.findall(r"quire\[([a-z,]+)\]|'\.\[([a-z,]+)\]'", page.read_text())
        for extra in ",".join(extras).strip(",").split(",")
    }
    assert {"otlp", "xgrammar", "dev"} <= PROJECT["optional-dependencies"].keys()
    assert named <= PROJECT["optional-dependencies"].keys()


def test_make_serve_does_not_install_what_only_tests_need():
    text = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^\$\(INSTALLED\):.*?\n\n", text, re.M | re.S)[0]
    assert re.search(r"^serve: install$", text, re.M)
    assert re.search(r"^test: install-dev$", text, re.M)
    assert "[dev]" not in recipe
    assert "--quiet" not in recipe


def test_make_wheel_says_what_is_missing_before_it_compiles(tmp_path: Path):
    script = ROOT / "deploy" / "wheel" / "make_wheel.py"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    words = ["-c", f"import sys; sys.executable = {str(python)!r}; import runpy; sys.argv = ['make', 'dist'];"
             f"runpy.run_path({str(script)!r}, run_name='__main__')"]  # fmt: skip
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env={"PATH": str(python.parent)}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1
    assert "is not in PATH" in done.stderr
    assert f"{python} -m pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_make_wheel_makes_one_for_many_linuxes_with_all_kernels(tmp_path: Path):
    pytest.importorskip("auditwheel")
    script = ROOT / "deploy" / "wheel" / "make_wheel.py"
    system = {**os.environ, "PATH": "/usr/bin:/bin"}  # an environment that is not activated
    subprocess.run([sys.executable, script, tmp_path], check=True, env=system)
    [wheel] = tmp_path.glob("quire-*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    kernels = [name for name in names if name.endswith(".so")]
    assert kernels
    assert all(name.startswith("quire/ops/cpu/built/") for name in kernels)
    assert not [name for name in names if "libgomp" in name]
    assert "quire/embedded/quire-tiny-embed/1_Pooling/config.json" in names
    assert "quire/embedded/quire-tiny/sample.png" in names
    assert "quire/embedded/quire-tiny-whisper/model.safetensors" in names
    assert "quire/embedded/quire-tiny-whisper/sample.wav" in names
    assert list(tmp_path.glob("vllm-*.whl"))
