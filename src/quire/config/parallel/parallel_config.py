"""ParallelConfig: numbers of devices, and how processes are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.config.number_types import AtLeast0, AtLeast1

LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Devices and processes."""

    tensor_parallel_size: AtLeast1 = 1
    """Number of ranks that split each layer; on a CPU, processes that share the machine's cores (docs/parallel.md)."""
    pipeline_parallel_size: AtLeast1 = 1
    """Number of stages that each compute a range of the layers; on a CPU, processes that share the machine's cores (docs/parallel.md)."""
    prefill_context_parallel_size: AtLeast1 = 1
    """Number of ranks that each compute a part of a prompt's tokens; multiplies the number of processes (docs/parallel.md)."""
    decode_context_parallel_size: AtLeast1 = 1
    """Number of ranks that keep a part of the KV cache's blocks each: all of prefill_context_parallel_size, times some of tensor_parallel_size with equal KV heads."""
    data_parallel_size: AtLeast1 = 1
    """Number of engines that share the requests, each with all weights, or with enable_expert_parallel a part of the experts (docs/parallel.md)."""
    data_parallel_size_local: AtLeast0 | None = None
    """How many of these engines run on this machine, and divide its cores and memory; unset: all."""
    data_parallel_rank: AtLeast0 | None = None
    """Serve only this one of the engines: your load balancer distributes the requests among the servers."""
    data_parallel_start_rank: AtLeast0 | None = None
    """First of the engines of this machine: the server distributes its requests among these, your load balancer among the servers."""
    data_parallel_external_lb: bool = False
    """Your load balancer distributes the requests among engines, of which each has a server (as with data_parallel_rank)."""
    data_parallel_hybrid_lb: bool = False
    """Your load balancer distributes the requests among machines (as with data_parallel_start_rank)."""
    data_parallel_multi_port_external_lb: bool = False
    """A server for each engine of this machine, at the ports from --port on; your load balancer distributes the requests."""
    data_parallel_address: str | None = None
    """Address of the server whose engines run on several machines."""
    data_parallel_rpc_port: Annotated[int, Meta(ge=0, le=65535)] = 29550
    """Port of that server for engines on other machines."""
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    """mp: engines run on the machine of the server; ray: Ray starts data_parallel_size_local engines on each machine."""
    nnodes: AtLeast1 = 1
    """Number of machines of all engines; each has the same number of ranks, or of whole engines (docs/machines.md)."""
    node_rank: AtLeast0 = 0
    """Number of this machine among them; 0 has the HTTP server."""
    master_addr: str = "127.0.0.1"
    """Address of machine 0, at which the others reach it; another than a loopback address needs QUIRE_CLUSTER_KEY_FILE."""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 29501
    """TCP port of machine 0 for the others."""
    cpu_distributed_timeout_seconds: AtLeast1 | None = None
    """Seconds that a rank waits for one on another machine that is alive, but does not come; unset: 300."""
    enable_expert_parallel: bool = False
    """Place whole experts on each rank instead of a part of every expert; with data_parallel_size, engines share the experts."""
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    """With enable_expert_parallel: linear: neighbouring experts on one rank; round_robin: on different ranks."""
    enable_eplb: bool = False
    """Move experts between ranks, and copy busy ones, so that all ranks have as many tokens."""
    eplb_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with window_size, step_interval, num_redundant_experts, log_balancedness and log_balancedness_interval:
    docs/parallel.md."""
    distributed_executor_backend: str | None = None
    """uni: the worker runs in the engine's process; mp: a process for each rank; ray: Ray starts the ranks; external_launcher: torchrun started this one; unset: uni, with several ranks mp."""
    worker_extension_cls: str = ""
    """A class, package.module.Class, whose methods `collective_rpc` can call on every worker."""
    attention_backend: str | None = None
    """TORCH_SDPA, or another attention backend of this platform; unset: the platform's first that supports the model."""
    enforce_eager: bool = False
    """Do not record steps as CUDA graphs."""
    cudagraph_capture_sizes: list[AtLeast1] = field(default_factory=list)
    """Batch sizes whose steps are recorded as CUDA graphs, on devices that support them; unset: 1, 2, 4, 8, 16 ... max_num_seqs."""

    @property
    def is_external(self) -> bool:
        """Whether this server has one engine of several, and knows nothing of the others."""
        return self.data_parallel_rank is not None

    @property
    def is_hybrid(self) -> bool:
        return self.data_parallel_hybrid_lb or self.data_parallel_start_rank is not None

    @property
    def ranks(self) -> range:
        """The data parallel ranks of the engines among which this server or program distributes its requests."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        if not self.is_hybrid:
            return range(self.data_parallel_size)
        first = self.data_parallel_start_rank or 0
        return range(first, first + (self.data_parallel_size_local or 1))

    @property
    def local_ranks(self) -> range:
        """Those of them whose processes run on this machine: the first ones. Their ranks may be on other machines."""
        count = self.data_parallel_size_local
        own = self.data_parallel_rank is not None or self.is_hybrid or count is None
        only_ranks_elsewhere = self.nnodes > 1 or self.data_parallel_backend == "ray"
        return self.ranks if own or only_ranks_elsewhere else range(count or 0)

    @property
    def nodes_of_engine(self) -> range:
        """The machines, of `nnodes`, with the ranks of this engine; on another machine than 0: of the engine whose ranks it has."""
        count = max(1, self.nnodes // self.data_parallel_size)
        engine = self.node_rank // count or self.data_parallel_rank or 0
        return range(engine * count, (engine + 1) * count)

    @property
    def port_of_engine(self) -> int:
        """The port of machine 0 to which the other machines of this engine connect: each engine has its own."""
        return self.master_port + self.nodes_of_engine.start // len(self.nodes_of_engine)

    @property
    def share(self) -> tuple[int, int]:
        """(which, of how many) engines that divide this machine's cores and memory."""
        count = self.data_parallel_size_local or 1
        if self.data_parallel_rank is None:
            return 0, count if self.data_parallel_size_local is not None else len(self.ranks)
        return (self.data_parallel_rank - (self.data_parallel_start_rank or 0)) % count, count

    def place_on_machine(self, rank: int, size: int) -> tuple[int, int]:
        """(which, of how many) of the processes that compute on this machine is rank `rank` of `size` of this engine."""
        index, engines = self.share
        return index * size + rank, engines * size

    @property
    def world_size(self) -> int:
        """The number of ranks of one engine."""
        sizes = self.pipeline_parallel_size, self.prefill_context_parallel_size
        return sizes[0] * sizes[1] * self.tensor_parallel_size
