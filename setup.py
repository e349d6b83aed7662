"""What pyproject.toml cannot say: a wheel takes the CPU's kernels along, compiled, where there is a compiler.

Without one, or if it fails, the wheel is pure Python, and the kernels are compiled where they first run (or plain torch
runs). An editable install has its sources at hand and takes that way as well. QUIRE_PREBUILD=0 leaves the step out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
from quire.ops.cpu import build, isa

KERNELS = Path("quire/ops/cpu/built")


class BuildWithKernels(build_py):
    """The package's files, and the libraries of each instruction set of this architecture beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or os.environ.get("QUIRE_PREBUILD") == "0":
            return
        folder = Path(self.build_lib) / KERNELS
        folder.mkdir(parents=True, exist_ok=True)
        wanted = isa.of_this_architecture()
        for old in {path.name for path in folder.glob("*.so")} - set(map(build.file_name, wanted)):
            (folder / old).unlink()
        try:
            for each in wanted:
                if not (folder / build.file_name(each)).exists():
                    build.make(each, folder)
        except (build.CannotBuild, OSError) as why:
            print(f"the CPU kernels are compiled later, where they first run: {why}")


class Wheel(bdist_wheel):
    """For any Python 3, and for this architecture only if there are libraries for it inside."""

    def get_tag(self) -> tuple[str, str, str]:
        command = self.get_finalized_command("build_py")
        if not any((Path(command.build_lib) / KERNELS).glob("*.so")):
            return super().get_tag()
        self.root_is_pure = False
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
