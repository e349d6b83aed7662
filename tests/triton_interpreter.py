"""Triton's interpreter, made fit for this NumPy and faster: import this before running kernels in it.

Triton 3.6 turns a scalar, which it keeps as an array of one element, into an integer by int(), and NumPy 2.4
refuses that for arrays that have a dimension.

At each launch, and again at each call of a jitted function inside a kernel, it looks through every name of triton.language for
those that it must replace by NumPy's: half the time of a test. The names are the same each time, so this looks once.
For each block it makes the table of NumPy's types; this makes an entry once for each name of a type.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import triton.language as tl
from triton.runtime import interpreter

Scope = interpreter._LangPatchScope
original_patch_lang = interpreter._patch_lang
original_patch_tensor = interpreter._patch_lang_tensor
original_np_dtype = interpreter._get_np_dtype
np_dtypes: dict[str, Any] = {}


def patch_tensor(tensor: Any, scope: Any) -> None:
    original_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


class Launch(Scope):  # type: ignore[misc]
    """The replacements during one launch; jitted functions that the kernel calls find them in place."""

    running: ClassVar[Launch | None] = None
    replacements: ClassVar[list[tuple[object, str, object]]] = []

    def __init__(self) -> None:
        super().__init__()
        if not self.replacements:
            first = original_patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            changed = {(id(obj), name): (obj, name) for obj, name, _ in first._changes}
            self.replacements += [(obj, name, vars(obj)[name]) for obj, name in changed.values()]
            first.restore()
        for obj, name, value in self.replacements:
            self.set_attr(obj, name, value)
        Launch.running = self

    def restore(self) -> None:
        Launch.running = None
        super().restore()


def patch_lang(function: Any) -> Any:
    return Launch() if Launch.running is None else Scope()


def np_dtype(dtype: Any) -> Any:
    if dtype.name not in np_dtypes:
        np_dtypes[dtype.name] = original_np_dtype(dtype)
    return np_dtypes[dtype.name]


if interpreter._patch_lang.__name__ != patch_lang.__name__:
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
