"""/v1/audio/transcriptions and /translations: the texts are Transformers', in every format, streamed or not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import whisper_checkpoint as whisper
from sound_server import TRANSCRIPTIONS, TRANSLATIONS, SoundServer, wav
from transformers.models.whisper import generation_whisper as generation
from whisper_checkpoint import END, FIRST_TIME, ID, LETTERS

from quire.frontend.media.log_mel import quiet_cuts
from quire.frontend.transcription.prompt_reader import need_transcription
from quire.frontend.transcription.segments import WindowText, joined, split
from quire.frontend.transcription.speech_tokens import SpeechTokens
from quire.frontend.transcription.words import smoothed, warped, words_of
from quire.server.audio.answers import clock, cue_text
from quire.server.audio.multipart import MOST_PARTS

RATE = 16_000
MOST = whisper.TEXT_LENGTH
GREEDY = {"temperature_increment_on_fallback": 0}
ONE, LONG = whisper.sound(1.3, 11), whisper.sound(5.3, 7)


@pytest.fixture(scope="module")
def server(whisper_path: str) -> Iterator[SoundServer]:
    made = SoundServer(whisper_path)
    yield made
    made.close()


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token < END).replace("Ġ", " ")


def windows(samples: np.ndarray) -> list[np.ndarray]:
    cuts = quiet_cuts(samples, int(whisper.SECONDS * RATE))
    return [samples[a:b] for a, b in zip(cuts, [*cuts[1:], len(samples)], strict=True)]


def expected(
    path: str, samples: np.ndarray, language: str = "en", task: str = "transcribe", timed: bool = False,
    before: list[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The tokens of each window, by Transformers."""
    prompt = [ID["<|startofprev|>"], *before] if before else []
    prompt += whisper.prefix(language, task, timed)
    found = []
    for window in windows(samples):
        mel = whisper.features(path, window)
        tokens = whisper.greedy(path, mel, prompt, MOST - len(prompt), timed)
        found.append(tokens[:-1] if tokens[-1] == END else tokens)
    return found


def whole(tokens: list[list[int]], language: str = "en") -> str:
    return joined([text_of(one) for one in tokens], language)


@torch.inference_mode()
def likeliest_language(path: str, samples: np.ndarray) -> str:
    net = whisper.model(path)
    states = net.get_encoder()(whisper.features(path, windows(samples)[0]))
    logits = net(encoder_outputs=states, decoder_input_ids=torch.tensor([[whisper.START]])).logits[
        0, -1
    ]
    return max(whisper.LANGUAGES, key=lambda name: float(logits[ID[f"<|{name}|>"]]))


# -- texts ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples", [ONE, LONG], ids=["one window", "five seconds"])
def test_json(server: SoundServer, whisper_path: str, samples: np.ndarray) -> None:
    found = server.json(wav(samples), language="de", **GREEDY)
    assert found["text"] == whole(expected(whisper_path, samples, "de"), "de")
    assert len(found["text"]) > 10
    assert found["usage"] == {"type": "duration", "seconds": math.ceil(len(samples) / RATE)}
    assert server.ask(wav(samples), language="de", response_format="text", **GREEDY).text == found["text"] + "\n"  # fmt: skip


def test_a_language_is_detected(server: SoundServer, whisper_path: str) -> None:
    language = likeliest_language(whisper_path, LONG)
    found = server.json(wav(LONG), response_format="verbose_json", **GREEDY)
    names = {"en": "english", "de": "german", "fr": "french", "ja": "japanese", "zh": "chinese"}
    assert found["language"] == names[language]
    assert found["text"] == whole(expected(whisper_path, LONG, language, timed=True), language)


@pytest.mark.parametrize("given", ["fr", "FR", "French", "fr-CA"])
def test_spellings_of_a_language(server: SoundServer, whisper_path: str, given: str) -> None:
    found = server.json(wav(ONE), language=given, **GREEDY)
    assert found["text"] == whole(expected(whisper_path, ONE, "fr"))


