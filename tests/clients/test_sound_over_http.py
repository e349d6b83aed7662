"""litellm with sound: transcriptions of a tiny Whisper, and chats of a tiny Qwen2-Audio, each beside the answer without a client."""

from __future__ import annotations

import base64
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_runs import need, serve

for room in ("sound", "media"):
    sys.path.append(str(Path(__file__).parents[1] / room))

FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "32M")
QUESTION = {"type": "text", "text": "What is it?"}
HOW: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that writes down speech, without /v1."""
    need("litellm")
    from whisper_checkpoint import make_whisper

    folder = tmp_path_factory.mktemp("whisper")
    with serve(folder / "log", make_whisper(folder), *FLAGS, "--served-model-name", "hears") as url:
        yield url


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model takes sound in chats."""
    need("litellm")
    from audio_checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("qwen2_audio")
    path, flags = make_checkpoint("qwen2_audio", folder), ("--max-model-len", "512", *FLAGS)
    with serve(folder / "log", path, *flags, "--served-model-name", "hears") as url:
        yield url


@pytest.fixture(scope="module")
def speech() -> tuple[str, bytes]:
    """A file as clients send it: (name, content)."""
    from sound_server import wav
    from whisper_checkpoint import sound

    return "speech.wav", wav(sound(1.3, 11))


def test_transcriptions(whisper: str, speech: tuple[str, bytes]):
    import litellm
    import openai

    how: dict[str, Any] = {"model": "openai/hears", "api_base": f"{whisper}/v1", "api_key": "x", "file": speech, "language": "en"}  # fmt: skip
    found = litellm.transcription(**how)  # it asks for verbose_json, because of the duration
    whole = transcribed(whisper, speech, {"language": "en", "response_format": "verbose_json"})
    plain = transcribed(whisper, speech, {"language": "en"})
    assert found.text in (whole["text"], plain["text"])
    asked = litellm.transcription(**how, response_format="verbose_json")
    assert (asked.text, len(asked.segments)) == (whole["text"], len(whole["segments"]))
    assert len(asked.text) > 5
    with pytest.raises(openai.BadRequestError, match="no sound that this server reads"):
        litellm.transcription(**{**how, "file": ("speech.wav", b"text")})


def transcribed(url: str, file: tuple[str, bytes], fields: dict[str, Any]) -> dict[str, Any]:
    """The answer to a form that no client has made."""
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]  # fmt: skip
    head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{file[0]}"\r\n\r\n'
    body = b"".join([*parts, head.encode(), file[1], b"\r\n--x--\r\n"])
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(f"{url}/v1/audio/transcriptions", body, headers)
    found: dict[str, Any] = json.load(urllib.request.urlopen(request))
    return found


@pytest.mark.parametrize("model", ["openai/hears", "hosted_vllm/hears"])
def test_sound_in_chats(chat: str, speech: tuple[str, bytes], model: str):
    import litellm

    data = base64.b64encode(speech[1]).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    messages: list[Any] = [{"role": "user", "content": [sound, QUESTION]}]
    body = json.dumps({"model": "hears", "messages": messages, **HOW}).encode()
    request = urllib.request.Request(f"{chat}/v1/chat/completions", body, {"Content-Type": "application/json"})  # fmt: skip
    expected = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    how: dict[str, Any] = {"model": model, "api_base": f"{chat}/v1", "api_key": "x", "messages": messages, **HOW}  # fmt: skip
    assert litellm.completion(**how).choices[0].message.content == expected
    chunks = litellm.completion(stream=True, **how)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected
