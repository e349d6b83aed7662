"""Hooks that programs hang on a model's modules, and other functions that they put in the place of `forward`.

Each is called, or refused: while there is one, steps run module by module, with no shorter way round them. Knows how modules
keep their hooks. Looked for when a function that a program asked for has run, and never in a step, so one that is hung
later by a model that was kept is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as modules

from quire.errors import QuireError, Unsupported, ValidationError
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.quantization.fused import fuse_model, unfuse_model
from quire.worker.model_input import TokenModelInput
from quire.worker.worker import Worker

TABLES = ("_forward_hooks", "_forward_pre_hooks")
FORWARD = "forward"

Found = dict[tuple[str, str], set[Any]]
"""By a module's name and a table's: the keys in it."""


class ModuleHooks:
    """Stands around what a program may have called in this worker."""

    def __init__(self, worker: Worker):
        self.worker, self.ways = worker, (worker.source, worker.at_once)
        self.watched = False
        self._begin()
        functions = worker.functions
        self.rpc, self.put_away = functions["collective_rpc"], functions["put_away"]
        functions.update(
            collective_rpc=self.call,
            apply_model=self.apply,
            put_away=self.sleep,
        )

    def _begin(self) -> None:
        """With a model that the worker has now. It is not kept from going."""
        worker = self.worker
        self.known = ref(worker.model)
        self.ours = registered_hooks(worker.model)
        self.fused = 0  # layers that were, before the model was watched
        if self.watched:
            self.watched = False
            worker.source, worker.at_once = self.ways
            worker.place(worker.model)

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As the worker's `collective_rpc`.

        Raises:
            Unsupported: a hook on a module that is not called by itself; it is taken away.
        """
        model = self.worker.model
        if model is not self.known():
            self._begin()
        before = registered_hooks(model)
        try:
            return self.rpc(method, args, kwargs)
        finally:
            self._look(model, before)

    def apply(self, function: Any) -> Any:
        """`function(model)`.

        Raises:
            ValidationError: it is no function; a request over HTTP, whose arguments are JSON, cannot give one.
        """
        if not callable(function):
            raise ValidationError(
                "apply_model takes a function, which only a program has (LLM.apply_model): JSON holds none",
                parameter="args",
            )
        return function(self.worker.model)

    def sleep(self, level: int) -> None:
        """As the worker's `put_away`."""
        if self.watched and level > 1 and self.worker.model is self.known():
            raise QuireError(
                "hooks on the model's modules would be lost with its weights: remove them, or sleep at level 1"
            )
        self.put_away(level)

    def _look(self, model: Any, before: Found) -> None:
        now = registered_hooks(model)
        dead = {
            place: keys - before.get(place, set())
            for place, keys in now.items()
            if not is_called(model.get_submodule(place[0]))
        }
        for (name, table), keys in dead.items():
            kept = model.get_submodule(name).__dict__
            for key in keys:
                (kept if table == FORWARD else kept[table]).pop(key)
        self._run_modules(model, registered_hooks(model) != self.ours)
        if names := sorted(name for (name, _), keys in dead.items() if keys):
            raise Unsupported(
                f"a hook on {', '.join(names)} (it would not be called: larger calls compute it)",
                "hang it on a layer, its self_attn or its mlp, or on the model",
            )

    def _run_modules(self, model: Any, watched: bool) -> None:
        """Whether each step calls each module."""
        if watched is self.watched:
            return
        self.watched, worker = watched, self.worker
        if watched:
            self.fused = unfuse_model(model)
            worker.source, worker.at_once = TokenModelInput(model), None
        else:
            if self.fused:
                fuse_model(model)
            worker.source, worker.at_once = self.ways
        worker.place(model)


def is_called(module: nn.Module) -> bool:
    """Whether it is called by itself, where no shorter way is taken: of some, other methods are."""
    if isinstance(module, Linear):
        return not module.silu
    return not isinstance(module, RMSNorm | Attention)


def registered_hooks(model: Any) -> Found:
    """What hangs on any of its modules, or on all there are."""
    result: Found = {}
    if not isinstance(model, nn.Module):
        return result
    for name, module in model.named_modules():
        for table in TABLES:
            if kept := module.__dict__[table]:
                result[name, table] = set(kept)
        if FORWARD in module.__dict__:
            result[name, FORWARD] = {FORWARD}
    if everywhere := {*modules._global_forward_hooks, *modules._global_forward_pre_hooks}:
        result["", "all"] = everywhere
    return result
