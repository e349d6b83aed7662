"""Random workloads whose engines die: every output equals the reference, and a request that kills is the only one to end.

    clients (ProcessClient) --- sockets in memory --- engines on toy devices, with flight recorders; they die and are replaced

Knows what a supervisor does after a death. `python tests/engine/deaths.py 2000` runs many by hand.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from test_client import make
from workload import Setting, draw_requests, draw_setting, reference

from quire.engine import process_client
from quire.engine.engine_state import EngineState, StateBoard
from quire.engine.flight_recorder import FlightRecorder, read_recording
from quire.engine.poison_requests import POISON, Suspects
from quire.engine.process_client import ProcessClient
from quire.features.resumed_requests.gate import COUNTER, ResumedRequestsGate
from quire.protocol.output import EngineOutput
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest, ToEngine
from quire.protocol.tensor_data import FrameEncoder

MAX_TURNS = 20_000


class Died(BaseException):
    """The process of an engine ends."""


class Pipe:
    """One direction of a socket."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, data: bytes) -> None:
        self.messages.append(data)

    def poll(self, wait_ms: int) -> int:
        return len(self.messages)

    def recv_multipart(self) -> list[bytes]:
        return self.messages.pop(0)


class MemorySockets:
    """In the place of `EngineSockets`. `ends`: of each process, by its folder."""

    ends: ClassVar[dict[Path, MemorySockets]] = {}

    def __init__(self, context: Any, folder: Path, client: int):
        other = self.ends.setdefault(folder, self)
        self.down, self.up = (Pipe(), Pipe()) if other is self else (other.down, other.up)

    def close(self) -> None:
        pass


class Mortal:
    """An engine of the test: each process that follows a death, the supervisor that starts the processes, and the client."""

    def __init__(self, world: World, number: int):
        self.world, self.number = world, number
        self.folder = world.folder / str(number)
        self.folder.mkdir()
        self.board = StateBoard()
        self.board.publish(EngineState(1, "ready"))
        self.client = ProcessClient(
            world.resolved, self.folder, self.board, suspects=world.client_suspects
        )
        self.encoder = FrameEncoder()
        self.start()

    def start(self) -> None:
        world = self.world
        self.process = process = world.setting()
        self.gate = ResumedRequestsGate(process.core.counts)
        process.core.counts[COUNTER] = 0
        process.scheduler.gates.append(self.gate)
        process.device.kin |= world.kin
        write = process.device._write

        def write_or_die(row: Any, sequence: list[int], start: int, end: int) -> None:
            if start <= world.killers.get(row.id, -1) < end:
                raise Died(row.id)
            write(row, sequence, start, end)

        process.device._write = write_or_die
        folder = self.folder / str(self.board.latest.epoch)
        folder.mkdir(exist_ok=True)
        self.recorder = FlightRecorder(folder)
        process.core.observers.add(self.recorder)
        self.sockets = MemorySockets(None, folder, 0)
        self.unsent: list[EngineOutput] = []

    def close(self) -> None:
        self.world.resumed += self.process.core.counts[COUNTER]
        self.recorder.close()
        self.client.close()
        self.board.close()

    def is_loading(self) -> bool:
        """Long enough for its client to hear of the death."""
        return self.client.epoch != self.board.latest.epoch

    def turn(self) -> None:
        if self.is_loading():
            return
        sockets, core, rng = self.sockets, self.process.core, self.world.rng
        for data in sockets.down.messages:
            core.inbox.put(msgspec.msgpack.decode(data, type=ToEngine))
        sockets.down.messages.clear()
        self.process.late.now += 1
        try:
            self.unsent += core.receive(block=False)
            self.unsent += core.step()
        except Died as died:
            self.world.excuse(self, *died.args)
            self.die()
            return
        if self.unsent and rng.random() < 0.7:
            sockets.up.messages.append(self.encoder.encode(self.unsent))
            self.unsent = []

    def die(self) -> None:
        """As `EngineSupervisor._after`."""
        state = self.board.latest
        self.recorder.close()
        recording = read_recording(self.folder / str(state.epoch))
        lengths = {} if recording is None else recording.lengths()
        suspects = self.world.suspects
        blamed = [] if recording is None else suspects.died(recording.running(), lengths)
        self.world.resumed += self.process.core.counts[COUNTER]
        self.board.publish(EngineState(
            state.epoch + 1, "restarting", lost=lengths, blamed=blamed, recorded=recording is not None,
            poison=suspects.poison(),
        ))  # fmt: skip
        self.start()


