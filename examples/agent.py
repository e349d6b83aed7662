"""An agent with a tool: the model calls it, and answers with its result."""

import json

from quire import LLM, SamplingParams


def get_weather(city: str) -> str:
    return json.dumps({"sky": "rainy", "degrees": 7 if city == "Oslo" else 21})


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

llm = LLM("quire-tiny")
params = SamplingParams(max_tokens=80, temperature=0)
messages: list[dict] = [{"role": "user", "content": "What is the weather in Oslo?"}]
text = llm.chat(messages, params, tools=[TOOL])[0].outputs[0].text
# quire-tiny writes calls in the hermes form. `quire serve` reads all forms and returns `tool_calls`.
call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
print("call:", call["name"], call["arguments"])
messages += [
    {"role": "assistant", "content": text},
    {"role": "tool", "content": get_weather(**call["arguments"])},
]
print("answer:", llm.chat(messages, params, tools=[TOOL])[0].outputs[0].text)
