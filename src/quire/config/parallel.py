"""ParallelConfig: numbers of devices, and how processes are made. Sizes above 1 are not supported yet."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Devices and processes."""

    tensor_parallel_size: int = 1
    """Devices that share each layer."""
    pipeline_parallel_size: int = 1
    """Devices that share the stack of layers."""
    data_parallel_size: int = 1
    """Engines that share the load."""
    enable_expert_parallel: bool = False
    """Whole experts on each device instead of slices of all."""
    distributed_executor_backend: str | None = None
    """uni: the worker in the engine's process; mp: the worker in its own; unset: uni."""
    attention_backend: str | None = None
    """TORCH_SDPA, or a name that this platform has; unset: the platform's first that fits."""
    enforce_eager: bool = False
    """No graphs."""
    cudagraph_capture_sizes: list[int] = field(default_factory=list)
    """Numbers of requests whose steps are recorded as graphs, on devices that can; unset: 1, 2, 4, 8, 16 ... max_num_seqs."""
