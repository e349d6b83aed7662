"""How far a load is: the shares that it reports, its bar, its log lines."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.models import progress
from quire.models.load import build_model
from quire.models.progress import LoadProgress
from quire.platforms.cpu import CpuPlatform

Reports = list[tuple[str, float]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; `clock[0] += 1` lets one pass."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_share_is_of_the_whole_load(clock: list[float]) -> None:
    seen: Reports = []
    load = LoadProgress(lambda *about: seen.append(about))
    for phase, until in (("reading", 0.4), ("packing", 1.0)):
        for _ in load.each(phase, [1, 3], lambda item: item, 4, until):
            clock[0] += 1
    shares = [("reading", 0.0), ("reading", 0.1), ("reading", 0.4), ("reading", 0.4),
              ("packing", 0.4), ("packing", 0.55), ("packing", 1.0), ("packing", 1.0)]  # fmt: skip
    assert seen == [(phase, pytest.approx(share)) for phase, share in shares]


def test_it_is_not_reported_for_each_tensor(clock: list[float]) -> None:
    seen: Reports = []
    load = LoadProgress(lambda *about: seen.append(about))
    for _ in load.each("reading", range(1000), lambda _: 1, 1000, 1.0):
        clock[0] += 0.01
    assert 10 / progress.REPORT_EVERY_S * 0.8 < len(seen) < 10 / progress.REPORT_EVERY_S + 3


def test_without_a_terminal_there_are_log_lines(clock: list[float], caplog) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        for _ in LoadProgress().each(
            "packing weights", range(10), lambda _: 1 << 30, 10 << 30, 1.0
        ):
            clock[0] += 2
    assert [record.getMessage() for record in caplog.records] == [
        f"packing weights: {part} % of 10.00 GiB" for part in (30, 60, 90)
    ]


@pytest.mark.parametrize("bar", [True, False])
def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, bar: bool) -> None:
    """use_tqdm_on_load=False leaves it out."""
    monkeypatch.setattr(progress, "BAR_AFTER_S", 0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    for _ in LoadProgress(bar=bar).each("reading weights", [1 << 20] * 4, int, 4 << 20, 1.0):
        pass
    assert ("reading weights" in screen.getvalue()) == bar
    assert ("4.00M" in screen.getvalue()) == bar


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({"dtype": "bfloat16"}, ["reading weights", "packing weights"]),
        ({"dtype": "bfloat16", "quantization": "int8"}, ["reading weights", "quantizing weights", "packing weights"]),
        ({"model_impl": "transformers"}, ["reading weights"]),
        ({"load_format": "dummy"}, ["reading weights", "packing weights"]),
    ],
)  # fmt: skip
def test_a_checkpoint_of_one_file_is_counted(original, monkeypatch, options, phases) -> None:
    """(There was nothing between the first line and the last.)"""
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0.0)
    files = list(Path(original[0]).glob("*.safetensors"))
    assert len(files) == 1
    config = EngineConfig.from_keywords(model=str(original[0]), skip_tokenizer_init=True, **options)
    seen: Reports = []
    build_model(
        resolve_config(config).spec, CpuPlatform(), report=lambda *about: seen.append(about)
    )
    assert list(dict.fromkeys(phase for phase, _ in seen)) == phases
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(seen) > 10