class World:
    """Engines, requests and deaths, drawn from a seed."""

    def __init__(self, seed: int, folder: Path):
        self.rng, self.folder = random.Random(seed), folder
        self.resolved = make().resolved
        self.suspects, self.client_suspects = Suspects(), Suspects()
        self.killers: dict[str, int] = {}
        """By id, the position whose computation ends the process."""
        self.excused: set[str] = set()
        """They were on trial when their engine died for another reason, which looks as if they had done it."""
        self.resumed = 0.0
        first = self.setting()
        draw_requests(first)
        self.arrivals = [self.drawn(asked) for asked in first.arrivals]
        self.kin = first.device.kin
        self.got: dict[str, list[int]] = {asked.id: [] for asked in self.arrivals}
        self.ends: dict[str, EngineOutput] = {}
        self.aborted: set[str] = set()
        if self.rng.random() < 0.6:
            self.make_killer(self.rng.choice(self.arrivals))
        self.deaths = self.rng.choice([0, 1, 2, 2])
        self.engines = [Mortal(self, number) for number in range(self.rng.choice([1, 1, 2]))]
        if len(self.engines) == 2:
            for one in self.engines:
                one.client.give_back = self.give_back

    def setting(self) -> Setting:
        """A process: it need not be configured as the one before it."""
        while True:
            setting = draw_setting(self.rng.randrange(1 << 30))
            cross = setting.scheduler.kv.max_encoder_len
            if not setting.faulty and not cross and setting.scheduler.kv.pool.usable >= 60:
                return setting

    def drawn(self, asked: EngineRequest) -> EngineRequest:
        if isinstance(asked.params, PoolingParams):
            asked.params = PoolingParams()
        asked.extras = {"number": asked.id.encode()}  # no two requests have one digest
        return asked

    def make_killer(self, asked: EngineRequest) -> None:
        if not isinstance(asked.params, PoolingParams):
            self.killers[asked.id] = self.rng.randrange(len(asked.tokens) + 12)

    def give_back(self, outputs: list[EngineOutput], requests: list[EngineRequest]) -> None:
        self.take(outputs)
        for request in requests:
            self.submit(request)

    def submit(self, request: EngineRequest) -> None:
        self.rng.choice(self.engines).client.submit(request)

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.id not in self.ends, f"{output.id} speaks after its end"
            assert output.logprobs is None
            self.got[output.id] += output.tokens
            if output.finish is not None:
                self.ends[output.id] = output

    def run(self) -> None:
        to_come, rng = list(self.arrivals), self.rng
        for _ in range(MAX_TURNS):
            if len(self.ends) == len(self.arrivals):
                break
            if to_come and rng.random() < 0.4:
                self.submit(to_come.pop(0))
            if rng.random() < 0.01:
                self.abort(rng.choice(self.arrivals).id)
            for engine in self.engines:
                engine.turn()
                if self.deaths and rng.random() < 0.03 and not engine.is_loading():
                    self.kill(engine)
            if rng.random() < 0.8:
                for engine in self.engines:
                    self.receive(engine.client)
        self.check()

    def abort(self, id: str) -> None:
        if id not in self.ends:
            for engine in self.engines:
                if id in engine.client._unfinished:
                    self.aborted.add(id)
                    engine.client.abort([id])

    def kill(self, engine: Mortal) -> None:
        self.deaths -= 1
        self.excuse(engine)
        engine.die()

    def excuse(self, engine: Mortal, guilty: str = "") -> None:
        request = engine.gate.on_trial
        if request is not None and request.id != guilty:
            self.excused.add(request.id)

    def receive(self, client: ProcessClient) -> None:
        client._receive(0)
        outputs, client._outputs = client._outputs, []
        self.take(outputs)

    def check(self) -> None:
        for asked in self.arrivals:
            id = asked.id
            assert id in self.ends, f"{id} was lost"
            (want, why), got, end = reference(asked), self.got[id], self.ends[id]
            if end.finish in ("abort", "error"):
                assert got == want[: len(got)], f"{id}: {got} is not how {want} begins"
            else:
                assert (got, end.finish) == (want, why), f"{id}: {got} {end.finish} != {want} {why}"
            if end.finish == "abort":
                assert id in self.aborted
            if end.finish == "error":
                assert end.error == POISON, end.error
                assert id in self.killers or id in self.excused, f"{id} ended for what another did"
        for engine in self.engines:
            engine.process.core.idle = False
            assert not engine.client._unfinished


def trial(seed: int) -> World:
    """Run and check one random workload."""
    before, process_client.EngineSockets = process_client.EngineSockets, MemorySockets  # type: ignore
    try:
        with tempfile.TemporaryDirectory() as folder:
            world = World(seed, Path(folder))
            try:
                world.run()
            finally:
                for engine in world.engines:
                    engine.close()
            return world
    finally:
        process_client.EngineSockets = before  # type: ignore


def main(trials: int, first: int = 0) -> None:
    logging.disable(logging.CRITICAL)
    resumed, guilty = 0.0, 0
    for seed in range(first, first + trials):
        try:
            world = trial(seed)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        resumed += world.resumed
        guilty += sum(world.ends[id].finish == "error" for id in world.killers)
    print(
        f"{trials} workloads equal to the reference; {resumed:.0f} requests went on, {guilty} guilty ones ended"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:]))
