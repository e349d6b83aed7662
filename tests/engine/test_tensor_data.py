"""Tensors in messages arrive unchanged in another process; other objects are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_process_client import Place, ask, place  # noqa: F401

from quire.engine.engine_main import FrontendLink
from quire.errors import ValidationError
from quire.executor.messages import decode_up, encode
from quire.protocol.output import EngineOutput, FromEngine, Reply
from quire.protocol.plan import StepResult
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest, ToEngine
from quire.protocol.tensor_data import MAX_BYTES, FrameDecoder, FrameEncoder, TensorData

SIZES = [0, 1, 3, 1000, 100_000]


def vector(size: int) -> TensorData:
    return TensorData("float32", [size], os.urandom(4 * size))


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_survives_a_round_trip_between_processes(size: int) -> None:
    sent = StepResult(3, [[], [4]], tensors={0: vector(size)})
    assert decode_up(encode(sent)) == sent


def test_only_large_tensors_have_frames_of_their_own() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder[list[FromEngine]](list[FromEngine])
    sent = [EngineOutput(str(size), [], "stop", tensor=vector(size)) for size in SIZES]
    frames = encoder.encode(sent)
    assert [len(frame) for frame in frames[1:]] == [400_000]
    assert len(frames[0]) < 5_000
    assert decoder.decode([bytes(frame) for frame in frames]) == sent
    assert len(encoder.encode(sent[:1])) == 1


def test_a_client_in_another_process_gets_the_same_tensors(place: Place, tmp_path: Path) -> None:  # noqa: F811
    client = place.client()
    link = FrontendLink(tmp_path / "1", 1)
    sent = [EngineOutput(str(size), [], "stop", tensor=vector(size)) for size in SIZES]
    for id in [output.id for output in sent]:
        client.submit(EngineRequest(id, [1], PoolingParams(dimensions=3)))
    link.send(list(sent))
    assert client.outputs() == sent
    asked = msgspec.msgpack.decode(link.down.recv(), type=ToEngine)
    assert isinstance(asked, EngineRequest)
    assert asked.params == PoolingParams(dimensions=3)
    link.down.context.destroy(linger=0)
    client.close()


@dataclass(frozen=True)
class Point:
    x: int


@pytest.mark.parametrize("value", [object(), 1 << 64, {Point(1): 2}, "\ud800"])
def test_an_answer_that_cannot_be_sent_is_an_error_of_that_call(tmp_path: Path, value: Any) -> None:
    """Regression: it ended the engine, or the frontend's thread that receives outputs."""
    link, frames = FrontendLink(tmp_path, 1), []
    link._send = lambda socket, messages: frames.append(link.encoder.encode(messages))  # type: ignore[method-assign, assignment]
    output = EngineOutput("other", [5], None)
    link.send([Reply(3, value), output, Reply(4, [1])])
    first, *others = FrameDecoder[list[FromEngine]](list[FromEngine]).decode(frames[0])
    assert isinstance(first, Reply)
    assert (first.id, first.value) == (3, None)
    assert "cannot be sent to another process" in (first.error or "")
    assert others == [output, Reply(4, [1])]
    link.down.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("float32", [3], 8), ("complex64", [1], 8), ("float32", [-1, -2], 8), ("uint8", [1] * 9, 1), ("float32", [2, 2], 17)],
)  # fmt: skip
def test_bytes_that_are_no_tensor_are_refused(dtype: str, shape: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="tensor"):
        TensorData(dtype, shape, bytes(size))


@pytest.mark.parametrize("wire", [["float32", [1], 1], ["float32", [1], 7], ["float32", [1]], 5, ["uint8", [2], b"x"]])  # fmt: skip
def test_frames_that_are_no_tensor_are_refused(wire: object) -> None:
    decoder = FrameDecoder[StepResult](StepResult)
    values = ["result", 1, [[]], {}, {}, {}, [], {}, {}, {0: wire}]
    with pytest.raises(msgspec.ValidationError):
        decoder.decode([msgspec.msgpack.encode(values), b"123"])


def test_a_tensor_has_a_largest_size() -> None:
    assert MAX_BYTES <= 1 << 30
    with pytest.raises(ValueError, match="has 3 bytes"):
        TensorData("uint8", [MAX_BYTES + 1], b"123")


@pytest.mark.parametrize(
    "wrong",
    [{"dimensions": 0}, {"use_activation": "maybe"}, {"step_tag_id": -1}, {"returned_token_ids": ["a"]}, {"extra_kwargs": 3}],
)  # fmt: skip
def test_pooling_parameters_are_validated(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as error:
        PoolingParams(**wrong)  # type: ignore[arg-type]
    assert error.value.parameter == next(iter(wrong))