def test_translation(server: SoundServer, whisper_path: str) -> None:
    found = server.json(
        wav(ONE), TRANSLATIONS, language="ja", response_format="verbose_json", **GREEDY
    )
    assert found["task"] == "translate"
    assert found["text"] == whole(expected(whisper_path, ONE, "ja", "translate", True), "ja")
    assert found["text"] != server.json(wav(ONE), language="ja", response_format="verbose_json", **GREEDY)["text"]  # fmt: skip


def test_a_prompt_goes_before(server: SoundServer, whisper_path: str) -> None:
    before = [LETTERS.index(letter) for letter in "Ġabc"]
    found = server.json(wav(LONG), language="en", prompt="abc", **GREEDY)
    assert found["text"] == whole(expected(whisper_path, LONG, before=before))
    long = server.json(wav(ONE), language="en", prompt="abc" * 500, **GREEDY)
    kept = [LETTERS.index(letter) for letter in ("abc" * 500)[-(MOST // 2 - 1) :]]
    assert long["text"] == whole(expected(whisper_path, ONE, before=kept))


def test_special_tokens_in_a_prompt_do_not_count(server: SoundServer, whisper_path: str) -> None:
    found = server.json(wav(ONE), language="en", prompt="<|endoftext|>b<|de|>", **GREEDY)
    before = [LETTERS.index("Ġ"), LETTERS.index("b")]
    assert found["text"] == whole(expected(whisper_path, ONE, before=before))


# -- times ------------------------------------------------------------------------------------------
def test_segments(server: SoundServer, whisper_path: str) -> None:
    found = server.json(wav(LONG), language="en", response_format="verbose_json", **GREEDY)
    tokens = expected(whisper_path, LONG, timed=True)
    assert found["text"] == whole(tokens)
    assert found["duration"] == 5.3
    segments = found["segments"]
    assert [segment["id"] for segment in segments] == list(range(len(segments)))
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 5.3
    assert "".join(segment["text"] for segment in segments) == "".join(map(text_of, tokens))
    first = segments[0]
    assert first["start"] == round((tokens[0][0] - FIRST_TIME) / 50, 2)
    assert 0 < first["no_speech_prob"] < 1
    assert first["avg_logprob"] < 0 < first["compression_ratio"]
    starts = [len(window) / RATE for window in windows(LONG)]
    offsets = {segment["seek"] for segment in segments}
    assert offsets <= {round(100 * sum(starts[:n])) for n in range(len(starts))}
    assert len(offsets) > 1


def test_silence_has_a_probability(server: SoundServer, whisper_path: str) -> None:
    with torch.inference_mode():
        net = whisper.model(whisper_path)
        states = net.get_encoder()(whisper.features(whisper_path, ONE))
        ids = torch.tensor([[whisper.START]])
        logits = net(encoder_outputs=states, decoder_input_ids=ids).logits[0, -1]
    silence = float(logits.softmax(-1)[ID["<|nospeech|>"]])
    found = server.json(wav(ONE), response_format="verbose_json", **GREEDY)
    assert abs(found["segments"][0]["no_speech_prob"] - silence) < 1e-5


def test_a_window_without_speech_has_no_text(server: SoundServer) -> None:
    strict = {"no_speech_threshold": 0, "logprob_threshold": 0}
    found = server.json(wav(ONE), response_format="verbose_json", **GREEDY, **strict)
    assert (found["text"], found["segments"]) == ("", [])


def test_subtitles(server: SoundServer) -> None:
    verbose = server.json(wav(LONG), language="en", response_format="verbose_json", **GREEDY)
    srt = server.ask(wav(LONG), language="en", response_format="srt", **GREEDY)
    assert srt.headers["content-type"].startswith("text/plain")
    cues = [cue.split("\n", 2) for cue in srt.text.strip().split("\n\n")]
    assert [cue[0] for cue in cues] == [str(n + 1) for n in range(len(cues))]
    assert [cue[2] for cue in cues] == [
        cue_text(one["text"]) for one in verbose["segments"] if one["text"].strip()
    ]
    vtt = server.ask(wav(LONG), language="en", response_format="vtt", **GREEDY)
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:0")
    assert [line for line in vtt.text.split("\n") if "-->" in line] == [
        cue[1].replace(",", ".") for cue in cues
    ]
    assert clock(3725.0625, ",") == "01:02:05,062"
    assert cue_text("a\n b --> c") == "a b -> c"


def test_text_is_carried_over(server: SoundServer, whisper_path: str) -> None:
    """Windows one after the other, each from the last timestamp and with the text before."""
    found = server.json(
        wav(LONG), language="en", condition_on_previous_text="true", response_format="verbose_json", **GREEDY
    )  # fmt: skip
    start, before, texts = 0, list[int](), []
    special, most = specials(), MOST // 2 - 1
    while start < len(LONG):
        part = LONG[start : start + int(whisper.SECONDS * RATE)]
        prompt = ([ID["<|startofprev|>"], *before] if before else []) + whisper.prefix("en")
        tokens = whisper.greedy(whisper_path, whisper.features(whisper_path, part), prompt, MOST - len(prompt))  # fmt: skip
        window = WindowText(0, len(part) / RATE, tokens[:-1] if tokens[-1] == END else tokens, "")
        split(window, True, special, server.engine.tokenizer)  # type: ignore[arg-type]
        texts.append(window.tokens)
        before = (before + [token for token in window.tokens if token < END])[-most:]
        start += max(int(window.advance * RATE), RATE // 50)
    assert found["text"] == whole(texts)
    assert len(texts) >= 3


def specials() -> SpeechTokens:
    return SpeechTokens(whisper.START, END, 0, FIRST_TIME - 1, 0, 0, 0, {"en": 1}, (), (), None)


@pytest.mark.parametrize(
    ("times", "segments", "advance"),
    [
        ([0.0, "a", 1.0, 1.0, "b", 1.6], [(0, 1), (1, 1.6)], 2.0),  # one timestamp closes the text
        ([0.0, "a", 1.0, 1.0, "b"], [(0, 1), (1, 2)], 1.0),  # the rest is not complete
        ([0.0, "a", 1.0, 1.0], [(0, 1)], 1.0),
        ([0.4, "a"], [(0, 0.4)], 2.0),
        ([0.4, "a", 0.8], [(0.4, 0.8)], 2.0),
        (["a"], [(0, 2)], 2.0),
        ([0.0], [], 2.0),
        ([], [], 2.0),
    ],
)  # fmt: skip
def test_timestamps_split_a_window(
    server: SoundServer, times: list[Any], segments: list[tuple[float, float]], advance: float
) -> None:
    tokens = [
        LETTERS.index(time) if isinstance(time, str) else FIRST_TIME + round(time * 50)
        for time in times
    ]
    window = WindowText(0.0, 2.0, tokens, "")
    split(window, True, specials(), server.engine.tokenizer)  # type: ignore[arg-type]
    assert [(one.start, one.end) for one in window.segments] == segments
    assert window.advance == advance


# -- words ------------------------------------------------------------------------------------------
def test_words(server: SoundServer, whisper_path: str) -> None:
    """Their times are of Transformers' attention, by its filter and its path."""
    asked = {"language": "en", "response_format": "verbose_json", **GREEDY}
    found = server.json(wav(LONG), **asked, **{"timestamp_granularities[]": "word"})
    assert "segments" not in found
    prompt, words, start = whisper.prefix("en"), [], 0
    for part, tokens in zip(windows(LONG), expected(whisper_path, LONG, timed=True), strict=True):
        weights = attention(whisper_path, part, [*prompt, *tokens], len(prompt))
        seconds = len(part) / RATE
        states = len(part) // 320
        cut = weights[:, :, :states]
        normed = (cut - cut.mean(1, keepdim=True)) / cut.std(1, keepdim=True, unbiased=False)
        matrix = generation._median_filter(normed[None], 7)[0].mean(0).numpy()
        text, time = generation._dynamic_time_warping(-matrix)
        jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
        times = (time[jumps] * 0.02).tolist()
        of_part = words_of(tokens, times, seconds, "en", specials(), server.engine.tokenizer)  # type: ignore[arg-type]
        offset = start / RATE
        words += [[one.word, one.start + offset, one.end + offset] for one in of_part]
        start += len(part)
    assert [one["word"] for one in found["words"]] == [word for word, *_ in words]
    assert len(words) > 5
    for one, (_, begin, end) in zip(found["words"], words, strict=True):
        assert abs(one["start"] - begin) < 0.011
        assert abs(one["end"] - end) < 0.011
        assert one["start"] <= one["end"] <= 5.3
    both = server.json(wav(LONG), **asked, **{"timestamp_granularities[]": ["word", "segment"]})
    assert both["words"] == found["words"]
    assert both["segments"]


@torch.inference_mode()
def attention(path: str, samples: np.ndarray, tokens: list[int], begin: int) -> torch.Tensor:
    """Of the heads of the upper layers when each token after `begin` is drawn: [heads, tokens, states]."""
    net = transformers.WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()  # fmt: skip
    states = net.get_encoder()(whisper.features(path, samples))
    found = net(
        encoder_outputs=states, decoder_input_ids=torch.tensor([tokens]), output_attentions=True
    )
    layers = found.cross_attentions[net.config.decoder_layers // 2 :]
    return torch.cat([layer[0] for layer in layers])[:, begin - 1 : -1]


def test_paths_are_those_of_transformers() -> None:
    draw = np.random.default_rng(0)
    for rows, columns in ((1, 1), (1, 9), (5, 3), (7, 40), (30, 100)):
        cost = draw.standard_normal((rows, columns)).astype(np.float32)
        text, time = generation._dynamic_time_warping(cost)
        jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
        assert warped(cost) == time[jumps].tolist()
    given = draw.standard_normal((2, 3, 20)).astype(np.float32)
    assert (
        smoothed(given) == generation._median_filter(torch.from_numpy(given)[None], 7)[0].numpy()
    ).all()


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" a bc. d", "en", ["a", "bc.", "d"]), ("a bc", "en", ["a", "bc"]), (" .a", "en", [".a"]), ("abc", "zh", ["a", "b", "c"]),
        (" ", "en", []), ("", "en", []),
    ],
)  # fmt: skip
def test_tokens_become_words(
    server: SoundServer, text: str, language: str, words: list[str]
) -> None:
    tokens = [FIRST_TIME, *(LETTERS.index(letter.replace(" ", "Ġ")) for letter in text)]
    times = [at / 10 for at in range(len(tokens))]
    found = words_of(tokens, times, 2.0, language, specials(), server.engine.tokenizer)  # type: ignore[arg-type]
    assert [one.word for one in found] == words
    assert all(one.start <= one.end for one in found)


# -- attempts ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_text_that_cannot_be_trusted_is_drawn_again(server: SoundServer) -> None:
    """The same request has the same text, at whichever temperature it ends."""
    asked = {"language": "en", "response_format": "verbose_json"}
    first = server.json(wav(ONE), **asked, logprob_threshold=-100, compression_ratio_threshold=100)
    assert first["segments"][0]["temperature"] == 0
    last = server.json(wav(ONE), **asked, logprob_threshold=0)
    assert last["segments"][0]["temperature"] == 1
    assert last["text"] != first["text"]
    assert server.json(wav(ONE), **asked, logprob_threshold=0) == last
    counts = server.client.core.counts  # type: ignore[attr-defined]
    passes = counts["encoder_passes"]
    server.json(wav(ONE), **asked, logprob_threshold=0)
    assert counts["encoder_passes"] == passes  # no attempt encodes again
    drawn = server.json(wav(ONE), **asked, temperature=0.7, seed=5)
    assert drawn["segments"][0]["temperature"] == 0.7
    assert drawn == server.json(wav(ONE), **asked, temperature=0.7, seed=5)
    assert drawn != server.json(wav(ONE), **asked, temperature=0.7, seed=6)


# -- streams ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_stream_has_the_same_text(server: SoundServer, language: str) -> None:
    text = server.json(wav(LONG), language=language, **GREEDY)["text"]
    events = server.events(wav(LONG), language=language)
    deltas, done = events[:-1], events[-1]
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 10
    assert "".join(event["delta"] for event in deltas) == text
    assert done == {
        "type": "transcript.text.done", "text": text, "usage": {"type": "duration", "seconds": 6},
    }  # fmt: skip


def test_a_stream_with_segments(server: SoundServer) -> None:
    whole = server.json(wav(LONG), language="en", response_format="verbose_json", **GREEDY)
    events = server.events(wav(LONG), language="en", response_format="verbose_json")
    segments = [event for event in events if event["type"] == "transcript.text.segment"]
    keys = ("start", "end", "text")
    assert [[one[key] for key in keys] for one in segments] == [
        [one[key] for key in keys] for one in whole["segments"]
    ]


@pytest.mark.parametrize(("path", "kind", "prefix"), [(TRANSCRIPTIONS, "transcription", "trsc-"), (TRANSLATIONS, "translation", "trsl-")])  # fmt: skip
def test_a_stream_of_chunks(server: SoundServer, path: str, kind: str, prefix: str) -> None:
    asked = {"language": "en", "stream_format": "vllm"}
    text = server.json(wav(ONE), path, language="en", **GREEDY)["text"]
    chunks = server.events(wav(ONE), path, **asked, stream_include_usage="true")
    assert {chunk["object"] for chunk in chunks} == {f"{kind}.chunk"}
    assert chunks[0]["id"].startswith(prefix)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 5
    chunks = server.events(wav(ONE), path, **asked, stream_continuous_usage_stats="true")
    assert all("usage" in chunk for chunk in chunks[:-1])


def test_a_client_that_leaves_ends_its_windows(server: SoundServer) -> None:
    from starlette.requests import ClientDisconnect

    from quire.server.audio.transcription import Transcription
    from quire.server.sse import until_disconnect

    front = server.engine.front

    async def leave() -> None:
        from quire.server.audio.fields import TranscriptionRequest
        from quire.server.endpoint import RequestContext

        reader = need_transcription(front, "x")
        sound = await reader.sound.load(wav(LONG), "file", reader.model.samples)
        request = _Request()
        context = RequestContext(request, server.state, server.engine, "toy", None)  # type: ignore[arg-type]
        source = Transcription(
            context, "gone", TranscriptionRequest(), reader, sound, "transcribe", "en", False
        )

        async def receive() -> dict[str, Any]:
            while not server.state.active:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await until_disconnect(receive, source.whole())  # type: ignore[arg-type]
        while front.live or server.state.active:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert server.state.media_room.taken == 0


class _Request:
    headers: dict[str, str] = {}  # noqa: RUF012
    scope: dict[str, Any] = {}  # noqa: RUF012


# -- errors -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"language": "xx"}, "language", "'xx' is unknown; this model has de, en, fr, ja, zh"),
        ({"response_format": "docx"}, "response_format", "json, text, srt, verbose_json, vtt"),
        ({"response_format": "diarized_json"}, None, "diarized_json"),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"temperature": "nan"}, "temperature", "between 0 and 2"),
        ({"temperature": "3"}, "temperature", "between 0 and 2"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities", "letter"),
        ({"stream": "true", "response_format": "srt"}, "stream", "one piece"),
        ({"stream_format": "xml"}, "stream_format", "xml"),
        ({"n": "2"}, "n", "one text"),
        ({"chunking_strategy": "x"}, "chunking_strategy", "auto"),
        ({"vllm_xargs": "{"}, "vllm_xargs", "JSON"),
        ({"top_p": "7"}, "top_p", "top_p"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens", "at least 1"),
    ],
)  # fmt: skip
def test_wrong_fields(
    server: SoundServer, fields: dict[str, str], param: str | None, says: str
) -> None:
    message, found = server.refused(wav(ONE), **fields)
    assert says in message
    assert found == param


