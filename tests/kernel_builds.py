"""The builds of the CPU kernels that this machine runs, as parameters of tests.

To compile one takes 45 s of processor time. `make test` runs the best build of this machine; the others are slow.
"""

from __future__ import annotations

import pytest

from quire.ops.cpu import bindings, build, isa

NAMES = [each.name for each in isa.usable()]
BUILDS = [
    pytest.param(name, marks=() if name == NAMES[0] else pytest.mark.slow) for name in NAMES
]  # fmt: skip


def kernels_of(name: str) -> bindings.Kernels:
    """The kernels of a build; without a compiler the test is skipped."""
    try:
        return bindings.load(name)
    except build.Missing as why:
        pytest.skip(str(why))
