"""KeptStates: recurrent states at their checkpoints, which are kept in parts, as blocks are.

A state is larger than a block, so its bytes are divided into parts. Part i has the name of the block that ends at the checkpoint, in
the group after the last KV group + i. A state is kept if all parts are.

    load    a place of the CheckpointPool that nobody finds -> parts are read, and the plans copy them there -> after the plan with the
            last part the checkpoint can be found, so the request can continue from it. Each plan names the one before that has
            copied parts: if one has failed, workers refuse to continue from the state.
    save    the step that has made the checkpoint is committed -> plans copy its parts, a few each -> a thread writes them. A
            checkpoint that is evicted before is copied by the plan that overwrites it, if its parts are no more than a plan may copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kvcache.checkpoints import Checkpoint, CheckpointPool
from quire.kvstore.disk import Key
from quire.kvstore.store_list import StoreList

MOST_PENDING = 4096
"""States that wait to be saved; more are not kept."""


@dataclass(eq=False, slots=True)
class StateLoad:
    """A state on its way to a reserved place.

    Attributes:
        num_left: parts that no plan has copied yet.
        last_step: the last plan that copied parts; 0: none has.
    """

    hash: bytes
    slot: int
    num_left: int
    last_step: int = 0


@dataclass(eq=False, slots=True)
class StateSave:
    """A checkpoint that is being saved. `step`: made it, or continues from it; `num_copied`: parts that plans have copied."""

    slot: int
    step: int
    num_copied: int = 0


class KeptStates:
    """Knows checkpoints, names and parts; the gate knows plans and requests. Plug it into the pool as a listener.

    Args:
        first_group: the number of the first part.
        part_bytes: of each part, over all ranks; empty: no states are kept.
        boundary: checkpoints are at multiples of this number of blocks.
        is_committed: whether a step is.
        skip: called for each state that is lost before it is saved.
    """

    def __init__(
        self,
        pool: CheckpointPool,
        store: StoreList,
        first_group: int,
        part_bytes: Sequence[int],
        boundary: int,
        is_committed: Callable[[int], bool],
        skip: Callable[[], None],
    ):
        self.pool, self.store, self.first_group, self.part_bytes = (
            pool,
            store,
            first_group,
            part_bytes,
        )
        self.boundary, self._is_committed, self._skip = boundary, is_committed, skip
        self.new: dict[bytes, tuple[int, bool]] = {}
        """Since the last plan was made: the place, and whether a request continues from the state (else a step makes it)."""
        self.unsaved: OrderedDict[bytes, StateSave] = OrderedDict()
        self.leaving: list[tuple[bytes, StateSave]] = []  # overwritten by the next plan
        pool.listeners.append(self)

    def keys(self, hash: bytes) -> list[Key]:
        """The names of the parts of a state."""
        return [(self.first_group + part, hash) for part in range(len(self.part_bytes))]

    def is_part(self, key: Key) -> bool:
        return key[0] >= self.first_group

    # -- loads ------------------------------------------------------------------------------------
    def last_kept(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """The last number of blocks after `first`, up to `end`, at which a state is kept that can be loaded; `first`: there is none."""
        if self.pool.can_reserve:
            for number, hash in enumerate(self.places(hashes, first, end)):
                if self.is_kept(hash, self.store.__contains__):
                    return (end // self.boundary - number) * self.boundary
        return first

    def places(self, hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """The names of blocks after `first`, up to `end`, at which a state may be kept, the last one first."""
        if not self.part_bytes:
            return []
        last = end // self.boundary * self.boundary
        return [hashes[number - 1] for number in range(last, first, -self.boundary)]

    def is_kept(self, hash: bytes, has: Callable[[Key], bool]) -> bool:
        """Whether `has` knows all parts. Most prompts have hundreds of places and few states: the part that is written last says no."""
        last = self.first_group + len(self.part_bytes) - 1
        return has((last, hash)) and all(map(has, self.keys(hash)))

    def bytes_to_load(self, hash: bytes) -> int:
        """Of the state with this name, unless it is in the device's memory."""
        return 0 if hash in self.pool else sum(self.part_bytes)

    def begin_load(self, hash: bytes) -> StateLoad | None:
        """None: it is there, or no place is left."""
        if not self.part_bytes or hash in self.pool or (slot := self.pool.reserve()) is None:
            return None
        return StateLoad(hash, slot, len(self.part_bytes))

    def copied(self, load: StateLoad, num_parts: int, step: int) -> None:
        """This plan copies so many parts."""
        load.num_left, load.last_step = load.num_left - num_parts, step
        if not load.num_left:
            self.pool.publish(load.hash, load.slot, step)

    def cancel(self, load: StateLoad) -> None:
        """The load is not needed any more."""
        if load.num_left:
            self.pool.give_back(load.slot)

    def failed_load(self, load: StateLoad) -> None:
        """A plan that copied parts has failed."""
        if self.pool.find(load.hash) == Checkpoint(load.slot, load.last_step):
            self.pool.forget(load.hash)

    # -- as a CheckpointListener ------------------------------------------------------------------
    def on_add(self, hash: bytes, found: Checkpoint) -> None:
        self.new[hash] = found.slot, False

    def on_use(self, hash: bytes, found: Checkpoint) -> None:
        self.new.setdefault(hash, (found.slot, True))

    def on_forget(self, hash: bytes, found: Checkpoint, is_evicted: bool) -> None:
        is_new = self.new.pop(hash, None) is not None
        save = self.unsaved.pop(hash, None)
        if save is not None and is_evicted and self._is_committed(save.step):
            self.leaving.append((hash, save))
        elif save is not None or (is_new and is_evicted):
            self._skip()

    # -- saves ------------------------------------------------------------------------------------
    def consider(self, step: int, is_wanted: Callable[[bytes, bool], bool]) -> None:
        """`step`: of the plan that is made now. is_wanted: whether a state is saved, by its name and whether it is used again."""
        new, self.new = self.new, {}
        for hash, (slot, is_reused) in new.items():
            if hash in self.unsaved or not self.part_bytes or not is_wanted(hash, is_reused):
                continue
            if not all(self.store.is_everywhere(key) for key in self.keys(hash)):
                self.unsaved[hash] = StateSave(slot, step)
        while len(self.unsaved) > MOST_PENDING:
            self.unsaved.popitem(last=False)
            self._skip()

    def choose(self, most: int, most_leaving: int) -> list[tuple[Key, int]]:
        """(name, place) of the parts that this plan copies: of states that it overwrites first, then of the oldest."""
        leaving, self.leaving = self.leaving, []
        chosen: list[tuple[Key, int]] = []
        for hash, save in leaving:
            keys = self.keys(hash)[save.num_copied :]
            if len(chosen) + len(keys) <= most_leaving:
                chosen += [(key, save.slot) for key in keys]
            else:
                self._skip()
        for hash, save in list(self.unsaved.items()):
            if len(chosen) >= most or not self._is_committed(save.step):
                break
            keys = self.keys(hash)[save.num_copied :][: most - len(chosen)]
            chosen += [(key, save.slot) for key in keys]
            save.num_copied += len(keys)
            if save.num_copied == len(self.part_bytes):
                del self.unsaved[hash]
        return chosen

    def failed(self, step: int) -> None:
        """What this step, and those after it, made or continued from may be wrong."""
        for hash in [hash for hash, save in self.unsaved.items() if save.step >= step]:
            del self.unsaved[hash]

    def forget_unsaved(self) -> None:
        self.new.clear()
        self.unsaved.clear()
        self.leaving.clear()
