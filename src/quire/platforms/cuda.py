"""The CUDA platform: NVIDIA GPUs, their memory, CUDA graphs and copy streams.

Knows torch's CUDA interface. Does not know models or kernels. One device per process: the first that
CUDA_VISIBLE_DEVICES allows.

Not yet proven on a GPU: tests cover what needs none, and `detect.py` uses this platform only if QUIRE_DEVICE=cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError, NotEnoughMemory
from quire.platforms import detect
from quire.platforms.base import Memory

RESERVE = 1 << 30
"""Bytes besides weights, activations and cache: CUDA graphs, workspaces of libraries, partial results of attention, and
fragmentation in the allocator."""
WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, which is impossible during a capture."""
OF_RECORDING = range(900, 910)
"""CUDA errors that end a capture (cudaErrorStreamCaptureUnsupported and those after it) and leave the device usable."""


class CudaPlatform:
    """See `Platform`.

    Raises:
        ConfigError: torch finds no device, though the driver has one.
    """

    name = "cuda"
    attention: tuple[str, ...] = detect.ATTENTION["cuda"]
    kernels: tuple[str, ...] = ("triton", "reference")

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "torch finds no CUDA device; install a CUDA build of torch that matches the driver"
            )
        found = detect.cuda_facts()
        self._facts = found
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.description = found.name
        self.default_depth = found.depth
        self.default_block_size = found.block_size
        self.default_num_batched_tokens = found.num_batched_tokens
        # No 16-bit partial results in split sums: where cuBLAS splits depends on the number of rows.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def prepare(self, weight_bytes: int) -> None:
        """Create the CUDA context, so that the memory plan sees what the context takes."""
        torch.cuda.init()
        torch.zeros(1, device=self.device)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.device)
        # Memory that torch's allocator has cached is free too.
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return Memory(total, free + kept)

    def plannable(self, forecast: Memory, tables: int) -> Memory:
        """See `Platform`. Uses current memory as a bound, because a forecast without a context assumes an empty GPU."""
        now = self.memory()
        available = min(forecast.available, now.available) - RESERVE - tables
        return Memory(now.total, max(0, available))

    def check_room(self, needed: int) -> None:
        """Check that a step's activations fit after everything else is allocated.

        Raises:
            NotEnoughMemory: they do not fit: the server would fail under load.
        """
        available = self.memory().available
        if available < needed:
            raise NotEnoughMemory(
                f"{available >> 20} MiB are free on {self.description} after loading weights and KV cache, but a step"
                f" needs {needed >> 20} MiB; another program may have allocated memory meanwhile. Lower"
                " gpu_memory_utilization."
            )

    def graph_capturer(self) -> CudaGraphCapturer:
        return CudaGraphCapturer()

    def copier(self) -> CudaCopier:
        return CudaCopier(self.device)

    def supports(self, dtype: str) -> bool:
        return dtype in self._facts.dtypes

    def preferred_dtype(self, checkpoint: str) -> str:
        return self._facts.preferred_dtype(checkpoint)


class Graph:
    """A captured CUDA graph and its output; see worker/graphs.py."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor):
        self.graph, self.output = graph, output

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphCapturer:
    """Captures CUDA graphs on its own stream; all graphs share one memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """See `GraphCapturer`. The runs keep their order with the work on the caller's stream.

        Raises:
            RuntimeError: `run` did something that CUDA cannot capture. The device stays usable.
        """
        before = torch.cuda.current_stream()
        try:
            return self._record(run)
        except torch.AcceleratorError as error:
            if getattr(error, "error_code", 0) not in OF_RECORDING:
                raise
            # Torch still marks the old pool as in capture.
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            raise RuntimeError(str(error).partition("\n")[0]) from error
        finally:
            torch.cuda.set_stream(before)  # torch does not restore it if a capture fails

    def _record(self, run: Callable[[], Tensor]) -> Graph:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (of grammars) may use the device meanwhile: forbid uncapturable calls in this thread only.
        mode = "thread_local"
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
            output = run()
        return Graph(graph, output)


class CudaCopier:
    """Copies on its own stream; see `Copier`."""

    def __init__(self, device: torch.device):
        self.place = device
        self.stream = torch.cuda.Stream(device)

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.place)
        # keeps the allocator from reusing freed memory during a copy
        buffer.record_stream(self.stream)
        return buffer

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        done = torch.cuda.Event()
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
            done.record(self.stream)
        return done

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)
