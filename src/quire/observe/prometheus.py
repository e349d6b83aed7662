"""/metrics: exports the entries of `metric_table.py` to Prometheus.

Knows snapshots of the engine and times of requests. Does not know HTTP routes or the text format. Each instance
has its own registry, so that two servers in one process stay separate.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from quire.config.engine import Resolved
from quire.logging import get_logger
from quire.observe.buckets import buckets, checked
from quire.observe.engine_snapshots import ENGINE, SnapshotCollector
from quire.observe.http_metrics import HttpMetrics
from quire.observe.metric_table import ALIASES, OBSERVED
from quire.observe.processes import FamilyCollector, Processes, allocate_files
from quire.protocol.output import EngineReady, EngineStats
from quire.version import __version__

log = get_logger(__name__)

NAMING = (b"quire:key_", b"quire:adapter_", b"vllm:lora_requests_info")
"""Metrics with names of keys or of adapters."""
"""Metric families with the label `key`, the name of an API key, begin with this text."""
MAX_ADAPTER_LABELS = 1024
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LIMITS = REQUESTS, TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"
"""The limits of the waiting queue: the reasons for rejecting requests."""


class AliasCollector(Collector):
    """Exports a histogram a second time, under its old name."""

    def __init__(self, name: str, source: Histogram):
        self.name, self.source = name, source

    def collect(self) -> Iterable[Metric]:
        for metric in self.source.collect():
            yield renamed(metric, self.name)


def renamed(metric: Metric, name: str) -> Metric:
    alias = Metric(name, f"Old name of {metric.name}.", metric.type)
    alias.samples = [
        Sample(name + s.name.removeprefix(metric.name), *s[1:]) for s in metric.samples
    ]
    return alias


class MergedCollector(Collector):
    """Metrics of several processes, from the files that prometheus_client keeps in `folder`: sums of counters and
    histograms, ended processes included; also under old names."""

    def __init__(self, folder: str, legacy: bool):
        self.files = MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]
        self.legacy = legacy

    def collect(self) -> Iterable[Metric]:
        try:
            merged = list(self.files.collect())  # type: ignore[no-untyped-call]
        except (OSError, ValueError, RuntimeError, struct.error) as why:
            log.warning_every("files", 60.0, "could not read the metrics files: %s", why)
            return
        for metric in merged:
            yield metric
            for alias, source in ALIASES.items() if self.legacy else ():
                if source == metric.name:
                    yield renamed(metric, alias)


class Histograms(Histogram):
    """A histogram that finds a value's bucket by binary search, and can take many values at once."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)
        self._sum.inc(amount)

    def observe_all(self, values: Sequence[float]) -> None:
        places = Counts(bisect_left(self._upper_bounds, value) for value in values)
        for place, count in places.items():
            self._buckets[place].inc(count)
        self._sum.inc(sum(values))


