"""Names and detect: every name that users of vLLM write means a format, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from call_writers import THOUGHTS, WRITERS

import quire
from quire.config.unsupported import PARSERS
from quire.errors import ConfigError
from quire.frontend.parsers.format_registry import FormatRegistry
from quire.frontend.parsers.format_table import MarkerPattern
from quire.frontend.parsers.formats import (
    REASONING,
    REASONING_NAMES,
    REASONING_ORDER,
    TOOL_NAMES,
    TOOL_ORDER,
    TOOLS,
)
from quire.frontend.parsers.model_formats import ModelFormats
from quire.frontend.request_manager import response_template

# Of vLLM's versions up to 0.30; those that we refuse are in PARSERS.
NAMED = """apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots
ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3 hy_v4
inkling plamo3 internlm jamba k2_horizon kimi_k2 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax
minimax_m2 minimax_m3 mistral olmo3 openai phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam"""
REASON = """cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47
granite holo2 hunyuan_a13b hy_v3 hy_v4 inkling plamo3 k2_horizon kimi_k2 ling3 mimo minimax_m2 minimax_m2_append_think minimax_m3
granite_thinking_parser minicpmv mistral nemotron_v3 olmo3 openai_gptoss poolside_v1 qwen3 seed_oss step3 step3p5"""
REFUSED = "hf kimi_k3 muse_glimmer"

TEMPLATES = {
    ("hermes", "qwen3"): '<tool_call>\\n{\\"name\\": <n>, \\"arguments\\": <a>}</tool_call> <think>\\n\\n</think>',
    ("qwen3_coder", ""): "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>",
    ("openai", "openai_gptoss"): "<|start|>assistant<|channel|>analysis<|message|> functions <tool_call>",
    ("mistral", "mistral"): "[TOOL_CALLS] + name + [ARGS] [THINK]",
    ("kimi_k2", "kimi_k2"): "<|tool_calls_section_begin|> <think></think>",
    ("k2_horizon", "k2_horizon"): "<ifm|think> <ifm|tool_calls> <ifm|tool_call>{{ name }}",
    ("deepseek_v3", "deepseek_r1"): "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json <｜Assistant｜> </think>",
    ("deepseek_v31", "deepseek_r1"): "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} <｜Assistant｜></think>",
    ("deepseek_v32", "deepseek_v3"): "<｜DSML｜function_calls> <｜DSML｜invoke name= <｜Assistant｜> </think>",
    ("deepseek_v4", "deepseek_v3"): "<｜DSML｜tool_calls> <｜DSML｜invoke name= <｜Assistant｜> </think>",
    ("deepseek_v41", "deepseek_v3"): "<｜DSML｜ calls> <｜DSML｜ invoke name= <｜Assistant｜> </think>",
    ("glm45", "glm45"): "<tool_call>{f}<arg_key>{k}</arg_key> <think> {\"arguments\"}",
    ("hy_v3", "hy_v3"): "<tool_calls:opensource> <tool_call:opensource> <tool_sep:opensource> <arg_key:opensource> <think:opensource>",
    ("llama3_json", ""): '<|start_header_id|> {"name": f, "parameters": {}}',
    ("llama4_pythonic", ""): "<|header_start|> <|python_start|>[f(a=1)]<|python_end|>",
    ("minimax_m2", "minimax_m2"): "<minimax:tool_call> <invoke name= <think>",
    ("minimax_m3", "minimax_m3"): "]<]minimax[>[<tool_call> <mm:think>",
    ("dots", ""): "<dots_function_call> <invoke name= <parameter name=",
    ("gemma4", "gemma4"): '<|tool_call>call: <|channel>thought',
    ("functiongemma", ""): "<start_function_call>call:{{ name }}",
    ("olmo3", "olmo3"): "<functions></functions> <function_calls> <think>",
    ("lfm2", ""): "<|tool_list_start|> <|tool_call_start|>",
    ("seed_oss", "seed_oss"): "<seed:tool_call> <seed:think>",
    ("step3", ""): "<｜tool_calls_begin｜> <steptml:invoke name=",
    ("minicpm5", "qwen3"): '<function name="{{ f }}"><param name="{{ k }}"> <think></think>',
    ("granite", "granite"): "<|tool_call|> Here is my thought process: Here is my response:",
    ("granite-20b-fc", ""): "<function_call> {{ call | tojson }}",
    ("phi4_mini_json", ""): "<|tool|>' + tools + '<|/tool|> <|tool_call|>",
    ("internlm", ""): "<|action_start|><|plugin|>",
    ("longcat", ""): "<longcat_tool_call>",
    ("apertus", "apertus"): "<|tools_prefix|> <|inner_prefix|>",
    ("cohere_command3", "cohere_command3"): "<|START_THINKING|> <|START_ACTION|> <|START_RESPONSE|>",
    ("cohere_command3", "cohere_command4"): "<|START_THINKING|> <|START_ACTION|> <|START_TEXT|>",
    ("gigachat3", ""): "<|message_sep|>\n\nfunction call<|role_sep|>\n",
    ("jamba", "hunyuan_a13b"): "<tool_calls>[ <think> <answer>",
    ("hermes", "ernie45"): '<tool_call> {"name": n, "arguments": a} </think> <response>',
    ("plamo3", "plamo3"): "<|plamo:begin_tool_requests:plamo|> <|plamo:begin_think:plamo|>",
    ("inkling", "inkling"): "<|content_thinking|> <|content_text|> <|content_invoke_tool_json|>",
    ("", ""): "{{ messages }}",
}  # fmt: skip


def test_every_family_has_a_template():
    assert {names[0] for names in TEMPLATES} == {"", *TOOL_ORDER}
    assert {names[1] for names in TEMPLATES} == {"", *REASONING_ORDER}
    # No template tells these: it is like another format's template, or says nothing.
    assert set(TOOLS) - set(TOOL_ORDER) == {
        "pythonic",
        "xlam",
        "minimax",
        "mimo",
        "step3p5",
        "poolside_v1",
    }
    assert set(REASONING) - set(REASONING_ORDER) == {
        "ling3",
        "nemotron_v3",
        "minimax_m2_append_think",
    }


def test_known_names():
    known = FormatRegistry()
    for name in NAMED.split():
        assert known.choose_tools(name, "").name in TOOLS
    for name in REASON.split():
        assert known.choose_reasoning(name, "").name in REASONING
    assert set(REFUSED.split()) == set(PARSERS)
    assert set(TOOL_NAMES.values()) <= set(TOOLS)
    assert set(REASONING_NAMES.values()) <= set(REASONING)


def test_the_page_has_every_format_and_every_other_name():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    table = page[page.index("| models | `--tool-call-parser`") :].partition("\n\n")[0]
    rows = [row.strip("| ").split("|") for row in table.splitlines()[2:]]
    for column, (formats, others) in enumerate(((TOOLS, TOOL_NAMES), (REASONING, REASONING_NAMES)), start=1):  # fmt: skip
        cells = [row[column] for row in rows if len(row) > column]
        items = [item.strip() for cell in cells for item in cell.split(",") if item.strip()]
        renamed = dict(item.split(" = ") for item in items if " = " in item)
        assert {item for item in items if " = " not in item} == set(formats)
        assert renamed == others


def test_others_are_refused_by_name():
    known = FormatRegistry()
    for name in PARSERS:
        with pytest.raises(ConfigError, match=f"tool_call_parser='{name}' is not supported yet"):
            known.choose_tools(name, "")
    with pytest.raises(ConfigError, match=r"tool_call_parser='hf' .* auto uses the checkpoint's"):
        known.choose_tools("hf", "")
    with pytest.raises(
        ConfigError, match="reasoning_parser='qwen33' is unknown; did you mean qwen3"
    ):
        known.choose_reasoning("qwen33", "")


@pytest.mark.parametrize(("names", "template"), TEMPLATES.items(), ids=lambda x: str(x)[:30])
def test_templates_show_their_format(names, template):
    for asked in (None, "auto"):
        found = ModelFormats(asked, asked, template)
        assert (found.tool_choice.name, found.reasoning_choice.name) == names
        assert all(
            ("template has" in c.why) == bool(c.name)
            for c in (found.tool_choice, found.reasoning_choice)
        )
    off = ModelFormats("none", "none", template)
    assert off.tools is None
    assert off.reasoning is None
    assert off.output_format([]) is None


def test_the_embedded_model():
    folder = Path(quire.__file__).parent / "embedded" / "quire-tiny"
    found = ModelFormats(None, None, (folder / "chat_template.jinja").read_text())
    assert (found.tool_choice.name, found.reasoning_choice.name) == ("hermes", "qwen3")


def test_a_response_template_counts_too(tmp_path):
    assert response_template(tmp_path) == ""
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"response_template": {"calls": r"<\|tool_call\>(.*)", "thoughts": r"<\|channel\>thought"}}))  # fmt: skip
    text = response_template(tmp_path)
    found = ModelFormats(None, None, text)
    assert (found.tool_choice.name, found.reasoning_choice.name) == ("gemma4", "gemma4")
    file.write_text("[]")
    assert response_template(tmp_path) == ""


def test_prompts_open_and_close_thoughts():
    reasoning = ModelFormats("hermes", "qwen3", "").reasoning
    assert reasoning is not None
    assert reasoning.is_open("<|im_start|>assistant\n<think>\n") is True
    assert reasoning.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert reasoning.is_open("user: <think> now<|im_end|>\nassistant\n") is None
    assert reasoning.is_open("... <think>\nHm", last="<think>\nHm") is True
    assert reasoning.is_open("... </think>Yes", last="<think>Hm</think>Yes") is False
    assert reasoning.is_open("... Yes", last="Yes") is None


def test_special_tokens_are_kept_if_the_format_uses_them():
    kept = ModelFormats("mistral", "none", "", specials=["</s>", "[TOOL_CALLS]"])
    tools = [{"function": {"name": "f"}}]
    reading = kept.output_format(tools)
    assert reading is not None
    assert reading.markers_are_special
    plain = ModelFormats("hermes", "qwen3", "", specials=["<|im_end|>"]).output_format(tools)
    assert plain is not None
    assert not plain.markers_are_special


def test_no_mark_hides_another():
    """In running text the first mark that fits is taken, so none may begin another."""
    for format in TOOLS.values():
        for state in format.states.values():
            if state.kind in ("skip", "close"):
                continue
            marks = MarkerPattern(state.markers)
            assert not marks.prefixes & set(state.markers), state
    assert set(WRITERS) == set(TOOLS)
    assert set(THOUGHTS) == set(REASONING)
