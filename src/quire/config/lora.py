"""LoraConfig: which LoRA adapters an engine serves, and how many at once.

Knows every form in which adapters can be named. Does not know files or the form of PEFT (`features/lora`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.config.number_types import AtLeast1

FORMS = 'NAME=PATH, {"name": NAME, "path": PATH}, or a dict of names and paths'
KEYS = ("name", "path", "base_model_name", "is_3d_lora_weight")
MAX_NAME = 256  # characters
MEDIA = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """LoRA adapters."""

    enable_lora: bool = False
    """Serve LoRA adapters beside the model."""
    lora_modules: list[Any] = field(default_factory=list)
    """Adapters to load at the start: NAME=PATH, or JSON objects with name, path and base_model_name (for its model card)."""
    default_mm_loras: dict[str, Any] = field(default_factory=dict)
    """Adapters of requests that have pictures, videos or sound and name no adapter: {"audio": PATH}. Their names are image, video and audio."""
    max_loras: AtLeast1 = 1
    """Maximum different adapters in one step."""
    max_cpu_loras: AtLeast1 | None = None
    """Maximum loaded adapters; the least recently used is dropped, and read again when it is needed; unset: max_loras, or the number of lora_modules and default_mm_loras if that is more."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Maximum rank of an adapter; memory is taken for the rank that it has."""
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Number format of the adapters' weights; auto: the model's dtype."""
    fully_sharded_loras: bool = False
    """Split both matrices of an adapter between devices (accepted without effect: each rank has all of A, and of B its own outputs)."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Names of the layers that adapters may change, such as q_proj; tensors for other layers are left out. Unset: all."""
    allowed_lora_paths: list[str] = field(default_factory=list)
    """Directories from which requests to /v1/load_lora_adapter may load adapters; unset: any."""
    allow_lora_from_hub: bool = False
    """Requests to /v1/load_lora_adapter may name public adapters of the hub, which are downloaded: at most 2 GiB each, without a token."""

    @property
    def capacity(self) -> int:
        """Maximum loaded adapters."""
        return self.max_cpu_loras or max(self.max_loras, len(self.adapters))

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """All that are loaded at the start, as objects with name, path and base_model_name."""
        own = ({"name": kind, "path": path} for kind, path in self.default_mm_loras.items())
        return [*self.lora_modules, *map(_of_object, own)]


def lora_modules(value: Any) -> list[dict[str, Any]]:
    """Every form of `lora_modules` as a list of objects with name and path.

    Raises:
        ValueError: a wrong form, an invalid name, or a name that is given twice.
    """
    found = list(_modules(value))
    names = [one["name"] for one in found]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given twice; give each adapter its own name")
    return found


def adapters_by_kind(value: Any) -> dict[str, str]:
    """`default_mm_loras`, from JSON or a dict. Raises ValueError: another form, or another kind."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not all(
        kind in MEDIA and isinstance(path, str) and path for kind, path in value.items()
    ):
        raise ValueError(
            f'must be a JSON object of {", ".join(MEDIA)} and paths, such as {{"audio": PATH}}'
        )
    return dict(value)


def check_name(name: Any) -> None:
    """Raises ValueError: not a name that a request could use as its model."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError("the name of an adapter is empty; give it a name")
    if len(name) > MAX_NAME:
        raise ValueError(
            f"the name {name[:40]!r}... of an adapter has {len(name)} characters; the limit is {MAX_NAME}"
        )
    if not name.isprintable():
        raise ValueError(f"the name {name!r} of an adapter has characters that cannot be printed")


def _modules(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, str):
        yield from _of_text(value.strip())
    elif isinstance(value, Mapping):
        if "name" in value and "path" in value:
            yield _of_object(value)
        else:
            for name, path in value.items():
                more = path if isinstance(path, Mapping) else {"path": path}
                yield _of_object({"name": name, **more})
    elif isinstance(value, Iterable):
        for item in value:
            yield from _modules(item)
    else:
        raise ValueError(f"{value!r} names no adapter; write {FORMS}")


def _of_text(text: str) -> Iterator[dict[str, Any]]:
    if text[:1] in ("{", "["):
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as why:
            raise ValueError(f"{text[:80]!r} is not JSON ({why}); write {FORMS}") from None
        yield from _modules(given)
        return
    name, equals, path = text.partition("=")
    if not equals:
        raise ValueError(f"{text[:80]!r} has no path; write {FORMS}")
    yield _of_object({"name": name.strip(), "path": path.strip()})


def _of_object(fields: Mapping[Any, Any]) -> dict[str, Any]:
    if strange := [key for key in fields if key not in KEYS]:
        raise ValueError(
            f"unknown key {strange[0]!r} of an adapter; the keys are {', '.join(KEYS)}"
        )
    base = fields.get("base_model_name")
    if not isinstance(fields.get("path"), str) or not fields["path"]:
        raise ValueError(f"the adapter {fields.get('name')!r} has no path; write {FORMS}")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"base_model_name={base!r} of an adapter must be a name of the model")
    return {"name": fields["name"], "path": fields["path"], "base_model_name": base}
