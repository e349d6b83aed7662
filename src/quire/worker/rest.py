"""A worker that gives its memory back for a while.

Knows its cache's storages and how to load the model again. The cache's pages go back to the operating system and its
tensors stay where they are: whoever remembers an address (`quantization/fused.py` does) is right afterwards.
Weights that are dropped come back as another model, in which nobody remembers anything.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from quire.errors import QuireError
from quire.logging import get_logger
from quire.models.base import LanguageModel
from quire.worker.untouched import give_back
from quire.worker.worker import Worker

log = get_logger(__name__)

Storages = list[tuple[Tensor, ...]]


class Rest:
    """`put_away` and `bring_back`, as functions of a worker.

    Args:
        storages: the cache, as `allocate_cache` returned it.
        load: makes the model anew.
        equip: hands a model its cache.
    """

    def __init__(
        self,
        worker: Worker,
        storages: Storages,
        load: Callable[[], LanguageModel],
        equip: Callable[[LanguageModel], Storages],
    ):
        self.worker, self.storages, self.load, self.equip = worker, storages, load, equip
        self.has_weights = True
        worker.functions.update(put_away=self.put_away, bring_back=self.bring_back)

    def put_away(self, level: int) -> None:
        """Give back what the cache holds; at level 2 the weights too. No step is under way."""
        worker = self.worker
        if worker.forget is not None:
            worker.forget(list(range(worker.rows.max_rows)))
        held = sum(give_back(part) for parts in self.storages for part in parts)
        if level > 1 and self.has_weights:
            self.has_weights, self.storages = False, []
            absent: Any = Absent()
            worker.place(absent)
        collect()
        log.info(
            "asleep: %.2f GiB of KV cache given back%s",
            *(held / 2**30, "" if self.has_weights else ", and the weights"),
        )

    def bring_back(self, parts: Sequence[str]) -> None:
        """Load the weights again if they are asked for and not there. The cache comes when it is written to."""
        if "weights" in parts and not self.has_weights:
            model = self.load()
            self.storages = self.equip(model)
            self.worker.place(model)
            self.has_weights = True
            collect()


class Absent:
    """Stands for a model whose weights were dropped."""

    per_request = False

    def __getattr__(self, name: str) -> NoReturn:
        raise QuireError("the engine sleeps and its weights are dropped: wake it up first")


def collect() -> None:
    """Free what nobody holds: cycles of long-lived objects too, and what malloc keeps for later.

    Where what was built is set aside from collections (`engine/process.py`), so is what is there now.
    """
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
