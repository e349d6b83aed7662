"""Timing of calls on a GPU.

Knows CUDA events, CUDA graphs and the GPU's L2 cache. Does not know what it times. Two ways:

    timed    events around each call: for long calls, because it includes the host's launches
    cold     a CUDA graph with many calls, each after a read that evicts the L2 cache: the time of a kernel of a few
             microseconds inside a captured step, where its weights or keys come from memory
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

CACHE = 256 << 20  # bytes: a few times the size of a GPU's L2 cache
REPLAYS = 5


def timed(run: Run, call: Callable[[], Any], least: int = 10) -> float:
    """Median seconds of a call on the device, after a warm-up."""
    if run.device != "cuda":
        return _on_the_host(call)
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(least + 1)]
    for mark in marks:
        mark.record()
        if mark is not marks[-1]:
            call()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def cold(run: Run, call: Callable[[], Any], times: int = 10) -> float:
    """Seconds of a call with a cold L2 cache. A call that CUDA cannot capture is timed by `timed`."""
    if run.device != "cuda":
        return _on_the_host(call)
    filler = torch.zeros(CACHE // 4, device=run.device)

    def after_filling() -> None:
        filler.amax()
        call()

    try:
        both, alone = (_recorded(what, times) for what in (after_filling, filler.amax))
    except RuntimeError:
        torch.cuda.synchronize()
        return timed(run, call, times)
    return max(1e-9, (both - alone) / times)


def _recorded(call: Callable[[], Any], times: int) -> float:
    """Median seconds of a graph with this many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    took = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took) / 1e3


def _on_the_host(call: Callable[[], Any]) -> float:
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
