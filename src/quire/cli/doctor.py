"""`quire doctor MODEL [flags of serve]`: would it start here, how many requests would fit, and what would go wrong?

Reads config.json, the small files beside it and the headers of the weights; loads neither weights nor torch (except
for a model with recurrent states or several ranks, which it constructs without weights, and for a tokenizer without tokenizer.json, which
needs Transformers). For a hub id that is not in the local cache, it fetches only these. Exit status 0: it would start, 1: not, 2: usage error.
Knows how the engine and the frontend decide before they are built. `doctor_checks.py` has the single checks.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from quire.cli.doctor_checks import DoctorFinding, findings, remote_tensors
from quire.cli.doctor_kept import kept_blocks
from quire.cli.doctor_pictures import picture_rows
from quire.cli.doctor_speed import memory_bandwidth, tokens_per_second
from quire.config.checkpoint_dtype import stored_dtype
from quire.config.engine import EngineConfig, Resolved
from quire.config.flags import parse
from quire.engine.resolve import resolve_without_weights
from quire.errors import ModelNotFound, NotEnoughMemory, QuireError
from quire.models.checkpoint_files import (
    TensorHeader,
    in_memory,
    on_disk,
    stored_tensors,
    weight_files,
)
from quire.models.registry import choose_impl
from quire.models.supported import own_cache
from quire.parallel.layout import RankLayout
from quire.platforms.detect import PlatformFacts, cpu_facts, facts
from quire.protocol.tensor_data import ITEMSIZE
from quire.startup_timer import table
from quire.worker.memory_forecast import forecast_specs, forecast_weights, loaded_tensors
from quire.worker.memory_plan import MemoryPlan, make_plan, size

SECRETS = (
    "--api-key",
    "--api_key",
    "--hf-token",
    "--hf_token",
    "--kv-remote-url",
    "--kv_remote_url",
)
"""Flags whose values are not printed."""

LENGTHS = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
"""Request lengths in the table "What fits"."""


@dataclass(slots=True)
class DoctorReport:
    """What the examination found, until the first error."""

    config: EngineConfig
    facts: PlatformFacts
    resolved: Resolved | None = None
    weights: int = 0
    """Bytes, as in the files."""
    remote: bool = False
    """The weights have not been fetched yet."""
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """What pictures cost."""
    plan: MemoryPlan | None = None
    findings: list[DoctorFinding] = field(default_factory=list)

    @property
    def would_start(self) -> bool:
        return not any(one.level == "error" for one in self.findings)


def main(argv: Sequence[str]) -> int:
    """Print the report; 0: it would start, 1: it would not, 2: a usage error."""
    with captured_warnings() as warnings:
        config = parse(argv, "quire doctor")
        report = examine(config)
    report.findings += [DoctorFinding("warning", text) for text in dict.fromkeys(warnings)]
    print(text_of(report), end="")
    if report.would_start and not any(word.startswith(SECRETS) for word in argv):
        print(f"\n  {shlex.join(['quire', 'serve', *argv])}")
    return 0 if report.would_start else 1


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Collects warnings of Quire's loggers, instead of printing them."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    ours = logging.getLogger("quire")
    before = list(ours.handlers), ours.propagate
    ours.handlers, ours.propagate = [Keep(logging.WARNING)], False
    try:
        yield texts
    finally:
        ours.handlers, ours.propagate = before


def examine(config: EngineConfig) -> DoctorReport:
    """Find out all that can be known without loading; an error ends this and goes into the report."""
    try:
        report = DoctorReport(config, facts())
    except QuireError as why:  # QUIRE_DEVICE names a device that is not there
        return DoctorReport(config, cpu_facts(), findings=[DoctorFinding("error", str(why))])
    try:
        report.resolved, _ = resolve_without_weights(config)
        found = _weights(report, report.resolved)
        report.weights = on_disk(found)
        report.pictures = picture_rows(report.resolved, found)
        report.plan = _plan(report, report.resolved, found)
    except QuireError as why:
        report.findings.append(DoctorFinding("error", str(why)))
    if report.resolved is not None:
        report.findings += findings(report.resolved, report.facts, report.plan, report.weights)
    return report


def _weights(report: DoctorReport, resolved: Resolved) -> list[TensorHeader] | int:
    """From the local headers; from the hub's, if the weights have not been fetched yet."""
    try:
        return stored_tensors(resolved.path, resolved.hf_config, report.config.load.load_format)
    except ModelNotFound:
        there = remote_tensors(report.config.model)
        if there is None:
            raise
    report.remote = True
    return there


