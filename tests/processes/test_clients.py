"""The official clients, unchanged. Each is skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Served
from tiny_llama import make_checkpoint

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    with Served(path, "--served-model-name", "tiny", "--api-key", "k") as found:
        yield found


def test_openai(server: Served):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        parts, usage = [], None
        usages = {"include_usage": True}
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options=usages):
            parts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(parts) == whole.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        texts = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, n=2)
        assert len(texts.choices) == 4
        with client.responses.stream(
            model="tiny", input="Hi", max_output_tokens=8, temperature=0
        ) as stream:
            final = list(stream)[-1].response
        assert final.output_text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nope"):
            client.chat.completions.create(model="nope", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked | {"temperature": 9})
        assert refused.value.param == "temperature"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_anthropic(server: Served):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        asked = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_tokens": 8,
            "extra_body": {"temperature": 0},
        }
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage == whole.usage
        count = client.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert count.input_tokens == whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**asked | {"model": "nope"})
