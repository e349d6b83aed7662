"""Templates that use too much time or memory end in time, with a reason, and affect no other request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest
from asymptotic import seconds

from quire.errors import ConfigError, ValidationError
from quire.frontend import jinja_sandbox, untrusted_templates
from quire.frontend.chat import ChatOptions
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.jinja_sandbox import TemplateTooSlow
from quire.frontend.untrusted_templates import UntrustedTemplateRenderer
from quire.processes.isolated_child import IsolatedChild

CHAT = [{"role": "user", "content": "hi"}]
SECONDS = 0.3


def again(expression: str, start: str = "'xy'") -> str:
    """A value that grows in each of sixty rounds."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {expression} %}}{{% endfor %}}{{{{ ns.x }}}}"
    )


SLOW = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that choose nothing": (
        "{% set l = range(99999) | list %}{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}"
    ),
    "a tree of macros": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
}
LARGE = {
    "times": "{{ 'x' * 10**9 }}",
    "times, lists": "{{ [1] * 10**9 }}",
    "a doubled text": again("ns.x ~ ns.x"),
    "a doubled text, by +": again("ns.x + ns.x"),
    "a large number": "{{ 10 ** 99999 }}",
    "squared numbers": again("ns.x * ns.x", "7"),
    "a macro's text": "{% macro m() %}{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "text": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
}
WITHIN_PYTHON = {
    "replace": again("ns.x | replace('x', ns.x)"),
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>1000000000}'.format('x') }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "indent": again("('\n' ~ ns.x) | indent(99999, true)"),
    "wordwrap": "{{ ('x' * 99999) | wordwrap(1, wrapstring='y' * 99999) }}",
    "a list of itself, written": again("[ns.x, ns.x]"),
    "a list of itself, as JSON": again("[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "batch": "{{ range(9) | batch(10**9, 'x') | list | length }}",
    "a chain of names": "{{ messages" + ".a" * 50000 + " }}",
    "brackets": "{{ " + "(" * 50000 + ")" * 50000 + " }}",
}


@pytest.mark.parametrize("trick", SLOW)
def test_a_slow_template_is_stopped(trick: str):

    def render() -> None:
        with pytest.raises(TemplateTooSlow, match=r"needs more than 0\.1 s"):
            ChatTemplate(SLOW[trick]).render(CHAT, seconds=0.1)

    assert seconds(render) < 20  # none of them would end within a minute


@pytest.mark.parametrize("trick", LARGE)
def test_a_template_with_too_much_output_is_stopped(trick: str):

    def render() -> None:
        with pytest.raises(
            ValidationError, match=r"more than|recursion is too deep|Range too big"
        ) as caught:
            ChatTemplate(LARGE[trick]).render(CHAT, seconds=60)
        assert not isinstance(caught.value, TemplateTooSlow)

    assert seconds(render) < 20


@pytest.fixture(scope="module")
def others() -> Iterator[UntrustedTemplateRenderer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted_templates, "GRACE_S", 0.4)
        made = UntrustedTemplateRenderer(SECONDS)
        yield made
        made.close()


@pytest.fixture
def patient(others: UntrustedTemplateRenderer) -> Iterator[UntrustedTemplateRenderer]:
    """For templates that do no harm: a busy machine starts a process slowly."""
    others.seconds = 60
    yield others
    others.seconds = SECONDS


def test_tricks_within_python_end_with_their_process(others: UntrustedTemplateRenderer):
    """All of them, two at a time; and templates that do no harm are rendered meanwhile and after."""

    def refused(trick: str) -> float:
        begun = time.monotonic()
        with pytest.raises(ValidationError, match="template") as caught:
            others.render(CHAT, ChatOptions(template=tricks[trick]), {})
        assert caught.value.parameter == "chat_template", (trick, caught.value)
        return time.monotonic() - begun

    tricks = {"nested loops": SLOW["nested loops"], **WITHIN_PYTHON}
    with ThreadPoolExecutor(2) as threads:
        took = dict(zip(tricks, threads.map(refused, tricks), strict=True))
    assert max(took.values()) < 30, took
    others.seconds = 60
    options = ChatOptions(template="{{ bos }}{{ messages[0].content }}{{ tools }}", tools=[1])
    assert others.render(CHAT, options, {"bos": "<s>"}) == "<s>hi[1]"
    others.seconds = SECONDS


def test_a_process_serves_again(patient: UntrustedTemplateRenderer):
    for count in range(3):
        source = f"{count}" + "{% for m in messages %}{{ m.role }}{% endfor %}"
        assert patient.render(CHAT, ChatOptions(template=source), {}) == f"{count}user"
    before = patient.idle[-1].process.pid
    for source, says in (("{{ raise_exception('no sir') }}", "no sir"), ("{% if %}", "line 1")):
        with pytest.raises(ValidationError, match=says):
            patient.render(CHAT, ChatOptions(template=source), {})
    assert patient.idle[-1].process.pid == before


def test_a_process_that_ended_is_replaced(patient: UntrustedTemplateRenderer):
    patient.render(CHAT, ChatOptions(template="x"), {})
    gone = patient.idle[-1]
    gone.process.kill()
    gone.process.wait()
    assert patient.render(CHAT, ChatOptions(template="y"), {}) == "y"
    assert gone not in patient.idle


def test_content_parts_reach_the_template_in_its_format(patient: UntrustedTemplateRenderer):
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert patient.render(chat, ChatOptions(template=source), {}) == "[a]"
    assert patient.render(chat, ChatOptions(template="{{ messages[0].content }}"), {}) == "a"


def test_the_sandbox_does_not_change_the_result():
    source = (
        "{% for a in range(4) if a % 2 %}{{ loop.index }}{{ loop.last }}{{ a ~ none ~ [1] ~ missing ~ 'x' }}"
        "{% else %}none{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}{{ 2 ** 10 * 3 + 1 }}{{ [1] + [2] }}"
        "{% set x %}{{ 'y' * 3 }}{% endset %}{{ x }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for a in [[1], []] recursive %}<{{ loop(a) if a is iterable else a }}>{% endfor %}"
    )
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render()
    assert jinja_sandbox.render_template(source, {}) == plain


def test_deeply_nested_templates_are_refused():
    with pytest.raises(ConfigError, match="nested too deeply"):
        jinja_sandbox.render_template(WITHIN_PYTHON["brackets"], {})


def test_a_process_has_no_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "ANOTHER_SECRET"):
        monkeypatch.setenv(name, "a secret of the operator")
    child = IsolatedChild("quire.frontend.untrusted_templates")
    try:
        given = Path(f"/proc/{child.process.pid}/environ").read_bytes()
    finally:
        child.end()
    assert b"a secret of the operator" not in given
