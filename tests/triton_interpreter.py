"""Triton's interpreter, made fit for this NumPy: import this before running kernels in it.

Triton 3.6 turns a scalar, which it keeps as an array of one element, into an integer by int(), and NumPy 2.4
refuses that for arrays that have a dimension.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


if getattr(_patch, "__name__", "") != "_patched":
    interpreter._patch_lang_tensor = _patched
