"""A worker that gives its memory back for a while.

Knows its cache's storages, and how to make a model and its cache again. Three things may be away:

    cache, on the host      its pages go back to the system; tensors stay where they are, and so does every address
                            that somebody remembers (`quantization/fused.py` does)
    cache, on a device      its tensors go, and are made anew; the source forgets what it recorded of them
    weights                 at level 1 on the host: there they stay, which is why that costs nothing where they run;
                            at level 2, or if they cannot be moved, nowhere: another model is loaded, in which nobody
                            remembers anything
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from quire.errors import QuireError
from quire.logging import get_logger
from quire.models.base import LanguageModel
from quire.quantization.apply import move
from quire.worker.lazy_memory import give_back
from quire.worker.worker import Worker

log = get_logger(__name__)

Storages = list[tuple[Tensor, ...]]


class WorkerSleep:
    """`put_away` and `bring_back`, as functions of a worker.

    Args:
        storages: the cache, as `allocate_cache` returned it.
        device: where weights and cache are while they are used.
        load: makes the model anew.
        equip: hands a model its cache.
        begun: is told of the cache when it is empty again, and of none when it goes.
    """

    def __init__(
        self,
        worker: Worker,
        storages: Storages,
        device: torch.device,
        *,
        load: Callable[[], LanguageModel],
        equip: Callable[[LanguageModel], Storages],
        begun: Callable[[Storages], None],
    ):
        self.worker, self.storages, self.device = worker, storages, device
        self.load, self.equip, self.begun = load, equip, begun
        self.in_place = device.type == "cpu"
        self.away: set[str] = set()
        self.equipped = True
        worker.functions.update(put_away=self.put_away, bring_back=self.bring_back)

    def put_away(self, level: int) -> None:
        """Give back what the cache holds; at level 2 the weights too. No step is under way.

        At level 0 weights are left where they are.
        """
        worker = self.worker
        if worker.forget is not None:
            worker.forget(list(range(worker.rows.max_rows)))
        self.begun([])
        for parts in self.storages:
            for part in parts:
                give_back(part)
        fixed = isinstance(worker.model, UnloadedModel) or not worker.model.movable
        dropped = level > 1 or (level == 1 and fixed)
        if dropped or not self.in_place:
            self._drop_cache()
        if dropped:
            worker.place(ABSENT)
        elif level and not self.in_place:
            self._move(torch.device("cpu"))
        self.away |= {"weights", "kv_cache"} if level else {"kv_cache"}
        collect()
        log.info("asleep: the KV cache is given back%s", ", and the weights" if dropped else "")

    def bring_back(self, parts: Sequence[str]) -> None:
        """Make what is asked for and not there. On the host the cache's pages come when they are written to."""
        worker = self.worker
        if "weights" in parts:
            if isinstance(worker.model, UnloadedModel):
                worker.place(self.load())
            elif not self.in_place:
                self._move(self.device)
        self.away -= set(parts)
        if not self.away and not self.equipped:
            self.storages = self.equip(worker.model)
            worker.place(worker.model)
            self.equipped = True
        if not self.away:
            self.begun(self.storages)
        collect()

    def _drop_cache(self) -> None:
        self.storages, self.equipped = [], False
        model = self.worker.model
        if not isinstance(model, UnloadedModel):
            for layer in model.attention_layers():
                layer.cache = None
            self.worker.place(model)

    def _move(self, device: torch.device) -> None:
        model = self.worker.model
        if isinstance(model, nn.Module):
            move(model, device)


class UnloadedModel:
    """Stands for a model whose weights were dropped."""

    per_request = False

    def __getattr__(self, name: str) -> NoReturn:
        raise QuireError("the engine sleeps and its weights are dropped: wake it up first")


ABSENT: Any = UnloadedModel()


def collect() -> None:
    """Free what nobody holds: cycles of long-lived objects too, and what malloc keeps for later.

    Where what was built is set aside from collections (`engine/engine_process.py`), so is what is there now.
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
