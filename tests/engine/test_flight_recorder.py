"""The flight recorder: recordings are readable after any engine death, and replay to the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_client import Device, ask, collect, make
from toy_device import StepFailed

from quire.engine import flight_recorder
from quire.engine.client import InlineClient
from quire.engine.replay import replay
from quire.protocol.plan import EnteredRow
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams


def recorded(folder: Path, device: type[Device] = Device) -> InlineClient:
    client = make(device)
    client.core.executor.kin = Kin()
    client.recorder = flight_recorder.FlightRecorder(folder)
    client.core.observers.add(client.recorder)
    return client


class Kin(dict):
    """`kin` of the toy: the KV of every request depends only on its tokens."""

    def __missing__(self, id):
        return (None, "")


def fresh() -> Device:
    device = make().core.executor
    device.kin = Kin()
    return device


def run(client: InlineClient, rng: random.Random, requests: int) -> None:
    for start in range(0, requests, 6):
        ids = {f"r{start + i}" for i in range(6)}
        for id in sorted(ids):
            ask(client, id, rng.randint(1, 40))
        collect(client, ids)
    client.recorder.close()


@pytest.mark.parametrize("requests", [6, 60])
def test_a_replay_produces_the_same_tokens(tmp_path: Path, requests: int) -> None:
    run(recorded(tmp_path), random.Random(requests), requests)
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    steps = list(replay(recording, fresh(), budget=16))
    assert len(steps) > 30
    assert all(step.result is not None and not step.differs for step in steps)
    if requests == 60:
        assert recording.start.rows  # the recording starts in the middle of requests


def test_added_tokens_are_recorded_and_replayed(tmp_path: Path) -> None:
    client = recorded(tmp_path)
    device = client.core.executor
    device.adding = 0.6
    run(client, random.Random(6), 6)
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    again = fresh()
    again.adding = 0.6  # it draws from the same seed
    steps = list(replay(recording, again, budget=16))
    assert device.num_added > 10
    assert all(step.result is not None and not step.differs for step in steps)
    assert [s.result.added_tokens for s in steps] == [s.recorded.added_tokens for s in steps]  # type: ignore[union-attr]


def test_a_replay_detects_different_tokens(tmp_path: Path) -> None:
    run(recorded(tmp_path), random.Random(1), 6)
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    result = next(
        f for f in recording.frames if isinstance(f, flight_recorder.StepResult) and f.tokens[0]
    )
    result.tokens[0][0] += 1
    assert sum(step.differs for step in replay(recording, fresh(), budget=16)) == 1


def test_a_crash_records_the_ids_of_its_step(tmp_path: Path) -> None:
    class Dying(Device):
        left = 5

        def result(self, step):
            self.left -= 1
            if not self.left:
                raise MemoryError
            return super().result(step)

    client = recorded(tmp_path, Dying)
    ask(client, "short", 2)
    ask(client, "long", 30)
    with pytest.raises(Exception, match="MemoryError"):
        collect(client, {"short", "long"})
    client.recorder.close()
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    assert recording.unfinished() == {"long"}
    assert recording.seen() == {"short", "long"}


def test_an_incomplete_last_frame_is_ignored(tmp_path: Path) -> None:
    run(recorded(tmp_path), random.Random(1), 6)
    whole = flight_recorder.read_recording(tmp_path)
    for path in tmp_path.glob("flight-*"):
        path.write_bytes(path.read_bytes()[:-3])
    cut = flight_recorder.read_recording(tmp_path)
    assert whole is not None
    assert cut is not None
    assert cut.frames == whole.frames[:-1]


def test_an_unclosed_segment_is_readable(tmp_path: Path) -> None:
    """A segment larger than its first allocation; a restarted one contains none of its old frames."""
    segment, path = flight_recorder.RecordingSegment(tmp_path / "flight-0"), tmp_path / "flight-0"
    encode = flight_recorder.msgspec.msgpack.encode
    long = [flight_recorder.StepPlan(n, [], [], list(range(60_000))) for n in range(3)]
    assert list(flight_recorder.frames(path)) == []
    for plan in long:
        segment.append(encode(plan))
    assert list(flight_recorder.frames(path)) == long
    segment.restart()
    assert list(flight_recorder.frames(path)) == []
    short = flight_recorder.StepPlan(9, [], [], [1])
    segment.append(encode(short))
    assert list(flight_recorder.frames(path)) == [short]
    segment.close()
    assert list(flight_recorder.frames(path)) == [short]
    assert path.stat().st_size == 4 + len(encode(short))


@pytest.mark.skipif(not hasattr(flight_recorder.os, "posix_fallocate"), reason="no such call here")
def test_a_full_disk_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = flight_recorder.RecordingSegment(tmp_path / "flight-0")

    def full(file: int, start: int, room: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flight_recorder.os, "posix_fallocate", full)
    segment.append(b"a" * 1000)
    with pytest.raises(OSError, match="No space left"):
        segment.append(b"a" * flight_recorder.ROOM)
    segment.close()


def test_a_segment_that_was_just_begun_is_passed_over(tmp_path: Path) -> None:
    run(recorded(tmp_path), random.Random(1), 6)
    whole = flight_recorder.read_recording(tmp_path)
    (tmp_path / "flight-1").write_bytes(bytes(100))
    assert flight_recorder.read_recording(tmp_path) == whole


def test_a_failed_step_stops_a_replay_with_its_error(tmp_path: Path) -> None:
    run(recorded(tmp_path), random.Random(1), 6)
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None

    class Failing(Device):
        def launch(self, plan):
            raise StepFailed

    device = fresh()
    device.__class__ = Failing
    steps = list(replay(recording, device, budget=16))
    assert len(steps) == 1
    assert isinstance(steps[0].error, StepFailed)


def test_an_empty_folder_has_no_recording_and_a_wrong_file_is_refused(tmp_path: Path) -> None:
    assert flight_recorder.read_recording(tmp_path) is None
    (tmp_path / "flight-0").write_bytes(b"\x03\x00\x00\x00abc")
    with pytest.raises(ValueError, match="not a flight recording"):
        flight_recorder.read_recording(tmp_path)


# -- a recording that cannot be written -------------------------------------------------------------
def tokens_of(client: InlineClient, ids: set[str]) -> dict[str, list[int]]:
    return {
        id: [t for one in outs for t in one.tokens] for id, outs in collect(client, ids).items()
    }


def no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("when", ["at the first step", "later", "the folder is missing", "a fault"])
def test_a_recording_that_cannot_be_written_costs_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Regression: the engine died of it, and so did its replacement."""
    folder = tmp_path / "gone" if when == "the folder is missing" else tmp_path
    client, stops = make(), []
    client.core.executor.kin = Kin()
    recorder = flight_recorder.FlightRecorder(folder, lambda: stops.append(1))
    client.core.observers.add(recorder)
    if when == "later":
        ask(client, "before", 3)
        collect(client, {"before"})
        assert not stops
        assert flight_recorder.read_recording(folder) is not None
    if when == "a fault":
        monkeypatch.setattr(flight_recorder.FlightRecorder, "_result", lambda self, result: 1 / 0)
    else:
        monkeypatch.setattr(flight_recorder.RecordingSegment, "_grow", no_space)
        monkeypatch.setattr(flight_recorder.RecordingSegment, "append", no_space)
    ids = {f"r{number}" for number in range(4)}
    for id in sorted(ids):
        ask(client, id, 30)
    got = tokens_of(client, ids)
    assert stops == [1]
    assert recorder not in client.core.observers
    assert flight_recorder.read_recording(folder) is None
    assert not list(folder.glob("flight-*"))
    plain = make()
    for id in sorted(ids):
        ask(plain, id, 30)
    assert got == tokens_of(plain, ids)


