"""One short script for each Python client, each with checks of its own against the answer without a client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from client_runs import PROMPT, TOKENS, command, need

pydantic = pytest.importorskip("pydantic")
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
HOW: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}


class Pet(pydantic.BaseModel):
    """A schema with few answers, so that the small model ends it."""

    kind: Literal["dog", "cat"]
    good: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def test_openai(v1: str, story: str):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=v1, api_key="x")
    ask = client.chat.completions
    assert ask.create(model="quire-tiny", messages=CHAT, **HOW).choices[0].message.content == story
    chunks = ask.create(model="quire-tiny", messages=CHAT, stream=True, **HOW)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == story
    called = ask.create(model="quire-tiny", messages=CHAT, tools=[WEATHER], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    parsed = client.chat.completions.parse(model="quire-tiny", messages=CHAT, response_format=Pet)
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    answer = client.responses.create(
        model="quire-tiny", input=PROMPT, temperature=0, max_output_tokens=TOKENS
    )
    assert answer.output_text == story

    async def many() -> list[str]:
        many = openai.AsyncOpenAI(base_url=v1, api_key="x").chat.completions
        calls = [many.create(model="quire-tiny", messages=CHAT, **HOW) for _ in range(8)]
        return [one.choices[0].message.content for one in await asyncio.gather(*calls)]

    assert asyncio.run(many()) == [story] * 8


def test_anthropic(url: str, story: str):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="x")
    how = {
        "model": "quire-tiny",
        "max_tokens": TOKENS,
        "messages": CHAT,
        "extra_body": {"temperature": 0},
    }
    assert client.messages.create(**how).content[0].text == story
    with client.messages.stream(**how) as stream:
        assert "".join(stream.text_stream) == story
    assert client.messages.count_tokens(model="quire-tiny", messages=CHAT).input_tokens > 5


def test_litellm(v1: str, story: str):
    litellm = pytest.importorskip("litellm")
    for model in ("openai/quire-tiny", "hosted_vllm/quire-tiny"):
        how: dict[str, Any] = {
            "model": model,
            "api_base": v1,
            "api_key": "x",
            "messages": CHAT,
            **HOW,
        }
        assert litellm.completion(**how).choices[0].message.content == story
        chunks = litellm.completion(stream=True, **how)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == story


def test_langchain(v1: str, url: str, story: str):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="quire-tiny", base_url=v1, api_key="x", temperature=0)
    short = model.bind(max_tokens=TOKENS)
    assert short.invoke(PROMPT).content == story
    assert "".join(one.content for one in short.stream(PROMPT)) == story
    assert isinstance(model.with_structured_output(Pet).invoke(PROMPT), Pet)
    (call,) = model.bind_tools([weather], tool_choice="required").invoke(PROMPT).tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")
    langchain_anthropic = pytest.importorskip("langchain_anthropic")
    claude = langchain_anthropic.ChatAnthropic(
        model="quire-tiny", base_url=url, api_key="x", temperature=0, max_tokens=TOKENS
    )
    assert claude.invoke(PROMPT).content == story


def test_langchain_community(v1: str, completion: str):
    llms = pytest.importorskip("langchain_community.llms")
    model = llms.VLLMOpenAI(model_name="quire-tiny", openai_api_base=v1, openai_api_key="x", **HOW)
    assert model.invoke(PROMPT) == completion


def test_llama_index(v1: str, story: str, completion: str):
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    how: dict[str, Any] = {"model": "quire-tiny", "api_base": v1, "api_key": "x", **HOW}
    chat = like.OpenAILike(is_chat_model=True, **how)
    assert chat.chat([ChatMessage(role="user", content=PROMPT)]).message.content == story
    assert (
        "".join(one.delta for one in chat.stream_chat([ChatMessage(role="user", content=PROMPT)]))
        == story
    )
    assert like.OpenAILike(is_chat_model=False, **how).complete(PROMPT).text == completion


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(v1: str, mode: str):
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    client = instructor.from_openai(
        openai.OpenAI(base_url=v1, api_key="x"), mode=instructor.Mode[mode]
    )
    found = client.chat.completions.create(
        model="quire-tiny", messages=CHAT, response_model=Pet, max_retries=0
    )
    assert isinstance(found, Pet)


def test_pydantic_ai(v1: str, story: str):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("quire-tiny", provider=OpenAIProvider(base_url=v1, api_key="x"))
    how = pydantic_ai.ModelSettings(**HOW)
    assert pydantic_ai.Agent(model, model_settings=how).run_sync(PROMPT).output == story
    for output in (pydantic_ai.NativeOutput(Pet), pydantic_ai.ToolOutput(Pet)):
        assert isinstance(pydantic_ai.Agent(model, output_type=output).run_sync(PROMPT).output, Pet)


def test_openai_agents(v1: str, story: str):
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=v1, api_key="x")
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model="quire-tiny", openai_client=client)
        typed = agents.Agent(name="typed", model=model, output_type=Pet)
        assert isinstance(agents.Runner.run_sync(typed, PROMPT).final_output, Pet)
    chat = agents.OpenAIChatCompletionsModel(model="quire-tiny", openai_client=client)
    agent = agents.Agent(name="teller", model=chat, model_settings=agents.ModelSettings(**HOW))
    assert agents.Runner.run_sync(agent, PROMPT).final_output == story


def test_dspy(v1: str, story: str):
    dspy = pytest.importorskip("dspy")
    model = dspy.LM("openai/quire-tiny", api_base=v1, api_key="x", cache=False, **HOW)
    (found,) = model(PROMPT)
    assert (found if isinstance(found, str) else found["text"]) == story


def test_outlines(v1: str):
    outlines, openai = pytest.importorskip("outlines"), pytest.importorskip("openai")
    client = openai.OpenAI(base_url=v1, api_key="x")
    assert Pet.model_validate_json(outlines.from_openai(client, "quire-tiny")(PROMPT, Pet))
    model = outlines.from_vllm(client, "quire-tiny")
    assert model(PROMPT, Literal["yes", "no"]) in ("yes", "no")
    assert model(PROMPT, outlines.types.Regex("[ab]{3}")).strip("ab") == ""
    grammar = outlines.types.CFG('?start: "yes" | "no"\n')
    assert model(PROMPT, grammar) in ("yes", "no")


def test_haystack(v1: str, story: str):
    generators = pytest.importorskip("haystack.components.generators.chat")
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    made = generators.OpenAIChatGenerator(
        api_key=Secret.from_token("x"), model="quire-tiny", api_base_url=v1, generation_kwargs=HOW
    )
    assert made.run([ChatMessage.from_user(PROMPT)])["replies"][0].text == story


def test_smolagents(v1: str, story: str):
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(model_id="quire-tiny", api_base=v1, api_key="x", **HOW)
    assert model([smolagents.ChatMessage(role="user", content=PROMPT)]).content == story


def test_autogen(v1: str, story: str):
    models = pytest.importorskip("autogen_ext.models.openai")
    from autogen_core.models import UserMessage

    can = dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), False)
    client = models.OpenAIChatCompletionClient(
        model="quire-tiny", base_url=v1, api_key="x", model_info={**can, "family": "unknown"}, **HOW
    )
    found = asyncio.run(client.create([UserMessage(content=PROMPT, source="user")]))
    assert found.content == story


def test_crewai(v1: str, story: str):
    crewai = pytest.importorskip("crewai")
    model = crewai.LLM(model="openai/quire-tiny", base_url=v1, api_key="x", **HOW)
    assert model.call(PROMPT).strip() == story.strip()


def test_llm_command(v1: str, story: str, tmp_path: Path):
    need("llm")
    entry = f"- model_id: tiny\n  model_name: quire-tiny\n  api_base: {v1}\n  api_key_name: none\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry, encoding="utf-8")
    how = ["-o", "temperature", "0", "-o", "max_tokens", str(TOKENS), "--key", "x"]
    for stream in (["--no-stream"], []):
        said = command("llm", "-m", "tiny", PROMPT, *how, *stream, LLM_USER_PATH=str(tmp_path))
        assert said.strip() == story.strip()


def test_locust(url: str, tmp_path: Path):
    need("locust")
    (tmp_path / "locustfile.py").write_text(
        "from locust import HttpUser, task\n"
        "class User(HttpUser):\n"
        "    @task\n"
        "    def ask(self):\n"
        "        body = {'model': 'quire-tiny', 'prompt': 'Once', 'max_tokens': 4}\n"
        "        assert self.client.post('/v1/completions', json=body).json()['usage']['completion_tokens']\n",
        encoding="utf-8",
    )
    words = [
        "-f",
        str(tmp_path / "locustfile.py"),
        "--headless",
        "-u",
        "4",
        "-t",
        "5s",
        "--host",
        url,
        "--json",
    ]
    (found,) = json.loads(command("locust", *words))
    assert found["num_requests"] > 5
    assert found["num_failures"] == 0


def test_guidellm(url: str, tmp_path: Path):
    need("guidellm")
    model = Path(__file__).parents[2] / "src" / "quire" / "embedded" / "quire-tiny"
    command(
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=quire-tiny", "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=4", "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={model}", "--output", f"kind=json,path={tmp_path / 'out.json'}",
        "--disable-console",
    )  # fmt: skip
    (report,) = tmp_path.glob("*.json")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
