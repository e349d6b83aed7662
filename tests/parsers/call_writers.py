"""What models write: each format's calls as text, by writers that know nothing of the parser.

A writer takes calls, as (name, arguments), and gives the text. `TOOLS` are the tools they may be of.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[list[Call]], str]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": ["number", "null"]},
                    "on": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    }
    for name in ("get_weather", "f", "ns.read-file")
]


def python(value: Any) -> str:
    return repr(value)


def python_call(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(v, quote) for v in value) + "]"
    return json.dumps(value)


def parameter(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def json_call(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def json_list(calls: list[Call]) -> str:
    return "[" + ", ".join(map(json_call, calls)) + "]"


def each(form: Callable[[Call], str], between: str = "\n") -> Writer:
    return lambda calls: between.join(form(call) for call in calls)


def with_parameters(
    call: Call, begin: str, end: str, first: str, last: str, around: str = ""
) -> str:
    """`first` is filled with the key, and with whether the value is a text."""
    lines = [begin.format(call[0])]
    for key, value in call[1].items():
        mark = first.format(key, json.dumps(isinstance(value, str)))
        lines.append(f"{mark}{around}{parameter(value)}{around}{last}")
    return "\n".join([*lines, end])


def qwen(call: Call, around: str = "\n") -> str:
    inner = with_parameters(
        call, "<function={}>", "</function>", "<parameter={}>", "</parameter>", around
    )
    return f"<tool_call>\n{inner}\n</tool_call>"


def seed(call: Call) -> str:
    return qwen(call).replace("tool_call>", "seed:tool_call>")


def invokes(calls: list[Call], mark: str, outer: str, kind: str = "", around: str = "") -> str:
    first = f'<{mark}parameter name="{{}}"{kind}>'
    made = (
        with_parameters(call, f'<{mark}invoke name="{{}}">', f"</{mark}invoke>", first, f"</{mark}parameter>", around)
        for call in calls
    )  # fmt: skip
    return f"<{outer}>\n" + "\n".join(made) + f"\n</{outer}>"


TYPED = ' string="{}"'


def pairs(call: Call, mark: str = "", kind: str = "") -> str:
    return "".join(
        f"<{mark}arg_key>{k}</{mark}arg_key>\n{kind}<{mark}arg_value>{parameter(v)}</{mark}arg_value>\n"
        for k, v in call[1].items()
    )


def glm(call: Call) -> str:
    return f"<tool_call>{call[0]}\n{pairs(call)}</tool_call>"


def hunyuan(calls: list[Call]) -> str:
    made = "\n".join(f"<tool_call>{c[0]}<tool_sep>\n{pairs(c)}</tool_call>" for c in calls)
    return f"<tool_calls>\n{made}\n</tool_calls>"


def horizon(kind: str) -> Writer:
    return lambda calls: (
        "<ifm|tool_calls>\n"
        + "\n".join(
            f"<ifm|tool_call>{c[0]}\n{pairs(c, 'ifm|', kind)}</ifm|tool_call>" for c in calls
        )
        + "\n</ifm|tool_calls>"
    )


def minicpm(call: Call, begin: str, end: str) -> str:
    made = "".join(
        f'<param name="{k}">{begin}{parameter(v)}{end}</param>' for k, v in call[1].items()
    )
    return f'<function name="{call[0]}">{made}</function>'


def step(calls: list[Call]) -> str:
    made = "\n".join(
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        + with_parameters(
            c,
            '<steptml:invoke name="{}">',
            "</steptml:invoke>",
            '<steptml:parameter name="{}">',
            "</steptml:parameter>",
        )
        + "<｜tool_call_end｜>"
        for c in calls
    )
    return f"<｜tool_calls_begin｜>\n{made}\n<｜tool_calls_end｜>"


def deepseek(form: str, between: str) -> Writer:
    def write(calls: list[Call]) -> str:
        made = between.join(
            f"<｜tool▁call▁begin｜>{form.format(c[0], json.dumps(c[1]))}<｜tool▁call▁end｜>"
            for c in calls
        )
        return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"

    return write


def kimi(calls: list[Call]) -> str:
    made = "".join(
        f"<|tool_call_begin|>functions.{c[0]}:{at}<|tool_call_argument_begin|>{json.dumps(c[1])}<|tool_call_end|>"
        for at, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c[0]} <|constrain|>json<|message|>{json.dumps(c[1])}<|call|>"
        for c in calls
    )


def plamo(calls: list[Call]) -> str:
    def part(name: str, inner: str) -> str:
        return f"<|plamo:begin_{name}:plamo|>{inner}<|plamo:end_{name}:plamo|>"

    json_ = "<|plamo:constrain|>json<|plamo:msg|>"
    made = (
        part("tool_request", part("tool_name", c[0]) + part("tool_arguments", json_ + json.dumps(c[1])))
        for c in calls
    )  # fmt: skip
    return part("tool_requests", "".join(made))


def inkling(calls: list[Call]) -> str:
    return "<|message_model|>".join(
        f"<|content_invoke_tool_json|>{json_call(c, 'args')}<|end_message|>" for c in calls
    )


def elements(name: str, value: Any, inside: bool = False) -> str:
    """Inside others no schema tells a text from a number, so texts have quotes."""
    mark = "]<]minimax[>["
    if value and isinstance(value, dict):
        inner = "".join(elements(key, one, True) for key, one in value.items())
    elif value and isinstance(value, list):
        inner = "".join(elements("item", one, True) for one in value)
    else:
        inner = json.dumps(value) if inside else parameter(value)
    return f"{mark}<{name}>{inner}{mark}</{name}>"


def minimax(calls: list[Call]) -> str:
    mark = "]<]minimax[>["
    made = "\n".join(
        f'{mark}<invoke name="{c[0]}">{"".join(elements(k, v) for k, v in c[1].items())}{mark}</invoke>'
        for c in calls
    )
    return f"{mark}<tool_call>\n{made}\n{mark}</tool_call>"


WRITERS: dict[str, list[Writer]] = {
    "hermes": [each(lambda c: f"<tool_call>\n{json_call(c)}\n</tool_call>")],
    "llama3_json": [
        each(lambda c: json_call(c, "parameters"), "; "),
        lambda calls: "<|python_tag|>" + each(json_call, "; ")(calls),
    ],
    "llama4_pythonic": [
        lambda calls: f"<|python_start|>[{', '.join(map(python_call, calls))}]<|python_end|>",
        lambda calls: f"[{', '.join(map(python_call, calls))}]",
    ],
    "pythonic": [lambda calls: f"[{', '.join(map(python_call, calls))}]"],
    "mistral": [
        lambda calls: "[TOOL_CALLS]" + json_list(calls),
        each(lambda c: f"[TOOL_CALLS]{c[0]}[ARGS]{json.dumps(c[1])}", ""),
        each(lambda c: f"[TOOL_CALLS]{c[0]}[CALL_ID]abc123def[ARGS]{json.dumps(c[1])}", ""),
        each(lambda c: f"[TOOL_CALLS]{c[0]}{json.dumps(c[1])}", ""),
    ],
    "qwen3_coder": [each(qwen), each(lambda c: qwen(c).replace("<tool_call>\n", "").replace("\n</tool_call>", ""))],
    "step3p5": [each(qwen)],
    "deepseek_v3": [deepseek("function<｜tool▁sep｜>{}\n```json\n{}\n```", "\n")],
    "deepseek_v31": [deepseek("{}<｜tool▁sep｜>{}", ""), deepseek("{}<｜tool▁sep｜>{}", "\n")],
    "deepseek_v32": [
        lambda calls: invokes(calls, "｜DSML｜", "｜DSML｜function_calls", TYPED),
        lambda calls: invokes(calls, "｜DSML｜", "｜DSML｜function_calls"),
    ],
    "glm45": [each(glm)],
    "poolside_v1": [each(glm)],
    "kimi_k2": [kimi],
    "granite": [lambda calls: "<|tool_call|>" + json_list(calls), lambda calls: "<tool_call> " + json_list(calls)],
    "granite-20b-fc": [each(lambda c: f"<function_call> {json_call(c)}")],
    "phi4_mini_json": [lambda calls: "functools" + json_list(calls)],
    "minimax_m2": [
        lambda calls: invokes(calls, "", "minimax:tool_call"),
        lambda calls: invokes(calls, "", "minimax:tool_call", around="\n"),
    ],
    "gemma4": [
        each(lambda c: f"<|tool_call>call:{c[0]}{gemma(c[1], '<|' + chr(34) + '|>')}<tool_call|>", "")
    ],
    "functiongemma": [
        each(lambda c: f"<start_function_call>call:{c[0]}{gemma(c[1], '<escape>')}<end_function_call>", "")
    ],
    "olmo3": [
        lambda calls: f"<function_calls>\n{each(python_call)(calls)}\n</function_calls>",
        lambda calls: f"<function_calls>[{each(python_call, ', ')(calls)}]</function_calls>",
    ],
    "seed_oss": [each(seed)],
    "xlam": [
        json_list,
        lambda calls: f"```json\n{json_list(calls)}\n```",
        lambda calls: f"[TOOL_CALLS]{json_list(calls)}",
        lambda calls: f"<tool_call>{json_list(calls)}</tool_call>",
    ],
    "internlm": [each(lambda c: f"<|action_start|><|plugin|>\n{json_call(c, 'parameters')}<|action_end|>")],
    "jamba": [lambda calls: f"<tool_calls>{json_list(calls)}</tool_calls>"],
    "lfm2": [lambda calls: f"<|tool_call_start|>[{', '.join(map(python_call, calls))}]<|tool_call_end|>"],
    "longcat": [each(lambda c: f"<longcat_tool_call>\n{json_call(c)}\n</longcat_tool_call>")],
    "openai": [harmony],
    "plamo3": [plamo],
    "inkling": [inkling, lambda calls: calls[0][0] + inkling(calls)],
    "mimo": [each(lambda c: qwen(c, ""))],
    "dots": [lambda calls: invokes(calls, "", "dots_function_call")],
    "deepseek_v4": [lambda calls: invokes(calls, "｜DSML｜", "｜DSML｜tool_calls", TYPED)],
    "deepseek_v41": [lambda calls: invokes(calls, "｜DSML｜ ", "｜DSML｜ calls", TYPED)],
    "hy_v3": [
        hunyuan,
        lambda calls: hunyuan(calls).replace(">", ":opensource>").replace("<b:opensource>", "<b>"),
        lambda calls: hunyuan(calls).replace("<tool_sep>", ""),
    ],
    "k2_horizon": [
        horizon(""),
        horizon("<ifm|arg_type>string</ifm|arg_type>\n"),
        lambda calls: "<ifm|tool_calls>" + each(lambda c: f"<ifm|tool_call>{json_call(c)}</ifm|tool_call>")(calls) + "</ifm|tool_calls>",
    ],
    "minicpm5": [each(lambda c: minicpm(c, "", "")), each(lambda c: minicpm(c, "<![CDATA[", "]]>"))],
    "step3": [step],
    "minimax_m3": [minimax],
    "minimax": [lambda calls: f"<tool_calls>\n{each(json_call)(calls)}\n</tool_calls>"],
    "apertus": [
        lambda calls: f"<|tools_prefix|>[{', '.join(json.dumps({c[0]: c[1]}) for c in calls)}]<|tools_suffix|>",
    ],
    "cohere_command3": [
        lambda calls: "<|START_ACTION|>"
        + "[\n    "
        + ",\n    ".join(json.dumps({"tool_call_id": "0", "tool_name": c[0], "parameters": c[1]}) for c in calls)
        + "\n]<|END_ACTION|>",
    ],
    "gigachat3": [
        each(lambda c: f"function call<|role_sep|>\n{json_call(c)}"),
        each(lambda c: f"<|message_sep|>\n\nfunction call<|role_sep|>\n{json_call(c)}", ""),
        each(lambda c: f"<|function_call|>{json_call(c)}", ""),
    ],
}  # fmt: skip

# Formats whose calls are the whole output, or come after the text in a message of their own.
ALONE = frozenset(("llama3_json", "pythonic", "llama4_pythonic", "xlam", "openai", "inkling"))
DOTLESS = frozenset(("pythonic",))

THOUGHTS: dict[str, tuple[str, str]] = {
    "deepseek_r1": ("", "</think>"),
    "deepseek_v3": ("", "</think>"),
    "nemotron_v3": ("<think>\n", "\n</think>\n"),
    "minimax_m2_append_think": ("", ""),
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "granite": ("Here is my thought process:\n", "\nHere is my response:\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "glm45": ("<think>", "</think>\n"),
    "kimi_k2": ("<think>", "</think>"),
    "ling3": ("<think>", "</think>\n\n"),
    "minimax_m2": ("<think>\n", "\n</think>\n\n"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "olmo3": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "ernie45": ("", "\n</think>\n\n<response>\n"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "hy_v3": ("<think:opensource>", "</think:opensource>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "k2_horizon": ("<ifm|think_fast>\n", "\n</ifm|think_fast>\n"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "inkling": ("<|content_thinking|>", "<|end_message|><|message_model|>"),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}

TEXTS = (
    "", "a", "Berlin", "it's \"so\"", "two\nlines", "tab\there", "back\\slash", "naïve ☃ 你好 🙂", "<b>", "{x}",
    "[1, 2]", "true", "3", "a, b=c)", "</think", "x <tool", "{\"a\": 1}", "line\n\nline",
)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {
            key: value(rng, depth + 1) for key in rng.sample(["k", "key2", "Z"], rng.randrange(3))
        }
    return [rng.choice(TEXTS), rng.randrange(-99, 10**6), rng.choice([0.5, -1.25, 1e21, 3.0]), rng.random() < 0.5, None][kind % 5]  # fmt: skip


def arguments(rng: random.Random) -> dict[str, Any]:
    made = {
        "text": rng.choice(TEXTS),
        "count": rng.randrange(-5, 5000),
        "ratio": rng.choice([None, 2.5, -1]),
        "on": rng.random() < 0.5,
        "tags": [value(rng, 1) for _ in range(rng.randrange(4))],
        "more": {key: value(rng, 1) for key in rng.sample(["k", "x_y"], rng.randrange(3))},
    }
    keys = rng.sample(list(made), rng.randrange(len(made) + 1))
    return {key: made[key] for key in keys}


def calls(rng: random.Random, most: int = 3) -> list[Call]:
    names = ["get_weather", "f", "ns.read-file"]
    return [(rng.choice(names), arguments(rng)) for _ in range(rng.randrange(1, most + 1))]
