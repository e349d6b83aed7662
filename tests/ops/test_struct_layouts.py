"""Structs that Python fills for the CPU kernels: a field in another place than in C++ refuses the library."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import pytest

from quire.ops.cpu import bindings, build, structs

KERNELS = bindings.best()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the native kernels do not run on this CPU")


def found() -> dict[str, structs.Layout]:
    assert KERNELS is not None
    path = str(build.library(KERNELS.isa))
    return structs.layouts_of(ctypes.CDLL(path))


def variant(mirror: type[ctypes.Structure], fields: list[Any]) -> type[ctypes.Structure]:
    return type(mirror.__name__, (ctypes.Structure,), {"_fields_": fields})


def broken(mirror: type[ctypes.Structure], number: int) -> dict[str, type[ctypes.Structure]]:
    """The mirror with one field missing, renamed, of another size, or after its neighbour."""
    fields = list(mirror._fields_)
    name, kind = fields[number]
    other = ctypes.c_int16 if ctypes.sizeof(kind) > 4 else ctypes.c_int64
    before, after = fields[:number], fields[number + 1 :]
    return {
        "missing": variant(mirror, before + after),
        "renamed": variant(mirror, [*before, (f"{name}_2", kind), *after]),
        "resized": variant(mirror, [*before, (name, other), *after]),
        "moved": variant(mirror, [*before, *after[:1], (name, kind), *after[1:]]),
    }


def test_the_library_and_python_agree() -> None:
    assert structs.differences(found()) == []
    assert set(found()) == {mirror.__name__.removeprefix("C") for mirror in structs.MIRRORS}


@pytest.mark.parametrize("mirror", structs.MIRRORS, ids=lambda mirror: mirror.__name__)
def test_each_broken_field_is_detected(mirror: type[ctypes.Structure]) -> None:
    library, name = found(), mirror.__name__.removeprefix("C")
    for number, (field, _) in enumerate(mirror._fields_):
        for how, wrong in broken(mirror, number).items():
            if how == "moved" and number + 1 == len(mirror._fields_):
                continue
            differing = structs.differences(library, [wrong])
            assert any(f"{name}.{field} is" in line for line in differing), (field, how)


def test_a_missing_struct_is_detected() -> None:
    library = found()
    del library["Step"]
    assert "Step is absent in the library" in structs.differences(library)[0]


def test_a_library_of_another_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert KERNELS is not None
    window = [name for name, _ in structs.CLayer._fields_].index("window")
    wrong = broken(structs.CLayer, window)["missing"]
    monkeypatch.setattr(structs, "MIRRORS", (structs.CWeight, wrong))
    with pytest.raises(build.CannotBuild, match=r"Layer\.window is 8 bytes at .*absent in str"):
        bindings.Kernels(KERNELS.isa)
    monkeypatch.setattr(bindings, "load", bindings.load.__wrapped__)
    monkeypatch.setenv("QUIRE_CPU_ISA", KERNELS.isa.name)
    with caplog.at_level(logging.WARNING):
        assert bindings.best.__wrapped__() is None
    assert "Layer.window" in caplog.text


def test_types_come_from_the_headers() -> None:
    pointer, long, real, small = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
    known = bindings.signatures()
    assert known["act_and_mul"] == (None, [pointer, pointer, long, long, small])
    assert known["add_norm"] == (
        None,
        [pointer, pointer, pointer, long, long, real, small, pointer],
    )
    assert known["threads"] == (small, [])
    assert set(known) > {"linear", "attention", "layers", "step", "layouts"}
