"""Writes the calls of one output as deltas: id, name and arguments in JSON.

Knows the request's tools, and the state of the current call. Does not know markers, nor the text around calls.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.frontend.parsers.format_table import Alias
from quire.frontend.parsers.tool_schemas import ArgumentTypes, ToolSchemas
from quire.frontend.parsers.value_reader import MalformedValue, escaped, quoted

MAX_NAME = 512  # characters
LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class CallDelta:
    """New data of one call; the first delta has id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ParsedDelta:
    """New reasoning, content and call deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, later: ParsedDelta) -> None:
        self.reasoning += later.reasoning
        self.content += later.content
        for call in later.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


def new_id(kind: str) -> str:
    if kind == "short":
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


@dataclass(slots=True)
class CallWriter:
    """The calls of one output.

    Args:
        make_id: makes the id of a call.
        types_apply: the types of the schema apply to arguments that have types of their own, too.
        untyped_text: a value is a string where the schema names no type.
        wrappers: names of parameters that hold all arguments if the tool has no parameter of that name.
        checks_schema: a call is written at its end, if it follows the schema.
        aliases: name of an unknown tool -> the tool that is called.
    """

    tools: ToolSchemas
    make_id: Callable[[], str]
    known_only: bool = False
    types_apply: bool = False
    untyped_text: bool = False
    wrappers: tuple[str, ...] = ()
    checks_schema: bool = False
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    num_calls: int = 0
    """Number of calls that have started."""
    has_ended: bool = False
    """Some call is complete."""
    started: bool = False
    name: str = ""
    id: str = ""
    key: str = ""
    _deltas: list[tuple[CallDelta, list[str]]] = field(default_factory=list)
    _num_parameters: int = 0
    _is_wrapper: bool = False
    _alias: Alias | None = None
    _checked: list[tuple[str, str]] = field(default_factory=list)
    """Keys and values of a call that waits for its end."""
    _wrapped: tuple[str, str] | None = None
    """Key and value of a wrapper, until the next parameter or the end of the call decides."""

    def take(self) -> list[CallDelta]:
        """The deltas since the last `take`."""
        calls = [call for call, _ in self._deltas]
        for call, parts in self._deltas:
            call.arguments = "".join(parts)
        self._deltas = []
        return calls

    def begin(self, name: str, known_only: bool = False) -> None:
        """Set the name of the call. Raises MalformedValue."""
        name = name.strip()
        if not name or len(name) > MAX_NAME or any(char.isspace() for char in name):
            raise MalformedValue(f"{name[:40]!r} is not the name of a tool")
        alias = self.aliases.get(name)
        if alias is not None and name not in self.tools and alias.tool in self.tools:
            self._alias, name = alias, alias.tool
        if (known_only or self.known_only) and name not in self.tools:
            raise MalformedValue(f"unknown tool {name[:40]!r}")
        self.name = name

    def types(self) -> ArgumentTypes | None:
        """The types that apply to the call's JSON arguments."""
        return ArgumentTypes(self.tools, self.name) if self.types_apply else None

    def arguments(self, text: str) -> None:
        """Write JSON of the call's arguments; the first piece starts the call."""
        if not self.started:
            self.started = True
            delta = CallDelta(self.num_calls, "", self.id or self.make_id(), self.name)
            self._deltas.append((delta, []))
            self.num_calls += 1
        if not self._deltas or self._deltas[-1][0].index != self.num_calls - 1:
            self._deltas.append((CallDelta(self.num_calls - 1), []))
        self._deltas[-1][1].append(text)

    def end(self, complete: bool = True) -> None:
        """End the call. `complete`: it is not malformed."""
        self.has_ended |= complete
        self.started = self._is_wrapper = False
        self.name = self.id = self.key = ""
        self._num_parameters, self._wrapped, self._alias = 0, None, None
        self._checked.clear()

    # -- calls whose parameters have markers of their own -----------------------------------------
    def begin_key(self, key: str) -> None:
        """Set the name of a parameter. Raises MalformedValue: a checked call has no such name, and dropping it loses text."""
        if self.checks_schema and any(char.isspace() for char in key):
            raise MalformedValue(f"{key[:40]!r} is not the name of a parameter")
        self.key = key

    def begin_value(self, is_text: bool) -> bool:
        """Begin the value of the parameter `key`; returns whether the value is a string, which `add_text` writes.

        `is_text`: it is a string unless the schema has another type.
        """
        if self.checks_schema:
            return False
        self._write_wrapped()
        types = self.tools.types(self.name, self.key)
        self._is_wrapper = (
            not self._num_parameters
            and self.key in self.wrappers
            and self.tools.lacks(self.name, self.key)
        )
        if self._is_wrapper:
            self.arguments("")
            return False
        text = types == {"string"} or (not types and (is_text or self.untyped_text))
        self._write_key(self.key)
        self.arguments('"' if text else "")
        return text

    def _write_key(self, key: str) -> None:
        self.arguments(", " if self._num_parameters else "{")
        self.arguments(quoted(key) + ": ")
        self._num_parameters += 1

    def add_text(self, text: str) -> None:
        if text:
            self.arguments(escaped(text))

    def add_value(self, text: str) -> None:
        """Write the whole value, with the type of the schema."""
        if self.checks_schema:
            self._checked.append((self.key, text))
        elif self._is_wrapper:
            self._wrapped = (self.key, text)
        else:
            self.arguments(self.tools.value(self.name, self.key, text))

    def _write_wrapped(self) -> None:
        """The parameter before was no wrapper."""
        if self._wrapped is not None:
            key, text = self._wrapped
            self._write_key(key)
            self.arguments(self.tools.value(self.name, key, text))
            self._wrapped = None

    def _write_checked(self) -> None:
        """Write a whole call. Raises MalformedValue: it does not follow the tool's schema."""
        name, alias = self.name, self._alias or Alias(self.name)
        (key, text), *others = self._checked or [("", "")]
        is_wrapper = not others and key in self.wrappers and self.tools.lacks(name, key)
        inner = self.tools.unwrapped(name, text) if is_wrapper else None
        if inner is not None:
            present, written = set(json.loads(inner)), inner
        else:
            named = [(alias.parameters.get(key, key), text) for key, text in self._checked]
            known = {key: text for key, text in named if not self.tools.lacks(name, key)}
            if len(dict(named)) < len(named):
                raise MalformedValue(f"a parameter of {name[:40]!r} occurs twice")
            parts = {key: self.tools.value(name, key, text) for key, text in known.items()}
            parts |= {
                key: json.dumps(value) for key, value in alias.adds.items() if key not in parts
            }
            written = ", ".join(f"{quoted(key)}: {value}" for key, value in parts.items())
            present, written = set(parts), f"{{{written}}}"
        if missing := [key for key in self.tools.required(name) if key not in present]:
            raise MalformedValue(f"the call of {name[:40]!r} lacks {missing[0][:40]!r}")
        self.arguments(written)

    def end_parameters(self) -> None:
        """Raises MalformedValue: a call that is checked does not follow the tool's schema."""
        if self.checks_schema:
            self._write_checked()
            self.end()
            return
        inner = self.tools.unwrapped(self.name, self._wrapped[1]) if self._wrapped else None
        if inner is not None:
            self.arguments(inner)
        else:
            self._write_wrapped()
            self.arguments("}" if self._num_parameters else "{}")
        self.end()

    def cut_value(self, text: str, is_text: bool) -> None:
        """The output ended inside a value: write its text, without closing the string."""
        if self._is_wrapper:
            self._write_key(self.key)
        if not is_text:
            self.arguments('"')
        self.add_text(text)

    def cut_key(self, text: str) -> None:
        """The output ended inside a parameter's name."""
        self._write_wrapped()
        self.arguments((", " if self._num_parameters else "{") + '"')
        self.add_text(text)