def test_wrong_files(server: SoundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.refused(b"text") == ("`file`: this is no sound that this server reads: send WAV, FLAC, MP3, OGG, M4A or WebM", "file")  # fmt: skip
    assert "missing" in server.refused(None)[0]
    assert "is a text, not a file" in server.refused(None, file="abc")[0]
    monkeypatch.setenv("QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    for size in ((1 << 20) + 1, 3 << 20):
        message, param = server.refused(bytes(size), 413)
        assert "QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB" in message
        assert param == "file"
    monkeypatch.setenv("QUIRE_MAX_AUDIO_DECODE_DURATION_S", "1")
    assert "has 1.3 s; the limit is 1 (QUIRE_MAX_AUDIO_DECODE_DURATION_S)" in server.refused(wav(ONE))[0]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "multipart/form-data"),
        ("multipart/form-data; boundary=x", b"", "`file` is missing"),
        ("multipart/form-data; boundary=x", b"--y\r\n", "damaged"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: a\r\n\r\nb\r\n--x--\r\n", "no name"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * (MOST_PARTS + 1), "more than 64 fields"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"b" * (1 << 19), "bytes of text"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A" * 9000 + b": b\r\n\r\nb\r\n--x--\r\n", "damaged"),
    ],
)  # fmt: skip
def test_wrong_forms(server: SoundServer, kind: str, body: bytes, says: str) -> None:
    async def post(http: Any) -> Any:
        return await http.post(TRANSCRIPTIONS, content=body, headers={"content-type": kind})

    found = server.run(post)
    assert found.status_code == 400, found.text
    assert says in found.json()["error"]["message"]