def test_large_parameters_are_left_out_and_the_files_are_bounded(tmp_path: Path) -> None:
    """Regression: they were written for each child, again at each 64th plan: one request wrote 3 GiB."""
    client = recorded(tmp_path)
    large = SamplingParams(max_tokens=40, allowed_token_ids=list(range(200_000)))
    ids = {f"r{number}" for number in range(8)}
    for id in sorted(ids):
        client.core.executor.kin[id] = (None, "")
        client.submit(EngineRequest(id, [1, 2, 3], large))
    collect(client, ids)
    client.recorder.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("flight-*")) < 100_000
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    assert recording.seen() == ids
    [left_out] = {tuple(row.params.extra_args["left_out"]) for row in recording.start.rows or first(recording)}  # fmt: skip
    assert left_out == ("allowed_token_ids",)


def first(recording: flight_recorder.Recording) -> list[EnteredRow]:
    return next(f.entered for f in recording.frames if isinstance(f, flight_recorder.StepPlan))


def test_a_recording_is_bounded_and_replayable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "ROOM", 1 << 9)
    monkeypatch.setattr(flight_recorder, "MOST_ROOM", 1 << 10)
    run(recorded(tmp_path), random.Random(60), 60)
    assert all(path.stat().st_size <= 1 << 10 for path in tmp_path.glob("flight-*"))
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    steps = list(replay(recording, fresh(), budget=16))
    assert len(steps) > 5
    assert all(step.result is not None and not step.differs for step in steps)


def test_a_recording_lists_the_requests_running_at_its_end(tmp_path: Path) -> None:
    client = recorded(tmp_path)
    ask(client, "short", 2)
    ask(client, "long", 30)
    client.outputs()
    while "short" in client.core.scheduler.requests:
        client.outputs()
    client.outputs()
    recording = flight_recorder.read_recording(tmp_path)
    assert recording is not None
    assert [row.id for row in recording.running()] == ["long"]
    assert recording.seen() == {"short", "long"}
    client.recorder.close()
