"""Builds the executor of an engine: a worker in this process, or a process for each rank, which builds its own.

Knows executors and the features of a configuration; their parts of a worker are added in `worker/build.py`, which loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.config.engine import Resolved
from quire.config.serialize import resolved_from_bytes
from quire.engine.enabled_features import enabled_features
from quire.executor.inline import InlineExecutor
from quire.parallel.rank_address import RankAddress
from quire.startup_timer import Report, no_report
from quire.worker.build import build_worker

if TYPE_CHECKING:
    from quire.engine.feature import Feature
    from quire.executor.base import Executor
    from quire.worker.worker import Worker


def build_executor(
    resolved: Resolved, features: Sequence[Feature], report: Report = no_report
) -> Executor:
    """`features`: of this process; a worker in it shares them. Raises: as `build_worker`."""
    for feature in features:
        feature.begin()
    if resolved.executor in ("mp", "ray"):
        from quire.engine.rank_launcher import start_ranks

        return start_ranks("quire.engine.build_executor:worker_from_wire", resolved, report)
    make = partial(build_worker, resolved, features, report)
    if resolved.executor == "uni":
        return InlineExecutor(make())
    from quire.engine.external_launcher import external_executor

    return external_executor(resolved, make)


def worker_from_wire(payload: bytes, report: Report) -> Worker:
    """The worker of a process that has none of its engine's objects."""
    encoded, address = msgspec.msgpack.decode(payload, type=tuple[bytes, RankAddress])
    resolved = resolved_from_bytes(encoded)
    features = enabled_features(resolved)
    for feature in features:
        feature.begin()
    return build_worker(resolved, features, report, address)
