"""What of the CUDA platform can be known without a card: when it is chosen, and the arithmetic of its memory."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import Tensor

from quire.attention.base import BACKENDS
from quire.errors import ConfigError, NotEnoughMemory
from quire.layers.linear import Linear
from quire.layers.weight_slots import set_parameter
from quire.logging import get_logger
from quire.models.offload import Offload
from quire.ops.dispatch import MODULES
from quire.platforms import cuda, detect
from quire.platforms.base import PLATFORMS, Memory, platform_of
from quire.platforms.cpu import CpuPlatform

GIB = 1 << 30
CARD = detect.CudaDevice("A card", 80 * GIB, (9, 0))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "cuda_device", lambda: CARD)
    monkeypatch.setattr(detect, "cuda_missing", lambda: "")


def platform(allocated: int, reserved: int, free: int, monkeypatch) -> cuda.CudaPlatform:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, CARD.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    return cuda.CudaPlatform()


def test_cuda_is_used_on_request(card, monkeypatch, caplog) -> None:
    monkeypatch.setattr(detect, "logger", get_logger("quire.platforms.detect"))  # it warns once
    with caplog.at_level(logging.WARNING):
        assert detect.facts().device == detect.facts().device == "cpu"
    (said,) = caplog.messages
    assert said == "not using A card: CUDA support is experimental; set QUIRE_DEVICE=cuda to use it"
    monkeypatch.setenv("QUIRE_DEVICE", "cuda")
    found = detect.facts()
    assert (found.device, found.depth, found.block_size, found.dtypes[0]) == (
        "cuda",
        2,
        16,
        "bfloat16",
    )
    monkeypatch.setattr(detect, "cuda_missing", lambda: "torch was built without CUDA")
    with pytest.raises(ConfigError, match="QUIRE_DEVICE=cuda, but torch was built without CUDA"):
        detect.facts()


def test_the_platform_reports_its_backends_and_defaults(card, monkeypatch) -> None:
    here = platform(0, 0, 70 * GIB, monkeypatch)
    assert set(here.attention) <= set(BACKENDS)
    assert set(here.kernels) <= {*MODULES, "reference"}
    assert here.default_depth == 2
    assert here.preferred_dtype("bfloat16") == "bfloat16"
    assert set(PLATFORMS) == {"cpu", "cuda"}
    assert isinstance(platform_of("cpu"), CpuPlatform)


def test_the_memory_plan_uses_free_memory_minus_a_reserve(card, monkeypatch) -> None:
    here = platform(allocated=2 * GIB, reserved=3 * GIB, free=60 * GIB, monkeypatch=monkeypatch)
    assert here.memory() == Memory(80 * GIB, 61 * GIB)
    assert here.plannable(Memory(80 * GIB, 80 * GIB), GIB) == Memory(
        80 * GIB, 60 * GIB - cuda.RESERVE
    )
    here.check_room(61 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"62464 MiB are free on A card.*needs 62465 MiB"):
        here.check_room(61 * GIB + (1 << 20))


def test_a_build_of_torch_without_cuda_is_refused(card, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        cuda.CudaPlatform()


@pytest.mark.device
def test_weights_travel_on_streams_of_the_card() -> None:
    """Large copies beside large products: what a layer computes with is its own, pass after pass."""
    torch.manual_seed(0)
    layers = [Linear(2048, 2048) for _ in range(9)]
    weights = [torch.randn(2048, 2048).bfloat16() for _ in layers]
    for layer, weight in zip(layers, weights, strict=True):
        set_parameter(layer, "weight", weight.clone())
    here = torch.device("cuda")
    offload = Offload(cuda.CudaCopier(here), 7 * weights[0].nbytes)
    offload.choose(layers)
    offload.install()
    x = torch.randn(512, 2048, device=here).bfloat16()
    want = [x @ weight.to(here).T for weight in weights]
    for _ in range(20):
        for layer, one in zip(layers, want, strict=True):
            assert layer.weight.is_cuda
            torch.testing.assert_close(layer(x), one)


class Streams:
    """Of torch.cuda, as much as a graph capturer uses; a capture that fails leaves its stream current, as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.made = "the caller's", 0
        for name, stand_in in {
            "current_stream": lambda: self,
            "set_stream": lambda stream: setattr(self, "current", "the caller's"),
            "stream": lambda stream: contextlib.nullcontext(),
            "Stream": lambda: self,
            "synchronize": lambda: None,
            "graph_pool_handle": self.pool,
            "CUDAGraph": lambda: None,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def pool(self) -> int:
        self.made += 1
        return self.made

    def wait_stream(self, stream) -> None:
        pass

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.current = "the capturer's"
        yield
        self.current = "the caller's"


def failing(code: int):
    runs = []

    def run() -> Tensor:
        runs.append(1)
        if len(runs) > cuda.WARM_UPS:
            error = torch.AcceleratorError("CUDA error: not now\nmore")
            error.error_code = code
            raise error
        return torch.zeros(1)

    return run


def test_a_failed_capture_is_not_a_lost_device(monkeypatch) -> None:
    streams = Streams(monkeypatch)
    capturer = cuda.CudaGraphCapturer()
    assert capturer.capture(lambda: torch.ones(1)).output == 1
    with pytest.raises(RuntimeError, match=r"^CUDA error: not now$") as caught:
        capturer.capture(failing(900))  # cudaErrorStreamCaptureUnsupported
    assert not isinstance(caught.value, torch.AcceleratorError)
    assert (streams.current, capturer.pool) == ("the caller's", 2)
    with pytest.raises(torch.AcceleratorError):
        capturer.capture(failing(719))  # cudaErrorLaunchFailure
    assert streams.current == "the caller's"
