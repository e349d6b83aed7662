"""Sleep mode of a worker: it frees memory and restores it later.

Knows the storages of its cache, and how to load a model and allocate a cache again. It can free three things:

    cache, on the host      returns its pages to the system. Tensors keep their addresses, because other code keeps
                            these addresses (`native/fused_decoder.py`)
    cache, on a device      drops its tensors and allocates new ones; the model input drops its captured graphs
    weights                 level 1 moves them to host memory, so on a CPU they stay where they are.
                            Level 2, or a model that cannot be moved, drops them; a new model is loaded later, and
                            nothing keeps addresses of it
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from quire.config.engine import ModelSpec, Resolved
from quire.errors import QuireError
from quire.logging import get_logger
from quire.models.base import LanguageModel
from quire.platforms.memory import give_back
from quire.quantization.apply import move
from quire.worker.kv_cache import cached_layers
from quire.worker.load_format import with_load_format
from quire.worker.row_states import RowStates
from quire.worker.worker import Worker

log = get_logger(__name__)

SLEEP = "sleep"

Storages = list[tuple[Tensor, ...]]


class WorkerSleep:
    """Provides `sleep_worker`, `wake_up_worker`, `reload_weights` and `update_config` as functions of a worker.

    Args:
        storages: the cache, as `allocate_cache` returned it.
        states: the recurrent states.
        device: where weights and cache are while the worker is awake.
        load: loads models again: `load(resolved, others=others)`.
        specs: the configuration, and the models beside the main one.
        allocate: gives models their cache, and their states.
        on_cache_reset: called with the cache when it is empty again, and with [] when it is freed.
    """

    def __init__(
        self,
        worker: Worker,
        storages: Storages,
        states: RowStates,
        device: torch.device,
        *,
        load: Callable[..., list[LanguageModel]],
        specs: tuple[Resolved, Sequence[ModelSpec]],
        allocate: Callable[[Sequence[LanguageModel]], Storages],
        on_cache_reset: Callable[[Storages], None],
    ):
        self.worker, self.storages, self.device = worker, storages, device
        self.states = states
        self.resolved, self.others = specs
        self.load, self.allocate, self.on_cache_reset = load, allocate, on_cache_reset
        self.in_place = device.type == "cpu"
        self.missing_parts: set[str] = set()
        self.has_cache = True
        worker.functions.update(
            sleep_worker=self.sleep, wake_up_worker=self.wake_up, reload_weights=self.reload,
            update_config=self.update_config,
        )  # fmt: skip

    def sleep(self, level: int) -> None:
        """Free the cache; at level 2 the weights too. No step may be in flight.

        Level 0 leaves the weights where they are.
        """
        worker = self.worker
        if worker.forget is not None:
            worker.forget(list(range(worker.rows.max_rows)))
        self.on_cache_reset([])
        for parts in (*self.storages, self.states.tensors):
            for part in parts:
                give_back(part)
        movable = all(isinstance(m, nn.Module) and m.movable for m in worker.models)
        dropped = level > 1 or (level == 1 and not movable)
        if dropped or not self.in_place:
            self._drop_cache()
        if dropped:
            worker.set_models([ABSENT] * len(worker.models))
        elif level and not self.in_place:
            self._move(torch.device("cpu"))
        self.missing_parts |= {"weights", "kv_cache"} if level else {"kv_cache"}
        collect()
        log.info("asleep: released the KV cache%s", ", and the weights" if dropped else "")

    def wake_up(self, parts: Sequence[str]) -> None:
        """Restore the missing ones of `parts`. On the host the cache's pages are allocated on first write."""
        worker = self.worker
        if "weights" in parts:
            if isinstance(worker.model, UnloadedModel):
                worker.set_models(self.load(self.resolved, others=self.others))
            elif not self.in_place:
                self._move(self.device)
        self.missing_parts -= set(parts)
        if not self.missing_parts and not self.has_cache:
            self.storages = self.allocate(worker.models)
            worker.fuse(SLEEP)
            self.has_cache = True
        if not self.missing_parts:
            self.on_cache_reset(self.storages)
        collect()

    def reload(self) -> None:
        """Load the weights again, from a checkpoint that was replaced meanwhile.

        Raises:
            QuireError: there is a KV cache, which the old weights have computed.
        """
        worker = self.worker
        if "kv_cache" not in self.missing_parts:
            raise QuireError(
                "reload_weights would leave keys and values of the old weights in the KV cache: call it between sleep(level=2)"
                " and wake_up(tags=['kv_cache'])"
            )
        if self.has_cache:
            self._drop_cache()
        worker.set_models([ABSENT] * len(worker.models))
        collect()
        worker.set_models(self.load(self.resolved, others=self.others))

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """Set the load format of later loads: `{"load_config": {"load_format": "auto"}}`.

        Raises:
            ValidationError: another field, or a load format that the engine must know when it starts.
        """
        self.resolved, self.others = with_load_format(overrides, self.resolved, self.others)

    def _drop_cache(self) -> None:
        self.storages, self.has_cache = [], False
        for layer in cached_layers([m for m in self.worker.models if m is not ABSENT]):
            layer.drop_cache()
        self.states.drop()
        self.worker.unfuse(SLEEP)  # nothing keeps addresses of the cache or the weights

    def _move(self, device: torch.device) -> None:
        for model in self.worker.models:
            if isinstance(model, nn.Module):
                move(model, device)


class UnloadedModel:
    """Takes the place of a model whose weights were dropped."""

    per_request = False

    def __getattr__(self, name: str) -> NoReturn:
        raise QuireError("the engine is asleep and its weights are dropped: wake it up first")


ABSENT: Any = UnloadedModel()


def collect() -> None:
    """Free unreferenced memory: reference cycles among long-lived objects too, and memory that malloc caches.

    If the process froze its objects for the garbage collector (`engine/engine_main.py`), they are frozen again.
    """
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
