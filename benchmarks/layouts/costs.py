"""The cost model of `python -m benchmarks layouts`: seconds of exchanges, of a step and of a workload, and bytes of each device.

Knows numbers of links, devices and parts of a model. Does not know torch, config.json or the command line.

    exchange    gather: (n - 1) * latency + (n - 1) / n * S / bandwidth, S bytes of all parts together
                send: latency + S / bandwidth; an all-reduce, which Quire does not need, would take two gathers of S bytes
    step        the longer of arithmetic and memory traffic, then the exchanges
    workload    each request's prompt once, then a decode step for each token, for all requests that run at once

Decision 65 says why Quire gathers. Sources: for exchanges, the usual model of latency and bandwidth (Thakur, Rabenseifner and
Gropp, 2005); for steps, the roofline model (Williams, Waterman and Patterson, 2009). Units: bytes, seconds, operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class LinkSpeed(NamedTuple):
    """How long a message takes between two devices."""

    latency_s: float
    bandwidth: float  # bytes/s, in each direction


LINKS = {
    "nvlink": LinkSpeed(2e-6, 450e9),
    "pcie": LinkSpeed(5e-6, 50e9),
    "infiniband": LinkSpeed(5e-6, 50e9),
    "ethernet": LinkSpeed(50e-6, 12.5e9),
    "shared-memory": LinkSpeed(27e-6, 53.8e9),
    "gloo": LinkSpeed(170e-6, 1.1e9),
    "internet": LinkSpeed(15e-3, 12.5e6),
}
"""NVLink 4, PCIe 5 x16, InfiniBand NDR, 100 GbE with TCP, shared memory of two sockets and gloo on loopback (both from DeepSpeed
#5391), and the internet at 100 Mbit/s and 15 ms."""


class DeviceSpeed(NamedTuple):
    """One device; `operations`: per second, in 16 bits."""

    operations: float
    bandwidth: float
    memory: float


DEVICES = {
    "a100": DeviceSpeed(312e12, 2.0e12, 80e9),
    "l40s": DeviceSpeed(362e12, 0.864e12, 48e9),
    "h100": DeviceSpeed(989e12, 3.35e12, 80e9),
    "h200": DeviceSpeed(989e12, 4.8e12, 141e9),
    "b200": DeviceSpeed(2250e12, 8.0e12, 180e9),
}
"""From data sheets. Real kernels reach a part of these numbers, so the plan compares layouts; it predicts no measurement."""


def send_s(link: LinkSpeed, num_bytes: float) -> float:
    return link.latency_s + num_bytes / link.bandwidth


def gather_s(link: LinkSpeed, ranks: int, num_bytes: float) -> float:
    """All ranks get the parts of all; `num_bytes` of all parts together."""
    return (ranks - 1) * (link.latency_s + num_bytes / ranks / link.bandwidth)


@dataclass(frozen=True, slots=True)
class PartCosts:
    """What one of `tensor` ranks has and does, over all layers of the model.

    Attributes:
        weights: bytes, embedding and LM head included; of one weight: `item`.
        ends: the embedding's and the head's bytes, which `weights` includes; `end`: the larger one's bytes.
        dense, head: weights that multiply each token, and each drawn token.
        experts: weights of all experts; a token uses the fraction `chosen` of them.
        kv: bytes of a token in the KV cache.
        attention: products of a query and the keys and values of one token.
        inner_widths: of each exchange in the layers, bytes of a token in one rank's part.
        drawn_widths: as `inner_widths`, of each drawn token.
        hidden: bytes of a token between layers.
    """

    tensor: int
    num_layers: int
    weights: float
    item: float
    ends: float
    end: float
    dense: int
    head: int
    experts: int
    chosen: float
    kv: int
    attention: int
    inner_widths: tuple[int, ...]
    drawn_widths: tuple[int, ...]
    hidden: int


class ParallelLayout(NamedTuple):
    """Numbers of engines, stages, prefill parts and ranks of a layer; neighbouring devices are ranks of a layer."""

    data: int = 1
    pipeline: int = 1
    prefill: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.prefill * self.tensor

    def __str__(self) -> str:
        short = zip(("dp", "pp", "pcp", "tp"), self, strict=True)
        return " ".join(f"{name} {n}" for name, n in short if n > 1) or "one device"


class Cluster(NamedTuple):
    """Devices and what connects them."""

    device: DeviceSpeed
    link: LinkSpeed
    machine_link: LinkSpeed
    per_machine: int  # devices of a machine

    def between(self, stride: int, ranks: int) -> LinkSpeed:
        """The slowest link of a group of ranks, `stride` devices apart."""
        return self.link if stride * ranks <= self.per_machine else self.machine_link


class PlannedLoad(NamedTuple):
    """Requests that run at once, in all engines together, and the tokens of each; `chunk`: tokens of a prefill step."""

    requests: int
    input_len: int
    output_len: int
    chunk: int


class LayoutCosts(NamedTuple):
    """The estimate of a layout; `reason`: why it cannot serve, else empty."""

    layout: ParallelLayout
    tokens_per_s: float = 0.0  # output tokens, of all engines
    ttft_s: float = 0.0  # of one prompt, on idle devices
    tpot_s: float = 0.0
    memory: float = 0.0  # bytes of the fullest device, with the requests that run
    requests: int = 0  # that run at once, in all engines
    exchange: float = 0.0  # part of a decode step
    reason: str = ""


def layouts(devices: int) -> Iterator[ParallelLayout]:
    """All that use this number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for pipeline, prefill, tensor in itertools.product(divisors, repeat=3):
        inner = pipeline * prefill * tensor
        if devices % inner == 0:
            yield ParallelLayout(devices // inner, pipeline, prefill, tensor)


class LayoutModel:
    """The costs of one layout. `part`: for its number of ranks of a layer."""

    def __init__(self, layout: ParallelLayout, part: PartCosts, cluster: Cluster):
        self.layout, self.part, self.cluster = layout, part, cluster
        # The share of the longest stage.
        self.share = -(-part.num_layers // layout.pipeline) / part.num_layers
        self.tensor_link = cluster.between(1, layout.tensor)
        self.part_link = cluster.between(layout.tensor, layout.prefill)
        self.stage_link = cluster.between(layout.tensor * layout.prefill, layout.pipeline)

    @property
    def weights(self) -> float:
        """Bytes of the fullest device: the first stage has the embedding, and the last the head."""
        part = self.part
        ends = part.ends if self.layout.pipeline == 1 else part.end
        return (part.weights - part.ends) * self.share + ends

    def compute_s(self, tokens: int, draws: int, context: float, rows: int) -> float:
        """Of a stage's products: `tokens` of `rows` requests, each of which attends to `context` tokens."""
        part, device = self.part, self.cluster.device
        # The share of the experts that some token uses.
        used = 1 - (1 - part.chosen) ** tokens if part.experts else 0.0
        products = tokens * (part.dense + part.experts * part.chosen + part.attention * context)
        products = products * self.share + draws * part.head
        read = (part.dense + part.experts * used) * self.share + (part.head if draws else 0)
        traffic = read * part.item + rows * context * part.kv * self.share
        return max(2 * products / device.operations, traffic / device.bandwidth)

    def exchange_s(self, tokens: int, draws: int, should_split: bool) -> float:
        """Of a stage's exchanges, and of its hidden states on the way to the next stage."""
        part, layout = self.part, self.layout
        n, link = layout.tensor, self.tensor_link
        seconds = sum(gather_s(link, n, n * width * tokens) for width in part.inner_widths)
        seconds *= self.share
        seconds += sum(gather_s(link, n, n * width * draws) for width in part.drawn_widths)
        if should_split:
            n, link = layout.prefill, self.part_link
            of_layer = n * tokens * part.kv / part.num_layers
            seconds += part.num_layers * self.share * gather_s(link, n, of_layer)
            seconds += gather_s(link, n, n * tokens * part.hidden)
        if layout.pipeline > 1:
            seconds += send_s(self.stage_link, 2 * tokens * part.hidden)
        return seconds

    def prefill_step_s(self, chunk: int, context: float) -> float:
        """Of a stage: a chunk of a prompt, dealt out to the prefill parts."""
        own = -(-chunk // self.layout.prefill)
        compute = self.compute_s(own, 1, context, 1)
        return compute + self.exchange_s(own, 1, self.layout.prefill > 1)

    def decode_step_s(self, requests: int, context: float) -> tuple[float, float]:
        """(seconds, part of exchanges) until each of an engine's requests has one more token: every stage runs once for each
        group of requests, and there are as many groups as stages. Prefill parts all compute all of it."""
        rows = -(-requests // self.layout.pipeline)
        exchange = self.exchange_s(rows, rows, False)
        step = self.compute_s(rows, rows, context, rows) + exchange
        return step * self.layout.pipeline, exchange / step

    def costs(self, load: PlannedLoad) -> LayoutCosts:
        part, layout, longest = self.part, self.layout, load.input_len + load.output_len
        weights = self.weights
        each = longest * part.kv * self.share
        activations = load.chunk / layout.prefill * part.hidden * 12
        room = self.cluster.device.memory * 0.9 - weights - activations
        if room < each:
            reason = f"{(weights + activations + each) / 1e9:.1f} GB for weights and one request"
            return LayoutCosts(layout, memory=weights + activations + each, reason=reason)
        wanted = -(-load.requests // layout.data)
        requests = min(wanted, int(room // each) if each else wanted)
        chunks = -(-load.input_len // load.chunk)
        chunk = -(-load.input_len // chunks)
        prefill = self.prefill_step_s(chunk, load.input_len / 2)
        tpot, exchange = self.decode_step_s(requests, load.input_len + load.output_len / 2)
        cycle = requests * chunks * prefill + load.output_len * tpot
        return LayoutCosts(
            layout,
            tokens_per_s=layout.data * requests * load.output_len / cycle,
            ttft_s=(chunks + layout.pipeline - 1) * prefill,
            tpot_s=tpot,
            memory=weights + activations + requests * each,
            requests=requests * layout.data,
            exchange=exchange,
        )


def plan(
    devices: int, parts: Mapping[int, PartCosts | str], cluster: Cluster, load: PlannedLoad
) -> list[LayoutCosts]:
    """Every layout of the devices, the fastest first; those that cannot serve come last.

    parts: by number of ranks of a layer: its costs, or why the model cannot be split so.
    """
    found = []
    for layout in layouts(devices):
        part = parts[layout.tensor]
        if isinstance(part, str):
            found.append(LayoutCosts(layout, reason=part))
        elif layout.pipeline > part.num_layers:
            reason = f"{layout.pipeline} stages for {part.num_layers} layers"
            found.append(LayoutCosts(layout, reason=reason))
        else:
            found.append(LayoutModel(layout, part, cluster).costs(load))
    return sorted(found, key=lambda one: (bool(one.reason), -one.tokens_per_s, one.layout))
