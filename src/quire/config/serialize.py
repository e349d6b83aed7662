"""A Resolved as bytes, for another Quire process: msgpack of plain values, no pickle.

Functions and classes are sent by name, `module:Name`, and imported by the receiver. Only the fields in NAMED may
contain them, and only a msgpack extension type marks such a name. JSON (a checkpoint's config.json, a request's body)
has no extension types, so no value in it can cause an import. Knows the tree of dataclasses. Does not know the
sender or the receiver.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from quire import env
from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.engine import EngineConfig, Resolved
from quire.config.options import section_class
from quire.config.pooling import PoolingModel
from quire.config.speculation import DraftModel, SpeculativeOptions
from quire.errors import ConfigError

NAME = 1
"""The code of the msgpack extension type for names, `module:Name`."""
NAMED = {"model": ("hf_overrides", "logits_processors")}
"""Section -> the fields that may contain functions and classes; only the user's own flags or keywords set them."""
WHERE = (
    "the working directory is not on the import path: add the folder of the module to PYTHONPATH"
)


def resolved_to_bytes(resolved: Resolved) -> bytes:
    """Encode.

    Raises:
        ConfigError: the other process could not import a function or class (a lambda, or one defined in a
            function or in the program's main file).
    """
    plain = {
        f.name: _plain(getattr(resolved, f.name)) for f in fields(resolved) if f.name != "config"
    }
    config = _sections(resolved.config)
    return _encode({"resolved": plain, "config": config, "path": _path_for(resolved.config)})


def resolved_from_bytes(data: bytes) -> Resolved:
    """Decode the result of `resolved_to_bytes` from a process of this server. Never pass it a file of unknown origin.

    Raises:
        ConfigError: a name cannot be imported here.
    """
    sent = msgspec.msgpack.decode(data)
    extend_path(sent["path"])
    fields = sent["resolved"]
    fields["stored"] = msgspec.convert(fields["stored"], CheckpointQuantization | None)
    fields["pooling"] = msgspec.convert(fields["pooling"], PoolingModel | None)
    fields["speculation"] = msgspec.convert(fields["speculation"], SpeculativeOptions | None)
    fields["draft"] = msgspec.convert(fields["draft"], DraftModel | None)
    return Resolved(**fields, config=_config(sent["config"]))


def _sections(config: EngineConfig) -> dict[str, Any]:
    return {
        section.name: _section(section.name, getattr(config, section.name))
        for section in fields(config)
    }


def _section(name: str, section: Any) -> dict[str, Any]:
    named = NAMED.get(name, ())
    return {
        f.name: (marked if f.name in named else _plain)(getattr(section, f.name))
        for f in fields(section)
    }


def _config(plain: dict[str, Any]) -> EngineConfig:
    sections: dict[str, Any] = {}
    for name, values in plain.items():
        named = {field: revived(values[field]) for field in NAMED.get(name, ())}
        sections[name] = section_class(name)(**{**values, **named})
    return EngineConfig(**sections)


def _encode(plain: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError) as why:
        raise ConfigError(
            f"the configuration contains a value that cannot be sent to another process: {why}"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if is_dataclass(value):  # the receiver makes the other fields itself
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
    return value


# -- functions and classes by name ----------------------------------------------------------------
def marked(value: Any) -> Any:
    """Replace functions and classes by their names, also in lists."""
    if isinstance(value, (list, tuple)):
        return [marked(item) for item in value]
    return Ext(NAME, name_of(value).encode()) if callable(value) else _plain(value)


def revived(value: Any) -> Any:
    """The inverse of `marked`.

    Raises:
        ConfigError: a name cannot be imported here.
    """
    if isinstance(value, list):
        return [revived(item) for item in value]
    if isinstance(value, Ext) and value.code == NAME:
        return by_name(str(value.data, "utf-8"))
    return value


def name_of(thing: Any) -> str:
    """`module:Name` of a function or class, if another process can import it under that name."""
    module = getattr(thing, "__module__", None) or "__main__"
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    if module != "__main__" and "<" not in name:
        try:
            if by_name(f"{module}:{name}") is thing:
                return f"{module}:{name}"
        except ConfigError:
            pass
    raise ConfigError(
        f"{module}.{name} cannot be imported by another process: define it at the top level of an importable module,"
        " or run one engine of one rank in this process (distributed_executor_backend=uni)"
    )


def by_name(name: str, option: str = "") -> Any:
    """The object that `module:Name` or `module.Name` names. `option`: whose value the name is, for errors.

    Raises:
        ConfigError: the name has another form, or cannot be imported.
    """
    about = f"{option}: {name!r}" if option else name
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    if not module or not path:
        raise ConfigError(f"{about} is not of the form module.Class or module:Class")
    try:
        thing: Any = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except Exception as why:
        reason = f"{type(why).__name__}: {why}"
        raise ConfigError(f"{about} cannot be imported: {reason} ({WHERE})") from why
    return thing


# -- where a child process searches for modules ---------------------------------------------------
def import_path() -> list[str]:
    """The folders of sys.path that a child process may also search.

    For `python -m`, `python -c` and a terminal, Python puts the working directory first although the user did not
    request it. It may contain a model's files, so it is removed. It stays if PYTHONPATH names it, or if it is the
    folder of the running script.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the directory was removed, so nothing can be found in it
        here = ""
    main = sys.modules.get("__main__")
    script = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")
    searched = (env.outer("PYTHONPATH") or "").split(os.pathsep)
    if (
        sys.flags.safe_path
        or script
        or any(os.path.abspath(one) == here for one in searched if one)
    ):
        return [folder for folder in sys.path if folder]
    return [folder for folder in sys.path if folder and os.path.abspath(folder) != here]


def extend_path(folders: list[str]) -> None:
    """Search these folders after all others, so that no file in them hides an installed module."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def _path_for(config: EngineConfig) -> list[str]:
    """The import path if the configuration names something to import; else an empty list."""
    overrides, processors = config.model.hf_overrides, config.model.logits_processors
    drafter = "custom_class" in str(config.speculation.speculative_config.get("method"))
    extension = config.parallel.worker_extension_cls
    named = processors or config.server.middleware or drafter or extension
    return import_path() if callable(overrides) or named else []
