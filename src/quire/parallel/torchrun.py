"""TorchrunMachines: ranks that torchrun has started find each other, and watch each other: no executor looks at them.

A rank that waits for another looks each second whether it must go on waiting. So a rank that is stopped, or whose engine has
ended, ends the engines of all ranks within 30 seconds. Knows torchrun's store. Does not know engines or layers. No torch here until `meet`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from quire.errors import RankLost
from quire.parallel.multi_node import MEET_S, Machines
from quire.processes.child import StopCounter

BEAT_S = 2.0
"""How often a rank tells the ranks of other machines that it lives."""
MISSED, LOOKS = 10, 20
"""Beats of this rank without one of another, or looks without a beat of its own, after which the other one, or the store, is lost."""
AGREE_S = 10.0
"""How long a rank whose step failed waits for the others to fail it, too."""


class RankWatch:
    """What one rank knows of the others of its engine.

    Args:
        store: of torchrun, for this engine only.
        nodes: the machine of each rank.
    """

    def __init__(self, store: Any, rank: int, nodes: Sequence[int]):
        self._store, self.rank = store, rank
        self._others = [other for other in range(len(nodes)) if other != rank]
        store.set(f"process {rank}", str(os.getpid()))
        store.add(f"beat {rank}", 1)
        local = [other for other in self._others if nodes[other] == nodes[rank]]
        self._stops = {each: StopCounter(int(store.get(f"process {each}"))) for each in local}
        far = [other for other in self._others if other not in local]
        self._beats, self._missed = dict.fromkeys(far, 0), dict.fromkeys(far, 0)
        # why the engine of another rank has ended; looks since the last beat
        self._why, self._looks, self._failures = "", 0, 0
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="rank-watch", daemon=True).start()

    def _beat(self) -> None:
        """The only thread that uses the store while ranks exchange: it may not answer."""
        try:
            while not self._left.wait(BEAT_S):
                self._looks = 0
                self._store.add(f"beat {self.rank}", 1)
                for other, before in self._beats.items():
                    self._beats[other] = count = self._store.add(f"beat {other}", 0)
                    self._missed[other] = self._missed[other] + 1 if count == before > 0 else 0
                if self._store.check(["left"]):
                    self._why = self._store.get("left").decode()
        except RuntimeError as error:
            self._why = f"the store of torchrun does not answer: {error}"

    def look(self) -> None:
        """Called each second of a wait for other ranks. Raises RankLost: one of them does not come any more."""
        self._looks += 1
        if (reason := self._why) or (reason := next(self._lost(), "")):
            raise RankLost(f"rank {self.rank} waited for others: {reason}")

    def _lost(self) -> Iterator[str]:
        stopped = [other for other, stops in self._stops.items() if stops.look()]
        yield from (f"rank {other} is stopped (SIGSTOP, or a debugger)" for other in stopped)
        silent = [other for other, missed in self._missed.items() if missed >= MISSED]
        yield from (f"rank {other} was silent for {MISSED * BEAT_S:g} s" for other in silent)
        if self._looks > LOOKS:
            yield f"the store of torchrun did not answer for {LOOKS} s"

    def failed(self, error: Exception) -> None:
        """A step failed here. Raises RankLost: other ranks did not fail it, or for another reason."""
        self._failures += 1
        keys = [f"failed {self._failures} {other}" for other in self._others]
        self._store.set(f"failed {self._failures} {self.rank}", str(error))
        until = time.monotonic() + AGREE_S
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise RankLost(f"only rank {self.rank} failed a step: {error}")
            time.sleep(0.05)
        if any(self._store.get(key).decode() != str(error) for key in keys):
            raise RankLost(f"ranks failed a step for different reasons, rank {self.rank}: {error}")

    def leave(self, why: str) -> None:
        """This rank's engine has ended: the others need not wait for it. May be called twice."""
        if not self._left.is_set():
            self._left.set()
            try:
                self._store.set("left", f"the engine of rank {self.rank} has ended: {why}")
            except RuntimeError:
                return  # the store has ended, so the others have


class TorchrunMachines(Machines):
    """Of rank `rank` of engine `engine`. `watch`: from `meet` on."""

    rank: int = 0
    engine: int = 0
    watch: Any = None

    def meet(self) -> Any:
        """Torch's store for the next engine of this process. Raises RankLost: the others did not come."""
        from quire.parallel.gloo import dist, prefixed

        seconds = timedelta(seconds=MEET_S)
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=seconds)))
        if not dist.is_initialized():  # programs ask torch.distributed for their rank
            group = prefixed("default group", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world)
        store = prefixed(f"engine {self.engine}", store)
        before = store.add("quire ranks", 1) - 1  # each rank adds 1 for each of its engines
        store = prefixed(f"quire {before // len(self.nodes)}", store)
        self.watch = RankWatch(store, self.rank, self.nodes)
        return store

    def look(self) -> None:
        """Raises RankLost: a rank does not come any more."""
        self.watch.look()
