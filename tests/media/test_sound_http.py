"""Sound in chats over HTTP: every form gets the tokens of the Python API, and each wrong part its error with its place."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from audio_checkpoints import RATE, sound
from vision_checkpoints import as_file, damaged, picture
from vision_server import VisionServer, asking, data_url, web_server

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.frontend.media.prompt_reader import media_inputs
from quire.frontend.media.wav import write_wav

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

TEXT = {"type": "text", "text": "What is it?"}
FILE = write_wav(sound(1), RATE)
HERE, DATA = "messages[0].content[1]", "messages[0].content[1].input_audio.data"
BROKEN = "the sound is damaged"


def data_part(file: bytes | str, kind: Any = "wav") -> dict[str, Any]:
    data = base64.b64encode(file).decode() if isinstance(file, bytes) else file
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def url_part(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def encoded(samples: np.ndarray, rate: int, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.fixture(scope="module")
def server(checkpoint: Any, same_process: Any) -> Iterator[VisionServer]:
    path = checkpoint("qwen2_audio")
    limits = {"audio": 2}
    made = VisionServer(path, same_process(path), limit_mm_per_prompt=limits, max_num_batched_tokens=128)  # fmt: skip
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Any, same_process: Any) -> list[int]:
    """The tokens that the Python API generates for this conversation, from samples and from a URL."""
    path = checkpoint("qwen2_audio")
    with LLM(model=path, dtype="float32", max_model_len=512, block_size=16) as llm:
        media_inputs(llm.front).processes = same_process(path)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        messages = [{"role": "user", "content": [url_part(data_url(FILE, "audio/wav")), TEXT]}]
        (out,) = llm.chat(messages, params, use_tqdm=False)
        text = "<s>[user]<|image_start|><|audio|><|image_end|>What is it?[assistant]"
        for samples in (sound(1), (sound(1), RATE), sound(1).tolist(), [sound(1)], FILE):
            prompt = {"prompt": text, "multi_modal_data": {"audio": samples}}
            (same,) = llm.generate([prompt], params, use_tqdm=False)
            assert same.outputs[0].token_ids == out.outputs[0].token_ids
        with pytest.raises(ValidationError, match="array of samples"):
            llm.generate([{"prompt": text, "multi_modal_data": {"audio": object()}}], params)
        with pytest.raises(ValidationError, match="reads text only"):
            llm.generate([{"prompt": text, "multi_modal_data": {"image": picture(1)}}], params)
        return list(out.outputs[0].token_ids)


URL = data_url(FILE, "audio/wav")
FORMS = [data_part(FILE), data_part(FILE, None), url_part(URL), {"type": "audio_url", "audio_url": URL}]  # fmt: skip


@pytest.mark.parametrize("part", FORMS, ids=["input_audio", "no format", "audio_url", "bare"])
def test_forms_of_a_part(part, server, expected):
    found = server.ask("/v1/chat/completions", asking(part, TEXT)).json()
    assert found["choices"][0]["token_ids"] == expected


def test_the_responses_dialect_and_a_name_of_the_client(server, expected):
    chat = server.ask("/v1/chat/completions", asking(data_part(FILE) | {"uuid": "mine"}, TEXT)).json()  # fmt: skip
    named = {"type": "audio_url", "audio_url": None, "uuid": "mine"}
    again = server.ask("/v1/chat/completions", asking(named, TEXT)).json()
    assert again["choices"][0]["token_ids"] == expected
    content = [data_part(FILE), {"type": "input_text", "text": TEXT["text"]}]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 8, "ignore_eos": True}  # fmt: skip
    found = server.ask("/v1/responses", body).json()
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_rates_widths_channels_and_formats(server):
    """The same sound as other files has the same number of tokens."""
    count = server.ask("/v1/chat/completions", asking(data_part(FILE), TEXT)).json()["usage"]["prompt_tokens"]  # fmt: skip
    six = np.stack([sound(1)] * 6, 1)
    files = [
        encoded(sound(1, rate=8000), 8000), encoded(sound(1), RATE, subtype="PCM_24"), encoded(six, RATE),
        encoded(sound(1), RATE, "FLAC"), encoded(sound(1, rate=48_000), 48_000, "OGG", "OPUS"),
    ]  # fmt: skip
    for file in files:
        found = server.ask("/v1/chat/completions", asking(data_part(file, "mp3"), TEXT, max_tokens=1))  # fmt: skip
        assert found.status_code == 200, found.text
        assert abs(found.json()["usage"]["prompt_tokens"] - count) <= 1


WRONG = [
    (data_part("@@@"), DATA, "not valid base64"),
    (data_part(""), DATA, "a sound file in base64"),
    (data_part(FILE, 7), f"{HERE}.input_audio.format", "a string"),
    ({"type": "input_audio", "input_audio": "x"}, f"{HERE}.input_audio", "data"),
    (data_part(as_file(picture(1))), DATA, "WAV, FLAC, MP3, OGG, M4A or WebM"),
    (data_part(b"RIFF\0\0\0\0WAVEjunk"), DATA, BROKEN),
    (data_part(FILE[:20] + b"\xff" * 8 + FILE[28:]), DATA, BROKEN),
    (data_part(encoded(np.zeros(0), RATE)), DATA, "no sound"),
    (data_part(encoded(np.zeros(1), RATE)), DATA, "too short"),
    (data_part(write_wav(sound(1, 2.5), RATE)), DATA, "2.5 s, and the model hears 2 s"),
    (data_part(encoded(np.zeros(601 * 8000, np.int16), 8000, "FLAC")), DATA, "601.0 s; the limit is 600"),
    (url_part("ftp://x/y.wav"), f"{HERE}.audio_url.url", "data:, http:// or https://"),
    (url_part("http://127.0.0.1:9/a.wav"), f"{HERE}.audio_url.url", "not in the public internet"),
    (url_part("http://[::ffff:169.254.169.254]/a"), f"{HERE}.audio_url.url", "not in the public internet"),
    (url_part("file:///etc/passwd"), f"{HERE}.audio_url.url", "--allowed-local-media-path"),
    ({"type": "audio_url", "audio_url": None, "uuid": "unknown"}, HERE, "no item of this `uuid`"),
    ({"type": "image_url", "image_url": {"url": "http://x"}}, f"{HERE}.image_url.url", "text only"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "param", "words"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_a_wrong_part_gets_an_error_with_its_place(part, param, words, server):
    message, where = server.refused(TEXT, part)
    assert where == param
    assert words in message


def test_too_many_sounds_are_refused_before_any_is_fetched(server):
    message, where = server.refused(*[url_part("http://127.0.0.1:9/none.wav")] * 3)
    assert where == "messages[0].content[2].audio_url.url"
    assert "3 sounds; the limit is 2" in message


def test_a_large_file_is_refused_unread(server, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "0")
    assert "0 MiB" in server.refused(TEXT, data_part(write_wav(sound(8), RATE)))[0]


def test_a_text_that_spells_a_placeholder_stays_text(server):
    part = {"type": "text", "text": "hear <|audio|> and"}
    found = server.ask("/v1/chat/completions", asking(part, data_part(FILE), TEXT, max_tokens=1))
    assert found.status_code == 200, found.text


def test_a_slow_host_holds_no_request_longer_than_the_deadline(checkpoint, same_process, monkeypatch):  # fmt: skip
    monkeypatch.setenv("VLLM_AUDIO_FETCH_TIMEOUT", "0.2")
    path = checkpoint("qwen2_audio")
    listed = VisionServer(path, same_process(path), allowed_media_domains=["127.0.0.1"])
    try:
        with web_server(lambda head: b"HTTP/1.1 200 OK\r\n\r\n" + FILE, seconds=0.5) as (port, _):
            message, where = listed.refused(TEXT, url_part(f"http://127.0.0.1:{port}/"), status=422)
    finally:
        listed.close()
    assert ("AUDIO_FETCH_TIMEOUT" in message, where) == (True, f"{HERE}.audio_url.url")


def test_damaged_files_are_read_or_refused(server):
    draw, codes = random.Random(5), set[int]()
    for file in (FILE, encoded(sound(1), RATE, "FLAC")):
        for _ in range(15):
            body = asking(TEXT, data_part(damaged(file, draw)), max_tokens=1)
            codes.add(server.ask("/v1/chat/completions", body).status_code)
    assert codes <= {200, 400}


# -- attacks: real processes decode ---------------------------------------------------------------
@pytest.fixture(scope="module")
def attacked(checkpoint: Any) -> Iterator[VisionServer]:
    made = VisionServer(checkpoint("qwen2_audio"), max_num_batched_tokens=128)
    yield made
    made.close()


def all_statuses(server: VisionServer, bodies: Iterable[dict[str, Any]], at_once: int = 8) -> Counter[int]:  # fmt: skip
    """Of the answers, by status; some requests at once."""
    found, waiting = Counter[int](), iter(bodies)

    async def client(http: httpx.AsyncClient) -> None:
        for body in waiting:
            answer = await http.post("/v1/chat/completions", json=body)
            found[answer.status_code] += 1
            if answer.status_code not in (200, 400):
                pytest.fail(answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["param"] == DATA

    async def go() -> None:
        transport = httpx.ASGITransport(server.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300) as http:  # fmt: skip
            await asyncio.gather(*(client(http) for _ in range(at_once)))

    asyncio.run(go())
    return found


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_two_thousand_damaged_sounds_in_chats(kind, attacked, expected):
    """Each is read or refused, and the server then answers as before."""
    subtype = {"OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}.get(kind, "PCM_16")
    draw, file = random.Random(7), encoded(sound(1), RATE, kind, subtype)
    bodies = (asking(TEXT, data_part(damaged(file, draw)), max_tokens=1) for _ in range(2000))
    found = all_statuses(attacked, bodies)
    assert found.total() == 2000
    assert found[200]
    assert found[400]
    again = attacked.ask("/v1/chat/completions", asking(data_part(FILE), TEXT)).json()
    assert again["choices"][0]["token_ids"] == expected
    scheduler = attacked.client.core.scheduler  # type: ignore[attr-defined]
    assert not scheduler.running
    assert attacked.state.media_room.taken == 0


@pytest.mark.attack
def test_an_opus_bomb_in_a_chat(attacked, expected):
    """An hour of silence in a small file; another chat is answered beside it."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, 1, format="OGG", subtype="OPUS") as out:
        for _ in range(60):
            out.write(np.zeros(60 * 48_000, np.float32))
    bombs = [asking(TEXT, data_part(file.getvalue()))] * 3
    assert all_statuses(attacked, [*bombs, asking(TEXT)]) == {400: 3, 200: 1}
    message, where = attacked.refused(TEXT, data_part(file.getvalue()))
    assert (where, "the limit is 600" in message) == (DATA, True)
    again = attacked.ask("/v1/chat/completions", asking(data_part(FILE), TEXT)).json()
    assert again["choices"][0]["token_ids"] == expected


