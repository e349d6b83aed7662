"""LoraHook: the adapters of a worker. Reads their files in a thread, and gives each row its adapter.

Knows files, the model's table of adapters (`layers/lora.py`), and rows. Does not decide what is in memory: the engine's registry
does, and calls `functions`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.config.lora import LoraConfig
from quire.errors import QuireError
from quire.features.lora.adapter_files import read_adapter
from quire.features.lora.adapter_modules import Targets
from quire.features.lora.gate import NAME
from quire.forward_context import ForwardBatch
from quire.layers.lora import AdapterTable, AdapterWeights, encoder_place, lora_targets
from quire.logging import get_logger
from quire.models.base import LanguageModel
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook
from quire.worker.request_rows import RequestRows

log = get_logger(__name__)

NICE = 10
"""Priority of the thread that reads: the steps of other requests go first."""


class ReadAdapter(NamedTuple):
    """An adapter that is read, and the table that it was prepared for."""

    version: str
    weights: AdapterWeights
    table: AdapterTable


class LoraHook(Hook):
    """Gives rows their adapters.

    Args:
        targets: of the whole model, if the worker's is a stage of it: an adapter has parts for other stages, too.
    """

    name = NAME
    order = 45

    def __init__(self, rows: RequestRows, options: LoraConfig, targets: Targets | None = None):
        self._rows, self._options, self._targets = rows, options, targets
        chosen = options.lora_dtype
        self._dtype = None if chosen == "auto" else getattr(torch, chosen)
        self._thread = ThreadPoolExecutor(1, "lora-reader", _lower_priority)
        self._read: dict[int, Future[ReadAdapter]] = {}  # by ticket
        self._slots: dict[str, int] = {}  # by version
        self._table: AdapterTable | None = None
        self._model: LanguageModel | None = None

    # -- as a Hook
    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """A model gets a table; the models of a sleeping worker have none."""
        self._model, self._table, self._slots = models[0], None, {}
        if isinstance(models[0], nn.Module):
            limits = self._options.capacity, self._rows.max_rows, self._options.max_lora_rank
            self._table = AdapterTable(models[0], *limits)

    @property
    def table(self) -> AdapterTable:
        """The table of the main model. Raises QuireError: the model's weights are dropped."""
        if self._table is None:
            raise QuireError("the engine is asleep and its weights are dropped: wake it up first")
        return self._table

    def enter(self, new: EnteredRow) -> None:
        """A request whose adapter is not in memory fails: the plan is of another engine (engine/replay.py)."""
        if new.adapter is None:
            return
        if (slot := self._slots.get(new.adapter)) is None:
            self._rows.faults[new.row] = f"the adapter version {new.adapter} is not loaded"
        else:
            self.table.number_of_row[new.row] = slot

    def leave(self, row: int) -> None:
        self.table.number_of_row[row] = -1

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.table.accepts_fast_step(plan)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is not None:
            self.table.put(plan, batch)

    # -- for the registry
    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Functions of the worker."""
        named = (
            self.read_adapter, self.adapters_read, self.add_adapter, self.discard_adapter, self.remove_adapter,
        )  # fmt: skip
        return {function.__name__: function for function in named}

    def read_adapter(self, ticket: int, path: str, version: str) -> None:
        """Read an adapter in a thread. `version`: the one that it must be; empty: any."""
        self._read[ticket] = self._thread.submit(self._in_thread, path, version)

    def adapters_read(self, tickets: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What is known of the tickets that are read: version, rank and bytes, or an error."""
        return {
            ticket: _report(self._read[ticket]) for ticket in tickets if self._read[ticket].done()
        }

    def add_adapter(self, ticket: int, slot: int, version: str) -> bool:
        """Put an adapter that is read into a slot of the table; False: it was read for a model that is gone."""
        read = self._read.pop(ticket).result()
        if read.table is not self._table:
            return False
        read.table.add(slot, read.weights)
        self._slots[version] = slot
        return True

    def discard_adapter(self, ticket: int) -> None:
        """Forget what was read."""
        self._read.pop(ticket)

    def remove_adapter(self, slot: int) -> None:
        """Free a slot of the table. No row may use it."""
        self._slots = {version: used for version, used in self._slots.items() if used != slot}
        if self._table is not None:
            self._table.remove(slot)

    @torch.inference_mode()
    def _in_thread(self, path: str, version: str) -> ReadAdapter:
        model, table = self._model, self.table
        chosen = self._options.lora_target_modules
        targets = self._targets or Targets(lora_targets(model), partial(encoder_place, model))
        files = read_adapter(Path(path), self._options.max_lora_rank, targets, chosen)
        if version not in ("", files.digest):
            raise QuireError(
                f"the files of the adapter in {path} have changed since it was loaded: load it again with"
                " load_inplace, to use the new ones"
            )
        modules = files.modules()
        if self._targets is not None:
            modules = {name: each for name, each in modules.items() if name in table.places}
        return ReadAdapter(files.digest, table.prepare(modules, self._dtype), table)


def _report(read: Future[ReadAdapter]) -> dict[str, Any]:
    if (error := read.exception()) is None:
        found = read.result()
        return {
            "version": found.version,
            "rank": found.weights.rank,
            "bytes": found.weights.num_bytes,
        }
    if not isinstance(error, QuireError):
        log.error("an adapter could not be read", exc_info=error)
        return {"error": f"the adapter could not be read: {type(error).__name__}: {error}"}
    return {"error": str(error)}


def _lower_priority() -> None:
    if hasattr(os, "PRIO_PROCESS") and hasattr(threading, "get_native_id"):
        thread = threading.get_native_id()  # on Linux, a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
