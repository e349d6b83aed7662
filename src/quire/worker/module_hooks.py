"""User hooks on a model's modules, and user functions that replace a module's `forward`.

Every hook is either called or refused. While there is one, steps run module by module, without fused layers or fast
paths. Knows how PyTorch modules store their hooks. The search for hooks runs after a function that the user called
through RPC, never in a step: a hook that the user adds later, through a model reference it kept, is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as modules

from quire.config.serialize import by_name
from quire.errors import ConfigError, QuireError, Unsupported, ValidationError
from quire.worker.worker import Worker

TABLES = ("_forward_hooks", "_forward_pre_hooks")
FORWARD = "forward"
REASON = "hooks on modules"

HookKeys = dict[tuple[str, str], set[Any]]
"""By (module name, hook table): the keys in that table."""


class RpcWorker:
    """The worker, as a user's function gets it, with the attributes of vLLM's worker that such functions use.

    Args:
        rank: among the ranks of the model. local_rank: among the ranks of this machine.
    """

    def __init__(self, worker: Worker, rank: int = 0, local_rank: int = 0):
        self.worker = worker
        self.rank, self.local_rank = rank, local_rank
        self.device = worker.platform.device
        self.model_runner = self  # functions read worker.model_runner.model

    def get_model(self) -> Any:
        return self.worker.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


def extended_worker(worker: Worker, rank: int, local_rank: int, extension: str) -> RpcWorker:
    """A RpcWorker that has the methods of the class `extension` too ("package.module.Class"; "": none).

    Raises:
        ConfigError: the class cannot be imported, or one of its methods has the name of a method that the worker has.
    """
    if not extension:
        return RpcWorker(worker, rank, local_rank)
    added = by_name(extension, "worker_extension_cls")
    if not isinstance(added, type):
        raise ConfigError(f"worker_extension_cls={extension} is not a class")
    own_names = {*vars(RpcWorker), *dir(worker), *worker.functions}
    names = (each for each in dir(added) if not each.startswith("__"))
    if both := sorted(own_names.intersection(names)):
        raise ConfigError(
            f"worker_extension_cls={extension}: the worker has {', '.join(both)} already; rename it in the class"
        )
    extended: type[RpcWorker] = type("ExtendedWorker", (RpcWorker, added), {})
    return extended(worker, rank, local_rank)


class ModuleHooks:
    """Wraps the worker functions that can add or lose hooks. `rpc_worker`: what the user's functions get."""

    def __init__(self, worker: Worker, rpc_worker: RpcWorker | None = None):
        self.worker, self.rpc_worker = worker, rpc_worker or RpcWorker(worker)
        self.has_hooks = False
        self._follow_model()
        functions = worker.functions
        self._rpc, self._sleep = functions["collective_rpc"], functions["sleep_worker"]
        functions.update(
            collective_rpc=self.call,
            apply_model=self.apply,
            call_function=self.call_function,
            get_model=lambda: worker.model,
            sleep_worker=self.sleep,
        )

    def _follow_model(self) -> None:
        """Start over with the worker's current model. Only a weak reference to it is kept."""
        worker = self.worker
        self._model = ref(worker.model)
        self._own_hooks = registered_hooks(worker.model)
        self._run_modules(False)

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces the worker's `collective_rpc`.

        Raises:
            Unsupported: a hook is on a module that the model does not call as a module; the hook is removed.
        """
        if self.worker.model is not self._model():
            self._follow_model()
        before = registered_hooks(self.worker.model)
        added = type(self.rpc_worker) is not RpcWorker and not method.startswith("_")
        own = getattr(type(self.rpc_worker), method, None) if added else None
        try:
            if callable(own) and not hasattr(RpcWorker, method):
                return own(self.rpc_worker, *args, **(kwargs or {}))
            return self._rpc(method, args, kwargs)
        finally:
            if (model := self._model()) is not None:  # the function may have dropped it
                self._remove_uncalled(model, before)

    def apply(self, function: Any) -> Any:
        """Return `function(model)`.

        Raises:
            ValidationError: it is not a function; an HTTP request, whose arguments are JSON, cannot pass one.
        """
        if not callable(function):
            raise ValidationError(
                "apply_model needs a function, which JSON cannot contain; call LLM.apply_model from a program",
                parameter="args",
            )
        return function(self.worker.model)

    def call_function(self, function: Any, *args: Any, **keywords: Any) -> Any:
        """Return `function(worker, *args, **keywords)`; raises as `apply`."""
        return self.apply(lambda model: function(self.rpc_worker, *args, **keywords))

    def sleep(self, level: int) -> None:
        """Replaces the worker's `sleep_worker`."""
        if self.has_hooks and level > 1 and self.worker.model is self._model():
            raise QuireError(
                "sleep level 2 drops the model's modules and their hooks: remove the hooks, or sleep at level 1"
            )
        self._sleep(level)

    def _remove_uncalled(self, model: Any, before: HookKeys) -> None:
        """Remove the new hooks on modules that are not called, and switch off fusion if hooks remain."""
        hooks = registered_hooks(model)
        uncalled = {
            place: keys - before.get(place, set())
            for place, keys in hooks.items()
            if not is_called(model.get_submodule(place[0]))
        }
        for (name, table), keys in uncalled.items():
            tables = model.get_submodule(name).__dict__
            for key in keys:
                (tables if table == FORWARD else tables[table]).pop(key)
        self._run_modules(registered_hooks(model) != self._own_hooks)
        if names := sorted(name for (name, _), keys in uncalled.items() if keys):
            raise Unsupported(
                f"a hook on {', '.join(names)} (it would not be called: larger calls compute it)",
                "register it on a layer, its self_attn or its mlp, or on the model",
            )

    def _run_modules(self, has_hooks: bool) -> None:
        """Switch between running each module by itself (True) and the fused layers and fast paths (False)."""
        if has_hooks is not self.has_hooks:
            self.has_hooks = has_hooks
            (self.worker.unfuse if has_hooks else self.worker.fuse)(REASON)


def is_called(module: nn.Module) -> bool:
    """Whether unfused code calls this module itself. Of some modules it calls other methods."""
    return getattr(module, "is_called", True)


def registered_hooks(model: Any) -> HookKeys:
    """The hooks on any of the model's modules, and PyTorch's global hooks."""
    result: HookKeys = {}
    if not isinstance(model, nn.Module):
        return result
    for name, module in model.named_modules():
        for table in TABLES:
            if hooks := module.__dict__[table]:
                result[name, table] = set(hooks)
        if FORWARD in module.__dict__:
            result[name, FORWARD] = {FORWARD}
    if global_hooks := {*modules._global_forward_hooks, *modules._global_forward_pre_hooks}:
        result["", "all"] = global_hooks
    return result
