"""Chat templates render as Transformers renders them, in a sandbox; conversations are read in every form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.errors import ConfigError, Unsupported, ValidationError
from quire.frontend import chat
from quire.frontend.chat import ChatOptions
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.tokenizer import Tokenizer, load

TINY = Path(__file__).parents[2] / "tools/tiny_model/chat_template.jinja"
TEMPLATES = {
    "chatml": small_tokenizers.TEMPLATE,
    "trimmed": (
        "{{ bos_token }}{%- for m in messages %}\n[{{ m['role'] }}] {{ m['content'] | trim }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n[assistant]{% endif %}"
    ),
    "tools": (
        "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls is defined %}"
        "{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(system='none', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}"
        "{{ ns.n }}/{{ loop.length }}{{ m.content }}{% if ns.n > 3 %}{% break %}{% endif %}{% endfor %}{{ ns.system }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}"
    ),
    "blocks": (
        "{% for m in messages %}\n    {% if not loop.first %}\n ---\n    {% endif %}\n{{ m.content }}\n{% endfor %}\n"
        "{% macro close() %}end{% endmacro %}{{ close() }}{{ documents }}{{ enable_thinking }}"
    ),
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be <b>brief</b> & \"kind\"'s é"},
        {"role": "user", "content": "  two \n lines\n"},
        {"role": "assistant", "content": "yes 🎉"},
        {"role": "user", "content": "more"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "get", "arguments": {"at": "Köln", "n": 1.5}}}
            ],
        },
        {"role": "tool", "content": "rain", "name": "get"},
    ],
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "É <x>", "parameters": {"type": "object"}}}
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_tokenizers.save_byte_level(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def theirs(folder: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder: str) -> Tokenizer:
    return load(folder)


@pytest.mark.parametrize("name", [*TEMPLATES, "tiny"])
@pytest.mark.parametrize("which", range(len(CHATS)))
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, name: str, which: int,
    generation_prompt: bool, tools: list[Any] | None,
) -> None:  # fmt: skip
    source = TINY.read_text() if name == "tiny" else TEMPLATES[name]
    more = {"chat_template": source, "add_generation_prompt": generation_prompt, "tools": tools}
    expected = theirs.apply_chat_template(
        CHATS[which], tokenize=False, enable_thinking=False, **more
    )
    found = ours.apply_chat_template(CHATS[which], tokenize=False, enable_thinking=False, **more)
    if name != "generation" and not (name == "tools" and which == 2):
        options = ChatOptions(
            generation_prompt,
            template=source,
            template_kwargs={"enable_thinking": False},
            tools=tools,
        )
        assert chat.render(ours, CHATS[which], options) == expected
    assert found == expected


def test_ids_are_those_of_the_text(ours: Tokenizer, theirs: PreTrainedTokenizerFast):
    expected = theirs.apply_chat_template(CHATS[1], add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(CHATS[1], add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", ["chatml", "trimmed"])
def test_a_final_message_is_continued_as_transformers_does(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, name: str
):
    for said in ("The answer is", "The answer is ", "a\n"):
        messages = [*CHATS[0], {"role": "assistant", "content": said}]
        more: dict[str, Any] = {
            "tokenize": False,
            "continue_final_message": True,
            "chat_template": TEMPLATES[name],
        }
        expected = theirs.apply_chat_template(messages, **more)
        assert ours.apply_chat_template(messages, **more) == expected
        options = ChatOptions(False, True, template=TEMPLATES[name])
        assert chat.render(ours, messages, options) == expected


def test_continuing_and_a_generation_prompt_exclude_each_other(ours: Tokenizer):
    with pytest.raises(ValidationError, match="exclude each other"):
        chat.render(ours, CHATS[0], ChatOptions(True, True))


def test_a_python_function_becomes_a_tool_as_in_transformers(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast
):
    def weather(place: str, days: int = 1) -> str:
        """The weather.

        Args:
            place: A town.
            days: How many.
        """
        return place * days

    more: dict[str, Any] = {"tools": [weather], "chat_template": TEMPLATES["tools"]}
    expected = theirs.apply_chat_template(CHATS[0], tokenize=False, **more)
    assert ours.apply_chat_template(CHATS[0], tokenize=False, **more) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_a_template_does_not_reach_python(source: str):
    with pytest.raises(ValidationError, match="chat template"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_private_names_are_empty():
    template = ChatTemplate("<{{ raise_exception.__globals__ }}{{ messages.__len__ }}>")
    assert template.render([{"role": "user", "content": "x"}]) == "<>"


def test_a_templates_own_error_message_is_reported():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValidationError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_syntax_error_names_the_line():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% if %}").render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (TEMPLATES["chatml"], "string"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
            "{% endif %}{% endfor %}",
            "openai",
        ),
    ],
)  # fmt: skip
def test_the_content_format_is_detected(source: str, form: str):
    assert ChatTemplate(source).content_format == form


def test_content_parts_are_joined_for_string_templates(ours: Tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    found = chat.render(ours, [{"role": "user", "content": parts}], ChatOptions(False))
    assert found == "<|user|>a\nb\nc<|end|>"


def test_content_parts_are_passed_on_to_templates_that_read_them(ours: Tokenizer):
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    assert chat.render(ours, messages, ChatOptions(False, template=source)) == "[a][b][c]"
    both = "{% for m in messages %}{{ m.content is string }}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
    assert chat.render(ours, messages, ChatOptions(False, template=both)) == "FalseaTruec"
    options = ChatOptions(False, template=both, content_format="openai")
    assert chat.render(ours, messages, options) == "FalseaFalsec"


def test_a_clients_template_is_never_a_path(ours: Tokenizer, tmp_path: Path):
    (tmp_path / "secret").write_text("of this machine")
    path = str(tmp_path / "secret")
    assert chat.render(ours, CHATS[0], ChatOptions(template=path)) == "of this machine"
    options = ChatOptions(template=path, template_may_be_path=False)
    assert chat.render(ours, CHATS[0], options) == path


def test_a_template_of_a_request_that_is_wrong_is_the_requests_fault(ours: Tokenizer):
    for wrong in ("{% if %}", "nowhere.jinja"):
        with pytest.raises(ValidationError, match="template"):
            chat.render(ours, CHATS[0], ChatOptions(template=wrong))


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", "file"])
def test_media_are_refused_by_name(ours: Tokenizer, kind: str):
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]
    with pytest.raises(Unsupported, match=rf"content\[0\] of type {kind}"):
        chat.render(ours, messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must not be empty"),
        (["hi"], r"messages\[0\] must be a dict with role and content"),
        ([{"content": "hi"}], r"messages\[0\] must be a dict with role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must be a string or"),
    ],
)
def test_messages_of_no_form_are_refused(ours: Tokenizer, messages: list[Any], words: str):
    with pytest.raises(ValidationError, match=words):
        chat.render(ours, messages)


def test_a_missing_template_error_names_the_remedy(tmp_path: Path):
    bare = load(small_tokenizers.save_byte_level(tmp_path, chat_template=None))
    with pytest.raises(ValidationError, match="no chat template: start it with --chat-template"):
        chat.render(bare, CHATS[0])


def test_one_conversation_or_several():
    one = CHATS[0]
    assert chat.conversations(one) == [one]
    assert chat.conversations([one, CHATS[1]]) == [one, CHATS[1]]
    for wrong in ("hi", [], ["hi"], {"role": "user"}, [one, {"role": "user"}]):
        with pytest.raises(ValidationError, match="list of messages"):
            chat.conversations(wrong)


def test_templates_are_found_in_all_checkpoint_locations(tmp_path: Path):
    small_tokenizers.save_byte_level(tmp_path, chat_template="of the config")
    assert load(str(tmp_path)).chat_template == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert load(str(tmp_path)).chat_template == "of the file"
    assert load(str(tmp_path), chat_template="{{ 'given' }}").chat_template == "{{ 'given' }}"
    own = tmp_path / "own.jinja"
    own.write_text("of a path")
    assert load(str(tmp_path), chat_template=str(own)).chat_template == "of a path"
    with pytest.raises(ConfigError, match="neither a file nor a Jinja template"):
        load(str(tmp_path), chat_template="nowhere.jinja")


def test_named_templates_serve_tools(tmp_path: Path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]  # fmt: skip
    ours = load(small_tokenizers.save_byte_level(tmp_path, chat_template=named))
    assert chat.render(ours, CHATS[0]) == "plain"
    assert chat.render(ours, CHATS[0], ChatOptions(tools=TOOLS)) == "with tools"
