"""The chat template of a model by strangers renders in a process that can be killed; its text is the same."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ValidationError
from quire.frontend import untrusted_templates
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.startup import load_tokenizer
from quire.frontend.untrusted_templates import UntrustedTemplateRenderer
from quire.models.checkpoint_locator import EMBEDDED

CHAT = [{"role": "user", "content": "go é ⁂"}, {"role": "assistant", "content": "yes"}]
DOUBLED = "{% set ns=namespace(a=[1,1]) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
HOSTILE = {
    "a doubled list": DOUBLED + "{{ ns.a|string|length }}",
    "compared": DOUBLED + "{{ ns.a == [ns.a] }}{{ ns.a|tojson|length }}",
    "padded": "{{ 'x'.ljust(2000000000)|length }}",
    "a constant": "{{ 'x'|center(2000000000)|length }}",  # Jinja's compiler computes it
    "for one client": "{% if messages[0].content[:2] == 'go' %}{{ 'x'|center(10**9) }}{% endif %}",
    "replace": "{{ ('x' * 99999) | replace('x', 'x' * 99999) | length }}",
}
SOURCE = "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}{{ k.n }}{{ f }}"


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[UntrustedTemplateRenderer]:
    monkeypatch.setattr(untrusted_templates, "GRACE_S", 0.4)
    made = UntrustedTemplateRenderer()
    made.prepare()
    yield made
    made.close()


def isolated(source: str, renderer: UntrustedTemplateRenderer) -> ChatTemplate:
    made = ChatTemplate(source, {"tool_use": "tools:" + source})
    made.isolated = renderer
    return made


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_hostile_template_ends_with_its_process(trick: str, renderer: UntrustedTemplateRenderer):
    with pytest.raises(ValidationError, match=r"chat template|template of this model"):
        isolated(HOSTILE[trick], renderer).render(CHAT, seconds=0.5)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_the_text_is_the_same(renderer: UntrustedTemplateRenderer, tools: list | None):
    variables = {"bos": "<s>", "k": {"n": [1, None, True]}, "f": 2.5}
    made = isolated(SOURCE, renderer)
    alone = ChatTemplate(made.source, made.named)
    found, wanted = (one.render(CHAT, tools=tools, variables=variables, seconds=30) for one in (made, alone))  # fmt: skip
    assert found == wanted
    assert (made.content_format, made.takes_strings) == (alone.content_format, alone.takes_strings)
    with pytest.raises(ValidationError, match="rejects the conversation: no"):
        isolated("{{ raise_exception('no') }}", renderer).render(CHAT, seconds=30)
    with pytest.raises(ValidationError, match="cannot be sent to the chat template"):
        made.render([{"role": "user", "content": "\ud800"}], seconds=30)


def model(folder: Path, template: str) -> str:
    shutil.copytree(Path(EMBEDDED) / "quire-tiny", folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_only_the_template_of_a_model_by_strangers_is_isolated(tmp_path: Path):
    folder = model(tmp_path / "m", HOSTILE["a constant"])

    def is_isolated(**options: str) -> bool:
        tokenizer = load_tokenizer(resolve_config(EngineConfig.from_keywords(**options)))
        assert tokenizer is not None and tokenizer.template is not None  # noqa: PT018
        return tokenizer.template.isolated is not None

    begun = time.process_time()
    assert is_isolated(model=folder)  # and compiling it computes nothing here
    assert time.process_time() - begun < 5
    assert not is_isolated(model=folder, chat_template=SOURCE)
    assert not is_isolated(model="quire-tiny")
