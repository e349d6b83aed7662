"""Jinja sandbox: a template cannot reach Python internals, and its time and text size are limited.

Every loop, call and macro checks the clock, and every concatenation checks the size. One long operation of Python
itself (a huge sort, a padded text) remains possible, so clients' templates run in a process that can be killed
(`untrusted_templates`). Knows Jinja. Does not know conversations.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from quire.errors import ConfigError, ValidationError

SECONDS = 10.0
MOST_TEXT = 32 << 20  # characters: more than the longest context holds
NESTED = "the chat template does not parse: it is nested too deeply"
MOST_BITS = 1 << 16  # of an integer result of `*` or `**`

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class TemplateTooSlow(ValidationError):
    """A template exceeded its time limit."""


class TemplateTooLarge(Exception):
    """A template built a text or a number above the limit."""


def tick() -> None:
    if time.monotonic() > _deadline.get():
        raise TimeoutError


def bounded(size: int) -> None:
    if size > MOST_TEXT:
        raise TemplateTooLarge(f"it creates a string of more than {MOST_TEXT} characters")


def concat(pieces: Iterable[str]) -> str:
    """As "".join, for the output of macros and blocks, with checks of the clock and the size."""
    parts, size = [], 0
    for piece in pieces:
        tick()
        size += len(piece)
        bounded(size)
        parts.append(piece)
    return "".join(parts)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit rendering in this context; the next loop, call or macro after it raises. An earlier deadline stays."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace must not contain {name!r}")
        super().__setitem__(name, value)


# pass_context keeps Jinja from evaluating the filter at compile time (constant folding).
@jinja2.pass_context
def _ticked(_: jinja2.runtime.Context, value: Any) -> Any:
    tick()
    return value


@jinja2.pass_context
def _joined(_: jinja2.runtime.Context, parts: list[Any]) -> str:
    return concat(map(str, parts))


class _Watched(jinja2.visitor.NodeTransformer):
    """Adds the clock check to loops and the size check to `~`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        line = node.lineno
        look = _filter("_ticked", jinja2.nodes.Const(True, lineno=line))
        node.body.insert(0, jinja2.nodes.ExprStmt(look, lineno=line))
        if node.test is not None:
            node.test = jinja2.nodes.And(look, node.test, lineno=line)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filter("_joined", jinja2.nodes.List(node.nodes, lineno=node.lineno))


def _filter(name: str, value: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**"))
    concat = staticmethod(concat)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        tick()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "+":
            if isinstance(left, (str, list)) and isinstance(right, (str, list)):
                bounded(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            many = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()  # fmt: skip
            if many > MOST_BITS:
                raise TemplateTooLarge(f"it computes a number of more than {MOST_BITS} bits")
        elif operator == "*":
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                bounded(len(value) * count)
        return super().call_binop(context, operator, left, right)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Plain JSON: Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "_ticked": _ticked, "_joined": _joined}
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment


def check_syntax(source: str) -> None:
    """Raises ConfigError: the template does not parse. Runs nothing of it: Jinja's compiler computes constants."""
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise _unparsed(error) from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(NESTED) from error


def _unparsed(error: jinja2.TemplateSyntaxError) -> ConfigError:
    return ConfigError(f"the chat template does not parse: {error} (line {error.lineno})")


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Raises ConfigError: the template does not parse."""
    environment = _environment()
    try:
        return environment.from_string(_Watched().visit(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise _unparsed(error) from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # Python's nesting limits
        raise ConfigError(NESTED) from error


def render_template(source: str, variables: Mapping[str, Any], seconds: float = SECONDS) -> str:
    """Render a template.

    Raises:
        ConfigError: the template does not parse.
        TemplateTooSlow: it takes longer than `seconds`.
        ValidationError: it rejects its variables, fails on them, or builds too large a text.
    """
    template = compile_template(source)
    try:
        with deadline(seconds):
            return template.render(variables)
    except TimeoutError:
        raise TemplateTooSlow(
            f"the chat template needs more than {seconds:g} s for this conversation",
            parameter="chat_template",
        ) from None
    except (TemplateTooLarge, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "its recursion is too deep"
        raise ValidationError(
            f"the chat template was stopped on this conversation: {reason}",
            parameter="chat_template",
        ) from error
    except jinja2.TemplateError as error:
        raise ValidationError(
            f"the chat template rejects the conversation: {error}", parameter="messages"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValidationError(
            f"the chat template failed on this conversation ({type(error).__name__}: {error})",
            parameter="messages",
        ) from error