def test_other_routes_refuse_text_alone(server: SoundServer) -> None:
    async def post(http: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "a"}]}
        return (
            await http.post("/v1/completions", json={"prompt": "a"}),
            await http.post("/v1/chat/completions", json=body),
        )

    for found in server.run(post):
        assert found.status_code == 400
        assert "send a sound file to /v1/audio/transcriptions" in found.json()["error"]["message"]


# -- Python -----------------------------------------------------------------------------------------
def test_programs(whisper_path: str) -> None:
    from quire import LLM, SamplingParams
    from quire.errors import ValidationError

    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    allowed = [*(token for token in range(END) if token not in whisper.SUPPRESSED), END]
    params = SamplingParams(temperature=0, max_tokens=MOST - 4, allowed_token_ids=allowed)
    with LLM(model=whisper_path, dtype="float32", block_size=16, max_num_seqs=2) as llm:
        media = {"audio": (ONE, RATE)}
        both = [
            {"prompt": prompt, "multi_modal_data": media},
            {"encoder_prompt": {"prompt": "", "multi_modal_data": media}, "decoder_prompt": prompt},
        ]
        found = [one.outputs[0].token_ids for one in llm.generate(both, params)]
        assert found[0] == found[1]
        assert len(found[0]) > 5
        for wrong, says in (
            ({"prompt": prompt, "multi_modal_data": {"audio": [(ONE, RATE)] * 2}}, "one sound and nothing else, not 2"),
            ({"prompt": prompt, "multi_modal_data": {"audio": (LONG, RATE)}}, "has 5.3 s"),
            ({"prompt": prompt}, "writes down speech"),
            ({"encoder_prompt": "a", "decoder_prompt": prompt}, "a prompt for encoder and decoder is"),
        ):  # fmt: skip
            with pytest.raises(ValidationError, match=says):
                llm.generate(wrong, params)
