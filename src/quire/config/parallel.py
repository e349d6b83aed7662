"""ParallelConfig: numbers of devices, and how processes are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.ranges import AtLeast1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Devices and processes."""

    tensor_parallel_size: AtLeast1 = 1
    """Number of ranks that split each layer; on a CPU, processes that share the machine's cores (docs/parallel.md)."""
    pipeline_parallel_size: AtLeast1 = 1
    """Number of devices that each run a range of layers."""
    data_parallel_size: AtLeast1 = 1
    """Number of engines that share the requests."""
    enable_expert_parallel: bool = False
    """Place whole experts on each device instead of a slice of every expert."""
    distributed_executor_backend: str | None = None
    """uni: the worker runs in the engine's process; mp: in a process of its own; unset: uni."""
    attention_backend: str | None = None
    """TORCH_SDPA, or another attention backend of this platform; unset: the platform's first that supports the model."""
    enforce_eager: bool = False
    """Do not record steps as CUDA graphs."""
    cudagraph_capture_sizes: list[AtLeast1] = field(default_factory=list)
    """Batch sizes whose steps are recorded as CUDA graphs, on devices that support them; unset: 1, 2, 4, 8, 16 ... max_num_seqs."""
