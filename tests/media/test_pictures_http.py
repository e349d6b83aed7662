"""Pictures over HTTP: every protocol gets the tokens of the Python API, and each wrong part its error with its place."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vision_checkpoints import as_file, damaged, picture
from vision_server import DIRECT, VisionServer, asking, data_url, image_part, moved, ok, web_server

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.config.media import MediaConfig
from quire.frontend.media.prompt_reader import media_inputs

URL = data_url(as_file(picture(1)))
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def server(checkpoint: Any, processes: Any) -> Iterator[VisionServer]:
    path = checkpoint("llava")
    made = VisionServer(path, processes(path), limit_mm_per_prompt={"image": 3}, enable_mm_embeds=True, trust_request_mm_kwargs=True)  # fmt: skip
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Any, same_process: Any) -> list[int]:
    """The tokens that the Python API generates for this conversation."""
    with LLM(model=checkpoint("llava"), dtype="float32", max_model_len=512, block_size=16) as llm:
        media_inputs(llm.front).processes = same_process(checkpoint("llava"))
        content = [{"type": "image_pil", "image_pil": picture(1)}, TEXT]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (out,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        return list(out.outputs[0].token_ids)


@pytest.mark.parametrize(
    "part",
    [image_part(URL), {"type": "image_url", "image_url": URL}, {"type": "input_image", "image_url": URL}, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}],
    ids=["object", "bare string", "input_image", "detail"],
)  # fmt: skip
def test_forms_of_a_chat_part(part, server, expected):
    found = server.ask("/v1/chat/completions", asking(part, TEXT)).json()
    assert found["choices"][0]["token_ids"] == expected


def test_responses_and_anthropic_and_batches_read_the_same_prompt(server, expected):
    prompt = server.ask("/v1/chat/completions", asking(image_part(URL), TEXT)).json()
    count = prompt["usage"]["prompt_tokens"]
    text = prompt["choices"][0]["message"]["content"]
    content = [
        {"type": "input_image", "image_url": URL},
        {"type": "input_text", "text": TEXT["text"]},
    ]
    body = {
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 8,
        "ignore_eos": True,
    }
    found = server.ask("/v1/responses", body).json()
    assert (found["usage"]["input_tokens"], found["output"][0]["content"][0]["text"]) == (
        count,
        text,
    )
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, TEXT]
    message = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8, "temperature": 0}
    assert server.ask("/v1/messages", message).json()["usage"]["input_tokens"] == count
    assert server.ask("/v1/messages/count_tokens", message).json()["input_tokens"] == count
    batch = asking(image_part(URL), TEXT)
    batch["messages"] = [batch["messages"], [{"role": "user", "content": "only text"}]]
    found = server.ask("/v1/chat/completions/batch", batch).json()
    assert found["choices"][0]["token_ids"] == expected


def test_a_conversation_with_pictures_is_continued(server):
    """As the whole conversation in one request; with no more pictures than a request may have."""
    picture, fixed = {"type": "input_image", "image_url": URL}, {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}  # fmt: skip
    first = [{"role": "user", "content": [picture, {"type": "input_text", "text": "What is it?"}]}]
    made = server.ask("/v1/responses", {"input": first, **fixed}).json()
    more = [{"role": "user", "content": [picture, {"type": "input_text", "text": "And this?"}]}]
    answer = {"role": "assistant", "content": made["output"][0]["content"][0]["text"]}
    whole = server.ask("/v1/responses", {"input": [*first, answer, *more], **fixed}).json()
    found = server.ask("/v1/responses", {"input": more, "previous_response_id": made["id"], **fixed}).json()  # fmt: skip
    assert found["output"][0]["content"] == whole["output"][0]["content"]
    assert found["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    three = server.ask("/v1/responses", {"input": more, "previous_response_id": found["id"], **fixed})  # fmt: skip
    assert three.status_code == 200
    four = server.ask("/v1/responses", {"input": more, "previous_response_id": three.json()["id"], **fixed})  # fmt: skip
    assert (four.status_code, "has 4 pictures; the limit is 3" in four.text) == (400, True)
    store = server.state.responses
    assert store.size > 3 * len(URL)


def test_a_tool_result_may_have_a_picture(server):
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [TEXT, {"type": "image", "source": source}],
    }
    messages = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, TEXT]},
    ]
    tokens = server.ask("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"]
    result["content"].pop()
    assert (
        server.ask("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"]
        == tokens - 16
    )


def test_a_text_that_spells_a_placeholder_stays_text(server):
    spelled = {"type": "text", "text": "a <image> in words"}
    found = server.ask("/v1/chat/completions", asking(spelled, image_part(URL), prompt_logprobs=0))
    tokens = found.json()["usage"]["prompt_tokens"]
    other = {"type": "text", "text": "a (image) in words"}
    assert (
        server.ask("/v1/chat/completions", asking(other, image_part(URL))).json()["usage"][
            "prompt_tokens"
        ]
        == tokens
    )


def test_a_second_question_uses_the_prefix_cache(server):
    server.ask("/v1/chat/completions", asking(image_part(data_url(as_file(picture(9)))), TEXT))
    before = media_inputs(server.engine.front).cache.hits
    counts = dict(server.client.core.counts)
    found = server.ask(
        "/v1/chat/completions", asking(image_part(data_url(as_file(picture(9)))), TEXT)
    )
    assert found.status_code == 200
    assert media_inputs(server.engine.front).cache.hits == before + 1
    assert server.client.core.counts["encoder_passes"] == counts["encoder_passes"]


WRONG = [
    (image_part("ftp://x/y.png"), "messages[0].content[1].image_url.url", "data:, http:// or https://"),
    (image_part(7), "messages[0].content[1].image_url.url", "must be a URL"),
    ({"type": "image_url"}, "messages[0].content[1].image_url", "must be a URL"),
    (image_part("data:image/png;base64,@@@"), "messages[0].content[1].image_url.url", "not valid base64"),
    (image_part("data:image/png,abc"), "messages[0].content[1].image_url.url", "base64"),
    (image_part(data_url(b"no picture")), "messages[0].content[1].image_url.url", "PNG, JPEG, WebP, BMP or GIF"),
    (image_part(URL[:-400]), "messages[0].content[1].image_url.url", "damaged"),
    (image_part(URL) | {"uuid": 7}, "messages[0].content[1]", "uuid"),
    ({"type": "image_url", "image_url": None, "uuid": "unknown"}, "messages[0].content[1]", "no item of this `uuid`"),
    ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "messages[0].content[1].image_url.url", "detail"),
    ({"type": "image"}, "messages[0].content[1]", "image"),
    ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[1]", "image_pil"),
    ({"type": "video_url", "video_url": {"url": "http://x"}}, "messages[0].content[1].video_url.url", "no videos"),
    ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1].input_audio.data", "base64"),
    ({"type": "audio_url", "audio_url": "http://x"}, "messages[0].content[1].audio_url", "takes no sound in prompts"),
    ({"type": "image_embeds", "image_embeds": "x"}, "messages[0].content[1].image_embeds", "is not base64"),
    ({"type": "image_embeds", "image_embeds": 7}, "messages[0].content[1].image_embeds", "must be base64"),
    ({"type": "image_embeds", "image_embeds": {"image_embeds": "x", "more": 1}}, "messages[0].content[1].image_embeds", "must be base64"),
    ({"type": "video_embeds", "video_embeds": "eA=="}, "messages[0].content[1].video_embeds", "no videos"),
    (image_part("file:///etc/passwd"), "messages[0].content[1].image_url.url", "--allowed-local-media-path"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "param", "words"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_a_wrong_part_gets_an_error_with_its_place(part, param, words, server):
    message, where = server.refused(TEXT, part)
    assert where == param
    assert words in message
    assert "PIL" not in message
    assert "0x" not in message


def test_too_many_pictures_are_refused_before_any_is_fetched(server):
    message, where = server.refused(*[image_part("http://127.0.0.1:9/none.png")] * 4)
    assert where == "messages[0].content[3].image_url.url"
    assert "the limit is 3" in message


def test_what_pictures_do_not_support_is_refused_by_name(server):
    message, _ = server.refused(image_part(URL), TEXT, truncate_prompt_tokens=5)
    assert "truncate_prompt_tokens of a prompt with media" in message


def test_tokenize_counts_the_tokens_of_pictures(server):
    body = asking(image_part(URL), TEXT)
    found = server.ask("/tokenize", {"messages": body["messages"]}).json()
    chat = server.ask("/v1/chat/completions", body).json()
    assert found["tokens"] == chat["prompt_token_ids"]
    assert found["count"] == chat["usage"]["prompt_tokens"]


def test_many_completions_of_large_pictures_are_refused(server, monkeypatch):
    monkeypatch.setattr(server.state.media_room, "most", 20_000)
    assert "lower `n`" in server.refused(image_part(URL), TEXT, n=3, temperature=1)[0]


def test_beam_search_of_a_picture(server):
    """The best of several beams is at least as likely as the greedy output, and depends on the picture."""
    found = server.ask("/v1/chat/completions", asking(image_part(URL), TEXT, use_beam_search=True, n=2))  # fmt: skip
    other = image_part(data_url(as_file(picture(3))))
    texts = [server.ask("/v1/chat/completions", asking(one, TEXT, use_beam_search=True, n=2)).json()["choices"][0]["message"]["content"] for one in (image_part(URL), other)]  # fmt: skip
    assert found.json()["choices"][0]["message"]["content"] == texts[0] != texts[1]


def test_a_model_without_pictures_says_so(checkpoint):
    made = VisionServer(checkpoint("llava"), language_model_only=True)
    try:
        message, where = made.refused(TEXT, image_part(URL))
        assert "--language-model-only" in message
        assert where == "messages[0].content[1].image_url.url"
    finally:
        made.close()


def test_a_template_of_strings_gets_placeholders_before_the_text(tmp_path, same_process):
    from vision_checkpoints import make_checkpoint

    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    made = VisionServer(make_checkpoint("llava", tmp_path, template), same_process(str(tmp_path)))
    try:
        body = asking(TEXT, image_part(URL), TEXT, return_prompt_text=True)
        found = made.ask("/v1/chat/completions", body).json()
        assert found["prompt_text"] == "[user]<image>\nWhat is it?\nWhat is it?"
        media_inputs(made.engine.front).in_place = True  # --interleave-mm-strings
        found = made.ask("/v1/chat/completions", body).json()
        assert found["prompt_text"] == "[user]What is it?\n<image>\nWhat is it?"
    finally:
        made.close()


def test_the_encoder_cache_can_be_emptied(server):
    assert server.client.call("reset_encoder_cache") is True


def test_damaged_files_get_an_answer_or_a_400(server):
    draw, codes = random.Random(5), set[int]()
    for number in range(40):
        kind = ("PNG", "JPEG", "GIF", "WEBP")[number % 4]
        file = damaged(as_file(picture(number, 40, 30), kind), draw)
        codes.add(
            server.ask(
                "/v1/chat/completions", asking(image_part(data_url(file)), max_tokens=1)
            ).status_code
        )
    assert codes == {200, 400}


def test_structured_output_of_a_picture(server):
    body = asking(image_part(URL), TEXT, structured_outputs={"choice": ["red", "blue"]})
    body.pop("ignore_eos")
    text = server.ask("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text in ("red", "blue")


def test_a_picture_is_asked_for_again_by_its_uuid(server, expected):
    named = image_part(URL) | {"uuid": "mine"}
    again = {"type": "image_url", "image_url": None, "uuid": "mine"}
    both = server.ask("/v1/chat/completions", asking(named, TEXT)).json()
    assert both["choices"][0]["token_ids"] == expected
    for part in (again, {"type": "image_url", "image_url": {"url": None}, "uuid": "mine"}):
        found = server.ask("/v1/chat/completions", asking(part, TEXT)).json()
        assert found["choices"][0]["token_ids"] == expected
    pair = server.ask(
        "/v1/chat/completions", asking(again, image_part(data_url(as_file(picture(4)))), TEXT)
    )
    other = server.ask(
        "/v1/chat/completions",
        asking(image_part(URL), image_part(data_url(as_file(picture(4)))), TEXT),
    )
    assert pair.json()["choices"][0]["token_ids"] == other.json()["choices"][0]["token_ids"]
    assert "uuid" in server.refused(again, TEXT, cache_salt="another")[0]
    media_inputs(server.engine.front).cache.clear()
    assert "uuid" in server.refused(again, TEXT)[0]


def test_what_cannot_be_fetched_is_a_422(server, monkeypatch):
    message, where = server.refused(image_part("http://169.254.169.254/latest/meta-data"))
    assert ("public internet" in message, where) == (True, "messages[0].content[0].image_url.url")
    monkeypatch.setattr(
        media_inputs(server.engine.front).fetcher,
        "config",
        MediaConfig(allowed_media_domains=["127.0.0.1"]),
    )
    with web_server(
        lambda head: moved("/x") if b" /a " in head else b"HTTP/1.1 404 No\r\n\r\n"
    ) as (port, _):
        message, where = server.refused(image_part(f"http://127.0.0.1:{port}/a"), status=422)
    assert ("status 404" in message, where) == (True, "messages[0].content[0].image_url.url")
    with web_server(lambda head: ok(as_file(picture(1)))) as (port, _):
        url = image_part(f"http://127.0.0.1:{port}/cat.png")
        assert server.ask("/v1/chat/completions", asking(url, TEXT)).status_code == 200


def test_a_client_that_leaves_ends_the_fetch(server, monkeypatch):
    listed = MediaConfig(allowed_media_domains=["127.0.0.1"])
    monkeypatch.setattr(media_inputs(server.engine.front).fetcher, "config", listed)
    monkeypatch.setenv("QUIRE_IMAGE_FETCH_TIMEOUT", "60")

    async def leave(port: int) -> float:
        parts = [json.dumps(asking(image_part(f"http://127.0.0.1:{port}/"), TEXT)).encode()]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop()}
            await asyncio.sleep(0.3)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Nobody reads it."""

        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        path = "/v1/chat/completions"
        scope = {**DIRECT, "path": path, "raw_path": path.encode(), "headers": headers}
        began = time.monotonic()
        await server.app(scope, receive, send)
        return time.monotonic() - began

    with web_server(lambda head: ok(bytes(100_000)), seconds=1) as (port, seen):
        assert asyncio.run(leave(port)) < 10
        assert len(seen) == 1


def test_async_llm_takes_pictures(checkpoint, same_process, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = {"dtype": "float32", "max_model_len": 512, "block_size": 16}
    prompt = {"prompt": "<s>see <image> here", "multi_modal_data": {"image": picture(1)}}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def go() -> list[int]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(checkpoint("llava"), **options))
        media_inputs(engine.front).processes = same_process(checkpoint("llava"))
        try:
            outputs = [out async for out in engine.generate(prompt, params, "one")]
            await engine.reset_mm_cache()
            await engine.reset_encoder_cache()
            return list(outputs[-1].outputs[0].token_ids)
        finally:
            engine.shutdown()

    with LLM(checkpoint("llava"), **options) as llm:
        media_inputs(llm.front).processes = same_process(checkpoint("llava"))
        (out,) = llm.generate([prompt], params, use_tqdm=False)
        llm.reset_mm_cache()
        llm.reset_encoder_cache()
    assert asyncio.run(go()) == list(out.outputs[0].token_ids)
