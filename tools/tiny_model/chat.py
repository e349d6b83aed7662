"""Renders samples as text with the chat template that is shipped, so that training and serving cannot differ.

Knows the template file. Knows nothing of tokens.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tools.tiny_model.sample import Sample

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text())


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """Return the conversation as text; kwargs are what the template reads (tools, enable_thinking ...)."""
    return _template().render(messages=messages, **kwargs)


def prompt_of(sample: Sample) -> str:
    """Return what the model is given; "" for raw text."""
    if not sample.messages:
        return ""
    return render(
        sample.messages,
        tools=sample.tools,
        add_generation_prompt=True,
        enable_thinking=sample.thinking,
    )


def answer_of(sample: Sample) -> str:
    """Return what the model is to say, up to and with the token that ends it."""
    if not sample.messages:
        return sample.answer + END_OF_TEXT
    return _thought(sample) + sample.answer + _calls(sample, bool(sample.answer)) + END_OF_TURN


def _thought(sample: Sample) -> str:
    if sample.reasoning is None or not sample.thinking:
        return ""
    return f"<think>\n{sample.reasoning}\n</think>\n\n"


def _calls(sample: Sample, after_text: bool) -> str:
    lines = [
        f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        for call in sample.calls or []
    ]
    return ("\n" if after_text and lines else "") + "\n".join(lines)
