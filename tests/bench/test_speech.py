"""The benchmark of Whisper with a tiny shape: its files, its table, and that Quire and Transformers do the same work."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import speech, speech_models

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_the_file_for_whisper_cpp_has_every_tensor_and_word(folder: Path) -> None:
    path = speech_models.checkpoint("test", folder)
    raw = speech_models.ggml(path).read_bytes()
    magic, *sizes = struct.unpack_from("<12i", raw)
    assert (magic, sizes[0], sizes[1:5], sizes[9:]) == (0x67676D6C, 51865, [1500, 64, 2, 2], [80, 1])  # fmt: skip
    at = 48 + 8 + 4 * 80 * 201
    (count,) = struct.unpack_from("<i", raw, at)
    at += 4
    words = []
    for _ in range(count):
        (length,) = struct.unpack_from("<i", raw, at)
        words.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    assert {bytes([number]) for number in range(256)} <= set(words)
    assert len(set(words)) == count == speech_models.WORDS
    found = {}
    while at < len(raw):
        dims, length, half = struct.unpack_from("<3i", raw, at)
        shape = struct.unpack_from(f"<{dims}i", raw, at + 12)[::-1]
        at += 12 + 4 * dims
        name, kind = raw[at : at + length].decode(), np.float16 if half else np.float32
        found[name] = np.frombuffer(raw, kind, int(np.prod(shape)), at + length).reshape(shape)
        at += length + found[name].nbytes
    expected = dict(speech_models.tensors(path))
    assert found.keys() == expected.keys()
    assert "decoder.blocks.1.cross_attn.query.bias" in found
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name].reshape(tensor.shape), tensor, atol=1e-3)


def row(engine: str, *seconds: float, **more: Any) -> dict[str, Any]:
    return {"shape": "base", "piece": "30s-8", "windows": 8, "tokens": 100, "engine": engine, "seconds": list(seconds), **more}  # fmt: skip


def test_the_table_compares_with_the_run_of_the_same_kind() -> None:
    rows = [
        row("quire", 3.0, 2.0, 2.5), row("quire f32", 5.0), row("quire int8", 2.0), row("transformers bf16", 6.0),
        row("faster-whisper int8", 3.0), row("whisper.cpp f16", failed="not installed"),
    ]  # fmt: skip
    lines = speech.table(rows)
    assert lines[2] == "| quire | 8 | 2.5 | 96 |  |  |"
    assert lines[5] == "| transformers bf16 | 8 | 6 | 40 | 2.40 x | 2.0 |"
    assert lines[6] == "| faster-whisper int8 | 8 | 3 | 80 | 1.50 x | 1.3 |"
    assert "not installed" in lines[7]


@pytest.mark.slow
def test_quire_and_transformers_draw_the_same_tokens_in_turns(folder: Path, tmp_path: Path) -> None:
    """A piece replaces its rows, and an engine that is not installed has a reason."""
    flags = ["--shape", "test", "--only", "30s-1", "--rounds", "2", "--tokens", "5", "--threads", "1", "--scripts", str(SCRIPTS),
             "--cache", str(folder), "--out", str(tmp_path), "--peers", str(tmp_path)]  # fmt: skip
    assert speech.main([*flags, "--engines", "quire f32", "transformers f32", "whisper.cpp"]) == 0
    assert speech.main([*flags, "--engines", "quire f32"]) == 0
    (file,) = tmp_path.glob("*.json")
    kept = json.loads(file.read_text())
    assert len(kept["commands"]) == 2
    by_engine = {one["engine"]: one for one in kept["rows"]}
    assert len(by_engine) == len(kept["rows"]) == 3
    assert "install.py whisper-cpp" in by_engine["whisper.cpp f16"]["failed"]
    assert [len(one.get("seconds", [])) for one in by_engine.values()] in ([0, 2, 2], [2, 0, 2], [2, 2, 0])  # fmt: skip
    assert "## test, 30s-1" in file.with_suffix(".md").read_text()


@pytest.mark.slow
def test_the_work_is_the_same(folder: Path) -> None:
    """Tokens of two windows, from the samples: Quire's and Transformers'."""
    from benchmarks.peers.run import Running

    given = Namespace(
        scripts=SCRIPTS, peers=folder, cache=folder, patience=600.0, threads=1, tokens=6
    )
    source, found = speech_models.checkpoint("test", folder), []
    for name in ("quire f32", "transformers f32"):
        running = Running(name, speech.asked_of(name, source, given), given)
        try:
            found.append(running.ask([[0], [1]], 6)["tokens"])
        finally:
            running.close()
    assert found[0] == found[1]
