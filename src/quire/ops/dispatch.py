"""Dispatch of ops. An op's body is its definition; all other implementations must agree with it.

    @op
    def rms_norm(x_TD, weight_D, eps): ...            # ops/reference.py: plain torch

    @rms_norm.on("native")                            # elsewhere: a kernel
    def _(x_TD, weight_D, eps): ...

`bind(("native", "reference"))` sets once which implementation of each op runs; a call then costs one attribute
lookup. An implementation that does not support some arguments (a dtype, a shape) calls `op.reference`.

The arithmetic of norms, RoPE and activations is written three times. A change of rounding is a change of all three:

    ops/reference.py                    the definition
    ops/cpu/kernels/norm_rope_act.h     C++, for the op (ops/cpu/norm_rope_act.py) and the fused layer (layer.cpp)
    ops/triton/norm_rope_act.py         Triton, for the op; qk_norm_rope_kv.py fuses the same steps with the KV write
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, Op[..., Any]] = {}

MODULES = {
    "native": "quire.ops.cpu.norm_rope_act",
    "triton": "quire.ops.triton.norm_rope_act",
}
"""Kind -> the module that registers its implementations; `bind` imports it."""


class Op(Generic[P, R]):
    """A callable with implementations by the name of their kind: reference, native, triton ..."""

    def __init__(self, reference: Callable[P, R]):
        self.name = reference.__name__
        self.reference = reference
        self.run = reference
        self.implementations: dict[str, Callable[P, R]] = {"reference": reference}
        functools.update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.run(*args, **kwargs)

    def on(self, kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation. It runs once `bind` has chosen it."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            if kind in self.implementations:
                raise ValueError(f"op {self.name} already has an implementation {kind}")
            self.implementations[kind] = function
            return function

        return register


def op(reference: Callable[P, R]) -> Op[P, R]:
    if reference.__name__ in OPS:
        raise ValueError(f"there already is an op {reference.__name__}")
    OPS[reference.__name__] = made = Op(reference)
    return made


def bind(kinds: Sequence[str]) -> dict[str, str]:
    """Set each op's implementation to the first of `kinds` that it has, else the reference; return op -> kind."""
    for kind in kinds:
        if kind in MODULES:
            importlib.import_module(MODULES[kind])
    chosen = {}
    for name, each in OPS.items():
        kind = next((k for k in kinds if k in each.implementations), "reference")
        each.run, chosen[name] = each.implementations[kind], kind
    return chosen


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on x's device."""
    try:
        from quire.ops.triton.launch import runs_on
    except ImportError:
        return False
    return runs_on(x)
