"""Sound and pictures on the page: recorded, chosen, dropped and pasted; sent to a real Whisper, and in messages of a chat."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import whisper_checkpoint as whisper
from chromium import PROGRAM, Chromium
from reader import content, scripted, text
from sound_server import TRANSCRIPTIONS, SoundServer, wav

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

HERTZ = 440
FILE = wav(whisper.sound(1.3, 11))
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")  # fmt: skip
KEEP_FORMS = """
    window.forms = [];
    window.theirs = fetch;
    window.fetch = (path, options) => {
        if (options?.body instanceof FormData) forms.push(options.body);
        return theirs(path, options);
    };
    0
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = SoundServer(whisper.make_whisper(tmp_path_factory.mktemp("whisper")))
    with server.listening() as found:
        yield found
    server.close()


@pytest.fixture(scope="module")
def browser(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """Its microphone hears a tone."""
    folder = tmp_path_factory.mktemp("browser")
    tone = folder / "tone.wav"
    tone.write_bytes(wav(0.5 * np.sin(2 * np.pi * HERTZ * np.arange(48_000 * 5) / 48_000), 48_000))
    flags = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={tone}"]  # fmt: skip
    with Chromium(folder, *flags) as found:
        found.sized(1300, 850)
        yield found


@pytest.fixture
def page(browser: Chromium, url: str) -> Chromium:
    browser.events.clear()  # complaints of the test before
    browser.open(url + "/")
    browser.until("document.getElementById('words').hidden && !document.getElementById('record').hidden")  # fmt: skip
    browser.js("document.getElementById('fresh').click(); document.getElementById('options-reset').click(); 0")  # fmt: skip
    browser.js(KEEP_FORMS)
    return browser


def give(browser: Chromium, way: str, *files: tuple[str, str, bytes]) -> None:
    """Choose, drop or paste files: (name, type, data)."""
    given = json.dumps([[name, kind, base64.b64encode(data).decode()] for name, kind, data in files])  # fmt: skip
    browser.js(f"""
        window.data = new DataTransfer();
        for (const [name, type, file] of {given})
            data.items.add(new File([Uint8Array.from(atob(file), letter => letter.charCodeAt(0))], name, {{type}}));
        if ("{way}" === "choose") {{
            document.getElementById("attach-file").files = data.files;
            document.getElementById("attach-file").dispatchEvent(new Event("change"));
        }} else if ("{way}" === "drop") {{
            document.getElementById("talk").dispatchEvent(new DragEvent("drop", {{dataTransfer: data, bubbles: true, cancelable: true}}));
        }} else {{
            document.body.dispatchEvent(new ClipboardEvent("paste", {{clipboardData: data, bubbles: true}}));
        }}
        0
    """)


def answer(browser: Chromium) -> str:
    browser.until("document.querySelector('.assistant .note')?.textContent && !document.querySelector('.busy')")  # fmt: skip
    found = browser.js("[...document.querySelectorAll('.assistant .text')].at(-1).textContent")
    return str(found)


def sent_file(browser: Chromium) -> bytes:
    found = browser.js("""
        new Promise(done => {
            const reader = new FileReader();
            reader.onload = () => done(reader.result.split(",")[1]);
            reader.readAsDataURL(forms.at(-1).get("file"));
        })
    """)
    return base64.b64decode(found)


def transcribed(url: str, file: bytes, **fields: Any) -> dict[str, Any]:
    asked = {"temperature_increment_on_fallback": 0, "no_speech_threshold": 1, **fields}
    found = httpx.post(url + TRANSCRIPTIONS, files={"file": ("a.wav", file)}, data=asked, timeout=300)  # fmt: skip
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def test_the_microphone_is_recorded_by_the_keyboard_alone_and_written_down(page: Chromium, url: str):  # fmt: skip
    page.js("document.getElementById('record').focus()")
    page.enter()
    page.until("/Stop 0:0[1-9]/.test(document.getElementById('record').textContent)")
    assert page.js("document.getElementById('level').value") > 0.02  # browsers change the gain
    page.enter()
    shown, file = answer(page), sent_file(page)
    with wave.open(io.BytesIO(file)) as read:
        assert (read.getframerate(), read.getnchannels(), read.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(read.readframes(read.getnframes()), np.int16)
    assert 16_000 <= len(samples) < 16_000 * 8
    whole = samples[-16_000:]
    assert abs(int(np.abs(np.fft.rfft(whole)).argmax()) - HERTZ) <= 1
    assert shown == transcribed(url, file)["text"]
    assert page.js("document.querySelectorAll('.user audio').length") == 1
    note = page.js("document.querySelector('.assistant .note').textContent")
    assert "s of sound in" in note
    assert page.complaints() == []


def test_a_recording_is_dropped_by_escape(page: Chromium):
    page.js("document.getElementById('record').click()")
    page.until("document.getElementById('record').textContent.startsWith('Stop')")
    page.press("Escape", 27)
    assert text(page, "record") == "Record"
    assert text(page, "attach-note") == "The recording is dropped."
    assert page.js("forms.length") == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["choose", "drop", "paste"])
def test_a_file_is_written_down(page: Chromium, url: str, way: str):
    give(page, way, ("speech.wav", "audio/wav", FILE))
    assert answer(page) == transcribed(url, FILE)["text"]
    assert sent_file(page) == FILE
    assert text(page, "attached") == ""


def test_times_language_and_task_of_the_options(page: Chromium, url: str):
    page.js("""
        for (const [name, value] of [["times", "on"], ["language", "de"], ["task", "translations"]])
            document.getElementById("option-" + name).value = value;
        0
    """)
    assert page.js("document.getElementById('option-top_k').parentElement.hidden")
    give(page, "choose", ("speech.wav", "audio/wav", FILE))
    lines = answer(page).splitlines()
    asked = {"language": "de", "response_format": "verbose_json", "temperature_increment_on_fallback": 0, "no_speech_threshold": 1}  # fmt: skip
    found = httpx.post(f"{url}/v1/audio/translations", files={"file": ("a.wav", FILE)}, data=asked, timeout=300)  # fmt: skip
    segments = found.json()["segments"]
    assert [line.split("  ", 1)[1] for line in lines] == [one["text"].strip() for one in segments]
    first = segments[0]
    assert lines[0].startswith(f"0:{first['start']:04.1f} – 0:{first['end']:04.1f}")


def test_wrong_files_are_refused_with_their_names(page: Chromium):
    give(page, "drop", ("notes.txt", "text/plain", b"x"))
    assert text(page, "attach-note") == "notes.txt: this model takes sound"
    give(page, "choose", ("none.wav", "audio/wav", b""))
    assert text(page, "attach-note") == "none.wav is empty"
    give(page, "choose", ("bad.wav", "audio/wav", b"text"))
    page.until("document.querySelector('.assistant .note.bad') !== null")
    note = page.js("document.querySelector('.assistant .note').textContent")
    assert "no sound that this server reads" in note
    assert page.js("forms.length") == 1  # and it is not sent again by itself


@contextmanager
def chatting(browser: Chromium, *kinds: str) -> Iterator[None]:
    """The page takes the server for one of a model that chats, and takes these kinds."""
    takes = json.dumps({"sampling": {}, "takes": {"media": kinds, "speech": False, "seconds": 2, "mib": 25}})  # fmt: skip
    browser.js(f"""
        window.real = fetch;
        window.fetch = (path, options) => path === "ui/defaults" ? Promise.resolve(new Response({takes!r})) : real(path, options);
        import("./ui/page/defaults.js").then(module => module.refreshDefaults())
    """)
    with scripted(browser, content("a dog")):
        yield
    browser.js("window.fetch = real; 0")


def test_sound_and_pictures_go_into_messages_and_stay_in_the_history(page: Chromium):
    with chatting(page, "image", "audio"):
        give(page, "choose", ("dog.wav", "audio/wav", FILE), ("dot.png", "image/png", PNG))
        assert page.js("document.querySelectorAll('#attached li').length") == 2
        page.js("document.getElementById('words').focus()")
        page.type("What is it?")
        page.enter()
        page.until("bodies.length === 1 && !document.querySelector('.busy')")
        assert page.js("document.querySelector('.assistant .text').textContent") == "a dog"
        sound, picture, words = page.js("bodies[0].messages[0].content")
        assert sound == {"type": "input_audio", "input_audio": {"data": base64.b64encode(FILE).decode(), "format": "wav"}}  # fmt: skip
        assert picture["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()  # fmt: skip
        assert words == {"type": "text", "text": "What is it?"}
        page.until("document.querySelector('.user img').naturalWidth === 1")
        page.until("document.querySelector('.user audio').duration > 1.2")
        kept = page.js("""
            URL.createObjectURL = (make => blob => { window.blob = blob; return make(blob); })(URL.createObjectURL.bind(URL));
            document.getElementById("history-open").click();
            import("./ui/page/storage.js").then(async store => {
                for (;;) if ((await store.loadAll()).some(one => one.turns[0]?.answer === "a dog")) return;
            })
        """)  # fmt: skip
        page.until("document.querySelector('.entry') !== null")
        page.js("document.getElementById('history-export').click(); 0")
        kept = json.loads(page.until("window.blob?.type === 'application/json' && blob.text()"))
        files = [turn["media"] for one in kept["conversations"] for turn in one["turns"] if turn["mode"] == "chat"]  # fmt: skip
        assert [one["name"] for one in files[-1]] == ["dog.wav", "dot.png"]
        assert base64.b64decode(files[-1][0]["blob"].split(",")[1]) == FILE
        page.js(f"""
            document.getElementById("history-clear").click();
            document.getElementById("history-clear").click();
            window.again = {json.dumps(json.dumps(kept))};
            0
        """)
        page.until("!document.querySelector('.entry')")
        page.js("""
            window.files = new DataTransfer();
            files.items.add(new File([again], "x.json"));
            document.getElementById("history-file").files = files.files;
            document.getElementById("history-file").dispatchEvent(new Event("change")); 0
        """)
        page.until("[...document.querySelectorAll('.entry')].find(one => one.textContent.includes('What is it?'))?.click() ?? document.querySelector('.user img') !== null")  # fmt: skip
        page.js("[...document.querySelectorAll('.assistant button')].find(one => one.textContent === 'Regenerate').click()")  # fmt: skip
        page.until("bodies.length === 2 && !document.querySelector('.busy')")
        assert page.js("bodies[1].messages[0].content[0].input_audio.data") == base64.b64encode(FILE).decode()  # fmt: skip
    assert page.complaints() == []


def test_a_recording_waits_for_the_question_of_a_chat_and_ends_at_the_models_limit(page: Chromium):
    with chatting(page, "audio"):
        page.js("document.getElementById('record').click()")
        page.until("document.querySelector('#attached audio') !== null")
        assert "the recording ended after 2 s" in page.until("document.getElementById('attach-note').textContent")  # fmt: skip
        assert page.js("bodies.length") == 0
        page.js("document.querySelector('#attached button').focus()")
        page.enter()
        assert page.js("document.activeElement.id") == "attach"
        assert page.js("document.querySelectorAll('#attached li').length") == 0


def test_a_model_of_text_takes_no_files(page: Chromium):
    with chatting(page):
        assert page.js("document.getElementById('attach').hidden")
        give(page, "drop", ("dot.png", "image/png", PNG))
        assert text(page, "attach-note") == "dot.png: this model takes text only"


@pytest.mark.parametrize("file", [
    {"kind": "text", "name": "a", "blob": "data:image/png;base64,AA=="},
    {"kind": "image", "name": "a", "blob": "data:text/html;base64,AA=="},
    {"kind": "image", "name": "a", "blob": "https://elsewhere.example/a.png"},
    {"kind": "image", "name": 7, "blob": "data:image/png;base64,AA=="},
    {"kind": "image", "name": "a", "blob": {}},
])  # fmt: skip
def test_a_damaged_file_in_an_import_is_refused(page: Chromium, file: Any):
    turn = {"parent": -1, "ask": "hi", "answer": "x", "media": [file]}
    said = page.js(f"""
        import("./ui/page/tree.js").then(tree => tree.checked({json.dumps({"turns": [turn], "leaf": 0})})).catch(error => error.message)
    """)
    assert "must be" in said


@pytest.mark.parametrize("width", [320, 390, 1300])
def test_buttons_and_players_fit(page: Chromium, width: int):
    with chatting(page, "image", "audio"):
        page.sized(width, 844)
        give(page, "choose", ("a long name of a sound file.wav", "audio/wav", FILE), ("dot.png", "image/png", PNG))  # fmt: skip
        assert page.js("document.documentElement.scrollWidth") <= width
        assert page.js("document.getElementById('chat').scrollWidth <= document.getElementById('chat').clientWidth + 1")  # fmt: skip
        small = page.js("""
            [...document.querySelectorAll("#ask button, #ask audio")].filter(one => one.offsetParent).map(one => one.getBoundingClientRect())
                .filter(box => box.height < 43.5 || box.width < 43.5).length
        """)
        assert small == 0 or width > 900
        page.js("for (const button of [...document.querySelectorAll('#attached button')]) button.click(); 0")  # fmt: skip
    page.sized(1300, 850)