class ServerMetrics:
    """All metrics of one server, or of one `LLM`.

    Args:
        shared: the folder of PROMETHEUS_MULTIPROC_DIR, which must have been set when this process started: `render`
            then covers all processes that share it. The engine's statistics reach each process, so they count once.
        custom: the user's buckets, by family.
        processes: with `shared`: returns the server's processes, pid -> name.
    """

    def __init__(
        self,
        model_name: str,
        *,
        legacy: bool = True,
        process: bool = True,
        http: bool = True,
        shared: str | None = None,
        custom: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
    ):
        self.model_name, self.legacy = model_name, legacy
        self.custom = checked(custom or {})
        process = process and shared is None
        self.registry = self._exported = CollectorRegistry()
        self._families: dict[str, Histograms] = {}
        self._observed: list[dict[str, Histograms]] = []
        """For each engine, in the order of `attach`."""
        self._caches: Gauge | None = None
        self._engines: dict[str, Callable[[], EngineStats]] = {}
        snapshots = SnapshotCollector(model_name, self._engines, legacy, self.custom)
        self.registry.register(snapshots)
        if shared is not None:
            allocate_files()
            self._exported = CollectorRegistry()
            self._exported.register(snapshots)
            self._exported.register(MergedCollector(shared, legacy))
            if processes is not None:
                self._exported.register(FamilyCollector(processes))
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self.http = HttpMetrics(self.registry) if http else None
        self._make_counters()
        self._make_gauges()

    def _make_counters(self) -> None:
        self._adapters: set[str] = set()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, ["model_name", *labels], registry=self.registry)

        self.rejected = counter(
            "vllm:admission_rejections", "Requests refused because the queue is full.", "reason"
        )
        for limit in LIMITS:  # a series that starts at 1 hides its first event from rate()
            self.rejected.labels(self.model_name, limit)
        self.tools = counter(
            "vllm:tool_call_parser_invocations",
            "Completions parsed for tool calls, by whether they contain any.",
            "mode", "outcome", "request_type",
        )  # fmt: skip
        self.media_items = counter(
            "quire:media_items",
            "Pictures and videos of requests, by what was done: fetched (once for a request), processed, cached, named (by uuid),"
            " embedded (rows of the request) or refused.",
            "kind", "outcome",
        )  # fmt: skip
        self.media_seconds = counter(
            "quire:media_seconds",
            "Seconds that fetching, and decoding and processing of pictures and videos took.",
            "kind", "outcome",
        )  # fmt: skip
        self.errors = counter(
            "quire:request_errors", "Requests with an error response, by status.", "status"
        )
        self.restarts = counter(
            "quire:process_restarts", "Restarted processes: engine or http.", "process"
        )
        for process in ("engine", "http"):
            self.restarts.labels(self.model_name, process)
        self.adapter_requests = counter(
            "quire:adapter_requests", "Requests by LoRA adapter.", "adapter"
        )
        self.adapter_tokens = counter(
            "quire:adapter_tokens", "Prompt and output tokens by LoRA adapter.", "adapter", "kind"
        )
        self.key_requests = counter("quire:key_requests", "Requests by key.", "key")
        self.key_tokens = counter(
            "quire:key_tokens", "Prompt and output tokens by key.", "key", "kind"
        )
        self.key_rejections = counter(
            "quire:key_rejections", "Requests refused because of a limit of their key.", "key"
        )

    def _make_gauges(self) -> None:
        def gauge(name: str, help: str, *labels: str, mode: str = "max") -> Gauge:
            """`mode`: how to combine the values of several processes."""
            return Gauge(name, help, labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        self.throughput: dict[str, Gauge] = {}
        for kind in ("prompt", "generation") if self.legacy else ():
            made = gauge(
                f"vllm:avg_{kind}_throughput_toks_per_s",
                f"Tokens of {kind}s per second, as in the log line.",
                "model_name", "engine", mode="mostrecent",
            )  # fmt: skip
            self.throughput[kind] = made
        self.rows = gauge("quire:max_num_seqs", "Maximum requests that run at once.", "model_name", "engine")  # fmt: skip
        name = self.model_name
        self.processed_media = gauge("quire:processed_media_bytes", "Bytes of processed pictures, videos and sound that the HTTP processes keep.", "model_name", mode="livesum").labels(name)  # fmt: skip
        self.processed_media_max = gauge("quire:processed_media_bytes_max", "Bound of these bytes.", "model_name", mode="livesum").labels(name)  # fmt: skip
        self.operations = gauge(
            "vllm:sleep_mode_operations_in_flight", "Sleep and wake-up operations in progress.",
            "model_name", "engine", "operation", mode="livesum",
        )  # fmt: skip
        self.slept = Histograms(
            "vllm:sleep_mode_operation_duration_seconds", "Seconds of sleep and wake-up operations.",
            ["model_name", "engine", "operation"], buckets=buckets("request_latency", 0, self.custom), registry=self.registry,
        )  # fmt: skip
        self.startup = gauge("quire:startup_seconds", "Seconds of each stage of start-up.", "stage")
        gauge("quire:build_info", "1, with the version as a label.", "version").labels(__version__).set(1)  # fmt: skip

    def attach(
        self,
        stats: Callable[[], EngineStats],
        max_model_len: int,
        info: Mapping[str, Any],
        engine: int = 0,
    ) -> None:
        """Connect to a ready engine: its statistics and its cache settings; once for each engine, in order.

        `engine`: its number, for labels.
        """
        label = str(engine)
        self._engines[label] = stats
        for row in OBSERVED if not self._families else ():
            histogram = Histograms(
                row.name,
                row.help,
                ["model_name", "engine"],
                buckets=buckets(row.family, max_model_len, self.custom),
                registry=self.registry,
            )
            self._families[row.name] = histogram
            for alias, source in ALIASES.items():
                if self.legacy and source == row.name:
                    self.registry.register(AliasCollector(alias, histogram))
        self._observed.append(
            {name: family.labels(self.model_name, label) for name, family in self._families.items()}
        )
        labels = {key: str(value) for key, value in info.items()} | {"engine": label}
        for gauge in (self.rows, *self.throughput.values()):
            gauge.labels(self.model_name, label)
        if self._caches is None:
            self._caches = Gauge(
                "vllm:cache_config_info", "Configuration of the KV cache, as labels.", list(labels),
                registry=self.registry, multiprocess_mode="max",
            )  # fmt: skip
        self._caches.labels(**labels).set(1)

    def observe(self, name: str, value: float, engine: int = 0) -> None:
        """Add a value to a histogram; does nothing before `attach`. `engine`: its place in the order of `attach`."""
        if engine < len(self._observed):
            self._observed[engine][name].observe(value)

    def observe_all(self, name: str, values: Sequence[float], engine: int = 0) -> None:
        """Add many values; as `observe`."""
        if values and engine < len(self._observed):
            self._observed[engine][name].observe_all(values)

    def refused(self, reason: str = REQUESTS) -> None:
        """Count a request that was rejected because too many wait."""
        self.rejected.labels(self.model_name, reason).inc()

    def read_for_calls(self, streamed: bool, called: bool, kind: str) -> None:
        """Count a finished completion of a request with tools."""
        mode, outcome = ("non_streaming", "streaming")[streamed], ("no_tool_call", "tool_call")[called]  # fmt: skip
        self.tools.labels(self.model_name, mode, outcome, kind).inc()

    def media(self, kind: str, outcome: str, seconds: float) -> None:
        """A picture or video of a request; see `Observe` of `frontend/media/inputs.py`."""
        self.media_items.labels(self.model_name, kind, outcome).inc()
        if seconds:
            self.media_seconds.labels(self.model_name, kind, outcome).inc(seconds)

    def replaced(self, process: str, count: int = 1) -> None:
        """Count processes that died or hung and were replaced."""
        self.restarts.labels(self.model_name, process).inc(count)

    def by_key(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count a finished request of this API key."""
        self.key_requests.labels(self.model_name, key).inc()
        self.key_tokens.labels(self.model_name, key, "prompt").inc(prompt_tokens)
        self.key_tokens.labels(self.model_name, key, "output").inc(output_tokens)

    def by_adapter(self, adapter: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count a finished request of this LoRA adapter. Clients name adapters, so only the first names are labels."""
        if adapter not in self._adapters and len(self._adapters) >= MAX_ADAPTER_LABELS:
            adapter = "other"
        self._adapters.add(adapter)
        self.adapter_requests.labels(self.model_name, adapter).inc()
        self.adapter_tokens.labels(self.model_name, adapter, "prompt").inc(prompt_tokens)
        self.adapter_tokens.labels(self.model_name, adapter, "output").inc(output_tokens)

    def key_refused(self, key: str) -> None:
        """Count a request that was rejected because of its API key's limits."""
        self.key_rejections.labels(self.model_name, key).inc()

    def failed(self, status: int) -> None:
        """Count a request that got an error response."""
        self.errors.labels(self.model_name, str(status)).inc()

    @contextmanager
    def resting(self, operation: str) -> Iterator[None]:
        """Measure a sleep or a wake-up, which runs inside."""
        began = time.monotonic()
        under_way = self.operations.labels(self.model_name, ENGINE, operation)
        under_way.inc()
        try:
            yield
        finally:
            under_way.dec()
            seconds = time.monotonic() - began
            self.slept.labels(self.model_name, ENGINE, operation).observe(seconds)

    def rates(self, prompt: float, generation: float, engine: int = 0) -> None:
        """Set the throughput gauges: tokens per second since the last statistics line. `engine`: its number."""
        for kind, value in (("prompt", prompt), ("generation", generation)):
            if kind in self.throughput:
                self.throughput[kind].labels(self.model_name, str(engine)).set(value)

    def render(self, named: bool = True) -> bytes:
        """All metrics as text. `named` False: without metrics by key and by adapter, and without the directory of a model's path."""
        text = generate_latest(self._exported)
        if named:
            return text
        lines = [
            line
            for line in text.splitlines(keepends=True)
            if not any(name in line.split(b"{")[0] for name in NAMING)
        ]
        return b"".join(lines).replace(
            self._label(self.model_name), self._label(self._public_name())
        )

    def _public_name(self) -> str:
        is_path = self.model_name.startswith(("/", "./", "../", "~"))
        return PurePath(self.model_name).name if is_path else self.model_name

    @staticmethod
    def _label(model_name: str) -> bytes:
        """The model_name label, escaped as in the text format."""
        escaped = model_name.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        return f'model_name="{escaped}"'.encode()

    def value(self, name: str) -> float:
        """A metric's sum over its labels."""
        samples = [sample for metric in self._exported.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.name == name)


def cache_info(cache_config: Any, ready: EngineReady, resolved: Resolved) -> dict[str, Any]:
    """Labels of cache_config_info: every field of the cache's configuration, and the resolved values."""
    fields = {f.name: getattr(cache_config, f.name) for f in dataclasses.fields(cache_config)}
    return fields | {
        "num_gpu_blocks": ready.num_blocks,
        "block_size": ready.block_size,
        "cache_dtype": resolved.kv_dtype,
        "enable_prefix_caching": resolved.prefix_caching,
        "kv_cache_size_tokens": ready.num_tokens,
        "recurrent_state_bytes": ready.state_bytes,
        "kv_cache_max_concurrency": round(ready.num_tokens / max(1, ready.max_model_len), 2),
    }
