"""The openai client and `quire bench serve` use the routes for sound of a real server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import whisper_checkpoint as whisper
from sound_server import SoundServer, wav

from quire.bench.serve.run import main as bench_serve

ONE = whisper.sound(1.3, 11)


@pytest.fixture(scope="module")
def server(whisper_path: str) -> Iterator[SoundServer]:
    made = SoundServer(whisper_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(server: SoundServer) -> Iterator[str]:
    with server.listening() as found:
        yield found


def file() -> io.BytesIO:
    found = io.BytesIO(wav(ONE))
    found.name = "one.wav"
    return found


def test_the_openai_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    calls, extra = client.audio.transcriptions, {"temperature_increment_on_fallback": 0}
    plain = calls.create(model="toy", file=file(), language="en", extra_body=extra)
    assert len(plain.text) > 5
    assert plain.usage.seconds == 2
    asked = {"model": "toy", "language": "en", "extra_body": extra}
    verbose = calls.create(file=file(), response_format="verbose_json", timestamp_granularities=["segment"], **asked)  # fmt: skip
    assert verbose.language == "english"
    assert verbose.segments[0].end <= verbose.duration == 1.3
    srt = calls.create(file=file(), response_format="srt", **asked)
    assert srt.startswith("1\n00:00:0")
    scored = calls.create(file=file(), include=["logprobs"], **asked)
    assert "".join(one.token for one in scored.logprobs).replace("Ġ", " ").strip() == plain.text
    events = list(calls.create(file=file(), stream=True, **asked))
    assert [one.type for one in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert "".join(one.delta for one in events[:-1]) == plain.text == events[-1].text
    english = client.audio.translations.create(model="toy", file=file(), extra_body=extra)
    assert english.text
    with pytest.raises(openai.BadRequestError, match="no sound that this server reads"):
        calls.create(model="toy", file=io.BytesIO(b"text"))
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        calls.create(model="other", file=file())


def test_a_load_of_sound(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--backend",
        "openai-audio",
        "--base-url",
        url,
        "--num-prompts",
        "3",
        "--random-audio-len",
        "1",
    ]
    result = [
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--disable-tqdm",
    ]
    assert bench_serve([*flags, *result, "--extra-body", '{"language": "en"}']) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["completed"] == 3
    assert found["total_audio_s"] == pytest.approx(3.0)
    assert found["rtfx"] > 0
    assert found["total_output_tokens"] > 5
    assert "Inverse real-time factor" in capsys.readouterr().out
    (tmp_path / "a.wav").write_bytes(wav(ONE))
    (tmp_path / "b.txt").write_text("no sound")
    own = ["--dataset-path", str(tmp_path), "--disable-tqdm"]
    assert bench_serve([*flags, *own]) == 0
    assert bench_serve([*flags, "--dataset-path", str(tmp_path / "b.txt")]) == 2
    assert "no sound files" in capsys.readouterr().err
