"""`prompt_embeds` of /v1/completions, against the same prompts as text; and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from asgi import browser
from safetensors.torch import load_file, save
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.media_room import MediaRoom
from quire.server.state import ServerState
from tests.tiny_text import tiny_text

TEXT = "/v1/completions"
TEXTS = ["Once upon a time", "The quick brown fox jumps"]


def new_state(**more: Any) -> ServerState:
    config = EngineConfig.from_keywords(
        model="quire-tiny",
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=256,
        **more,
    )
    state = make_state(None)
    state.attach(AsyncEngine(make_client(config), config))
    return state


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    made = new_state(enable_prompt_embeds=True)
    yield made
    made.serving().shutdown()


def post(state: ServerState, *bodies: dict[str, Any]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with browser(state) as client:
            tasks = [asyncio.wait_for(client.post(TEXT, json=body), 60) for body in bodies]
            return await asyncio.gather(*tasks)

    return asyncio.run(main())


def rows(state: ServerState, text: str) -> torch.Tensor:
    table_VD = load_file(tiny_text() / "model.safetensors")["model.embed_tokens.weight"]
    tokenizer = state.serving().tokenizer
    assert tokenizer is not None
    return table_VD[torch.tensor(tokenizer.encode(text))]


def embeds(state: ServerState, text: str) -> str:
    return base64.b64encode(save({"prompt_embeds": rows(state, text)})).decode()


def as_array(state: ServerState, text: str) -> str:
    np.save(file := io.BytesIO(), rows(state, text).float().numpy())
    return base64.b64encode(file.getvalue()).decode()


def choices(answer: httpx.Response) -> list[tuple[Any, ...]]:
    assert answer.status_code == 200, answer.text
    return [
        (c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in answer.json()["choices"]
    ]


MORE = [{"temperature": 0}, {"temperature": 0.8, "seed": 4, "n": 2, "logprobs": 2}]


@pytest.mark.parametrize("more", MORE)
def test_answers_are_those_of_the_texts(state: ServerState, more: dict[str, Any]) -> None:
    more = {"max_tokens": 12, **more}
    files = [embeds(state, text) for text in TEXTS]
    texts, lists, single, mixed = post(
        state,
        {"prompt": TEXTS, **more},
        {"prompt_embeds": files, "prompt": None, **more},
        {"prompt_embeds": as_array(state, TEXTS[0]), "prompt": "", **more},
        {"prompt_embeds": files[0], "prompt": [TEXTS[1]], **more},
    )
    n = more.get("n", 1)
    assert choices(lists) == choices(mixed) == choices(texts)
    assert choices(single) == choices(texts)[:n]
    assert lists.json()["usage"] == texts.json()["usage"]


def test_a_stream_is_the_whole(state: ServerState) -> None:
    body = {"prompt_embeds": embeds(state, TEXTS[0]), "max_tokens": 12, "temperature": 0}
    whole, streamed = post(state, body, {**body, "stream": True})
    import json

    parts = [
        json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(part["choices"][0]["text"] for part in parts) == choices(whole)[0][1]


def test_beam_search(state: ServerState) -> None:
    more = {"use_beam_search": True, "n": 2, "max_tokens": 6, "temperature": 0}
    text, file = post(
        state, {"prompt": TEXTS[0], **more}, {"prompt_embeds": embeds(state, TEXTS[0]), **more}
    )
    assert choices(file) == choices(text)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"echo": True}, "echo: a prompt of embeddings"),
        ({"return_prompt_text": True}, "return_prompt_text: a prompt of embeddings"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: a prompt of embeddings"),
        ({"prompt_embeds": "UEsDBA=="}, r"torch.save, which is a pickle"),
        ({"prompt_embeds": "A" * 400_000}, "characters of base64"),
        ({"prompt_embeds": []}, "`prompt` is missing"),
        ({"prompt_embeds": [""]}, "neither a file"),
        ({"prompt_embeds": 5}, "str"),
        ({"prompt_embeds": [["a"]]}, "str"),
        ({"prompt_embeds": ["UEsDBA=="] * 2000}, "limit is 1024"),
    ],
)
def test_refusals(state: ServerState, more: dict[str, Any], words: str) -> None:
    body = {"prompt_embeds": embeds(state, TEXTS[0]), "max_tokens": 3, **more}
    (answer,) = post(state, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"], answer.text


def test_bodies_of_megabytes_hold_no_other_request(state: ServerState) -> None:
    """The longest prompt twenty times at once, among other requests; a file of another size is refused unread."""
    longest = torch.zeros(255, 256)
    file = base64.b64encode(save({"a": longest})).decode()
    answers = post(
        state,
        *({"prompt_embeds": [file] * 8, "max_tokens": 1} for _ in range(20)),
        {"prompt_embeds": "A" * 10_000_000},
        {"prompt": TEXTS[0], "max_tokens": 3},
    )
    assert [one.status_code for one in answers] == [200] * 20 + [400, 200]
    assert state.media_room.taken == 0


def test_the_bytes_of_running_requests_are_bounded(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = rows(state, TEXTS[0]).nbytes
    monkeypatch.setattr(state, "media_room", MediaRoom(3 * size))
    body = {"prompt_embeds": embeds(state, TEXTS[0]), "max_tokens": 2, "temperature": 0.5}
    fits, n = post(state, {**body, "n": 3}, {**body, "n": 4})
    assert (fits.status_code, n.status_code) == (200, 400)
    assert "lower `n`" in n.json()["error"]["message"]
    taken = state.media_room.take(2 * size)
    with taken:
        (answer,) = post(state, {**body, "n": 2})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    (answer,) = post(state, {**body, "n": 2})
    assert answer.status_code == 200


def test_without_the_flag_the_error_names_it() -> None:
    state = new_state()
    (answer,) = post(state, {"prompt_embeds": embeds(state, TEXTS[0])})
    state.serving().shutdown()
    assert answer.status_code == 400
    assert "--enable-prompt-embeds" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "prompt_embeds"
