"""A corpus for each format, written from the formats' definitions: a text, and what it must be read as.

`CASES`: (tool format, reasoning format) -> cases of a title, the text, the content, the reasoning and the calls, each as
(name, arguments). `call_writers` has the tools: `f`, `get_weather`, `ns.read-file`, each with `text` (a string),
`count` (an integer), `ratio` (a number or null), `on` (a boolean), `tags` (an array), `more` (an object or null).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    title: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def call(**arguments: Any) -> tuple[tuple[str, Any], ...]:
    return (("f", arguments),)


HERMES = '<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>'
QWEN = "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>"
DSML_V4 = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="count" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
DSML_V32 = DSML_V4.replace("tool_calls", "function_calls")
DSML_V41 = DSML_V4.replace("｜tool_calls", "｜ calls").replace("｜invoke", "｜ invoke").replace("｜parameter", "｜ parameter")  # fmt: skip
DEEPSEEK = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"count": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
DEEPSEEK_31 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"count": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="count">1</parameter>\n</invoke>\n</minimax:tool_call>'
GLM = "<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
SEED = QWEN.replace("tool_call>", "seed:tool_call>")
KIMI = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"count": 1}<|tool_call_end|><|tool_calls_section_end|>'
GEMMA = "<|tool_call>call:f{count:1}<tool_call|>"
MINICPM = '<function name="f"><param name="count">1</param></function>'
HORIZON = "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>count</ifm|arg_key><ifm|arg_value>1</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
PREFIX = "]<]minimax[>["


def elements(inner: str) -> str:
    """A call of minimax_m3; `{}` in its arguments is the prefix."""
    text = f'{{}}<tool_call>\n{{}}<invoke name="f">{inner}{{}}</invoke>\n{{}}</tool_call>'
    return text.replace("{}", PREFIX)


P_THINK, P_THOUGHT = "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"
PLAMO = (
    "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>"
    '<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"count": 1}<|plamo:end_tool_arguments:plamo|>'
    "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
)
INKLING = '<|content_invoke_tool_json|>{"name": "f", "args": {"count": 1}}<|end_message|>'
I_NEXT = "<|end_message|><|message_model|>"
LIST = '[{"name": "f", "arguments": {"count": 1}}]'
ONE = call(count=1)
OPEN = "inside thoughts that are not closed"

CASES: dict[tuple[str, str], list[Case]] = {
    # -- calls inside thoughts that were not closed ---------------------------------------------------
    ("hermes", "qwen3"): [
        Case(OPEN, f"<think>hm\n{HERMES}", "", "hm", ONE),
        Case("a quoted mark stays a thought", "<think>I write <tool_call> and JSON.</think>Yes.", "Yes.", "I write <tool_call> and JSON."),
        Case("the output ends in a quoted mark", "<think>a <tool_call>", "", "a <tool_call>"),
        Case("an end of thoughts without a beginning", "Yes.</think> No.", "Yes. No."),
        Case("two beginnings", "<think><think>hm</think>Yes.", "Yes.", "hm"),
    ],
    ("hermes", "deepseek_r1"): [Case("vLLM keeps it a thought", f"hm {HERMES}", "", f"hm {HERMES}")],
    ("deepseek_v3", "deepseek_v3"): [Case(OPEN, f"hm{DEEPSEEK}", "", "hm", ONE)],
    ("deepseek_v32", "deepseek_v3"): [Case(OPEN, f"hm\n\n{DSML_V32}", "", "hm", ONE)],
    ("deepseek_v4", "deepseek_v3"): [
        Case(OPEN, f"<think>hm{DSML_V4}", "", "hm", ONE),
        Case("and with a misspelt outer mark", f"<think>hm{DSML_V4.replace('tool_calls>', 'toolcalls>', 1)}", "", "hm", ONE),
        Case("and without the outer mark", 'hm<｜DSML｜invoke name="f"></｜DSML｜invoke>', "", "hm", call()),
    ],
    ("minimax_m2", "minimax_m2"): [Case(OPEN, f"hm\n{MINIMAX}", "", "hm", ONE)],
    ("glm45", "glm45"): [Case(OPEN, f"<think>hm\n{GLM}", "", "hm", ONE)],
    ("seed_oss", "seed_oss"): [Case(OPEN, f"<seed:think>hm\n{SEED}", "", "hm", ONE)],
    ("step3p5", "deepseek_v3"): [Case(OPEN, f"hm\n{QWEN}", "", "hm", ONE)],
    ("qwen3_coder", "nemotron_v3"): [Case(OPEN, f"hm\n{QWEN}", "", "hm", ONE)],
    ("kimi_k2", "kimi_k2"): [Case(OPEN, f"<think>hm{KIMI}", "", "hm", ONE)],
    ("k2_horizon", "k2_horizon"): [Case(OPEN, f"<ifm|think>hm{HORIZON}", "", "hm", ONE)],
    ("gemma4", "gemma4"): [
        Case(OPEN, f"<|channel>thought\nhm{GEMMA}", "", "hm", ONE),
        Case("without the word", "<|channel>hm<channel|>Yes.", "Yes.", "hm"),
        Case("twice", "<|channel>thought\na<channel|>Yes. <|channel>b<channel|>No.", "Yes. No.", "ab"),
        Case("an end mark alone", "<channel|>Yes.", "Yes."),
        Case("the word alone", f"thought\nhm<channel|>Yes.{GEMMA}", "Yes.", "hm", ONE),
        Case("the word in an answer", "thoughts are free", "thoughts are free"),
        Case("an end of the turn", "Yes.<turn|>", "Yes."),
    ],
    ("llama3_json", "qwen3"): [
        Case("JSON in a thought is none", '<think>{"name": "f", "parameters": {}}</think>Yes.', "Yes.", '{"name": "f", "parameters": {}}'),
    ],
    ("minimax_m2", "minimax_m2_append_think"): [
        Case("thoughts are content", "hm</think>\n\nYes.", "<think>hm</think>\n\nYes."),
        Case("with a mark of its own", f"<think>hm</think>{MINIMAX}", "<think>hm</think>", "", ONE),
    ],
    # -- what stands after or between calls -----------------------------------------------------------
    ("hermes", ""): [
        Case("an empty block", "Yes. <tool_call>\n</tool_call> No.", "Yes. No."),
        Case("an end mark alone", "Yes.</tool_call> No.", "Yes. No."),
        Case("text after a call", f"{HERMES}\nDone.", "Done.", "", ONE),
        Case("a malformed call is whole", '<tool_call>{"f": 1}</tool_call> so', '<tool_call>{"f": 1}</tool_call> so'),
        Case("cut short", '<tool_call>{"name": "f", "arguments": {"text": "a', "", "", (("f", '{"text": "a'),)),
        Case("an unknown name", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", "", (("g", {}),)),
    ],
    ("phi4_mini_json", ""): [Case("a bracket", f"functools{LIST}\nMore.", "More.", "", ONE)],
    ("granite", ""): [
        Case("a bracket", f"<|tool_call|>{LIST} More.", "More.", "", ONE),
        Case("of Granite 3.0", f"<tool_call> {LIST}", "", "", ONE),
    ],
    ("gigachat3", ""): [Case("an end of the text", '<|function_call|>{"name": "f", "arguments": {"count": 1}}</s>', "", "", ONE)],
    ("mistral", ""): [Case("cut short after the name", "Ok. [TOOL_CALLS]f", "Ok.", "", call()), Case("a bracket", f"[TOOL_CALLS]{LIST}\nMore.", "More.", "", ONE)],
    ("jamba", ""): [Case("text after a call is dropped", f"Ok. <tool_calls>{LIST}</tool_calls> More.", "Ok.", "", ONE)],
    ("pythonic", ""): [Case("a bracket", "[f(count=1)] More.", "More.", "", ONE)],
    ("llama4_pythonic", ""): [Case("a bracket", "[f(count=1)] More.", "More.", "", ONE)],
    ("apertus", ""): [Case("brackets", '<|tools_prefix|>[{"f": {"count": 1}}] More.', "More.", "", ONE)],
    ("deepseek_v3", ""): [
        Case("the end of broken arguments", DEEPSEEK.replace("1}", "1"), "", "", (("f", '{"count": 1'),)),
        Case("text after a call is dropped", f"Ok. {DEEPSEEK} More.", "Ok.", "", ONE),
    ],
    ("deepseek_v31", ""): [Case("text after a call is dropped", f"{DEEPSEEK_31}\nMore.", "", "", ONE)],
    ("longcat", ""): [Case("text after a call is dropped", f"{HERMES.replace('tool_call', 'longcat_tool_call')} More.", "", "", ONE)],
    ("kimi_k2", ""): [
        Case("text after a call is dropped", f"Ok. {KIMI} More.", "Ok.", "", ONE),
        Case("a call after a malformed one", KIMI.replace("{", "oh {") + KIMI, KIMI.replace("{", "oh {"), "", ONE),
        Case("text after broken arguments", KIMI.replace("1}", "1"), "", "", (("f", '{"count": 1'),)),
        Case("cut short before the arguments", f"Ok. {KIMI[: KIMI.index('<|tool_call_arg')]}", "Ok.", "", call()),
        Case("an empty section", "Ok.<|tool_calls_section_begin|><|tool_calls_section_end|>", "Ok."),
    ],
    ("plamo3", "plamo3"): [
        Case("all", f"{P_THINK}hm{P_THOUGHT}Ok.{PLAMO}", "Ok.", "hm", ONE),
        Case("twice", f"{P_THINK}a{P_THOUGHT}Yes. {P_THINK}b{P_THOUGHT}No.", "Yes. No.", "ab"),
        Case("stray ends", f"{P_THOUGHT}Yes.{P_THOUGHT} No.<|plamo:tag|>", "Yes. No."),
        Case(OPEN, f"{P_THINK}hm{PLAMO}", "", "hm", ONE),
        Case("without a request's marker", PLAMO.replace("<|plamo:begin_tool_request:plamo|>", ""), "", "", ONE),
        Case("without the type of the arguments", PLAMO.replace("<|plamo:constrain|>json<|plamo:msg|>", ""), "", "", ONE),
        Case("cut short in a marker", f"Ok. {PLAMO[:20]}", "Ok."),
        Case("a beginning that is text", "Ok. <|", "Ok. <|"),
        Case("cut short before the name", PLAMO[: PLAMO.index(">f<") - 8]),
        Case("cut short in the name", PLAMO[: PLAMO.index(">f<") + 2], "", "", call()),
        Case("cut short before the arguments", PLAMO[: PLAMO.index("json<")], "", "", call()),
        Case("cut short in the arguments", PLAMO[: PLAMO.index(": 1")], "", "", (("f", '{"count"'),)),
    ],
    ("inkling", ""): [
        Case("all", f"<|content_thinking|>hm{I_NEXT}<|content_text|>Ok.{I_NEXT}f{INKLING}", "Ok.", "hm", ONE),
        Case("without a kind", "Ok.<|content_model_end_sampling|>", "Ok."),
        Case("without a kind and an end", "Ok. So", "Ok. So"),
        Case("text of tools", "<|content_tool_error|>boom<|end_message|><|content_invoke_tool_text|>do it<|end_message|>", "boomdo it"),
        Case("text after a call", f"{INKLING}<|message_model|><|content_text|>Done.<|end_message|>", "Done.", "", ONE),
        Case("a call within text", f"<|content_text|>Ok.{INKLING}", "Ok.", "", ONE),
        Case("a thought without an end", f"<|content_thinking|>hm{INKLING}", "", "hm", ONE),
        Case("cut short", INKLING[: INKLING.index(": 1")], "", "", (("f", '{"count"'),)),
    ],
    ("minimax_m3", ""): [
        Case("nested", elements("{}<more>{}<k>{}<item>1{}</item>{}<item>a b{}</item>{}</k>{}<z>{}<y>true{}</y>{}</z>{}</more>"),
             "", "", call(more={"k": [1, "a b"], "z": {"y": True}})),
        Case("an element twice", elements("{}<more>{}<k>1{}</k>{}<k>2{}</k>{}</more>"), "", "", call(more={"k": [1, 2]})),
        Case("types", elements("{}<text>12{}</text>{}<count>007{}</count>{}<tags>{}<item>1{}</item>{}</tags>{}<ratio>null{}</ratio>"),
             "", "", call(text="12", count=7, tags=[1], ratio=None)),
        Case("nothing in it", elements("{}<tags>{}</tags>{}<more>{}</more>{}<text>{}</text>"), "", "", call(tags=[], more={}, text="")),
        Case("any text", elements("{}<text>\n<b> </text> ]<]\n{}</text>"), "", "", call(text="\n<b> </text> ]<]\n")),
        Case("text around", f"Ok. {elements('{}<count>1{}</count>')} More.", "Ok. More.", "", ONE),
        Case("without arguments", elements(""), "", "", call()),
        Case("the end of another", elements("{}<count>1{}</on>"), elements("{}<count>1{}</on>")),
        Case("cut short in an element", elements("{}<count>1{}</count>{}<text>a").partition("a]<")[0] + "ab", "", "", (("f", '{"count": 1, "text": "ab'),)),
        Case("cut short after an element", elements("{}<count>1{}</count>Q").partition("Q")[0], "", "", ONE),
    ],
    # -- forms that models write by mistake -----------------------------------------------------------
    ("llama3_json", ""): [
        Case("text around", 'I call {"name": "f", "parameters": {"count": 1}} now.', "I call", "", ONE),
        Case("other JSON", 'So: {"a": {"b": [1]}} is it.', 'So: {"a": {"b": [1]}} is it.'),
        Case("an unknown name", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}'),
        Case("two", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", "", call() * 2),
    ],
    ("xlam", ""): [
        Case("after thoughts", f"<think>hm</think>{LIST}", "<think>hm</think>", "", ONE),
        Case("in a block, after text", f"I call:\n```json\n{LIST}\n```", "I call:", "", ONE),
        Case("in a block without a word", f"```\n{LIST}\n```", "", "", ONE),
        Case("another block", "```python\nx = [1]\n``` Yes.", "```python\nx = [1]\n``` Yes."),
    ],
    ("qwen3_coder", ""): [
        Case("no bracket", "<tool_call>\n<function=f\n</function>\n</tool_call>\n" + QWEN, calls=(("f", {}), *ONE)),
        Case("without the outer mark", "Ok.\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function> More.", "Ok. More.", "", ONE),
        Case("values without ends", "<tool_call><function=f><parameter=text>\na\n<parameter=count>\n1\n</function></tool_call>", "", "", call(text="a", count=1)),
        Case("a call without an end", "<tool_call><function=f><parameter=count>1</parameter></tool_call>", "", "", ONE),
        Case("no type in the schema", "<tool_call><function=f><parameter=new>5</parameter></function></tool_call>", "", "", call(new="5")),
        Case("types", "<tool_call><function=f><parameter=count>5.0</parameter><parameter=on>True</parameter><parameter=tags>['a', 1]</parameter><parameter=more>null</parameter></function></tool_call>",
             "", "", call(count=5, on=True, tags=["a", 1], more=None)),
        Case("a value that is not of its type", "<tool_call><function=f><parameter=count>many</parameter></function></tool_call>", "", "", call(count="many")),
        Case("cut short", "<tool_call><function=f><parameter=text>\nab\n", "", "", (("f", '{"text": "ab\\n'),)),
        Case("cut short before the name", "Ok. <tool_call>\n<function=", "Ok."),
        Case("cut short in the marker", "Ok. <tool_call>\n<func", "Ok."),
        Case("cut short in the name", "Ok. <tool_call>\n<function=get_wea", "Ok.", "", (("get_wea", {}),)),
        Case("cut short after the name", "<tool_call><function=f>\n<para", "", "", call()),
        Case("cut short after a value", "<tool_call><function=f><parameter=count>1</parameter>\n", "", "", ONE),
        Case("cut short in the next key", "<tool_call><function=f><parameter=count>1</parameter><parameter=te", "", "", ONE),
    ],
    ("step3p5", ""): [
        Case("without the outer mark", "<function=f><parameter=count>1</parameter></function>", "", "", ONE),
        Case("text after a call", f"Ok. {QWEN} More.", "Ok. More.", "", ONE),
    ],
    ("mimo", ""): [Case("no type in the schema", "<tool_call><function=f><parameter=new>42</parameter></function></tool_call>", "", "", call(new="42"))],
    ("seed_oss", ""): [
        Case("an empty block", "<seed:tool_call></seed:tool_call>Yes.", "Yes."),
        Case("no bracket", "<seed:tool_call><function=f</function></seed:tool_call>\n" + SEED, calls=(("f", {}), *ONE)),
    ],
    ("gemma4", ""): [
        Case("without the word", "<|tool_call>:f{count:1}<tool_call|>", "", "", ONE),
        Case("types", "<|tool_call>call:f{text:12345,count:<|\"|>3<|\"|>,on:true,ratio:null}<tool_call|>", "", "", call(text="12345", count=3, on=True, ratio=None)),
        Case("words for a string", "<|tool_call>call:f{text:null}<tool_call|>", "", "", call(text="null")),
        Case("cut short", "<|tool_call>call:f{text:<|\"|>a b", "", "", (("f", '{"text": "a b'),)),
        Case("an empty block", "Ok. <|tool_call><tool_call|>", "Ok."),
        Case("without arguments", "<|tool_call>call:f<tool_call|>", "", "", call()),
        Case("a call after a malformed one", f"<|tool_call>call:do it now<tool_call|>{GEMMA}", "<|tool_call>call:do it now<tool_call|>", "", ONE),
    ],
    ("k2_horizon", ""): [
        Case("types of JSON", '<ifm|tool_calls><ifm|tool_call>{"name": "f", "arguments": {"count": "3", "text": 3, "on": "true", "more": "{}"}}</ifm|tool_call></ifm|tool_calls>',
             "", "", call(count=3, text="3", on=True, more={})),
        Case("types", HORIZON.replace(">1<", '>"3"<'), "", "", call(count=3)),
        Case("no type in the schema", HORIZON.replace("count", "new"), "", "", call(new="1")),
        Case("an unknown name", HORIZON.replace(">f<", ">g<"), HORIZON.replace(">f<", ">g<")),
        Case("text around", f"Ok. {HORIZON} More.", "Ok. More.", "", ONE),
    ],
    ("deepseek_v32", ""): [
        Case("a string that is none", DSML_V32.replace("false", "true"), "", "", ONE),
        Case("wrapped", DSML_V32.replace('"count"', '"arguments"').replace(">1<", '>{"count": 1}<'), "", "", ONE),
        Case("wrapped in a string", DSML_V32.replace('"count" string="false">1<', '"input" string="true">{"text": "a"}<'), "", "", call(text="a")),
        Case("not wrapped: another value", DSML_V32.replace('"count"', '"arguments"'), "", "", call(arguments=1)),
        Case("not wrapped: an unknown key", DSML_V32.replace('"count"', '"input"').replace(">1<", '>{"z": 1}<'), "", "", call(input={"z": 1})),
        Case("no type in the schema", DSML_V32.replace("count", "new"), "", "", call(new=1)),
    ],
    ("deepseek_v4", ""): [
        Case("without the outer mark", 'Ok. <｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>', "Ok.", "", call()),
        Case("with a misspelt outer mark", DSML_V4.replace("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>"), "", "", ONE),
        Case("an unknown name without the outer mark", '<｜DSML｜invoke name="g"></｜DSML｜invoke>', "", "", (("g", {}),)),
        Case("in another spelling", DSML_V4.replace("<｜DSML｜tool_calls>", "<｜DSML｜tool>"), "", "", ONE),
        Case("text after a call is dropped", f"Ok. {DSML_V4} More.", "Ok.", "", ONE),
        Case("other marks are text", "See <｜DSML｜foo> and <|DSML|tool>.", "See <｜DSML｜foo> and <|DSML|tool>."),
        Case("a value without an end", DSML_V4.replace("</｜DSML｜parameter>", '<｜DSML｜parameter name="text" string="true">a</｜DSML｜parameter>'), "", "", call(count=1, text="a")),
    ],
    ("deepseek_v41", ""): [
        Case("as written", DSML_V41, "", "", ONE),
        Case("text after a call is dropped", f"Ok. {DSML_V41} More.", "Ok.", "", ONE),
        Case("without the outer mark", '<｜DSML｜ invoke name="f"></｜DSML｜ invoke>', "", "", call()),
    ],
    ("minimax_m2", ""): [
        Case("names without quotes", MINIMAX.replace('"', ""), "", "", ONE),
        Case("names in other quotes", MINIMAX.replace('"', "'"), "", "", ONE),
        Case("no type in the schema", MINIMAX.replace("count", "new"), "", "", call(new="1")),
        Case("an unknown name", MINIMAX.replace('"f"', '"g"'), MINIMAX.replace('"f"', '"g"')),
        Case("cut short", MINIMAX[: MINIMAX.index("1<") + 1], "", "", (("f", '{"count": "1'),)),
    ],
    ("dots", ""): [
        Case("cut short in the marker", "Ok. <dots_function_c", "Ok."),
        Case("in JSON", f"<dots_function_call>{LIST[1:-1]}</dots_function_call>", "", "", ONE),
        Case("an unknown name", '<dots_function_call><invoke name="g"></invoke></dots_function_call>', '<dots_function_call><invoke name="g"></invoke></dots_function_call>'),
    ],
    ("minicpm5", ""): [
        Case("collapsed tags", MINICPM.replace(" name", "name"), "", "", ONE),
        Case("a part around the arguments", MINICPM.replace("<param ", "<arguments><param ").replace("</param>", "</param></arguments>"), "", "", ONE),
        Case("wrapped in Python", MINICPM.replace('"count"', '"properties"').replace(">1<", ">{'count': 1}<"), "", "", ONE),
        Case("an unknown name", MINICPM.replace('"f"', '"g"'), MINICPM.replace('"f"', '"g"')),
        Case("text after a call", f"Ok. {MINICPM} More.", "Ok. More.", "", ONE),
        Case("any text", MINICPM.replace('"count">1', '"text"><![CDATA[</b> & "c"]]>'), "", "", call(text='</b> & "c"')),
    ],
    ("poolside_v1", ""): [
        Case("line breaks", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>\ta\n</arg_value>\n</tool_call>", "", "", call(text="\ta\n")),
        Case("types", "<tool_call>f<arg_key>count</arg_key><arg_value> 420 </arg_value></tool_call>", "", "", call(count=420)),
    ],
    ("glm45", ""): [
        Case("no parameters", "<tool_call>f</tool_call>", "", "", call()),
        Case("an empty block", "Ok. <tool_call> </tool_call>", "Ok."),
        Case("no type in the schema", GLM.replace("count", "new"), "", "", call(new=1)),
    ],
    ("lfm2", ""): [
        Case("zeros", "<|tool_call_start|>[f(count=07)]<|tool_call_end|>", "", "", call(count=7)),
        Case("numbers", "<|tool_call_start|>[f(count=1_000, ratio=-0.50, n=0x1F, m=+3)]<|tool_call_end|>", "", "", call(count=1000, ratio=-0.5, n=31, m=3)),
        Case("a set", "<|tool_call_start|>[f(tags={'a', 'b'}, more={'k': 1, 2: [3]})]<|tool_call_end|>", "", "", call(tags=["a", "b"], more={"k": 1, "2": [3]})),
        Case("a set of one, and an empty dictionary", "<|tool_call_start|>[f(tags={1}, more={})]<|tool_call_end|>", "", "", call(tags=[1], more={})),
        Case("quotes in quotes", "<|tool_call_start|>[f(text='sed -n '1,9p' f.py', count=1)]<|tool_call_end|>", "", "", call(text="sed -n '1,9p' f.py", count=1)),
        Case("quotes in quotes before brackets", """<|tool_call_start|>[f(text='run -c "g(x, sep='-'))"', count=1)]<|tool_call_end|>""",
             "", "", call(text="""run -c "g(x, sep='-'))\"""", count=1)),
        Case("quotes in quotes at the end", """<|tool_call_start|>[f(text='run -c "g(x, sep='-'))"')]<|tool_call_end|>""", "", "", call(text="""run -c "g(x, sep='-'))\"""")),
        Case("no number", "<|tool_call_start|>[f(ratio=nan)]<|tool_call_end|>", "nan)]", "", (("f", '{"ratio": '),)),
        Case("text after a call", "Ok. <|tool_call_start|>[f()]<|tool_call_end|> More.", "Ok. More.", "", call()),
        Case("cut short in a set", "<|tool_call_start|>[f(tags={'a", "", "", (("f", '{"tags": {"a'),)),
    ],
}  # fmt: skip
