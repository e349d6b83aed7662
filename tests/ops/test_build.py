"""How the kernels are built, and which build a machine gets."""

from __future__ import annotations

import logging
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.ops.cpu import bindings, build, isa
from quire.startup_timer import StartupStages


def test_without_a_compiler_there_is_a_reason_and_no_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        build.library(isa.usable()[0])
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_a_packaged_library_needs_matching_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    portable = isa.ISAS[-1]
    ours = tmp_path / build.file_name(portable)
    ours.touch()
    assert build.library(portable) == ours
    sources = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.library(portable) == ours  # the same sources elsewhere
    header = sources / "common.h"
    header.write_text(header.read_text() + "// changed\n")
    with pytest.raises(build.CannotBuild):
        build.library(portable)


CHANGING = """#!/bin/sh
# A compiler whose sources are written anew as soon as it begins.
while [ "$1" != -o ]; do case "$1" in *.cpp | *.o) from="$1" ;; esac; shift; done
echo "another version" >{sources}/common.h
case "$from" in *.cpp) cat "$(dirname "$from")/common.h" >"$2" ;; *) cp "$from" "$2" ;; esac
"""


def test_a_build_uses_the_sources_that_name_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """(A library of two versions kept the name of the first, and stayed.)"""
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "only.cpp").write_text('#include "common.h"')
    (sources / "common.h").write_text("one version\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(CHANGING.replace("{sources}", str(sources)))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "SOURCES", sources)
    name = build.file_name(isa.ISAS[-1])
    made = build.make(isa.ISAS[-1], tmp_path)
    assert (made.name, made.read_bytes()[: -build.SEAL]) == (name, b"one version\n")
    assert build.file_name(isa.ISAS[-1]) != name


SLOW_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo "$2" >>{log}
echo an object >"$2"
"""


@pytest.mark.parametrize(("patience_s", "times"), [(60, 1), (0, 3)])
def test_one_of_the_processes_that_need_a_build_compiles_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patience_s: float, times: int
) -> None:
    """The others wait for it, but not for ever."""
    sources, log, compiler = (tmp_path / name for name in ("kernels", "log", "compiler"))
    sources.mkdir()
    (sources / "only.cpp").touch()
    compiler.write_text(SLOW_COMPILER.replace("{log}", str(log)))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PATIENCE_S", patience_s)
    monkeypatch.setattr(build, "_run", lambda command: subprocess.run(command, check=True))
    with ThreadPoolExecutor(3) as processes:
        found = list(processes.map(build.library, [isa.ISAS[-1]] * 3))
    assert len(set(found)) == 1
    assert build.is_whole(found[0])
    assert log.read_text().count("only.o") == times


def test_a_failed_build_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a slower build ran without a message."""
    first, *others = isa.ISAS

    def load(name: str) -> object:
        if name == first.name:
            raise build.CannotBuild("the compiler took more than 1 s")
        if name == others[0].name:
            raise build.Missing("this CPU cannot run it")
        return SimpleNamespace(name=name, threads=torch.get_num_threads)

    monkeypatch.setenv("QUIRE_CPU_ISA", "auto")
    monkeypatch.setattr(isa, "usable", lambda: list(isa.ISAS))
    monkeypatch.setattr(bindings, "load", load)
    with caplog.at_level(logging.WARNING, "quire"):
        assert bindings.best.__wrapped__().name == others[1].name
    assert "amx: the compiler took more than 1 s" in caplog.text
    assert others[0].name not in caplog.text
    caplog.clear()
    monkeypatch.setattr(isa, "usable", lambda: others)
    assert bindings.best.__wrapped__().name == others[1].name
    assert not caplog.text


CPUS = {
    "x86_64": {
        "fpu sse sse2": ["portable"],
        "sse2 avx2 fma": ["avx2", "portable"],
        "sse2 avx2 fma avx512f avx512bw avx512vl avx512dq": ["avx512", "avx2", "portable"],
    },
    "aarch64": {"fp asimd": ["portable"]},
}


@pytest.mark.parametrize("machine", CPUS)
def test_usable_builds_match_the_cpu_flags(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    for words, names in CPUS[machine].items():
        monkeypatch.setattr(isa, "words", lambda words=words: frozenset(words.split()))
        assert [each.name for each in isa.usable()] == names


@pytest.mark.parametrize(("intel", "first"), [(True, "avx512vnni"), (False, "avx512bf16")])
def test_the_vendor_decides_whether_the_bf16_build_comes_first(
    intel: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = frozenset().union(*(each.needs for each in isa.ISAS if each.name != "amx"))
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "words", lambda: words)
    monkeypatch.setattr(isa, "by_intel", lambda: intel)
    names = [each.name for each in isa.usable()]
    assert names[0] == first
    assert sorted(names) == sorted(each.name for each in isa.ISAS if each.name != "amx")
    assert names[-2:] == ["avx2", "portable"]


WIDE = "fma avx2 avx512f avx512dq avx512bw avx512vl"
MACHINES = {  # the flags of /proc/cpuinfo that the code reads
    "Zen 3": ("AuthenticAMD", "fma avx2", "avx2"),
    "Zen 4": ("AuthenticAMD", f"{WIDE} avx512_bf16 avx512_vnni", "avx512bf16"),
    "Zen 5": ("AuthenticAMD", f"{WIDE} avx_vnni avx512_bf16 avx512_vnni movdiri", "avx512bf16"),
    "Skylake": ("GenuineIntel", WIDE, "avx512"),
    "Ice Lake": ("GenuineIntel", f"{WIDE} avx512_vnni", "avx512vnni"),
    "Cooper Lake": ("GenuineIntel", f"{WIDE} avx512_vnni avx512_bf16", "avx512vnni"),
    "Sapphire Rapids": (
        "GenuineIntel", f"{WIDE} avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8", "amx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_the_fastest_usable_build_is_chosen(
    machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vendor, flags, first = MACHINES[machine]
    told = "".join(
        f"processor\t: {core}\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n" for core in (0, 1)
    )
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(isa, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(isa, "words", isa.words.__wrapped__)
    monkeypatch.setattr(isa, "by_intel", isa.by_intel.__wrapped__)
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    assert isa.usable()[0].name == first


def test_compiling_is_a_stage_of_its_own_and_only_when_it_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    stages = StartupStages()
    loads: list[None] = []
    monkeypatch.setattr(bindings, "best", lambda: loads.append(None))
    bindings.compile_missing(stages)
    assert [name for name, _ in stages.done] == ["compiling the CPU kernels, once (about 10 s)"]
    assert len(loads) == 1
    (tmp_path / build.file_name(isa.usable()[0])).touch()
    bindings.compile_missing(stages)
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    bindings.compile_missing(stages)
    assert len(stages.done) == len(loads) == 1
