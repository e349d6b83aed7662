"""Settings of every test: no downloads, and one compute thread, so that a run is the same on any machine.

Without a GPU, Triton kernels run through Triton's interpreter, on the CPU.

Set before anything is imported, since some libraries read the environment once.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in Quire's own processes. Else torch's threads of two tests keep the cores from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each HTTP client would read the certificates of all authorities, in 50 ms. Tests connect only to this machine.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="module")
def restore_logging() -> Iterator[None]:
    """Restore the logger after each file, so that no test depends on the logging setup of another file."""
    yield
    ours = logging.getLogger("quire")
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    ours.propagate = True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the parent process ignores it (a job in the background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sighup_ends() -> Iterator[None]:
    """SIGHUP ends the processes that a test starts, also where nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the marker `sampled(N)`, all cases but the first of each N are slow."""
    seen = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: a full collection would take a second in the middle of a test. And collect as rarely
    as Quire's own processes do: with Python's thresholds, tests take a tenth longer."""
    from quire.processes.child import COLLECT_AFTER

    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not HAS_GPU and item.get_closest_marker("device") is not None:
        pytest.skip("needs a GPU")
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)  # what a test draws depends on no other test


@pytest.fixture
def native_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations run in the CPU's kernels during the test."""
    from quire.ops.dispatch import OPS, bind

    for op in OPS.values():
        monkeypatch.setattr(op, "run", op.run)  # so that it comes back
    bind(("native",))