def headers() -> Iterator[bytes]:
    """WAV files whose headers say wrong channels, rates, widths and sizes."""
    for at, size in ((4, 4), (16, 4), (20, 2), (22, 2), (24, 4), (28, 4), (32, 2), (34, 2), (40, 4)):  # fmt: skip
        for value in (0, 1, 2, 6, 7, 8, 255, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF):
            yield FILE[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + FILE[at + size :]


@pytest.mark.attack
def test_wrong_headers_in_chats(attacked):
    found = all_statuses(attacked, [asking(TEXT, data_part(one), max_tokens=1) for one in headers()])  # fmt: skip
    assert found.total() == len(list(headers()))


@pytest.mark.attack
def test_a_process_that_is_killed_is_replaced(attacked, expected):
    """A decoder that crashes takes its process with it: that request is refused, and the next one has a new process."""
    processes = media_inputs(attacked.engine.front).processes  # type: ignore[union-attr]
    for _ in range(3):
        for child in list(processes._idle):
            child.process.kill()
        codes = all_statuses(
            attacked, [asking(TEXT, data_part(FILE + os.urandom(8)), max_tokens=1)]
        )
        assert codes.keys() <= {200, 400}
    assert processes.replaced >= 1
    again = attacked.ask("/v1/chat/completions", asking(data_part(FILE), TEXT)).json()
    assert again["choices"][0]["token_ids"] == expected