def _plan(report: DoctorReport, resolved: Resolved, found: list[TensorHeader] | int) -> MemoryPlan:
    """The memory plan of the rank with the fewest blocks; if it does not fit, that with the longest context that does."""
    about, layout = report.facts, RankLayout.of(resolved.config.parallel)
    engines = resolved.config.parallel.share[1] if resolved.device == "cpu" else 1
    available = about.available_bytes // engines
    ranks_here = layout.size // len(resolved.config.parallel.nodes_of_engine)
    loaded = loaded_tensors(found, resolved.spec, resolved.device)
    whole = in_memory(loaded, ITEMSIZE[resolved.dtype], resolved.quantization)

    def smallest(resolved: Resolved) -> MemoryPlan:
        plans = []
        for stage in range(layout.pipeline):
            specs, own, states, parts = forecast_specs(resolved, (), layout, stage)
            sizes = int(whole * parts[0]), about.total_bytes, available // ranks_here
            plans.append(make_plan(resolved, *sizes, specs, (), states, own=own))
        return min(plans, key=lambda plan: plan.num_blocks)

    try:
        forecast_weights(resolved.spec, resolved.device, available, found)
        return smallest(resolved)
    except NotEnoughMemory as why:
        report.findings.append(DoctorFinding("error", str(why)))
    return smallest(replace(resolved, auto_max_model_len=True))


# The report as text


def text_of(report: DoctorReport) -> str:
    parts = [_head(report)]
    if report.resolved is not None:
        parts.append("Model\n" + table(_model(report, report.resolved)))
    if report.plan is not None:
        parts.append("Memory\n" + table(report.plan.table()))
        parts.append("What fits\n" + table(_fits(report.plan)))
    if report.resolved is not None and report.plan is not None and report.would_start:
        parts += _speed(report.resolved, report.plan)
    if report.resolved is not None and report.plan is not None:
        parts += kept_blocks(report.resolved, report.plan)
    for level, title in (("error", "Errors"), ("warning", "Warnings"), ("note", "Notes")):
        said = list(dict.fromkeys(f.text for f in report.findings if f.level == level))
        if said:
            parts.append("\n".join([title, *(f"  - {one}" for one in said)]))
    parts.append(
        "This configuration would start."
        if report.would_start
        else "This configuration would not start."
    )
    return "\n\n".join(parts) + "\n"


def _head(report: DoctorReport) -> str:
    here = report.facts
    return f"{report.config.model.model} on {here.device} ({here.name})"


def _model(report: DoctorReport, resolved: Resolved) -> list[tuple[str, str]]:
    config = resolved.hf_config
    try:
        impl, why = choose_impl(resolved.architecture, config, report.config.model.model_impl)
    except QuireError:
        impl, why = "none", "see below"
    prefixes = resolved.prefix_caching and not (impl == "transformers" and own_cache(resolved))
    stored_tensors = stored_dtype(resolved.path, config)
    rows = [
        ("directory", resolved.path),
        ("architecture", resolved.architecture),
        ("model code", f"{impl} ({why})"),
        (
            "dtype",
            resolved.dtype + (f", stored as {stored_tensors}" * (stored_tensors != resolved.dtype)),
        ),
        ("context", f"{resolved.max_model_len} tokens"),
        ("step", f"{resolved.max_num_batched_tokens} tokens, {resolved.max_num_seqs} requests"),
        ("prefix caching", "on" if prefixes else "off"),
    ]
    if (engines := resolved.config.parallel.share[1]) > 1:
        rows.append(("engines", f"{engines} divide this machine; the tables below are for each"))
    if report.weights:
        where = "not downloaded yet" if report.remote else _files(report, resolved)
        rows.insert(2, ("weights", f"{size(report.weights)}, {where}"))
    return rows + report.pictures


def _files(report: DoctorReport, resolved: Resolved) -> str:
    try:
        kind, files = weight_files(resolved.path, report.config.load.load_format)
    except QuireError:
        return "dummy"
    return f"{len(files)} {kind} file{'s' * (len(files) != 1)}"


def _speed(resolved: Resolved, plan: MemoryPlan) -> list[str]:
    """The section "Speed"; none if it cannot be estimated."""
    if tokens_per_second(resolved, plan, 1.0) is None:
        return []
    bandwidth = memory_bandwidth()
    speed = tokens_per_second(resolved, plan, bandwidth) or 0.0
    rows = [
        ("memory bandwidth", f"{size(int(bandwidth))} per second, measured now"),
        ("one request", f"about {speed:.{0 if speed >= 10 else 1}f} tokens per second; several at once get more in all"),
    ]  # fmt: skip
    return ["Speed\n" + table(rows)]


def _fits(plan: MemoryPlan) -> list[tuple[str, str]]:
    """How many requests of each length run at once before the next one must wait."""
    lengths = sorted({n for n in LENGTHS if n < plan.max_model_len} | {plan.max_model_len})
    rows = []
    for length in lengths:
        each = plan.layout.blocks_for(length, min(plan.max_step_tokens, length))
        count = plan.num_blocks // each
        most = min(count, plan.max_num_seqs)
        rows.append(
            (
                f"{length} tokens",
                f"{most} request{'s' * (most != 1)} at once"
                + (" (max_num_seqs)" if count > plan.max_num_seqs else ""),
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
