"""Validation of values that a user gave: whole numbers, numbers, texts, token ids.

Each function returns the value in its plain type (numpy scalars become Python's) or raises a ValidationError
that names the parameter, the value and what it must be. Knows no single parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from quire.errors import ValidationError

Kind = TypeVar("Kind", bound=IntEnum)

MAX_BIAS = 100.0
# encoded size; a request's own data is copied to each of its n children, and into the recording
MOST_DATA_BYTES = 1 << 16
MOST_DATA_DEPTH = 64  # nested dicts and lists; encoders recurse, and fail at Python's limit


def wrong(name: str, value: Any, must: str, remedy: str = "") -> ValidationError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    joint = " " if remedy.startswith("(") else ", "
    text = f"{name} must be {must}{joint + remedy if remedy else ''}; it is {shown}"
    return ValidationError(text, parameter=name, value=value)


def whole_number(
    name: str, value: Any, low: int | None, high: int | None = None, remedy: str = ""
) -> int:
    if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
        return value  # the usual case is fast; the code below builds error messages
    must = f"a whole number{span(low, high)}"
    if isinstance(value, bool):
        raise wrong(name, value, must, remedy)
    try:
        number = operator.index(value)
    except TypeError:
        if not (isinstance(value, float) and value.is_integer()):
            raise wrong(name, value, must, remedy) from None
        number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise wrong(name, number, must, remedy)
    return number


def span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" of at least {low}" if low is not None else ""


def number(
    name: str, value: Any, low: float | None, high: float | None, open_low: bool = False
) -> float:
    """A finite float in [low, high], or in (low, high] with `open_low`."""
    if (
        type(value) is float
        and low is not None
        and low < value < (math.inf if high is None else high)
    ):
        return value
    if open_low:
        must = f"a number above {low}" + (f" and at most {high}" if high is not None else "")
    else:
        must = f"a number{span(low, high)}"
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise wrong(name, value, must)
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong(name, value, must) from None
    if not math.isfinite(result):
        raise wrong(name, value, f"finite and {must}")
    below = low is not None and (result <= low if open_low else result < low)
    if below or (high is not None and result > high):
        raise wrong(name, value, must)
    return result


def truth(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool_", "bool"):  # numpy's
        return bool(value)
    raise wrong(name, value, "True or False")


def texts(name: str, value: Any) -> list[str]:
    """One string, or several; none of them empty."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise wrong(name, value, "a string or a list of strings")
    result = list(value)
    for text in result:
        if not isinstance(text, str):
            raise wrong(name, text, "a string or a list of strings")
        if not text:
            raise wrong(name, text, "without empty strings")
    return result


def token_ids(name: str, value: Any) -> list[int]:
    """Whole numbers of at least 0."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise wrong(name, value, "a list of token ids")
    return [whole_number(name, item, 0, (1 << 31) - 1) for item in value]


def count_or_switch(name: str, value: Any) -> int | None:
    """A count. True means 1, False and None mean not requested, -1 means all."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    return whole_number(name, value, -1, None, "-1 for the whole vocabulary")


def biases(name: str, value: Any) -> dict[int, float]:
    """Token id (also as decimal text, as in JSON) -> a finite number, clamped to ±100."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a dict of token id to number")
    result = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.strip().isdecimal():
            key = int(key)
        token = whole_number(name, key, 0, (1 << 31) - 1, "token ids as keys")
        result[token] = max(-MAX_BIAS, min(MAX_BIAS, number(name, bias, None, None)))
    return result


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong(name, value, "a dict with strings as keys")
    return dict(value)


def member(name: str, value: Any, kind: type[Kind]) -> Kind:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{item.name} ({item.value})" for item in kind)
        raise wrong(name, value, f"one of {known}") from None


def small_data(name: str, value: Any) -> dict[str, Any]:
    """A dict of plain data that the engine protocol can encode, of at most MOST_DATA_BYTES.

    Objects that cannot be encoded are accepted here: an engine in the caller's own process can use them.
    """
    result = mapping(name, value)
    try:
        size = len(msgspec.msgpack.encode(result))
        if size <= MOST_DATA_BYTES and depth_exceeds(result, MOST_DATA_DEPTH):
            raise RecursionError
    except TypeError:
        return result
    except RecursionError:
        fault = f"is nested deeper than {MOST_DATA_DEPTH} levels: flatten it"
        raise ValidationError(f"{name} {fault}", parameter=name) from None
    except (OverflowError, ValueError) as error:
        fault = (
            f"contains a value that cannot be sent ({error}); whole numbers have at most 64 bits"
        )
        raise ValidationError(f"{name} {fault}", parameter=name) from None
    if size > MOST_DATA_BYTES:
        fault = f"has {size} bytes; the limit is {MOST_DATA_BYTES}: send less data"
        raise ValidationError(f"{name} {fault}", parameter=name)
    return result


def depth_exceeds(value: Any, most: int) -> bool:
    """Whether dicts and lists are nested deeper than `most` levels. It does not search further than that."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(item, (Mapping, list, tuple))
        ]
        if not level:
            return False
    return True
